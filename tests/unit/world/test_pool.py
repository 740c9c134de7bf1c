import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from ringmap.errors import ClosedError, InputError, RolloutError
from ringmap.world import EnvPool, MegaWrapper
from tests.unit.world.envs import Faulty, Proof


class Info(gymnasium.Env):
    """Its info is what was planted."""

    observation_space = action_space = spaces.Discrete(3)
    planted: dict = {}  # noqa: RUF012

    def reset(self, seed=None, options=None):
        self.seed_given, self.options = seed, options
        return 0, dict(self.planted)

    def step(self, action):
        return 0, 1.5, True, False, dict(self.planted)


@pytest.fixture
def pool():
    pool = EnvPool([Info] * 3)
    pool.reset()
    yield pool
    pool.close()


def plant(pool, *infos):
    for env, info in zip(pool._crew.envs, infos, strict=True):
        env.planted = info
    _, *_, infos = pool.step([0, 1, 2])
    return infos


def test_arrays_tensors_and_numbers_are_stacked(pool):
    rows = [
        {
            "array": np.full((2, 3), i, np.uint8),
            "tensor": torch.full((2,), i),
            "int": i,
            "float": i / 2,
            "bool": i > 0,
            "scalar": np.float32(i),
            "text": f"t{i}",
            "nested": {"a": i},
            "none": None,
        }
        for i in range(3)
    ]
    infos = plant(pool, *rows)
    shapes = {name: (v.shape, v.dtype.name) for name, v in infos.items() if not isinstance(v, list)}
    assert shapes == {
        "array": ((3, 1, 2, 3), "uint8"),
        "tensor": ((3, 1, 2), "int64"),
        "int": ((3, 1), "int64"),
        "float": ((3, 1), "float64"),
        "bool": ((3, 1), "bool"),
        "scalar": ((3, 1), "float32"),
    }
    assert infos["array"][:, 0, 0, 0].tolist() == [0, 1, 2]
    assert infos["text"] == ["t0", "t1", "t2"]
    assert infos["nested"] == [{"a": 0}, {"a": 1}, {"a": 2}]
    assert infos["none"] == [None] * 3


def test_no_old_value_passes_for_a_new_one(pool):
    whole = {"x": np.zeros(2), "y": 1}
    assert plant(pool, whole, whole, whole)["x"].shape == (3, 1, 2)
    gone = plant(pool, whole, {"y": 2}, whole)
    assert isinstance(gone["x"], list)
    assert gone["x"][1] is None
    assert gone["y"].ravel().tolist() == [1, 2, 1]
    assert isinstance(plant(pool, whole, {**whole, "x": np.zeros(3)}, whole)["x"], list)
    again = plant(pool, whole, whole, whole)
    assert again["x"].shape == (3, 1, 2)
    late = plant(pool, {**whole, "z": 5}, whole, whole)
    assert late["z"][1:] == [None, None]
    assert "z" not in plant(pool, whole, whole, whole)
    assert "x" not in plant(pool, {}, {}, {})
    mixed = plant(pool, {"x": 1}, {"x": 2.5}, {"x": True})
    assert mixed["x"].ravel().tolist() == [1, 2.5, 1]


def test_what_an_environment_does_to_its_arrays_does_not_show(pool):
    array = np.zeros(2)
    infos = plant(pool, {"x": array}, {"x": array}, {"x": array})
    array += 1
    assert infos["x"].sum() == 0
    assert pool.rows[0]["x"].sum() == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_masked_environment_is_left_alone(workers):
    pool = EnvPool([lambda: MegaWrapper(Proof(), add_pixels=False)] * 4, workers)
    pool.reset(seed=5)
    assert pool.seeds == [5, 6, 7, 8]
    mask = np.array([True, False, True, False])
    before = {name: v.copy() for name, v in pool.infos.items()}
    actions = np.arange(8, dtype=np.float32).reshape(4, 2)
    _, rewards, terminateds, truncateds, infos = pool.step(actions, mask=mask)
    assert rewards.tolist() == [0, 0, 4, 0]
    assert rewards.dtype == np.float32
    assert terminateds.dtype == truncateds.dtype == bool
    assert not terminateds[~mask].any()
    assert not truncateds[~mask].any()
    assert infos["step_idx"].ravel().tolist() == [1, 0, 1, 0]
    for name, values in before.items():
        assert np.array_equal(infos[name][~mask], values[~mask], equal_nan=values.dtype.kind == "f")
    pool.reset(seed=[50, None, None, 53], mask=~mask)
    assert pool.seeds == [5, None, 7, 53]
    assert pool.infos["step_idx"].ravel().tolist() == [1, 0, 1, 0]
    assert pool.episodes == [1, 2, 1, 2]
    pool.close()


def test_seeds(pool):
    def given():
        return [env.seed_given for env in pool._crew.envs]

    for seed, expected in (
        (4, [4, 5, 6]),
        (np.int64(4), [4, 5, 6]),
        ([7, None, 1], [7, None, 1]),
        (np.array([3, 2, 1]), [3, 2, 1]),
        (None, [None] * 3),
    ):
        pool.reset(seed)
        assert given() == pool.seeds == expected
    pool.reset(options={"a": 1})
    assert [env.options for env in pool._crew.envs] == [{"a": 1}] * 3
    pool.reset(options=[{"a": 1}, None, {}])
    assert [env.options for env in pool._crew.envs] == [{"a": 1}, None, {}]


def test_spaces():
    for workers in (0, 1):
        pool = EnvPool([Proof] * 2, workers)
        assert pool.num_envs == 2
        assert pool.single_action_space == spaces.Box(-1e6, 1e6, (2,), np.float32)
        assert pool.action_space.shape == (2, 2)
        assert pool.observation_space.shape == (2, 3)
        assert pool.variation_space is pool.single_variation_space is None
        pool.close()


def test_results_are_reused_unless_copies_are_asked_for():
    for copy in (False, True):
        pool = EnvPool([Info] * 2, copy=copy)
        pool.reset()
        for env in pool._crew.envs:
            env.planted = {"x": np.zeros(2)}
        _, first, *_, infos = pool.step([0, 0])
        for env in pool._crew.envs:
            env.planted = {"x": np.ones(2)}
        pool.step([0, 0])
        assert infos["x"].sum() == (0 if copy else 4)
        pool.close()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.reset(seed=[1, 2]), "2 seeds, expected one for each of 3"),
        (lambda p: p.reset(seed=1.5), "a seed must be an integer, got 1.5"),
        (lambda p: p.reset(seed=-1), "must not be negative"),
        (lambda p: p.reset(options=[{}]), "1 options"),
        (lambda p: p.reset(mask=[True]), r"mask of shape \(1,\), expected \(3,\)"),
        (lambda p: p.step([0, 1]), r"actions of shape \(2,\), expected \(3,\)"),
        (lambda p: p.step([0, 1, 3]), r"action 3 of env 2 is not in Discrete\(3\)"),
        (lambda p: p.step([0.5, 1, 2]), "expected integers"),
        (lambda p: p.step(["a", "b", "c"]), "actions of dtype <U1"),
        (lambda p: p.call("x", [{}]), "1 arguments, expected 3"),
        (lambda p: EnvPool([]), "at least one environment"),
        (lambda p: EnvPool([Info], workers=2), "workers must be 0"),
    ],
)
def test_bad_arguments(pool, call, message):
    with pytest.raises(InputError, match=message):
        call(pool)


def test_actions_of_those_that_wait_are_not_looked_at(pool):
    pool.step([0, 9, 2], mask=[True, False, True])
    with pytest.raises(InputError, match="action 9 of env 1"):
        pool.step([0, 9, 2])


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("fault", ["step", "reset"])
def test_an_environment_that_raises(workers, fault):
    fns = [Faulty, lambda: Faulty(fault, at=(1, 2) if fault == "step" else (1, 0)), Faulty]
    pool = EnvPool(fns, workers)
    pool.reset(seed=3)
    pool.reset(seed=None if fault == "step" else [0, 1, 2]) if fault == "step" else None
    act = np.zeros((3, 1), np.float32)
    message = {
        "step": "EnvPool.step: env 1 of the pool, its episode 2, step 2: KeyError: 'planted'",
        "reset": r"EnvPool.reset: env 1 of the pool, its episode 2 \(seed 21\), step 0: ZeroDivisionError: planted",
    }[fault]
    with pytest.raises(RolloutError, match=message) as caught:
        if fault == "step":
            pool.step(act)
            pool.step(act)
        else:
            pool.reset(seed=20)
    assert isinstance(caught.value.__cause__, KeyError if fault == "step" else ZeroDivisionError)
    pool.reset(seed=0)  # the pool can be used on
    pool.step(act)
    pool.close()


def test_a_worker_that_dies_is_named():
    pool = EnvPool([Faulty, Faulty, Faulty, lambda: Faulty("dies", at=(0, 1))], workers=2)
    pool.reset(seed=0)
    with pytest.raises(RolloutError, match=r"died: worker 1 \(exit code -9\) with envs \[2, 3\]"):
        pool.step(np.zeros((4, 1), np.float32))
    with pytest.raises(RolloutError, match="worker processes are gone"):
        pool.reset()
    pool.close()
    pool.close()
    with pytest.raises(ClosedError):
        pool.reset()


def test_large_arrays_come_whole_from_workers():
    """Through shared memory, and, where that is too small, through the pipe."""

    class Large(Info):
        planted = {  # noqa: RUF012
            "a": np.arange(5000, dtype=np.int16).reshape(50, 100)[:, ::2],
            "b": np.ones((2, 3), np.complex128),
            "c": np.arange(300, dtype=">f8"),
        }

        def info_nbytes(self):
            return 5000

    pool = EnvPool([Large] * 3, workers=2)
    pool.reset()
    for name, value in Large.planted.items():
        for row in pool.rows:
            assert row[name].dtype == value.dtype
            assert np.array_equal(row[name], value)
    pool.close()


def test_a_factory_that_fails_in_a_worker_is_said(capfd):
    import os

    here = os.getpid()

    def make():
        if os.getpid() != here:
            raise ValueError("planted")
        return Info()

    with pytest.raises(RolloutError, match="died while it made its environments"):
        EnvPool([make] * 2, workers=1)


class Odd(Exception):
    """Is pickled, and can't be made again from that."""

    def __init__(self, what, more):
        super().__init__(what)
        self.more = more


def test_an_error_that_can_not_be_received_is_one_turn_that_failed():
    class Raises(Info):
        def step(self, action):
            raise Odd("planted", 3)

    pool = EnvPool([Info, Raises], workers=2)
    pool.reset(seed=0)
    with pytest.raises(RolloutError, match="env 1 of the pool, .*Odd: planted"):
        pool.step([0, 0])
    pool.reset(seed=0)
    pool.close()


def test_what_a_worker_says_next_is_not_written_over_what_it_said():
    class Counts(Info):
        count = 0

        def reset(self, seed=None, options=None):
            self.count = seed
            return 0, {"x": np.full(1000, self.count)}

        def step(self, action):
            self.count += 1
            return 0, 1.5, False, False, {"x": np.full(1000, self.count)}

        def info_nbytes(self):
            return 8000

    pool = EnvPool([Counts] * 2, workers=1)
    pool.reset(seed=[10, 20])
    kept = pool.rows[1]["x"]
    pool.step([0, 0], mask=[False, True])
    assert [set(row["x"].ravel().tolist()) for row in pool.rows] == [{10}, {21}]
    assert set(kept.ravel().tolist()) == {20}
    pool.close()


def test_after_an_interrupted_call_no_answer_is_taken_for_the_next_ones(monkeypatch):
    pool = EnvPool([Info] * 2, workers=2)
    pool.reset(seed=0)

    def step(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pool._crew._envs, "step", step)
        with pytest.raises(KeyboardInterrupt):
            pool.step([0, 0])
    with pytest.raises(RolloutError, match="worker processes are gone"):
        pool.step([0, 0])
    pool.close()
