"""Weights: how a policy reaches its collectors, through a file that is replaced whole.

    learner    publish(model, step) ─► policy.safetensors    written beside, synced, renamed; its metadata have the step
    collector  load_into(model)     ─► is it the file that was read last?   one stat
                                       else read it, compare all of it, copy

A reader holds the file that it read last open. Meanwhile no other file can get its inode number, so a stat of the path
tells whether it was replaced: file times are too coarse for that (a clock of 4 ms).

Invariants: a file never changes once it has its name; a model takes a whole set or stays what it was.
Not here: when a policy is loaded (world, recording), how often a step is used.
"""

from __future__ import annotations

import errno
import json
import operator
import os
import weakref
from typing import TYPE_CHECKING, Any

import xxhash

from ringmap.errors import (
    CorruptError,
    EnvironmentFault,
    InputError,
    LockedError,
    NewerVersionError,
)
from ringmap.extras import require
from ringmap.storage.commit.create import make_folder
from ringmap.storage.disk.calls import Turn
from ringmap.storage.disk.files import Disk, File
from ringmap.storage.disk.lock import WriterLock, describe, holder_of
from ringmap.storage.disk.paths import local_path
from ringmap.storage.disk.system import clear_error, clear_errors

if TYPE_CHECKING:
    import torch

__all__ = ["NO_POLICY", "POLICY_STEP", "Weights", "checked_weights"]

POLICY_STEP = "policy_step"
"""Episode data: the step of the weights that played an episode's first action."""

NO_POLICY = -1
"""The `policy_step` of an episode that began before anything was published."""

_FILE, _LOCK = "policy.safetensors", "lock"
_VERSION = 1
_CHECKSUM = b'"xxh3":"'
"""What stands before the checksum in a file: in no name of a tensor, where the quotes would be escaped."""
_DIGITS = 16

_turn = Turn()


class Weights:
    """The newest weights of a policy, in a directory: one learner publishes them, any number of collectors load them.

    Without pickle: a set is a file in the safetensors format, which holds tensors and runs no code. Tensors that share
    their memory (tied layers) are stored once. A set takes the place of the one before.

    Args:
        path: the directory. It is made by the first `publish`.
        model: loaded by `load_into()`, and between episodes by `World.collect` and `ReplayBufferCollectionWrapper`.
        disk: through which the files change; for tests.

    Attributes:
        path: the directory, absolute.
        model: as it was given.
        step: of the set that this object published or loaded last; None before that.

    Raises:
        InputError: `model` is no `torch.nn.Module`.
        MissingExtraError: safetensors or torch is not installed.

    Processes and threads: one publisher at a time, any number of readers, in any process of one machine, or of several
        that share a file system whose renames are atomic. Killed at any instruction, it leaves the set before or the
        new one, whole. Threads take turns; a signal handler in the middle of a call is refused. It can be pickled, with
        its model.

    Source: Decoupled actors and learners, as in Ape-X (Horgan et al., 2018). The file format:
        https://github.com/huggingface/safetensors

    Example:
        >>> import tempfile, torch
        >>> path = tempfile.mkdtemp() + "/policy"
        >>> learned, acting = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
        >>> Weights(path).publish(learned, step=1000)
        >>> weights = Weights(path)  # in a collector
        >>> weights.load_into(acting), weights.step
        (True, 1000)
        >>> torch.equal(acting.weight, learned.weight)
        True
        >>> weights.load_into(acting)  # nothing new
        False
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: torch.nn.Module | None = None,
        *,
        disk: Disk | None = None,
    ) -> None:
        require("weights", "Weights")
        self.path = local_path(path)
        self.model = None if model is None else _checked(model, "Weights")
        self.step: int | None = None
        self._disk = disk or Disk()
        self._path = os.path.join(self.path, _FILE)
        self._file: File | None = None
        self._which: tuple[int, int] | None = None
        self._count = 0  # of the sets that were seen
        self._filled: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    @property
    def policy_step(self) -> int:
        """What an episode says that begins with these weights: their step, -1 if none were published."""
        return NO_POLICY if self.step is None else self.step

    def __reduce__(self) -> Any:
        return type(self), (self.path, self.model)

    def __repr__(self) -> str:
        return f"Weights({self.path!r}, step={self.step})"

    # -- the learner ---------------------------------------------------------------------------

    def publish(self, model: torch.nn.Module, step: int) -> None:
        """Store the model's parameters and buffers as the newest set.

        Args:
            model: on any device; call it between updates.
            step: of the training, 0 or more. It may go back, as for a learner that was resumed.

        Raises:
            InputError: `step` is no step; a tensor can't be stored (sparse, uninitialised, of a dtype that
                safetensors lacks), or the model has extra state that is no tensor. Nothing was changed.
            LockedError: another process is publishing here at this moment.
            RoleError: this thread is in the middle of publishing or loading: the caller is a signal handler.
            EnvironmentFault: the disk refuses it. The set that is there stays, whole.

        Cost: two copies of the model in memory; a write of it, and two syncs of the disk.
        """
        where = "Weights.publish"
        step = _step_of(step, where)
        data = _encoded(_checked(model, where), step, where)
        with clear_errors(where, self.path, lambda: "the set that was published stays"):
            _turn.take(where, lambda: self._publish(model, data, where))
        self.step = step

    def _publish(self, model: torch.nn.Module, data: bytes, where: str) -> None:
        disk, folder = self._disk, self.path
        make_folder(disk, folder)
        lock = WriterLock(disk, os.path.join(folder, _LOCK), folder)
        try:
            lock.acquire()
        except LockedError:
            raise LockedError(
                f"{where}: {folder}: {describe(holder_of(lock.path))} is publishing here; let one learner "
                "publish, of several ranks the first"
            ) from None
        except EnvironmentFault as error:  # it speaks of a buffer
            if isinstance(error.__cause__, OSError):
                raise clear_error(error.__cause__, where, folder) from error.__cause__
            raise
        try:
            disk.replace_file(self._path, data)
            self._open()
        finally:
            lock.release()
        self._filled[model] = self._count  # a learner that collects by itself goes on with its own

    # -- collectors ----------------------------------------------------------------------------

    def load_into(self, model: torch.nn.Module | None = None) -> bool:
        """Copy the newest set into a model, if the model does not have it from here already.

        Args:
            model: of the same parameters and buffers, on any device; None: the one that this object was made with.

        Returns:
            True if it was copied; False if there is nothing new, or nothing was published yet.

        Raises:
            InputError: the weights are of another model: the message names the first tensor that differs in its name,
                shape or dtype. Or there is no model. The model is unchanged.
            CorruptError: the file is damaged or cut. The model is unchanged.
            NewerVersionError: a newer release published it.
            RoleError: this thread is in the middle of publishing or loading: the caller is a signal handler.
            EnvironmentFault: the disk refuses to read.

        Cost: one `stat` if there is nothing new; else the set is read and checked, and lies in memory twice.
        """
        where = "Weights.load_into"
        model = _checked(self.model if model is None else model, where)
        with clear_errors(where, self.path):
            if self._is_current() and self._filled.get(model) == self._count:
                return False
            return _turn.take(where, lambda: self._load(model, where))

    def _load(self, model: torch.nn.Module, where: str) -> bool:
        data = self._read()
        if data is None:
            return False
        step = _step_in(data, f"{where}: {self._path}")
        _copy(data, model, f"{where}: {self._path}")
        self._filled[model] = self._count
        self.step = step
        return True

    def _is_current(self) -> bool:
        """Whether nothing newer was published than what was read last. One system call."""
        try:
            status = os.stat(self._path, follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return self._which is not None
        return (status.st_dev, status.st_ino) == self._which

    def _open(self) -> int | None:
        """Hold the newest set; return how many bytes it has, None if nothing was published."""
        try:
            fd, status = self._disk.system.open_file(self._path, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            return None
        file, which = File(self._disk, fd, self._path), (status.st_dev, status.st_ino)
        if which != self._which:
            self._file, self._which, self._count = file, which, self._count + 1
        return status.st_size

    def _read(self) -> bytes | None:
        """Return the newest set; None if nothing was published."""
        while (nbytes := self._open()) is not None and self._file is not None:
            try:
                return self._file.read(nbytes, 0)
            except OSError as error:  # replaced by another host meanwhile
                if error.errno != errno.ESTALE:
                    raise
        return None


def checked_weights(weights: Any, where: str) -> Weights | None:
    """Return the argument `weights`; raise InputError if it is none."""
    if not (weights is None or isinstance(weights, Weights)):
        raise InputError(f"{where}: weights= must be a ringmap.Weights, got {type(weights).__name__}")
    return weights


def _step_of(step: Any, where: str) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise InputError(f"{where}: step must be a number, 0 or more, got {step!r}")
    return number


def _checked(model: Any, where: str) -> torch.nn.Module:
    import torch

    if not isinstance(model, torch.nn.Module):
        raise InputError(
            f"{where}: expected a torch.nn.Module, got {type(model).__name__}; name the policy's model: "
            "Weights(path, model)"
        )
    return model


def _tensors(model: torch.nn.Module, where: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors of a model by name, and for each name under which of them its memory is stored."""
    import torch

    found: dict[str, torch.Tensor] = {}
    stored: dict[str, str] = {}
    first: dict[Any, str] = {}
    for name, value in sorted(model.state_dict().items()):
        if not isinstance(value, torch.Tensor):
            raise InputError(
                f"{where}: {name!r} is a {type(value).__name__}: only tensors are stored, without pickle; register it "
                "as a buffer"
            )
        if torch.nn.parameter.is_lazy(value):
            raise InputError(f"{where}: {name!r} is not initialised; run the model once before that")
        if value.layout is not torch.strided or value.is_meta or value.is_quantized:
            kind = "on the device meta" if value.is_meta else "sparse or quantized"
            raise InputError(f"{where}: {name!r} is {kind}; only plain tensors are stored")
        key: Any = name
        if value.numel():
            key = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        found[name] = value
        stored[name] = first.setdefault(key, name)
    return found, stored


def _encoded(model: torch.nn.Module, step: int, where: str) -> bytes:
    """Return a model in the safetensors format, tied tensors once."""
    from safetensors.torch import save

    tensors, stored = _tensors(model, where)
    # Copies, each of its own memory: tensors that overlap otherwise than by being the same are refused as they are.
    copies = {name: tensors[name].detach().to("cpu", copy=True).contiguous() for name in sorted(set(stored.values()))}
    about = {"format": "pt", "version": str(_VERSION), "step": str(step), "xxh3": "0" * _DIGITS}
    try:
        data = bytes(save(copies, about))
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        odd = sorted({str(v.dtype).removeprefix("torch.") for v in copies.values()})
        raise InputError(
            f"{where}: safetensors refuses the model ({error}); its dtypes are {odd}; store others as a buffer of "
            "plain numbers"
        ) from error
    copies.clear()
    at = data.index(_CHECKSUM) + len(_CHECKSUM)
    return b"".join([data[:at], _checksum(data, at), memoryview(data)[at + _DIGITS :]])


def _checksum(data: bytes, at: int) -> bytes:
    """Return the checksum of all bytes but those at which it stands."""
    hasher = xxhash.xxh3_64(data[:at])
    hasher.update(memoryview(data)[at + _DIGITS :])
    return hasher.hexdigest().encode()


def _step_in(data: bytes, where: str) -> int:
    """Return the step of a set that is as it was written."""
    try:
        at = data.index(_CHECKSUM) + len(_CHECKSUM)
        if data[at : at + _DIGITS] != _checksum(data, at):
            raise ValueError("its checksum is another one")
        about = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        version, step = int(about["version"]), int(about["step"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise CorruptError(f"{where} is not what was written ({error}); publish again") from error
    if version != _VERSION:
        raise NewerVersionError(f"{where}: has version {version}, expected {_VERSION}: install a newer ringmap")
    return step


def _copy(data: bytes, model: torch.nn.Module, where: str) -> None:
    """Copy a set into a model, all of it or nothing."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    tensors, stored = _tensors(model, where)
    try:
        given = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise CorruptError(f"{where} is no safetensors file ({error}); publish again") from error
    names = list(model.state_dict())
    for name in [*names, *sorted(given.keys() - tensors.keys())]:
        source = stored.get(name)
        here = "nothing" if source is None else _described(tensors[name])
        if source is not None and source != name:
            here = f"{here} tied to {source!r}"
            there = "nothing" if name not in given else f"{_described(given[name])} of its own"
            alike = name not in given
        else:
            there = "nothing" if name not in given else _described(given[name])
            alike = here == there
        if not alike:
            raise InputError(
                f"{where}: the weights are of another model: {name!r} is {there} there, and {here} in this one, which "
                "is unchanged; load them into the model that was published"
            )
    model.load_state_dict({name: given[stored[name]] for name in names})


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
