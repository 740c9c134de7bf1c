"""An older version of the library and this one share a directory, and never read what the other did not write."""

import pytest

from tests.versions import pairs
from tests.versions.pairs import OLDER, Version, Wrong, turns, why_not


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
