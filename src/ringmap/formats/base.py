"""The contract of a format: what a reader and a writer of one on-disk layout owe.

    path --detect--> Format --open_reader--> dataset        (episodes come out)
                            --open_writer--> Writer         (episodes go in)

Every writer: takes per-step lists and bulk arrays alike; an empty episode changes nothing;
the schema of the first episode holds from then on, and an episode that does not fit raises
before a byte is written; killed at any moment, it leaves every episode readable whose
`write_episode` had returned. `ringmap.testing.FormatTests` tests all of this.
Not here: the list of formats (registry.py), what an episode must look like (schema.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from os import PathLike
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

from ringmap.errors import InputError

__all__ = [
    "EPISODE_DATA_KEY",
    "WRITE_MODES",
    "Format",
    "Writer",
    "split_episode_data",
    "validate_write_mode",
]

EPISODE_DATA_KEY = "_episode_data"
"""The reserved key of an episode: a mapping of values that are constant within it."""

WRITE_MODES = ("append", "overwrite", "error")
"""What a writer does where a dataset exists: extend it (the default), replace it, or refuse."""


@runtime_checkable
class Writer(Protocol):
    """Whatever episodes can be written to: a format's writer, or a buffer.

    Outside a `with` block a format's writer raises `RuntimeError`.
    """

    def __enter__(self) -> Self:
        """Open for writing."""
        ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Finish, and never swallow the exception."""
        ...

    def write_episode(self, ep_data: Mapping[str, Any]) -> None:
        """Write one whole episode: column -> per-step list, or array of shape (T, ...)."""
        ...

    def write_episodes(self, episodes: Iterable[Mapping[str, Any]]) -> None:
        """Write episodes as they come."""
        ...


class Format:
    """One on-disk layout. Register a subclass with `register_format`.

    A format that only reads leaves `open_writer` alone, and the other way round.
    """

    name: ClassVar[str] = ""
    """What `format=` calls it; the registry's key."""

    supports_episode_data: ClassVar[bool] = False
    """Whether a writer keeps what stands under `_episode_data`, and a reader returns it."""

    lossless: ClassVar[bool] = False
    """Whether what its writer stores comes back bit for bit, images too, without any option."""

    @classmethod
    def detect(cls, path: str | PathLike[str]) -> bool:
        """Tell whether a path looks like this format. Reads little, changes nothing, never raises."""
        raise NotImplementedError(f"{cls.__name__}.detect")

    @classmethod
    def can_read(cls) -> bool:
        """Tell whether there is a reader: whether `open_reader` is the format's own."""
        return cls.open_reader.__func__ is not Format.open_reader.__func__  # type: ignore[attr-defined]

    @classmethod
    def can_write(cls) -> bool:
        """Tell whether there is a writer: whether `open_writer` is the format's own."""
        return cls.open_writer.__func__ is not Format.open_writer.__func__  # type: ignore[attr-defined]

    @classmethod
    def open_reader(cls, path: str | PathLike[str], **options: Any) -> Any:
        """Return a dataset (`ringmap.data.Dataset`) of what lies at `path`.

        Every reader takes the options `num_steps`, `frameskip`, `transform`, and `layout`: "CHW" hands images out with
        their channels first, "HWC" as they are stored.
        """
        raise NotImplementedError(f"format {cls.name!r} does not support reading")

    @classmethod
    def open_writer(cls, path: str | PathLike[str], **options: Any) -> Writer:
        """Return a writer to `path`; every writer takes the option `mode`, one of `WRITE_MODES`."""
        raise NotImplementedError(f"format {cls.name!r} does not support writing (it is read-only)")


def validate_write_mode(mode: str) -> str:
    """Return `mode` if it is one of `WRITE_MODES`.

    Raises:
        InputError: it is not.
    """
    if mode not in WRITE_MODES:
        raise InputError(f"write mode must be one of {WRITE_MODES}, got {mode!r}")
    return mode


def split_episode_data(ep_data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `(per-step columns, values constant within the episode)` of an episode.

    Raises:
        InputError: the episode, or what stands under `_episode_data`, is no mapping.

    Example:
        >>> split_episode_data({"reward": [0.0, 1.0], "_episode_data": {"seed": 7}})
        ({'reward': [0.0, 1.0]}, {'seed': 7})
    """
    if not isinstance(ep_data, Mapping):
        raise InputError(
            f"an episode is a mapping of column -> one value per step, got {type(ep_data).__name__}; of a list of "
            "steps make {name: [step[name] for step in steps] for name in steps[0]}"
        )
    columns = {name: value for name, value in ep_data.items() if name != EPISODE_DATA_KEY}
    constant = ep_data.get(EPISODE_DATA_KEY)
    if constant is None:
        return columns, {}
    if not isinstance(constant, Mapping):
        raise InputError(
            f"{EPISODE_DATA_KEY!r} must be a mapping of name -> value constant within the episode, "
            f"got {type(constant).__name__}"
        )
    return columns, dict(constant)
