"""An older version of the library and this one share a directory, and never read what the other did not write."""

import numpy as np
import pytest

import ringmap
from tests.versions import pairs
from tests.versions.pairs import OLDER, Version, Wrong, turns, why_not

pytestmark = pytest.mark.slow


@pytest.fixture(params=OLDER)
def storage(request):
    if why := why_not(OLDER[request.param]):
        pytest.skip(why)
    return request.param


def test_they_take_turns(tmp_path, storage):
    calls, reads = turns(str(tmp_path), 0, storage, 3)
    assert calls > 8
    assert reads > calls // 3


def test_control_an_episode_too_few_is_noticed(tmp_path, monkeypatch, storage):
    real = pairs.stored
    monkeypatch.setattr(pairs, "stored", lambda model, *e: real(model, *e)[-3:])
    with pytest.raises(Wrong, match="turn"):
        turns(str(tmp_path), 0, storage, 3)


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_an_older_release_refuses_version_2_by_name(tmp_path, storage, mode):
    """And opens it as long as nothing was used that is new."""
    path, src = tmp_path / "buf", pairs.sources(OLDER[storage], str(tmp_path))
    with ringmap.ReplayBuffer(64, 2, path=path, spare_rows=8) as buf:
        buf.write_episode({"obs": np.zeros((5, 3))})
        buf.close()
    older = Version("the older one", src, path)
    older("open", mode, {})
    older("close")
    assert ringmap.upgrade(path) == ["chains", "groups", "mutable"]
    with pytest.raises(
        Wrong, match=r"NewerVersionError.*format version 2, this ringmap reads up to 1"
    ):
        older("open", mode, {})
    older.end()
    assert ringmap.check(path) == []


def test_control_a_changed_byte_is_noticed(tmp_path):
    path = tmp_path / "buf"
    version = Version("this one", pairs.ROOT / "src", path)
    version("open", "new", {})
    version("write", 1, 9)
    column = next((path / "columns").glob("*noise*"))
    with open(column, "r+b") as file:
        file.seek(4096 + 300 * 3)
        file.write(b"\xff")
    with pytest.raises(Wrong, match="CorruptError"):
        version("seen")
    version.end()
