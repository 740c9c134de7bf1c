"""Formats of other libraries that hold whole datasets: nothing is appended to them, and the refusal says what to do."""

import os
import re

import numpy as np
import pytest

from ringmap.data import ReplayBuffer, convert, get_format, load_dataset, merge
from ringmap.errors import ExistsError, InputError
from ringmap.formats.registry import describe_formats
from ringmap.world import World

NEEDS = {"lerobot": "av", "minari": "minari", "robomimic": "h5py"}
INSTEAD = r"ring.*convert.*merge"

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(params=sorted(NEEDS))
def name(request):
    pytest.importorskip(NEEDS[request.param], reason=f"{NEEDS[request.param]} is not installed")
    return request.param


def rows(number):
    obs = np.full((4, 2), number, np.float32)
    return {"obs": obs, "action": obs, "reward": np.arange(4.0)}


def bytes_below(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_nothing_is_appended(tmp_path, name):
    buf = ReplayBuffer(100, reward_at="next")
    buf.write_episodes([rows(0), rows(1)])
    path = tmp_path / "set-v0"
    assert {f.name: f.appends for f in describe_formats()}[name] is False
    with pytest.raises(InputError, match=INSTEAD):  # there is nothing to append to, either
        get_format(name).open_writer(path, mode="append")
    convert(buf, path, dest_format=name, progress=False)
    before = bytes_below(tmp_path)
    for use in (
        lambda: get_format(name).open_writer(path, mode="append"),
        lambda: convert(buf, path, dest_format=name, mode="append", progress=False),
        lambda: merge([buf], path, dest_format=name, mode="append", progress=False),
        lambda: buf.dump(path, format=name, mode="append"),
    ):
        with pytest.raises(InputError, match=INSTEAD):
            use()
    with pytest.raises(ExistsError, match=INSTEAD), get_format(name).open_writer(path):
        pass
    assert bytes_below(tmp_path) == before
    convert(buf, path, dest_format=name, mode="overwrite", progress=False)
    assert load_dataset(path, format=name).lengths.tolist() == [3, 3]


def test_a_killed_writer_leaves_whole_texts(tmp_path, name):
    """A copy of what is in the log has later, wider texts as they were given."""
    path, words = tmp_path / "set-v0", ["a", "a longer one"]
    pid = os.fork()
    if not pid:
        try:
            with get_format(name).open_writer(path) as writer:
                for number, word in enumerate(words):
                    writer.write_episode({**rows(number), "task": np.array([word] * 4)})
                os._exit(9)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    convert(path, tmp_path / "copy.zarr", source_format=name, progress=False)
    copy = load_dataset(tmp_path / "copy.zarr", output="numpy")
    task = next(n for n in ("task", "info/task") if n in copy.column_names)
    assert [copy.load_episode(n)[task][0] for n in range(2)] == words


def test_a_collection_is_not_resumed_into_it(tmp_path, name):
    """Refused before the first reset, whether something is there or not; without `resume` the default is "error"."""

    class Counts:
        resets = 0

        def set_env(self, env):
            pass

        def get_action(self, infos):
            Counts.resets += 1
            return world.envs.action_space.sample()

    world = World("CartPole-v1", 1, (8, 8), max_episode_steps=3)
    world.set_policy(Counts())
    path = tmp_path / "set-v0"
    for how in ({"resume": True}, {"mode": "append"}, {"resume": True, "mode": "overwrite"}):
        with pytest.raises(InputError, match=INSTEAD):
            world.collect(path, 2, seed=0, format=name, **how)
    assert not Counts.resets
    path.mkdir()
    (path / "mine").write_text("")
    with pytest.raises(ExistsError, match=re.escape("already exists")):
        world.collect(path, 2, seed=0, format=name)
    assert not Counts.resets
    world.close()
