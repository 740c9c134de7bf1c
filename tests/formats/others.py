"""Other options of a format that is under the whole suite already."""

import pytest


class OtherOptions:
    """Starts workers from a fork server: the suite of the format itself spawns some, which takes seconds."""

    @pytest.mark.parametrize("start", ["fork", "forkserver"])
    def test_data_loader(self, tmp_path, start):
        super().test_data_loader(tmp_path, start)
