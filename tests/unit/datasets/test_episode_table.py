"""Which names of episode data become columns of a table."""

import numpy as np
import pytest

from ringmap.datasets.episode_table import OWN, EpisodeTable


@pytest.mark.parametrize(("most", "kept"), [(None, "abc"), (2, "ab"), (0, "")])
def test_a_table_that_is_shown_has_so_many_names(most, kept):
    table = EpisodeTable(np.arange(2), np.array([3, 4]), most)
    table.put(0, {"a": 1, "b": "text", "c": 2.0})
    table.put(1, {"c": 5, "a": 6})
    assert table.names == [*OWN, *kept]
    assert (table.values("c") is None) == ("c" not in kept)
    if most != 0:
        assert table.values("a").numbers.tolist() == [1, 6]
