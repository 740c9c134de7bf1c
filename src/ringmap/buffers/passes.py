"""A pass: each item of one moment once, in an order that can be saved, resumed, and divided among ranks.

    order of the pass   17 3 8 | 0 21 5 | 9 ...          two ranks: 17 8 0 ...  and  3 21 ...
                               ^ place, of all ranks together

    over a frozen view      the same moment in each pass
    over a live view        it moves where a pass begins, as does a buffer

Invariants: the length and the items of a pass do not change while it runs; the order follows from seed and number of
the pass; all ranks of a pass count alike.
Not here: reading (engine.py), which episodes a moment has (view.py).
"""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np

from ringmap.buffers.options import check_whole
from ringmap.clips.gather import PINNED
from ringmap.datasets.base import LoaderDataset
from ringmap.errors import InputError, RoleError

__all__ = ["PassBuffer", "PassSampler", "PassSource", "PassView"]

Array = np.ndarray[Any, np.dtype[Any]]

_CHUNK = 4096
_KEYS = "shuffle", "seed", "pass", "moment", "count", "place"


class PassView(Protocol):
    """The items of one moment: a view."""

    @property
    def moment(self) -> dict[str, Any]:
        """What names the moment, in JSON."""
        ...

    def __len__(self) -> int:
        """Return the number of items."""
        ...

    def positions(self, ids: Array) -> Array:
        """Return the positions of the items with these ids, also of evicted ones."""
        ...


class PassSource(Protocol):
    """What passes are made over: a buffer, or a view."""

    @property
    def is_live(self) -> bool:
        """Whether a pass may have other items than the one before."""
        ...

    def __len__(self) -> int:
        """Return the number of items."""
        ...

    def begin_pass(self) -> PassView:
        """Return the view of a pass that begins; a live source moves to the newest state."""
        ...

    def view_at(self, moment: Mapping[str, Any]) -> PassView:
        """Return the view of an earlier moment.

        Raises:
            InputError: the moment is not one of this source.
        """
        ...

    def move_to(self, view: Any) -> None:
        """Move to the moment of a pass that is resumed."""
        ...


class PassBuffer(LoaderDataset):
    """A buffer as a source of passes: each is over what is stored where it begins."""

    is_live = True
    """Whether a pass may have other items than the one before."""

    engine: Any

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of items."""

    @abstractmethod
    def pinned(self) -> Any:
        """Return a view of what is stored now."""

    def begin_pass(self) -> PassView:
        """Return the view of a pass that begins."""
        self.engine.commit_pending(f"{type(self).__name__}.pass_sampler")  # workers see what is committed
        self.engine.refresh()
        view: PassView = self.pinned()
        return view

    def view_at(self, moment: Mapping[str, Any]) -> PassView:
        """Return the view of an earlier pass.

        Raises:
            InputError: the moment is not one of this buffer.
        """
        view: PassView = self.pinned().at(self, moment, f"{type(self).__name__}.pass_sampler")
        return view

    def move_to(self, view: Any) -> None:
        """Do nothing: a buffer stays where it is."""

    def pass_sampler(
        self, shuffle: bool = True, seed: int = 0, rank: int = 0, num_ranks: int = 1, drop_last: bool = False
    ) -> PassSampler:
        """Return a sampler for a DataLoader over this buffer that pins one state per pass.

        `DataLoader(buf, sampler=buf.pass_sampler(), batch_size=64, num_workers=2)` yields each clip that existed
        at the start of the pass exactly once, whatever is written meanwhile, unless it was evicted before it was read:
        then another one comes in its place, which `batch.redrawn` marks. The plain `shuffle=True` asks for `len(buf)`
        again at the end of a pass.

        Args:
            shuffle: a new order for each pass; False: oldest first.
            seed: of the orders; the same for the same seed and pass.
            rank: the number of this process among those that divide each pass. Before each pass of a buffer or a live
                view all take the moment of one of them: `PassSampler.next_pass`.
            num_ranks: how many do.
            drop_last: whether to leave out what is left where the clips do not go round; else the first ones of the
                order come twice.

        Raises:
            InputError: an argument is wrong.
        """
        return PassSampler(self, shuffle, seed, rank, num_ranks, drop_last)


class PassSampler:
    """Order the items of a buffer or a view for a DataLoader: made by `pass_sampler()` of either.

    What it yields names positions on the ring (PINNED + position), so that all workers, also persistent ones, read the
    items that the pass began with. To resume a pass after a restart:

        state = {"sampler": sampler.state_dict(taken=batches * batch_size), ...}     # when saving
        sampler.load_state_dict(state["sampler"])                                    # before the next `for`

    Args:
        source: the buffer or view to read.
        shuffle: a new order for each pass; False: oldest first.
        seed: of the orders.
        rank: the number of this process among those that divide each pass.
        num_ranks: how many do.
        drop_last: whether to leave out the last items of a pass that do not go round, so that all ranks get as many;
            else the first ones of the order come twice.

    Example:
        >>> from ringmap import ReplayBuffer
        >>> buf = ReplayBuffer(max_steps=100)
        >>> buf.write_episode({"obs": np.arange(6)})
        >>> sampler = buf.pass_sampler(seed=1)
        >>> sorted(int(buf[i]["obs"][0]) for i in sampler)
        [0, 1, 2, 3, 4, 5]
        >>> ranks = [buf.view().pass_sampler(seed=1, rank=rank, num_ranks=2) for rank in range(2)]
        >>> [len(sampler) for sampler in ranks], sorted(int(buf[i]["obs"][0]) for sampler in ranks for i in sampler)
        ([3, 3], [0, 1, 2, 3, 4, 5])
    """

    def __init__(
        self,
        source: PassSource,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
        drop_last: bool = False,
    ) -> None:
        where = "pass_sampler"
        self._source = source
        self.shuffle = bool(shuffle)
        self.seed = _whole(where, "seed", seed)
        self.num_ranks = _whole(where, "num_ranks", num_ranks, 1)
        self.rank = _whole(where, "rank", rank)
        if self.rank >= self.num_ranks:
            raise InputError(f"{where}: rank must be below num_ranks={num_ranks}, got {rank}")
        self.drop_last = bool(drop_last)
        self._pass = 0
        self._view: PassView | None = None
        self._count = self._begin = self._taken = 0
        self._is_ready = False  # the pass was begun, and is to be given out
        self._giving: object = None

    def _share(self, count: int) -> int:
        """Return how many of so many items each rank gets."""
        return count // self.num_ranks if self.drop_last else -(-count // self.num_ranks)

    def _place(self, taken: int) -> int:
        """Return the place in the pass, of all ranks together."""
        if taken >= self._share(self._count - self._begin):
            return self._count
        return self._begin + taken * self.num_ranks

    def __len__(self) -> int:
        """Return the items of this rank in the current pass, of one that was resumed those that were left; between
        passes, in a pass over what the buffer or view has now.
        """
        if self._view is None or (not self._is_ready and self._place(self._taken) == self._count):
            return self._share(len(self._source))
        return self._share(self._count - self._begin)

    def _start(self, view: PassView, number: int, place: int = 0) -> None:
        self._view, self._count, self._pass = view, len(view), number
        self._begin, self._taken, self._is_ready = place, 0, True

    def next_pass(self) -> dict[str, Any]:
        """Begin the next pass at this moment, and return its state: with `load_state_dict` other ranks take it, and
        count alike.

        Example:
            box = [sampler.next_pass() if rank == 0 else None]
            dist.broadcast_object_list(box)
            sampler.load_state_dict(box[0])  # then: for batch in loader
        """
        self._start(self._source.begin_pass(), self._pass + (self._view is not None))
        return self.state_dict()

    def __iter__(self) -> Iterator[int]:
        if not self._is_ready:
            if self._source.is_live and self.num_ranks > 1:
                raise RoleError(
                    f"PassSampler: each of {self.num_ranks} ranks would begin this pass at a moment of its own, count "
                    "other items, and wait "
                    "for ever; call next_pass() on rank 0, send what it returns, and load_state_dict() it on every "
                    "rank before each pass"
                )
            self._start(self._source.begin_pass(), self._pass + (self._view is not None))
        view, count, begin = self._view, self._count, self._begin
        assert view is not None
        if not count:
            len(self._source)  # which says why, and raises in a DataLoader
        self._source.move_to(view)
        self._is_ready, giving = False, object()
        self._giving = giving
        order = np.arange(count)
        if self.shuffle:
            order = np.random.default_rng([self.seed, self._pass]).permutation(count)
        given = self._share(count - begin) * self.num_ranks
        left = order[begin : begin + given]
        if given > len(left):
            left = np.append(left, order[np.arange(given - len(left)) % count])
        mine = left[self.rank :: self.num_ranks]
        for at in range(0, len(mine), _CHUNK):
            for place in (view.positions(mine[at : at + _CHUNK]) + PINNED).tolist():
                if self._giving is giving:
                    self._taken += 1
                yield place

    def state_dict(self, taken: int | None = None) -> dict[str, Any]:
        """Return the pass of this sampler, and its place in the pass: JSON.

        The state of one rank is that of all, where a batch ends: `taken` is the same number there. Any number of ranks
        may go on from it.

        Args:
            taken: items that the training loop of this rank has received since this pass began here, or was resumed:
                batches times batch size. None: all that were given to the loader, whose workers are some batches ahead
                of the loop.
        """
        most = self._share(self._count - self._begin)
        had = self._taken if taken is None else _whole("PassSampler.state_dict", "taken", taken)
        if had > most:
            raise InputError(f"PassSampler.state_dict: taken must lie between 0 and {most}, got {taken}")
        return {
            "shuffle": self.shuffle,
            "seed": self.seed,
            "pass": self._pass,
            "moment": None if self._view is None else self._view.moment,
            "count": self._count,
            "place": self._place(had),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that `state_dict` or `next_pass` returned: the next pass is the rest of that one.

        Items that were evicted since are redrawn.

        Raises:
            InputError: it is no such state, or that of another buffer, or of other items. Nothing was changed.
        """
        where = "PassSampler.load_state_dict"
        check_whole(where, state, _KEYS)
        seed, number = _whole(where, "seed", state["seed"]), _whole(where, "pass", state["pass"])
        count, place = (
            _whole(where, "count", state["count"]),
            _whole(where, "place", state["place"]),
        )
        shuffle, moment = state["shuffle"], state["moment"]
        if not isinstance(shuffle, bool):
            raise InputError(f"{where}: shuffle must be True or False, got {shuffle!r}")
        view = None if moment is None else self._source.view_at(moment)
        if (0 if view is None else len(view)) != count or place > count:
            raise InputError(
                f"{where}: the state is at item {place} of {count}, but its moment has "
                f"{0 if view is None else len(view)} items here: "
                "make the view with the same window, columns and anchors"
            )
        self.shuffle, self.seed = shuffle, seed
        if view is None or place == count:  # the pass had ended, or none has begun
            self._pass, self._view = number + (view is not None), None
            self._count = self._begin = self._taken = 0
            self._is_ready = False
        else:
            self._start(view, number, place)


def _whole(where: str, name: str, value: Any, least: int = 0) -> int:
    try:
        number = operator.index(value)
        if number >= least and not isinstance(value, bool):
            return number
    except TypeError:
        pass
    what = "positive" if least else "an integer and not negative"
    raise InputError(f"{where}: {name} must be {what}, got {value!r}")
