"""A window: which steps around an anchor a column holds, as a user writes it, and the cut that it means.

    {"pixels": Window(range(-1, 1)), "action": Window(range(-1, 15), pad="edge")}  --cut_of-->  Cut

Invariants: a window is checked against the stored columns before anything is drawn.
Not here: index arithmetic (cut.py), reading (gather.py).
"""

from __future__ import annotations

import itertools
import logging
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from ringmap.clips.cut import ANCHOR, Cut, Steps, Taken
from ringmap.clips.items import Computed
from ringmap.errors import ArgumentTypeError, InputError
from ringmap.storage.columns.schema import ColumnSpec, Schema

__all__ = [
    "Wanted",
    "Window",
    "WindowMaker",
    "WindowSpec",
    "check_anchors",
    "cut_of",
    "tell_no_lanes",
    "warn_unreached",
]

Array = np.ndarray[Any, np.dtype[Any]]


class WindowMaker(ABC):
    """Makes the windows of all columns, once it is known which there are.

    `across`: whether items run on into the next episode of their lane.
    """

    across = False

    @property
    @abstractmethod
    def key(self) -> tuple[Any, ...]:
        """A value that equal makers share."""

    @abstractmethod
    def window(self, schema: Schema, where: str, frameskip: int) -> Mapping[str, Any]:
        """Return name -> `Window`, whose offsets `frameskip` multiplies, `Computed` or function."""


_QUARTER = 0.25
"""Fraction of a step by which an offset in seconds may miss it."""
_PADS = ("edge", "zero", "nan")
_FAR = 1 << 31


WindowSpec = Mapping[str, Any] | WindowMaker
"""Name -> `Window`, `Computed`, or a function of the batch that returns a column; or what makes them, such as
`Sequences`."""


@dataclass(frozen=True)
class Window:
    """The steps of a column around a step t, the anchor.

    Args:
        offsets: of the steps from t, integers: a range, a list or an array, in any order. `frameskip` multiplies them.
        pad: what stands for a step outside the episode. None: there is none; steps t for which an offset leaves the
            episode are no anchors. "edge": the nearest step of the episode. "zero", "nan" (floats only), or a value.
        mask: name of the column that tells which rows are padding, bool `(B, n)`; `{}` stands for the name of the
            column. It comes for each padded column.
        seconds: offsets in seconds, in place of `offsets`, where the rate is known (`fps=`). Each must lie within a
            quarter of a step of a step.
        blanks: whether rows without a value (where rewards stand at the "next" step, the first reward and the last
            action of an episode) count as steps like any other, as stored, instead of as padding.

    Raises:
        InputError: no offsets, offsets that are no integers, or both `offsets` and `seconds`.

    Example:
        >>> Window(range(-1, 3), pad="edge").offsets, Window([0, -4]).offsets
        ((-1, 0, 1, 2), (0, -4))
    """

    offsets: Any = None
    pad: Any = None
    mask: str = "{}_is_pad"
    seconds: Any = None
    blanks: bool = False
    _hash: int = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if (self.offsets is None) == (self.seconds is None):
            raise InputError("Window: give offsets= or seconds=, and not both")
        chosen, name = (self.offsets, "offsets") if self.seconds is None else (self.seconds, "seconds")
        try:
            values = np.asarray(list(chosen))
        except TypeError:
            raise InputError(
                f"Window: {name} must be a list of numbers, got {chosen!r}; for one step write [{chosen!r}]"
            ) from None
        if not len(values):
            raise InputError(f"Window: {name} is empty; [0] is the anchor itself")
        kinds = "iu" if self.seconds is None else "iuf"
        if values.ndim != 1 or values.dtype.kind not in kinds:
            raise InputError(
                f"Window: {name} must be {'integers' if kinds == 'iu' else 'numbers'}, got {chosen!r}"
                + ("; for seconds write Window(seconds=...)" if values.dtype.kind == "f" else "")
            )
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise InputError(f"Window: {name} must be finite, got {chosen!r}")
        if max(abs(value) for value in values.tolist()) >= _FAR:
            raise InputError(f"Window: {name} must lie within 2**31 of the anchor, got {chosen!r}")
        object.__setattr__(self, name, tuple(values.tolist()))
        if isinstance(self.pad, str) and self.pad not in _PADS:
            raise InputError(f"Window: pad must be one of {(None, *_PADS)} or a value, got {self.pad!r}")
        if np.ndim(self.pad):
            raise InputError(f"Window: pad must be one value, got an array of shape {np.shape(self.pad)}")
        if not isinstance(self.mask, str) or not self.mask:
            raise InputError(f"Window: mask must be a name such as '{{}}_is_pad', got {self.mask!r}")
        if isinstance(self.pad, np.ndarray):
            object.__setattr__(self, "pad", self.pad[()])
        try:
            found = hash(self._fields)  # once: every draw looks its cut up
        except TypeError:
            raise InputError(f"Window: pad must be one value, got {self.pad!r}") from None
        object.__setattr__(self, "_hash", found)

    @property
    def _fields(self) -> tuple[Any, ...]:
        return self.offsets, self.pad, self.mask, self.seconds, self.blanks

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> Any:
        return Window, self._fields  # the hash of a text differs from process to process

    def steps(self, where: str, name: str, frameskip: int, fps: Fraction | float | None) -> tuple[int, ...]:
        """Return the offsets in stored steps.

        Raises:
            InputError: they are in seconds, and the rate is not known, or they miss the steps.
        """
        if self.seconds is None:
            return tuple(offset * frameskip for offset in self.offsets)
        if fps is None:
            raise InputError(
                f"{where}: the window of {name!r} is in seconds, and the rate of the steps is not known; pass fps="
            )
        found = np.array(self.seconds, np.float64) * float(fps)
        near = np.rint(found)
        off = np.abs(found - near)
        if off.max() > _QUARTER:
            worst = int(off.argmax())
            raise InputError(
                f"{where}: the window of {name!r} asks for {self.seconds[worst]!r} s, which at fps={float(fps):g} is "
                f"{found[worst]:.2f} steps; offsets must lie within a quarter of a step of a step"
            )
        return tuple(near.astype(np.int64).tolist())


def cut_of(
    where: str,
    schema: Schema,
    window: WindowSpec,
    *,
    columns: Iterable[str] | None = None,
    anchors: slice | None = None,
    drop_all_padded: bool = False,
    frameskip: int = 1,
    fps: Fraction | float | None = None,
    reward_at: str | None = None,
) -> Cut:
    """Return the cut of a window over stored columns.

    Args:
        where: the call to name in an error.
        schema: the stored columns.
        window: name -> `Window`, `Computed`, or a function.
        columns: names of the columns to hold, those of `window` included; None: all. Those without a window come at the
            anchor alone.
        anchors: leaves steps out: `slice(2, -7)` the first 2 and the last 7 of each episode.
        drop_all_padded: whether steps are left out at which a padded column would be padding alone.
        frameskip: multiplies offsets in steps.
        fps: steps per second.
        reward_at: "next": the first row of an episode has no reward, and the last no action; "same": all have; None:
            not known.

    Raises:
        InputError: an unknown column, a fill value that a column can't hold, a name that is taken, or a sum over
            rewards where it is not known where they stand.
    """
    across = isinstance(window, WindowMaker) and window.across
    if across and anchors is not None:
        raise InputError(
            f"{where}: anchors= leaves out steps at the ends of episodes, and {type(window).__name__}(across=True) "
            "runs over these; leave one of them out"
        )
    if isinstance(window, WindowMaker):
        window = window.window(schema, where, frameskip)
    names = schema.names
    specs = {spec.name: spec for spec in schema.columns}
    wanted = None if columns is None else _columns(where, columns, window, names)
    blanks = {"reward": (1, 0), "action": (0, 1)} if reward_at == "next" else {}
    blanks = {name: ends for name, ends in blanks.items() if name in specs}
    first, last = _ends(where, anchors)
    least, known = 0, dict[Steps, Steps]()
    named, computed, functions = dict[str, Taken](), list[Any](), list[Any]()
    made: dict[str, str] = {}  # columns that are added -> what adds them
    for name, how in window.items():
        if wanted is not None and name not in wanted:
            continue
        if isinstance(how, Computed):
            computed.append((name, how))
            _check_computed(where, name, how, schema, reward_at)
            for added in how.adds(name):
                if added in window and added != name:
                    raise InputError(
                        f"{where}: window[{name!r}] makes the column {added!r}, which has a window of its own"
                    )
                stored = () if added in how.reads(schema) else names  # it may replace what it reads
                _claim(where, made, added, name, stored)
            continue
        if not isinstance(how, Window):
            if not callable(how):
                raise InputError(f"{where}: window[{name!r}] must be a Window, a Computed or a function, got {how!r}")
            _claim(where, made, name, name, names)
            functions.append((name, how))
            continue
        if name not in specs:
            raise InputError(f"{where}: window has {unknown(name, names)}")
        offsets = how.steps(where, name, frameskip, fps)
        ends = (0, 0) if how.blanks else blanks.get(name, (0, 0))
        steps = Steps(offsets, how.pad is not None, *ends)
        steps = known.setdefault(steps, steps)
        mask = None
        if steps.padded:
            mask = how.mask.replace("{}", name)
            _claim(where, made, mask, name, names, " ; rename the mask: Window(..., mask='{}_padding')")
            if drop_all_padded:
                run_first, run_last, shortest = _some_real(steps)
                first, last, least = max(first, run_first), max(last, run_last), max(least, shortest)
        else:
            first, last = max(first, steps.before), max(last, steps.after)
        named[name] = Taken(steps, fill=_fill(where, specs[name], how.pad), mask=mask)
    others = ANCHOR if wanted is None else None
    for name in wanted or ():
        if name in specs:
            named.setdefault(name, ANCHOR)
    return Cut(named, others, first, last, least, blanks, reward_at, tuple(computed), tuple(functions), across=across)


def unknown(name: str, names: Iterable[str]) -> str:
    """Return, in words, that there is no such column, and the nearest."""
    import difflib  # here: an import of it is for errors alone

    known = list(names)
    near = difflib.get_close_matches(name, known, 1)
    hint = f", but {near[0]!r} is" if near else ""
    return f"a column {name!r} that is not stored{hint}; there are {known}"


def _columns(where: str, columns: Iterable[str], window: Mapping[str, Any], names: list[str]) -> list[str]:
    if isinstance(columns, str):
        raise InputError(f"{where}: columns must be a list of names, got {columns!r}; write [{columns!r}]")
    wanted = list(columns)
    for name in wanted:
        if name not in names and name not in window:
            raise InputError(f"{where}: columns has {unknown(name, [*names, *window])}")
    return wanted


def _ends(where: str, anchors: slice | None) -> tuple[int, int]:
    """Return how many steps a slice leaves out at both ends of every episode."""
    if anchors is None:
        return 0, 0
    good = isinstance(anchors, slice) and anchors.step in (None, 1)
    try:
        first = operator.index((good and anchors.start) or 0)
        last = operator.index((good and anchors.stop) or 0)
    except TypeError:
        good = False
    if not good or first < 0 or last > 0 or (anchors.stop == 0):
        raise InputError(
            f"{where}: anchors must be a slice that leaves out steps at the ends of episodes, such as slice(2, -7), "
            f"got {anchors!r}"
        )
    return first, -last


def _claim(where: str, made: dict[str, str], name: str, by: str, names: Iterable[str], remedy: str = "") -> None:
    """Take a name for a column that is added."""
    if name in names or name in made:
        taken = "is stored" if name in names else f"comes from window[{made[name]!r}]"
        raise InputError(
            f"{where}: window[{by!r}] adds a column {name!r}, but one of that name "
            f"{taken}{remedy or '; choose another name'}"
        )
    made[name] = by


def _check_computed(where: str, name: str, how: Computed, schema: Schema, reward_at: str | None) -> None:
    for column in how.reads(schema):
        if column not in schema.names:
            kind = type(how).__name__
            raise InputError(f"{where}: window[{name!r}], {kind}, reads {unknown(column, schema.names)}")
    if how.needs_reward_at and reward_at is None:
        raise InputError(
            f"{where}: window[{name!r}] needs the rewards, and it is not known where they stand: pass reward_at='next' "
            "if the reward "
            "of an action stands in the row of the step that it led to (as World and the recording wrapper write it), "
            "'same' if in the row of the action"
        )
    how.check(schema, where)


def _fill(where: str, spec: ColumnSpec, pad: Any) -> Any:
    """Return the value of padded rows, None for the nearest row."""
    if pad is None or (isinstance(pad, str) and pad == "edge"):
        return None
    if isinstance(pad, str) and pad == "zero":
        return np.zeros((), spec.dtype)[()]
    if isinstance(pad, str):
        if spec.dtype.kind not in "fc":
            raise InputError(
                f"{where}: the window of {spec.name!r} has pad='nan', but the column holds {spec.kind}; choose 'zero', "
                "'edge' or a value"
            )
        return np.array(np.nan, spec.dtype)[()]
    value = _held(spec.dtype, np.asarray(pad))
    if value is None:
        raise InputError(
            f"{where}: the window of {spec.name!r} has pad={pad!r}, which the column, {spec.kind}, can't hold"
        )
    return value


def _held(dtype: np.dtype[Any], pad: Array) -> Any:
    """Return a value as a column of this dtype holds it, a fraction rounded; None if it can't."""
    if pad.dtype.kind == "c" and dtype.kind != "c":
        return None
    try:
        with np.errstate(all="ignore"):
            value = pad.astype(dtype)[()]
            # Python compares integers with floats exactly, and NumPy dates of any unit.
            same = value == pad if dtype.kind in "mM" else value.item() == pad.item()
            if bool(same) or (value != value and pad != pad):
                return value
    except (TypeError, ValueError, OverflowError):
        return None
    rounded = pad.dtype.kind in "fc" and dtype.kind in "fc" and value != 0 and np.isfinite(value)
    return value if rounded else None


def _some_real(steps: Steps) -> tuple[int, int, int]:
    """Return how many steps to leave out at both ends, and the shortest episode, so that some row is no padding."""
    offsets = sorted(set(steps.offsets))
    gap = max((b - a for a, b in itertools.pairwise(offsets)), default=1)
    first = max(0, steps.blank_first - offsets[-1])
    last = max(0, steps.blank_last + offsets[0])
    # In a shorter episode the anchor may lie so that all its steps fall between two offsets.
    return first, last, steps.blank_first + steps.blank_last + gap


log = logging.getLogger("ringmap")


_MUCH = 0.1
"""Fraction of the steps that no item reaches, above which there is a warning."""


class Wanted(NamedTuple):
    """What a caller asked for; the arguments are those of `ReplayBuffer.sample`."""

    history: int
    frameskip: int
    window: WindowSpec | None = None
    columns: Iterable[str] | None = None
    anchors: slice | None = None
    drop_all_padded: bool = False
    fps: Fraction | float | None = None
    reward_at: str | None = None

    @property
    def is_plain(self) -> bool:
        """Whether whole clips are wanted, as without these arguments."""
        return self.window is None and self.columns is None and self.anchors is None

    @property
    def key(self) -> tuple[Any, ...]:
        """A value that equal requests share. A function, or a computed column, is itself only."""
        window, slice_ = self.window, self.anchors
        cut: Any = None
        if isinstance(window, WindowMaker):
            cut = window.key
        elif window is not None:
            cut = tuple([(n, w if isinstance(w, Window) else id(w)) for n, w in window.items()])
        ends = (slice_.start, slice_.stop, slice_.step) if isinstance(slice_, slice) else slice_
        return (
            self.history,
            self.frameskip,
            cut,
            self.columns,
            ends,
            self.drop_all_padded,
            self.fps,
            self.reward_at,
        )

    def cut(self, where: str, schema: Schema) -> Cut:
        """Return the cut of this request over stored columns.

        Raises:
            InputError: see `cut_of`.
        """
        if not isinstance(self.window, Mapping | WindowMaker | None):
            raise InputError(
                f"{where}: window must be a mapping of columns to Window(...), or Sequences(...), got {self.window!r}"
            )
        if self.window is not None:
            return cut_of(
                where,
                schema,
                self.window,
                columns=self.columns,
                anchors=self.anchors,
                drop_all_padded=self.drop_all_padded,
                frameskip=self.frameskip,
                fps=self.fps,
                reward_at=self.reward_at,
            )
        checked = cut_of(where, schema, {}, columns=self.columns, anchors=self.anchors)
        columns = None if self.columns is None else tuple(self.columns)
        cut = Cut.clip(self.history, self.frameskip, columns)
        if self.anchors is None:
            return cut
        return replace(cut, before=checked.before, after=max(cut.after, checked.after))


def check_anchors(where: str, anchors: Any) -> None:
    """Raise ArgumentTypeError if episodes are to be selected by `anchors`, which selects steps."""
    if callable(anchors) or isinstance(anchors, str):
        raise ArgumentTypeError(
            f"{where}: anchors= takes a slice of steps, such as slice(2, -7), got {anchors!r:.80}; which episodes are "
            "wanted says where=, of view, split and load_dataset"
        )


def tell_no_lanes(where: str) -> None:
    """Say in the log in which order sequences run over episodes without lanes."""
    log.info(
        "%s: across=True: the lanes of the stored episodes are not known; sequences run from one to the next in the "
        "order of storage",
        where,
    )


def warn_unreached(lengths: Array, cut: Cut, where: str) -> None:
    """Warn if more than a tenth of the stored steps are in episodes too short for a clip, and some are not."""
    if cut.across:
        return
    steps, missed = int(lengths.sum()), int(lengths[cut.counts(lengths) == 0].sum())
    if _MUCH * steps < missed < steps:
        log.warning(
            "%s: %d of %d stored steps are in no clip: episodes shorter than %d steps have none (the longest has %d); "
            "use a smaller history, or pad=",
            where,
            missed,
            steps,
            max(cut.span, cut.least),
            int(lengths.max()),
        )
