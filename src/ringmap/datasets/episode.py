"""The columns of an episode: the order of an image's axes, T + 1 rows, and what stands where there is no value.

    stored (T, H, W, C)  --readers-->  EpisodeDict (T, C, H, W)  --stored_layout-->  (T, H, W, C)

    row          0    1   ...   T-1    T
    observation  o0   o1        oT-1   oT
    action       a0   a1        aT-1   --     taken at the observation of its row
    reward       --   r1        rT-1   rT     came with the observation of its row
    next_obs     o1   o2        oT     --     the observation of the next row

    blank (--):  floats, complex   NaN         text    ""
                 integers, flags   0           dates   NaT

A transposed episode records this itself, so that a writer transposes it back: a
dataset can be read and written again, and mixed with fresh rollouts, without extra code.
Not here: which columns a dataset turns (stored.py), decoding of images (formats/), which environment plays which
episode (world/, recording/).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ringmap.storage.columns.values import nested

if TYPE_CHECKING:
    from ringmap.storage.columns.schema import ColumnSpec

__all__ = [
    "EpisodeDict",
    "PictureAxes",
    "as_nested",
    "blank",
    "blank_like",
    "channels_are_last",
    "is_image",
    "rows_of",
    "stored_layout",
    "to_channels_first",
    "to_channels_last",
]


Array = np.ndarray[Any, np.dtype[Any]]

M = TypeVar("M", bound=Mapping[str, Any])

PictureAxes = dict[str, tuple["ColumnSpec", bool]]
"""Column of pictures -> how it is stored, and whether it is handed out with its channels first."""


class EpisodeDict(dict[str, Any]):
    """An episode that remembers which of its columns were turned to channels first.

    It is a plain `dict` in every other way. A new dict made from its items forgets.

    Args:
        values: column -> values, as for `dict`.
        channels_first: names of the columns whose axes are (T, C, H, W) but (T, H, W, C) in storage.

    Example:
        >>> import numpy as np
        >>> episode = EpisodeDict({"pixels": np.zeros((5, 3, 64, 48), np.uint8)}, {"pixels"})
        >>> stored_layout(episode)["pixels"].shape
        (5, 64, 48, 3)
    """

    channels_first: frozenset[str]

    def __init__(
        self,
        values: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
        channels_first: Iterable[str] = (),
    ) -> None:
        super().__init__(values)
        self.channels_first = frozenset(channels_first)

    def copy(self) -> EpisodeDict:
        """Return a shallow copy that remembers as well."""
        return EpisodeDict(self, self.channels_first)

    def __copy__(self) -> EpisodeDict:
        return self.copy()


def stored_layout(ep_data: M) -> M | dict[str, Any]:
    """Return an episode with its images in the order in which they are stored.

    Args:
        ep_data: an episode; only an `EpisodeDict` that turned something is changed.

    Returns:
        `ep_data` itself when there is nothing to do (one attribute lookup), else a new dict whose
        turned columns are views of type and dtype as before.
    """
    turned = getattr(ep_data, "channels_first", None)
    if not turned:
        return ep_data
    return _stored(ep_data, turned, "")


def _stored(values: Mapping[str, Any], turned: frozenset[str], prefix: str) -> dict[str, Any]:
    made = {}
    for name, value in values.items():
        full = f"{prefix}{name}"
        if full in turned:
            value = to_channels_last(value)
        elif isinstance(value, Mapping):
            value = _stored(value, turned, f"{full}/")
        made[name] = value
    return made


def as_nested(episode: Mapping[str, Any], where: str) -> EpisodeDict:
    """Return an episode with the columns `obs/a`, `obs/b` as `{"obs": {"a": ..., "b": ...}}`, which a writer takes
    back.

    Raises:
        InputError: a column has the name of what holds another one.
    """
    return EpisodeDict(nested(episode, where), getattr(episode, "channels_first", ()))


def is_image(spec: ColumnSpec) -> bool:
    """Return whether a column holds images, whose axes are turned: uint8 or uint16, three axes, the last of size 1, 3
    or 4."""
    return spec.dtype in ("uint8", "uint16") and len(spec.shape) == 3 and spec.shape[-1] in (1, 3, 4)


def channels_are_last(value: Any, spec: ColumnSpec) -> bool:
    """Return whether pictures (..., H, W, C) of a column, maybe transformed, still have their channels last."""
    shape, channels = tuple(getattr(value, "shape", ())), spec.shape[-1]
    if len(shape) < 3 or shape[-1] != channels:
        return False
    return shape[-3] != channels or str(value.dtype).endswith(str(spec.dtype))


def to_channels_first(value: Any) -> Any:
    """Return (..., H, W, C) as (..., C, H, W): a view, array or tensor as it came."""
    if hasattr(value, "movedim"):
        return value.movedim(-1, -3)
    return value.swapaxes(-1, -2).swapaxes(-2, -3)


def to_channels_last(value: Any) -> Any:
    """Return (..., C, H, W) as (..., H, W, C): a view, array or tensor as it came; a list per step."""
    if isinstance(value, list | tuple):
        return [to_channels_last(step) for step in value]
    if hasattr(value, "movedim"):
        return value.movedim(-3, -1)
    return value.swapaxes(-3, -2).swapaxes(-2, -1)


def blank(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return a blank value of a shape and dtype.

    Example:
        >>> blank((2,), np.float32), blank((), np.int64), blank((), "<U3")
        (array([nan, nan], dtype=float32), array(0), array('', dtype='<U3'))
    """
    kind = np.dtype(dtype).kind
    if kind in "fcmM":
        return np.full(shape, "NaT" if kind in "mM" else np.nan, dtype)
    return np.zeros(shape, dtype)


def blank_like(value: Any) -> Any:
    """Return the blank value of the column that holds a value, an array or a string."""
    return "" if isinstance(value, str) else blank(value.shape, value.dtype)


def rows_of(kind: str, values: Any, none: Any, begins: bool = True, ends: bool = True) -> Any:
    """Return the rows of a column, with a blank in the row that has no value.

    Args:
        kind: "action" (the last row is blank), "reward" (the first), "next" (each row takes the value of the row
            after it, and the last is blank), or any other name (`values` as they are).
        values: a value per row, an array or a list; "next" without `ends` needs one row more.
        none: the blank value.
        begins: whether the first of `values` is the first row of the episode.
        ends: whether the last of `values` is its last row.

    Returns:
        `values` itself, changed in place; for "next" other rows.

    Example:
        >>> rows_of("reward", [5.0, 1.0, 2.0], np.nan), rows_of("next", [1, 2, 3], 0)
        ([nan, 1.0, 2.0], [2, 3, 0])
    """
    if kind == "next":
        if not ends:
            return values[1:]
        if isinstance(values, list):
            return [*values[1:], none]
        return np.concatenate([values[1:], none[None]])
    if kind == "action" and ends:
        values[-1] = none
    elif kind == "reward" and begins:
        values[0] = none
    return values
