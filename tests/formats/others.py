"""What takes long in the suites of datasets and formats, made shorter."""

import pytest


class OtherOptions:
    """Starts workers from a fork server: to spawn one takes seconds, as Lance and a plain dataset do.

    What reaches the worker is pickled in both ways.
    """

    @pytest.mark.parametrize("start", ["fork", "forkserver"])
    def test_data_loader(self, tmp_path, start):
        super().test_data_loader(tmp_path, start)
