"""What every sampler owes. A test class inherits `SamplerTests` and says how to make one.

    class TestMine(SamplerTests):
        @pytest.fixture
        def make_sampler(self): ...        # () -> a new sampler, the same each time

        def episode(self, length): ...     # its columns, if the sampler reads others than obs

Not here: which clips a sampler prefers, which is its own to prove.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringmap.buffers.replay import ReplayBuffer
from ringmap.clips.samplers.base import BaseSampler, as_sampler
from ringmap.errors import InputError

__all__ = ["SamplerTests"]

Array = np.ndarray[Any, np.dtype[Any]]
MakeSampler = Callable[[], Any]

_LENGTHS = [9, 1, 4, 30, 7]


def _skip_without_small_state(sampler: Any) -> None:
    if as_sampler(sampler).small_state() is None:
        pytest.skip("this sampler has no state to store with the buffer")


def _steps(buffer: ReplayBuffer, times: int) -> list[bytes]:
    return [buffer.sample(16)["obs"].tobytes() for _ in range(times)]


class SamplerTests:
    """The obligations of `ringmap.samplers.Sampler`, and of what `BaseSampler` adds, which a callable may have in
    part."""

    @pytest.fixture
    def make_sampler(self) -> MakeSampler:
        """Return what makes a sampler, each time the same: a seed in it is fixed."""
        raise NotImplementedError(f"{type(self).__name__} must supply make_sampler")

    def episode(self, length: int) -> dict[str, Any]:
        """Return the episode of this length that is written: `obs` (length, 2), ascending.

        Override it for a sampler that reads other columns, and add them.
        """
        return {"obs": np.arange(length * 2.0).reshape(length, 2)}

    def _write(self, buffer: ReplayBuffer, lengths: list[int]) -> None:
        for length in lengths:
            buffer.write_episode(self.episode(length))

    @pytest.mark.parametrize("history", [1, 2, 5])
    def test_returns_ids_of_clips(self, make_sampler: MakeSampler, history: int) -> None:
        """Whatever the size and history, ids are integers of shape `(B,)` that name clips."""
        sampler, buffer = make_sampler(), ReplayBuffer(max_steps=60)
        self._write(buffer, _LENGTHS)
        for step, size in enumerate([1, 7, 256]):
            ids = np.asarray(sampler(step, buffer, size, history))
            assert ids.shape == (size,)
            assert ids.dtype.kind in "iu"
            assert (ids >= 0).all()
            assert (ids < buffer.num_valid_ends(history)).all()

    def test_follows_what_is_written_and_evicted(self, make_sampler: MakeSampler) -> None:
        """Ids name clips while episodes come, go and are cleared."""
        sampler, buffer = make_sampler(), ReplayBuffer(max_steps=60, history_len=2)
        for turn in range(40):
            self._write(buffer, [_LENGTHS[turn % 5], 3])
            ids = np.asarray(sampler(turn, buffer, 32, 2))
            assert ((ids >= 0) & (ids < len(buffer))).all()
            if turn == 20:
                buffer.clear()

    def test_every_clip_read_is_whole(self, make_sampler: MakeSampler) -> None:
        """A batch drawn by it holds clips of one episode each."""
        buffer = ReplayBuffer(max_steps=60, history_len=3, sampler=make_sampler())
        for _ in range(20):
            self._write(buffer, _LENGTHS)
            clips = buffer.sample(32)["obs"]
            assert (np.diff(clips[..., 0], axis=1) == 2).all()

    def test_leaves_numpy_s_global_generator_alone(self, make_sampler: MakeSampler) -> None:
        """Drawing changes no global state."""
        before = pickle.dumps(np.random.get_state())  # noqa: NPY002
        buffer = ReplayBuffer(max_steps=60, sampler=make_sampler())
        self._write(buffer, _LENGTHS)
        buffer.sample(32)
        assert pickle.dumps(np.random.get_state()) == before  # noqa: NPY002

    def test_the_same_sampler_draws_the_same(self, make_sampler: MakeSampler) -> None:
        """Two made the same draw the same."""
        draws = []
        for _ in range(2):
            buffer = ReplayBuffer(max_steps=60, sampler=make_sampler())
            self._write(buffer, _LENGTHS)
            draws.append(_steps(buffer, 4))
        assert draws[0] == draws[1]

    def test_serves_as_a_base_sampler(self, make_sampler: MakeSampler) -> None:
        """`as_sampler` leaves it as it is, or wraps it; wrapped it draws the same, and a buffer shows what it was
        given."""
        given, buffer = make_sampler(), ReplayBuffer(max_steps=60)
        self._write(buffer, _LENGTHS)
        sampler = as_sampler(given)
        assert isinstance(sampler, BaseSampler)
        assert sampler.given is given
        assert as_sampler(sampler) is sampler
        bare = make_sampler()
        for step in range(3):
            ids = sampler(step, buffer, 16, 2)
            assert np.array_equal(ids, bare(step, buffer, 16, 2))
        buffer.sampler = given
        assert buffer.sampler is given

    def test_may_be_called_at_any_time(self, make_sampler: MakeSampler, tmp_path: Path) -> None:
        """What a buffer calls besides a draw works before the first draw, after draws and after `close`."""
        sampler = as_sampler(make_sampler())
        path = tmp_path / "buf"
        with ReplayBuffer(max_steps=60, path=path, sampler=sampler.given, sync_every_s=0) as buffer:
            self._write(buffer, _LENGTHS)
            for _ in range(2):
                for _ in range(2):
                    sampler.follow(buffer, 1)
                    sampler.flush()
                    assert not sampler.check()
                    assert not buffer.check()
                    buffer.sample(16)
                sampler.close()
                sampler.close()
            buffer.snapshot(tmp_path / "copy")  # which asks for `kept_priorities`
        buffer.close()

    def test_weighs_its_batches_or_does_not(self, make_sampler: MakeSampler) -> None:
        """All batches bring a weight for each clip, float32 and positive, or none of them does."""
        buffer = ReplayBuffer(max_steps=60, sampler=make_sampler())
        self._write(buffer, _LENGTHS)
        weights = [buffer.sample(16).weights for _ in range(3)]
        assert len({w is None for w in weights}) == 1
        for found in weights:
            if found is not None:
                assert found.shape == (16,)
                assert found.dtype == np.float32
                assert (found > 0).all()

    def test_takes_priorities_or_says_that_it_does_not(self, make_sampler: MakeSampler) -> None:
        """`update_priorities` raises InputError exactly where `has_priorities` is false."""
        sampler, buffer = make_sampler(), ReplayBuffer(max_steps=60)
        buffer.sampler = sampler
        self._write(buffer, _LENGTHS)
        batch = buffer.sample(16)
        if as_sampler(sampler).has_priorities:
            buffer.update_priorities(batch.ids, np.ones(16))
        else:
            with pytest.raises(InputError, match="priority"):
                buffer.update_priorities(batch.ids, np.ones(16))

    def test_state_dict_goes_on(self, make_sampler: MakeSampler) -> None:
        """A restored state, pickled in between, gives the draws that would have come."""
        if as_sampler(make_sampler()).state_dict() is None:
            pytest.skip("this sampler keeps no state")
        buffer = ReplayBuffer(max_steps=60, sampler=make_sampler())
        self._write(buffer, _LENGTHS)
        _steps(buffer, 3)
        state = pickle.loads(pickle.dumps(buffer.state_dict()))
        expected = _steps(buffer, 4)
        other = ReplayBuffer(max_steps=60, sampler=make_sampler())
        self._write(other, _LENGTHS)
        other.load_state_dict(state)
        assert _steps(other, 4) == expected
        buffer.load_state_dict(state)
        assert _steps(buffer, 4) == expected

    def test_a_pickled_one_goes_on(self, make_sampler: MakeSampler) -> None:
        """So does a pickled buffer with its sampler."""
        buffer = ReplayBuffer(max_steps=60, sampler=make_sampler())
        self._write(buffer, _LENGTHS)
        _steps(buffer, 3)
        copy = pickle.loads(pickle.dumps(buffer))
        assert _steps(copy, 4) == _steps(buffer, 4)

    def test_small_state_is_stored_with_the_buffer(self, make_sampler: MakeSampler, tmp_path: Path) -> None:
        """A directory that is opened again goes on drawing where it was closed; the state is small JSON."""
        _skip_without_small_state(make_sampler())
        options: dict[str, Any] = {"max_steps": 60, "path": tmp_path / "buf", "sync_every_s": 0}
        buffer = ReplayBuffer(**options, sampler=make_sampler())
        self._write(buffer, _LENGTHS)
        _steps(buffer, 3)
        assert len(json.dumps(buffer.sampler.small_state())) < 4000
        buffer.close()
        buffer = ReplayBuffer(**options, sampler=make_sampler())
        first = _steps(buffer, 4)
        buffer.close()
        unbroken = ReplayBuffer(max_steps=60, sampler=make_sampler())
        self._write(unbroken, _LENGTHS)
        assert _steps(unbroken, 7)[3:] == first

    def test_refuses_the_state_of_another(self, make_sampler: MakeSampler) -> None:
        """The state of another kind is an error, not a silent start from nothing."""
        sampler = as_sampler(make_sampler())
        _skip_without_small_state(sampler)
        state = sampler.state_dict()
        assert state is not None
        with pytest.raises(ValueError, match=r"state is that of 'Other'"):
            sampler.load_state_dict({**state, "kind": "Other"})
