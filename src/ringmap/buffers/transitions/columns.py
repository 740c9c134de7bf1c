"""The columns of transitions: converts the input of `add` to rows, and rows to the result of `sample`.

    observations[/leaf]...  [critic_observations[/leaf]...]  actions  rewards  dones  truncated  lanes  [extra...]
    [stack_K_PAD]

With a stack of frames, an observation is the newest frames of its episode, and a row stores the last one; `trees` are
what `add` takes and `sample` returns.

    stacks, size 4      [a a a a]  [a a a b]  [a a b c]  [a b c d]  [b c d e]        padding_type="reset"
    frames in rows       a          b          c          d          e
    earlier              0          1          2          3          3

`earlier` is a column: how many earlier frames of a row's stack are frames of its lane, at most size - 1. The others are
padding: the first frame again ("reset"), or zeros ("zero"). So a stack is read without a look at the rows between, and
row `p` of a lane takes the frames at p, p - N, ..., p - earlier * N, where N is the number of lanes.

The manifest says the size and the padding, and so does the name of the column: rings with others don't mix.

Invariants: rows have the dtypes and shapes of the columns, and one length, or an error is raised; a stack that is
stored is read back bit for bit; one that this is not true of is refused.
Not here: nested names (nested.py), where rows are stored, which row follows which (nstep.py, lanes.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ringmap.arguments import positive
from ringmap.buffers.batch import Batch
from ringmap.buffers.nested import Leaves, dtype_of, leaf_array
from ringmap.buffers.transitions.lanes import same_bytes
from ringmap.clips.cut import Layout
from ringmap.errors import InputError
from ringmap.storage.columns.schema import ColumnSpec, Schema
from ringmap.storage.columns.values import cast, nested, root
from ringmap.storage.commit.commit import NUMBERS
from ringmap.storage.records.manifest import Manifest
from ringmap.storage.records.step_file import Unlinked

__all__ = ["LANES", "FrameStack", "TransitionColumns"]


Array = np.ndarray[Any, np.dtype[Any]]

_WHOLE, _REAL, _TRUTH = {int, np.int64, np.int32}, {float, np.float32, np.float64}, {bool, np.bool_}
_MOST_REWARD = 3.4e38
"""A larger one, or a NaN, takes the path of casts."""

_OBS, _CRITIC = "observations", "critic_observations"
_SCALARS = (
    ColumnSpec("rewards", (), np.dtype("<f4")),
    ColumnSpec("dones", (), np.dtype("?")),
    ColumnSpec("truncated", (), np.dtype("?")),
)
_LANES = ColumnSpec("lanes", (), np.dtype("<i4"))
_NUMBERS = ColumnSpec(NUMBERS, (), np.dtype("<i8"))
"""The ordinal of the row's episode, which a commit gives: hidden."""
_TAIL = [spec.name for spec in (*_SCALARS, _LANES, _NUMBERS)]
_OWN = {
    _OBS,
    _CRITIC,
    f"next_{_OBS}",
    f"next_{_CRITIC}",
    "actions",
    "discounts",
    "ids",
    "weights",
    *_TAIL,
}


@dataclass(frozen=True)
class TransitionColumns:
    """The columns of one buffer, and how the observations are stacked, None if they are stored as they are."""

    schema: Schema
    stack: FrameStack | None = None

    @classmethod
    def of(cls, manifest: Manifest) -> TransitionColumns:
        """Return the columns of a buffer that has some."""
        assert manifest.schema is not None
        stack = manifest.stack and FrameStack(*manifest.stack)
        return cls(manifest.schema, stack if stack and stack.column in manifest.schema.columns else None)

    @classmethod
    def parse(
        cls,
        obs_shape: Any,
        obs_dtype: Any,
        critic_obs_shape: Any,
        action_shape: Any,
        action_dtype: Any,
        where: str,
        stack: FrameStack | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> TransitionColumns:
        """Return the columns for a user's shapes."""
        seen = Leaves.parse(_OBS, obs_shape, obs_dtype, where)
        if stack is not None:
            seen = Leaves(_OBS, stack.frames_of(seen.columns, where))
        trees = [seen]
        if critic_obs_shape is not None:
            trees.append(Leaves.parse(_CRITIC, critic_obs_shape, obs_dtype, where))
        action = Leaves.parse("actions", action_shape, dtype_of(action_dtype, where), where)
        if action.is_nested:
            raise InputError(f"{where}: action_shape: expected one shape, got a mapping")
        leaves = (spec for tree in (*trees, action) for spec in tree.columns)
        earlier = () if stack is None else (stack.column,)
        beside = (*_extras(extra, {*_OWN, *(spec.name for spec in earlier)}, where), *earlier)
        return cls(Schema((*leaves, *_SCALARS, _LANES, _NUMBERS, *beside)), stack)

    @cached_property
    def shown(self) -> Schema:
        """The columns, without hidden ones."""
        return Schema(tuple(spec for spec in self.schema.columns if spec != _NUMBERS))

    @cached_property
    def stacked(self) -> list[str]:
        """Names of the columns that hold frames."""
        return [] if self.stack is None else self.trees[0].names

    @cached_property
    def whole(self) -> list[str]:
        """Names of the observation columns that hold observations, not frames."""
        return [name for name in self.observed if name not in self.stacked]

    @cached_property
    def extra(self) -> tuple[ColumnSpec, ...]:
        """The further columns of a user."""
        stop = len(self.schema.columns) - (self.stack is not None)
        return self.schema.columns[self.schema.names.index(NUMBERS) + 1 : stop]

    @cached_property
    def trees(self) -> tuple[Leaves, ...]:
        """The observations, and the critic's if declared."""
        columns = self.schema.columns
        found = {p: tuple(c for c in columns if root(c.name) == p) for p in (_OBS, _CRITIC)}
        if self.stack is not None:
            found[_OBS] = self.stack.stacks_of(found[_OBS])
        return tuple(Leaves(prefix, specs) for prefix, specs in found.items() if specs)

    @cached_property
    def observed(self) -> list[str]:
        """Names of the observation columns, of both kinds."""
        return [name for tree in self.trees for name in tree.names]

    @cached_property
    def unlinked(self) -> Unlinked:
        """The next observations, which a row has while it is pending."""
        specs = {spec.name: spec for spec in self.schema.columns}
        return Unlinked(Schema(tuple(specs[name] for name in self.observed)), _LANES.name)

    @cached_property
    def action(self) -> ColumnSpec:
        """The column of actions."""
        return next(spec for spec in self.schema.columns if spec.name == "actions")

    # -- in ----------------------------------------------------------------------------------

    def observations(
        self, now: Any, after: Any, critic: Any, critic_after: Any, where: str
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        """Return the leaves of observations and next observations, `(N, ...)`, cast and checked against each other."""
        pairs = [(now, after), (critic, critic_after)]
        if len(self.trees) == 1 and (critic is not None or critic_after is not None):
            raise InputError(f"{where}: critic observations, but critic_obs_shape was not given")
        rows: dict[str, Array] = {}
        later: dict[str, Array] = {}
        for tree, (one, other) in zip(self.trees, pairs, strict=False):
            if one is None or other is None:
                raise InputError(f"{where}: {tree.prefix} and next_{tree.prefix} are both needed")
            rows |= tree.rows(one, where)
            later |= tree.rows(other, where)
        if len({len(v) for part in (rows, later) for v in part.values()}) > 1:
            sizes = {name: len(values) for name, values in rows.items()}
            sizes |= {f"next_{name}": len(values) for name, values in later.items()}
            raise InputError(f"{where}: expected as many rows of each, got {sizes}")
        return rows, later

    @cached_property
    def _alone(self) -> tuple[ColumnSpec, ColumnSpec, int, int] | None:
        """The columns of observations and actions, and the range of an action, of one array of observations."""
        if len(self.observed) > 1 or self.trees[0].is_nested or self.extra:
            return None
        action, low, high = self.action, 0, -1
        if action.dtype.kind in "iu" and not action.shape:
            limits = np.iinfo(action.dtype)
            low, high = int(limits.min), int(limits.max)
        return self.trees[0].columns[0], action, low, high

    def as_given(
        self, now: Any, action: Any, reward: Any, after: Any, done: Any, truncated: Any
    ) -> tuple[Any, ...] | None:
        """Return the values of a step, or of a batch of them, but for their lanes, if each has its column's type as it
        is; else None: `observations` and `rest` decide. Most calls are like this, and a check of any array costs as
        much as all else."""
        if self._alone is None:
            return None
        spec, column, low, high = self._alone
        if type(now) is not np.ndarray or type(after) is not np.ndarray:
            return None
        shape = now.shape
        if now.dtype != spec.dtype or after.dtype != spec.dtype or after.shape != shape:
            return None
        if shape != spec.shape:
            return self._as_given(now, action, reward, done, truncated)
        if type(action) is np.ndarray:
            if action.dtype != column.dtype or action.shape != column.shape:
                return None
        elif type(action) not in _WHOLE or not low <= action <= high:
            return None
        if type(reward) not in _REAL or not -_MOST_REWARD <= reward <= _MOST_REWARD:
            return None
        if type(done) not in _TRUTH or (truncated is not None and type(truncated) not in _TRUTH):
            return None
        return now, action, reward, done, bool(truncated)

    def _as_given(self, now: Array, action: Any, reward: Any, done: Any, truncated: Any) -> tuple[Any, ...] | None:
        """Do the work of `as_given` for a batch."""
        assert self._alone is not None
        spec, column, _, _ = self._alone
        if now.ndim != len(spec.shape) + 1 or now.shape[1:] != spec.shape or not len(now):
            return None
        lanes = now.shape[:1]
        given = (action, reward, done) if truncated is None else (action, reward, done, truncated)
        for value in given:
            if type(value) is not np.ndarray:
                return None
        if action.dtype != column.dtype or action.shape != lanes + column.shape:
            return None
        if reward.shape != lanes or done.shape != lanes or done.dtype != np.bool_:
            return None
        if reward.dtype != np.float32 and (
            reward.dtype != np.float64 or not np.abs(reward).max() <= _MOST_REWARD
        ):  # else one of them may not fit
            return None
        if truncated is None:
            return now, action, reward, done, False
        if truncated.shape != lanes or truncated.dtype != np.bool_:
            return None
        return now, action, reward, done, truncated

    def rest(self, actions: Any, rewards: Any, dones: Any, truncated: Any, count: int, where: str) -> dict[str, Array]:
        """Return the columns of a step other than observations, `(count, ...)` each."""
        rows = {"actions": _rows(actions, self.action, count, where)}
        if truncated is None:
            truncated = np.zeros(count, np.bool_)
        for spec, value in zip(_SCALARS, (rewards, dones, truncated), strict=True):
            rows[spec.name] = _rows(value, spec, count, where)
        return rows

    @cached_property
    def given(self) -> Schema:
        """The columns of a step as `add` takes them: whole observations, and no columns of our own."""
        leaves = (spec for tree in self.trees for spec in tree.columns)
        return Schema((*leaves, self.action, *_SCALARS, *self.extra))

    def newest(self, values: Mapping[str, Array]) -> dict[str, Array]:
        """Return the newest frame of each stack; other values as they are."""
        return {n: v[:, -1] if n in self.stacked else v for n, v in values.items()}

    def extra_rows(self, extra: Any, count: int, where: str) -> list[Array]:
        """Return the further columns of a step, `(count, ...)` each."""
        if not self.extra and not extra:
            return []
        given = extra if isinstance(extra, Mapping) else {}
        names = [spec.name for spec in self.extra]
        if given.keys() != set(names):
            raise InputError(
                f"{where}: extra must have the columns {names} that the buffer was made with, got "
                f"{list(given) or extra!r}"
            )
        return [_rows(given[spec.name], spec, count, where) for spec in self.extra]

    # -- out ---------------------------------------------------------------------------------

    def layout(self, size: int, is_single: bool) -> Layout:
        """Return the shape and dtype of each column of a flat batch of `size` transitions."""
        real, action = np.dtype(np.float32), self.action
        seen, *others = ({c.name: (c.shape, c.dtype) for c in tree.columns} for tree in self.trees)
        found = {**seen, "actions": (action.shape, action.dtype), "rewards": ((), real)}
        found |= {f"next_{name}": spec for name, spec in seen.items()}
        found["dones"] = (), real
        for other in others:
            found |= other | {f"next_{name}": spec for name, spec in other.items()}
        found |= {spec.name: (spec.shape, spec.dtype) for spec in self.extra}
        if not is_single:
            found["discounts"] = (), real
        return {name: ((size, *shape), dtype) for name, (shape, dtype) in found.items()}

    @cached_property
    def is_nested(self) -> bool:
        """Whether observations are nested."""
        return any(tree.is_nested for tree in self.trees)

    def public(self, batch: Batch[Any]) -> Batch[Any]:
        """Return a drawn batch of rows in its public form: `nested`, with ids and weights where there are weights."""
        if batch.weights is not None:
            batch["ids"], batch["weights"] = batch.ids, batch.weights
        return batch.like(self.nested(batch))

    def nested(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a flat batch in its public form and order; itself, if observations are not nested."""
        return nested(batch) if self.is_nested else batch


def _extras(extra: Any, taken: set[str], where: str) -> tuple[ColumnSpec, ...]:
    """Return the columns for `extra`, name -> (shape, dtype)."""
    if extra is not None and not isinstance(extra, Mapping):
        raise InputError(f"{where}: extra must be a mapping, name -> (shape, dtype), got {extra!r}")
    found: list[ColumnSpec] = []
    for name, given in (extra or {}).items():
        if not isinstance(name, str) or not name or "/" in name:
            raise InputError(f"{where}: extra: a name is a string without slashes, got {name!r}")
        if name in taken:
            raise InputError(f"{where}: extra: {name!r} is a column of every transition; choose another name")
        leaves = Leaves.parse(name, given, np.float32, f"{where}: extra")
        if leaves.is_nested:
            raise InputError(f"{where}: extra: {name!r}: expected (shape, dtype), got a mapping")
        found += leaves.columns
    return tuple(found)


def _rows(value: Any, spec: ColumnSpec, count: int, where: str) -> Array:
    """Return a value as `(count, *shape)` of the column's dtype; one step may lack the first axis."""
    if (
        type(value) is np.ndarray
        and value.dtype == spec.dtype
        and value.shape == (count, *spec.shape)
        and value.flags.c_contiguous
    ):
        return value
    array = leaf_array(value, where, spec.name)
    if count == 1 and array.shape == spec.shape:
        array = array[None]
    if array.shape == (count, 1) and not spec.shape:
        array = array[:, 0]
    if array.shape != (count, *spec.shape):
        raise InputError(
            f"{where}: {spec.name} has shape {array.shape}, expected {(count, *spec.shape)}, as observations have "
            f"{count} rows"
        )
    if array.dtype != spec.dtype:
        array = cast(array, spec.dtype, "safe", f"{where}: {spec.name}")
    return np.ascontiguousarray(array)


_PADDINGS = ("reset", "zero")
LANES = 256
"""Calls of up to as many lanes: all transitions that count have their frames. A larger number takes more of the
disk."""
_MOST = 255
"""`earlier` is one byte."""


@dataclass(frozen=True)
class FrameStack:
    """How observations are stacked: the number of frames, and what stands before the first one of an episode."""

    size: int
    padding_type: str = "reset"

    @classmethod
    def parse(cls, frame_stack: Any, padding_type: Any, where: str) -> FrameStack | None:
        """Return the stack that a caller asks for, None for none."""
        if padding_type not in _PADDINGS:
            raise InputError(
                f"{where}: padding_type must be one of {_PADDINGS}, got {padding_type!r}; a stack with other padding "
                "can't be built again from its frames"
            )
        if frame_stack is None:
            return None
        frame_stack = positive(where, "frame_stack", frame_stack)
        if frame_stack > _MOST:
            raise InputError(f"{where}: frame_stack must be at most {_MOST}, got {frame_stack}")
        return cls(int(frame_stack), padding_type)

    @cached_property
    def column(self) -> ColumnSpec:
        """The column `earlier`."""
        return ColumnSpec(f"stack_{self.size}_{self.padding_type}", (), np.dtype("u1"))

    # -- specs -------------------------------------------------------------------------------

    def frames_of(self, specs: Iterable[ColumnSpec], where: str) -> tuple[ColumnSpec, ...]:
        """Return the columns of frames for leaves of stacked observations."""
        frames = []
        for spec in specs:
            if not spec.shape or spec.shape[0] != self.size:
                raise InputError(
                    f"{where}: {spec.name} has shape {spec.shape}, but frame_stack={self.size}: give the shape of "
                    f"stacked observations, ({self.size}, *frame), as Gymnasium's FrameStackObservation has it"
                )
            frames.append(replace(spec, shape=spec.shape[1:]))
        return tuple(frames)

    def stacks_of(self, specs: Iterable[ColumnSpec]) -> tuple[ColumnSpec, ...]:
        """Return the leaves of stacked observations for columns of frames."""
        return tuple(replace(spec, shape=(self.size, *spec.shape)) for spec in specs)

    # -- how many ----------------------------------------------------------------------------

    def older(self, capacity: int) -> int:
        """Return how many rows before the newest `capacity` stay stored: the frames of the oldest of these."""
        return (self.size - 1) * min(capacity, LANES)

    def most_lanes(self, capacity: int) -> int:
        """Return how many lanes a call may have: nearly all transitions have their frames then."""
        return min(capacity, max(LANES, capacity // (16 * self.size)))

    # -- in ----------------------------------------------------------------------------------

    def check(
        self, stacks: Mapping[str, Array], after: Mapping[str, Array], begins: Array, before: int, where: str
    ) -> None:
        """Raise unless stacks, leaf -> `(N, size, ...)`, can be built again from the frames of their lanes.

        Args:
            stacks: of the step.
            after: after the step.
            begins: `(N,)`: lanes whose stack is not the one that their last step led to.
            before: the number of lanes of the call before.
            where: the method to name in an error.
        """
        is_new, why = (
            begins.any(),
            "frames in between were not stored; go on with the observation of a reset",
        )
        if before != len(begins):
            why = (
                f"the call before had {before} lanes, this one has {len(begins)}; give all lanes in each call (of "
                "Gymnasium's vector environments those with AutoresetMode.SAME_STEP), or begin anew with a reset"
            )
        for name, stack in stacks.items():
            _refuse(
                _differ(after[name][:, :-1], stack[:, 1:]),
                f"{where}: next_{name} of lane {{}} is not the stack of {name} moved by one frame; give as next "
                "observation the "
                "one that the step led to, also where the episode ended (not the first of the next episode)",
            )
            if is_new:
                _refuse(
                    begins & self._is_no_start(stack),
                    f"{where}: {name} of lane {{}} does not go on from the lane's last step, and its older frames are "
                    f"not the padding of an episode's start (padding_type={self.padding_type!r}): {why}",
                )

    def _is_no_start(self, stack: Array) -> Array:
        """Tell for each stack whether it holds something else than one frame, and padding."""
        older = stack[:, :-1]
        padding = stack[:, -1:] if self.padding_type == "reset" else np.zeros_like(stack[:, -1:])
        return _differ(older, np.broadcast_to(padding, older.shape))

    def earlier(self, begins: Array, before: Array | None) -> Array:
        """Return the column `earlier` of a call; `before`: that of the call before, None if all lanes begin."""
        if before is None or len(before) != len(begins):
            return np.zeros(len(begins), np.uint8)
        goes_on = np.minimum(before.astype(np.int64) + 1, self.size - 1)
        return np.where(begins, 0, goes_on).astype(np.uint8)

    # -- out ---------------------------------------------------------------------------------

    def positions(self, newest: Array, lanes: Array, earlier: Array) -> Array:
        """Return the positions of the frames of stacks, `(B, size)`, oldest first; of padding the first frame's."""
        back = np.minimum(self._back, earlier.astype(np.int64)[:, None])
        back *= lanes[:, None]
        return np.subtract(newest[:, None], back, out=back)

    def blank(self, stacks: Sequence[Array], earlier: Array, ahead: int = 0) -> None:
        """Put zeros where stacks, `ahead` steps from their rows, have padding, if it is zeros."""
        short = (earlier < self.size - 1 - ahead).nonzero()[0] if self.padding_type == "zero" else ()
        if len(short):
            is_padding = self._back > earlier[short].astype(np.int64)[:, None] + ahead
            for values in stacks:
                part = values[short]
                part[is_padding] = 0
                values[short] = part

    @cached_property
    def _back(self) -> Array:
        """How many steps before the row each frame of its stack is, for a row in the middle of an episode."""
        return np.arange(self.size - 1, -1, -1)


def _differ(one: Array, other: Array) -> Array:
    """Tell for each row whether any of its bytes differ; NaN equals itself."""
    if not one[0].nbytes or same_bytes(one, other):
        return np.zeros(len(one), np.bool_)
    if one.dtype.kind in "fc":
        one, other = (np.ascontiguousarray(a).view(np.uint8) for a in (one, other))
    found: Array = (one != other).reshape(len(one), -1).any(axis=1)
    return found


def _refuse(bad: Array, message: str) -> None:
    if bad.any():
        raise InputError(message.format(int(bad.argmax())))
