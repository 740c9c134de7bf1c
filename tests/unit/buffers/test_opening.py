"""`ringmap.open`: every directory by its own class, and what is refused."""

import json

import numpy as np
import pytest

import ringmap
from ringmap import DistillationBuffer, OfflineToOnlineReplayBuffer, ReplayBuffer, TransitionReplayBuffer
from ringmap.buffers.opening import kind_of
from ringmap.data import ShardedReplayBuffer
from ringmap.errors import (
    BadRingsError,
    CorruptError,
    InputError,
    LockedError,
    NewerVersionError,
    NoClipsError,
    NotFoundError,
    ReadOnlyError,
    UnknownFormatError,
)
from ringmap.storage.disk.checksums import json_checksum


def episodes(path, columns=("obs",)):
    with ReplayBuffer(100, path=path, history_len=2) as buf:
        buf.write_episode({name: np.arange(10.0) for name in columns})
    buf.close()


def transitions(path):
    buf = TransitionReplayBuffer(20, (3,), path=path, device=None)
    for step in range(5):
        buf.add(np.full(3, step), 0, 0.0, np.full(3, step + 1), False)
    buf.close()


def students(path):
    buf = DistillationBuffer(20, path=path, retention="fifo")
    buf.add(np.zeros((4, 2)), np.arange(4))
    buf.close()


def mixed(path):
    mix = OfflineToOnlineReplayBuffer(ReplayBuffer(9), online_capacity=50, path=path)
    mix.extend({"obs": np.arange(8.0), "done": np.arange(8) == 7})
    mix.close()


def of_one(path):
    episodes(path / "a")
    episodes(path / "b")
    (path / "policy").mkdir()


KINDS = {
    "episodes": (episodes, ReplayBuffer, 9),
    "transitions": (transitions, TransitionReplayBuffer, 5),
    "rows": (mixed, OfflineToOnlineReplayBuffer, 8),
    "distillation": (students, DistillationBuffer, 4),
    "fleet": (of_one, ShardedReplayBuffer, 18),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_directory_is_opened_by_its_class(tmp_path, kind):
    make, expected, count = KINDS[kind]
    make(tmp_path / "it")
    buf = ringmap.open(tmp_path / "it")
    assert type(buf) is expected
    assert len(buf) == count
    assert buf.sample(4)
    buf.close()


@pytest.mark.parametrize("kind", ["episodes", "transitions", "distillation"])
def test_a_writer_and_options(tmp_path, kind):
    make, _, _ = KINDS[kind]
    make(tmp_path / "it")
    buf = ringmap.open(tmp_path / "it", "r+", durability="power")
    with pytest.raises(LockedError):
        ringmap.open(str(tmp_path / "it"), mode="r+")
    buf.close()
    with pytest.raises(ValueError, match="mode"):
        ringmap.open(tmp_path / "it", "w")


def test_rows_of_a_mix_without_its_offline_half(tmp_path):
    mix = OfflineToOnlineReplayBuffer(offline := ReplayBuffer(9), online_capacity=50, path=tmp_path / "m", seed=0)
    mix.extend({"obs": np.arange(4.0)})
    with ringmap.open(tmp_path / "m") as reader:
        assert (len(reader), reader.offline_buffer, reader.offline_fraction) == (4, None, 0)
        mix.extend({"obs": np.arange(4.0, 8.0)})
        mix.flush()
        assert set(reader.sample(200)["obs"].tolist()) == set(range(8))
        assert [rows["obs"].tolist() for rows in reader.rows(5)] == [[0, 1, 2, 3, 4], [5, 6, 7]]
        with pytest.raises(ReadOnlyError):
            reader.extend({"obs": np.arange(4.0)})
    reader.close()
    offline.write_episode({"obs": np.full(9, -1.0)})
    both = ringmap.open(tmp_path / "m", offline_dataset=offline, seed=0)
    assert (both.sample(40)["obs"] < 0).sum() == 20
    with pytest.raises(ReadOnlyError):
        both.extend({"obs": np.arange(4.0)})
    both.close()
    mix.close()
    with pytest.raises(InputError, match="give offline_dataset="):
        ringmap.open(tmp_path / "m", "r+")
    written = ringmap.open(tmp_path / "m", "r+", offline_dataset=offline)
    written.extend({"obs": np.arange(4.0)})
    assert len(written.online_buffer) == 12
    written.close()


def test_a_mix_without_rows_has_nothing_to_draw(tmp_path):
    OfflineToOnlineReplayBuffer(ReplayBuffer(9), online_capacity=50, path=tmp_path / "m").close()
    with ringmap.open(tmp_path / "m") as reader, pytest.raises(NoClipsError, match="empty"):
        reader.sample(4)
    reader.close()


@pytest.mark.parametrize(
    ("others", "said"),
    [
        ({"b": transitions}, ["a: episodes of 'obs'", "b: transitions of "]),
        ({"b": lambda path: episodes(path, ["obs", "action"])}, ["a: episodes of 'obs'", "b: episodes of 'action'"]),
        ({"b": students}, ["b: distillation of "]),
        ({"b": episodes, "c": mixed}, ["a, b: episodes of ", "c: rows of "]),
        ({"b": lambda path: DistillationBuffer(9, path=path).close()}, ["b: distillation, no columns yet"]),
    ],
)
def test_rings_of_several_kinds_or_columns_are_listed(tmp_path, others, said):
    episodes(tmp_path / "it" / "a")
    for name, make in others.items():
        make(tmp_path / "it" / name)
    with pytest.raises(InputError, match="can't be read as one") as caught:
        ringmap.open(tmp_path / "it")
    for part in said:
        assert part in str(caught.value)
    with pytest.raises(InputError, match="^info: the rings in"):
        kind_of(str(tmp_path / "it"), "info")


def test_rings_of_one_unusual_kind_are_no_fleet(tmp_path):
    students(tmp_path / "it" / "a")
    students(tmp_path / "it" / "b")
    with pytest.raises(InputError, match="a, b: distillation"):
        ringmap.open(tmp_path / "it")


def test_what_can_not_be_read_is_left_to_the_fleet(tmp_path):
    of_one(tmp_path / "it")
    (tmp_path / "it" / "c").mkdir()
    (tmp_path / "it" / "c" / "manifest.json").write_text("{")
    with pytest.raises(BadRingsError, match="/c: "):
        ringmap.open(tmp_path / "it")
    with pytest.warns(RuntimeWarning, match="goes on without"):
        fleet = ringmap.open(tmp_path / "it", on_bad="skip")
    assert len(fleet) == 18
    fleet.close()


def test_rings_that_differ_in_what_an_update_may_change_are_a_fleet(tmp_path):
    episodes(tmp_path / "it" / "a")
    schema = {"obs": ringmap.Column((), np.float64, mutable=True)}
    with ReplayBuffer(100, path=tmp_path / "it" / "b", schema=schema, history_len=2) as buf:
        buf.write_episode({"obs": np.arange(10.0)})
        buf.update(np.arange(10), {"obs": np.full(10, -1.0)})
    buf.close()
    with ringmap.open(tmp_path / "it", seed=0) as fleet:
        assert set(fleet.sample(200)["obs"].ravel().tolist()) == {-1.0, *range(10)}
    fleet.close()


def test_rings_that_are_all_damaged_say_so(tmp_path):
    of_one(tmp_path / "it")
    for name in "ab":
        (tmp_path / "it" / name / "manifest.json").write_text("{")
    with pytest.raises(CorruptError, match="a/manifest.json: .*run ringmap.check"):
        ringmap.open(tmp_path / "it")


def test_rings_beside_a_dataset_are_a_fleet(tmp_path):
    of_one(tmp_path / "it")
    with ReplayBuffer.open(tmp_path / "it" / "a") as buf:
        buf.dump(tmp_path / "it" / "x.h5", format="hdf5")
    buf.close()
    with ringmap.open(tmp_path / "it") as fleet:
        assert len(fleet) == 18
    fleet.close()
    assert kind_of(str(tmp_path / "it"), "info") == "dataset"  # ambiguous, which a loader says


def test_a_fleet_has_no_writer(tmp_path):
    of_one(tmp_path / "it")
    with pytest.raises(InputError, match="written one by one"):
        ringmap.open(tmp_path / "it", "r+")


def test_nothing_something_else_and_a_newer_version(tmp_path):
    with pytest.raises(NotFoundError, match="nothing is there"):
        ringmap.open(tmp_path / "it")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises((UnknownFormatError, NotFoundError)):
        ringmap.open(tmp_path / "mine")
    episodes(tmp_path / "new")
    manifest = tmp_path / "new" / "manifest.json"
    body = json.loads(manifest.read_text())
    body["version"] = 99
    body.pop("checksum")
    manifest.write_text(json.dumps({**body, "checksum": json_checksum(body)}))
    with pytest.raises(NewerVersionError):
        ringmap.open(tmp_path / "new")


def test_a_dataset_names_its_loader(tmp_path):
    episodes(tmp_path / "buf")
    with ringmap.open(tmp_path / "buf") as buf:
        buf.dump(tmp_path / "x.h5", format="hdf5")
    buf.close()
    with pytest.raises(UnknownFormatError, match="is a dataset, expected a buffer; load_dataset"):
        ringmap.open(tmp_path / "x.h5")
