"""Identity: which buffer a directory is, although its manifest may be damaged, lost or foreign.

    manifests found, labels of columns, salts of state and table -> uuid -> manifest

The uuid that most files vouch for is the buffer's. A manifest that is lost is made again from
what the columns say of themselves: all but the settings, which stay behind.

Invariants: a manifest that any other file vouches for is taken as it is.
Not here: the other files (parts.py).
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from dataclasses import replace
from typing import Any

from ringmap.errors import (
    DamageError,
    NewerVersionError,
    UnknownFormatError,
    UnreleasedVersionError,
)
from ringmap.storage.columns.schema import Schema, stored_spec
from ringmap.storage.directory.entries import SIGNS
from ringmap.storage.directory.opening import examine
from ringmap.storage.inspect.raw_files import Files, Part
from ringmap.storage.records.layout import LAYOUT
from ringmap.storage.records.manifest import (
    VERSION,
    Manifest,
    born_in,
    read_limit,
    stored_options,
)
from ringmap.storage.records.names import COLUMNS, MANIFEST, STATE, TABLE
from ringmap.storage.records.table import RECORD, SPARE_SLOTS, EpisodeTable

__all__ = ["Identity", "decode"]

Label = dict[str, Any]


class Identity:
    """The manifest of a directory: as it stands there, or as the other files say that it was.

    Attributes:
        part: where the manifest lies, and what is wrong with it.
        manifest: the manifest, or None when nothing tells what it was.
        labels: what each file in `columns/`, or in the whole directory where need be, says of itself.

    Raises:
        UnknownFormatError: the directory holds no buffer, nor the remains of one.
        NewerVersionError, UnreleasedVersionError: the buffer is from another version of ringmap.
    """

    def __init__(self, files: Files) -> None:
        self.files = files
        _refuse_others(files)
        self.labels = _labels_of(files, files.names(COLUMNS))
        self.part, self.manifest = self._find()

    def _find(self) -> tuple[Part, Manifest | None]:
        own, fault = decode(self.files, MANIFEST)
        known = {str(label.get("uuid")) for label in self.labels.values()}
        if own is not None and (own.uuid.hex() in known or any(self.files.states(STATE, own.uuid))):
            return self._agreed(own)
        self.labels = _labels_of(self.files, self.files.columns())  # a column may lie anywhere
        by_label = Counter(str(label.get("uuid")) for label in self.labels.values())
        found = {name: other for name in self._others() if (other := decode(self.files, name)[0])}
        claimed = {manifest.uuid.hex() for manifest in [*found.values(), *([own] if own else [])]}
        scores = {text: by_label[text] + self._vouchers(text) for text in {*by_label, *claimed}}
        best = max(scores, key=lambda text: scores[text], default="")
        if own is not None:
            if scores[own.uuid.hex()] == scores[best]:
                return Part(MANIFEST, MANIFEST), own
            fault = "belongs to another buffer: no other file here knows its uuid"
        for name, manifest in found.items():
            if manifest.uuid.hex() == best:
                return Part(MANIFEST, name, [f"{fault}; it lies at {name}"]), manifest
        return Part(MANIFEST, None, [fault]), self.from_labels(best) or self._salvage()

    def _agreed(self, own: Manifest) -> tuple[Part, Manifest]:
        """Take a manifest, unless the columns, all of which are there, agree on another one."""
        expected = [own.label(i) for i in range(len(own.files))]
        known = [label in self.labels.values() for label in expected]
        if not all(known):
            made = self.from_labels(own.uuid.hex())
            # A column that was cut has no label: then those of the others are not all.
            if made is not None and (len(made.files) == len(expected) or not any(known)):
                fault = "contradicts what the columns say of themselves"
                return Part(MANIFEST, None, [fault]), made
        return Part(MANIFEST, MANIFEST), own

    def _others(self) -> list[str]:
        return [n for n in self.files.all() if n != MANIFEST and self.files.read(n, 1) == b"{"]

    def _vouchers(self, text: str) -> int:
        """Return how many of state and table are salted with a uuid."""
        try:
            uuid = bytes.fromhex(text)
        except ValueError:
            return 0
        slots = self.slots()
        known = slots > 0 and self.files.table(TABLE, slots, uuid).scan()[1].any()
        return int(any(self.files.states(STATE, uuid))) + bool(known)

    def slots(self) -> int:
        """Return how many records a table of this size has room for."""
        return (self.files.size(TABLE) - EpisodeTable.nbytes(0)) // RECORD.itemsize

    def from_labels(self, text: str) -> Manifest | None:
        """Make a manifest again from the labels of its columns, or None when one is missing."""
        mine = {
            label["column"]: label for label in self.labels.values() if label.get("uuid") == text and "column" in label
        }
        try:
            if not mine or sorted(mine) != list(range(len(mine))):
                return None
            labels = [mine[i] for i in range(len(mine))]
            specs = tuple(
                stored_spec(label["name"], label["shape"], label["dtype"], label.get("mutable") is True)
                for label in labels
            )
            born, lineage = born_in(labels[0]["born"], labels[0]["max_steps"])
            made = Manifest(
                bytes.fromhex(text), labels[0]["max_steps"], labels[0]["spare"], 1, born=born, lineage=lineage
            )
            options = [
                stored_options({k: label[k] for k in ("codecs", "chunk_steps") if k in label}) for label in labels
            ]
            backends = ["zarr" if given else "memmap" for given in options]
            made = made.with_columns(Schema(specs), backends, options, locked=any(s.mutable for s in specs))
            if [made.label(i) for i in range(len(specs))] != labels:
                return None
            made = made.with_sizes()
        except (KeyError, TypeError, ValueError):
            return None
        slots = self.slots()
        if slots <= 0 or EpisodeTable.faults(self.files.disk, self.files.path(TABLE), slots):
            slots = made.rows + SPARE_SLOTS
        return replace(made, table_slots=slots)

    def _salvage(self) -> Manifest | None:
        """Take what a damaged manifest of a buffer without columns still says, if state and table agree."""
        try:
            body = json.loads(self.files.read(MANIFEST, read_limit()))
            uuid = bytes.fromhex(body["uuid"].replace("-", ""))
            born, lineage = born_in(body, body["max_steps"])
            made = Manifest(
                uuid,
                body["max_steps"],
                body["spare"],
                body["table_slots"],
                born=born,
                lineage=lineage,
            )
            agreed = made.table_slots == made.rows + SPARE_SLOTS and any(self.files.states(STATE, uuid))
            fits = self.files.size(TABLE) == EpisodeTable.nbytes(made.table_slots)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
            return None
        return made if agreed and fits and not self.labels else None


def _labels_of(files: Files, names: list[str]) -> dict[str, Label]:
    return {name: label for name in names if (label := files.label(name))}


def decode(files: Files, name: str) -> tuple[Manifest | None, str]:
    """Return the manifest in a file, or None and what is wrong with it.

    Raises:
        NewerVersionError, UnreleasedVersionError: it is whole, and from another version of ringmap.
    """
    if not files.is_file(name):
        return None, "manifest is missing"
    data, path = files.read(name, read_limit()), files.path(name)
    try:
        return Manifest.decode(data, path), ""
    except (NewerVersionError, UnreleasedVersionError):
        if _is_of_another_version(data):
            raise
        return (
            None,
            "the manifest was edited or damaged: its version is not the one it was written with",
        )
    except DamageError as error:
        return None, str(error).removeprefix(f"{path}: ").partition(";")[0]


def _is_of_another_version(data: bytes) -> bool:
    """Tell a manifest of another version from one of ours whose version, or layout, was damaged."""
    body = json.loads(data)
    if type(body.get("version")) is not int:
        return False
    with contextlib.suppress(DamageError):
        own = {"version": VERSION, "layout": LAYOUT}
        Manifest.decode(json.dumps({**body, **own}).encode(), "")
        return False
    return True


def _refuse_others(files: Files) -> None:
    """Raise unless a buffer, or what is left of one, lies here."""
    ours = (SIGNS - {MANIFEST}) & set(files.names())
    if files.disk.exists(files.path(MANIFEST)):
        if ours or decode(files, MANIFEST)[0] is not None:
            return
    else:
        try:
            found = examine(files.disk, files.folder)
        except UnknownFormatError:
            if not ours:
                raise
            found = "buffer"
        except DamageError:
            found = "buffer"
        if found == "buffer":
            return
    raise UnknownFormatError(f"{files.folder}: no buffer is there; make one with ReplayBuffer(max_steps=..., path=...)")
