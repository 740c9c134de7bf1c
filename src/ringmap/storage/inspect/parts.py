"""The parts of a buffer: where the bytes of its table, its state and its columns lie.

A name is a claim; a label, a salt or a checksum is the proof. A part whose proof lies under
another name (two files were swapped) is found there.

Invariants: reads only; a damaged file is not taken for a foreign one as long as anything in
it shows that it is ours.
Not here: whose directory it is (identity.py), what the records say (scan.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ringmap.storage.inspect.identity import Identity
from ringmap.storage.inspect.raw_files import Files, Part, words_of
from ringmap.storage.records.manifest import Manifest
from ringmap.storage.records.names import STATE, TABLE
from ringmap.storage.records.state import StateFile
from ringmap.storage.records.table import EpisodeTable

__all__ = ["Parts"]


class Parts:
    """Which file is which.

    Attributes:
        manifest: the manifest, made again where it must be; None when nothing tells what it was.
        manifest_part, state, table: where they lie.
        columns: where each column lies; none before an episode is stored or a schema given.

    Raises:
        UnknownFormatError, NewerVersionError: as for `Identity`.
    """

    def __init__(self, files: Files) -> None:
        self.files = files
        self._identity = Identity(files)
        self.labels = self._identity.labels
        self.manifest_part, self.manifest = self._identity.part, self._identity.manifest
        self.table, self.state = Part(TABLE, None), Part(STATE, None)
        self.columns: list[Part] = []
        if self.manifest is not None:
            self.manifest = self._with_slots(self.manifest)
            self.state = self._find_state(self.manifest)
            self.table, has_records = self._find_table(self.manifest)
            self._find_columns(self.manifest, has_records)

    def _with_slots(self, manifest: Manifest) -> Manifest:
        """Return a manifest with as many slots as the table has by size, header and records, if these agree."""
        files, slots = self.files, self._identity.slots()
        if slots <= 0 or slots == manifest.table_slots:
            return manifest
        if words_of(lambda: EpisodeTable.faults(files.disk, files.path(TABLE), slots)):
            return manifest
        if not files.table(TABLE, slots, manifest.uuid).scan()[1].any():
            return manifest
        fault = f"says that the table has {manifest.table_slots} slots, but it has {slots}"
        self.manifest_part.faults.append(fault)
        return replace(manifest, table_slots=slots)

    def _find_state(self, manifest: Manifest) -> Part:
        files = self.files
        faults = words_of(lambda: StateFile.faults(files.disk, files.path(STATE)))
        if any(files.states(STATE, manifest.uuid)):
            return Part(STATE, STATE, faults)
        for name in files.all():
            if files.size(name) == StateFile.nbytes and any(files.states(name, manifest.uuid)):
                return Part(STATE, name, [*faults, f"it lies at {name}"])
        torn = "neither state in it is valid: torn, or of another buffer"
        return Part(STATE, None if faults else STATE, faults or [torn])

    def _find_table(self, manifest: Manifest) -> tuple[Part, bool]:
        """Return where the table lies, and whether anything says that records were stored."""
        files, slots = self.files, manifest.table_slots
        shown = [state.seq for state in files.states(self.state.at or STATE, manifest.uuid) if state]
        expected = max([*shown, int(manifest.table.get("seq", 0))])

        def faults(name: str) -> list[str]:
            return words_of(lambda: EpisodeTable.faults(files.disk, files.path(name), slots))

        own = faults(TABLE)
        blank = files.is_blank(TABLE, EpisodeTable.nbytes(0))
        for name in [TABLE, *(n for n in files.all() if n != TABLE and not faults(n))]:
            if files.table(name, slots, manifest.uuid).scan()[1].any():
                found = own if name == TABLE else [*own, f"it lies at {name}"]
                return Part(TABLE, name, found), True
        none = ["no record in it is valid: damaged, or of another buffer"] if expected else []
        ours = files.is_file(TABLE) and (blank or not expected)
        return Part(TABLE, TABLE if ours else None, own or none), expected > 0

    def _find_columns(self, manifest: Manifest, has_records: bool) -> None:
        if manifest.schema is None and has_records:
            now = Identity(self.files).manifest  # a writer may be storing its first episode
            if now is not None and now.schema is not None:
                manifest = self.manifest = now
        if manifest.schema is None and has_records:
            fault = "names no columns, but episodes are stored: an old copy"
            self.manifest_part.faults.append(fault)
            made = self._identity.from_labels(manifest.uuid.hex())
            if made is None:
                return
            manifest = self.manifest = replace(
                manifest,
                schema=made.schema,
                backends=made.backends,
                options=made.options,
                files=made.files,
                sizes=made.sizes,
            )
        # Until a record is stored, columns that no argument fixed are made again by the first episode.
        if manifest.schema is not None and (has_records or manifest.locked_by_argument):
            self.columns = [self._find_column(manifest, i) for i in range(len(manifest.files))]

    def _find_column(self, manifest: Manifest, index: int) -> Part:
        one, disk = manifest.column(index), self.files.disk
        file = one.file
        if not one.is_known:
            return Part(file, None, [f"unknown backend {one.kind!r}"])
        label, column = self.labels.get(file), one.at(disk, self.files.path(file))
        there = column.exists()
        ours = label is None and there and column.resembles()
        if there and (label == one.label or ours):
            return Part(file, file, words_of(column.faults))
        if not there:
            fault = words_of(column.faults)[0]
        elif label is None:
            fault = "is no column of this buffer: neither its header nor its label says so"
        else:
            buffer = "this" if label.get("uuid") == manifest.uuid.hex() else "another"
            fault = f"swapped: it is column {label.get('name')!r} of {buffer} buffer"
        for name in self._labelled(one.label):
            return Part(file, name, [f"{fault}; column {one.spec.name!r} lies at {name}"])
        return Part(file, None, [fault])

    def _labelled(self, wanted: dict[str, Any]) -> Iterator[str]:
        yield from (name for name, label in self.labels.items() if label == wanted)
        for name in self.files.columns():
            if name not in self.labels and self.files.label(name) == wanted:
                yield name
