"""The plan of a repair: what is to be done about each finding, in an order that may be interrupted.

    flag bad episodes -> files back in place -> columns, streams -> table -> manifest -> state.bin

Invariants: episodes that are bad are flagged before anything else, so that no step makes a
buffer open that would serve them; a file that may be somebody else's is set aside, never
overwritten; planning changes nothing.
Not here: what is wrong (faults.py), how a change is made (mending.py), lost records (missing_records.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import xxhash

from ringmap.errors import CorruptError, NewerVersionError
from ringmap.storage.columns.backends import BACKENDS
from ringmap.storage.columns.rows import combine
from ringmap.storage.commit.recovery import Progress
from ringmap.storage.disk.files import Disk
from ringmap.storage.disk.memory import MemoryDisk
from ringmap.storage.inspect.faults import (
    ASIDE,
    FRESH,
    ORPHAN,
    faults_in,
    home_of,
    orphans_in,
    sidecar_faults,
    stream_of,
)
from ringmap.storage.inspect.identity import decode
from ringmap.storage.inspect.mending import Hands
from ringmap.storage.inspect.missing_records import missing_records
from ringmap.storage.inspect.raw_files import Part, words_of
from ringmap.storage.inspect.scan import Scan
from ringmap.storage.records.blobs import LAST_OFFSET, decode_blob, encode_blob
from ringmap.storage.records.layout import COLUMNS, DATA, MANIFEST, OPEN, STATE, STREAM, TABLE
from ringmap.storage.records.manifest import Manifest
from ringmap.storage.records.table import DROPPED, EPISODE, EpisodeTable, Record
from ringmap.storage.sidecars import SIDECARS

__all__ = ["Action", "Plan"]

_MOVING = ".moving"


@dataclass(frozen=True, slots=True)
class Action:
    """Something that repair does, or would do.

    `file`: the file that it changes, relative to the buffer's directory; `what`: what it does to it;
    `seq`: the record that it concerns, if it concerns one; `episodes`, `steps`: how much is lost by it,
    where a lost record counts as an episode, as nothing tells what it was.
    """

    file: str
    what: str
    seq: int | None = None
    episodes: int = 0
    steps: int = 0

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


class Plan:
    """What is to be done, step by step.

    Args:
        disk: where the buffer is.
        folder: its directory.
        progress: called while episodes are verified.

    Attributes:
        actions: what the steps do, in words.

    Raises:
        CorruptError: the buffer can't be mended.
    """

    def __init__(self, disk: Disk, folder: str, progress: Progress | None) -> None:
        self.survey = survey = Scan(disk, folder)
        self.files, self.parts = survey.files, survey.parts
        self.actions: list[Action] = []
        self._steps: list[Callable[[], None]] = []
        try:
            self.findings = list(faults_in(survey, progress))
            if self.findings:
                self.manifest = self._refuse_hopeless()
                self.hands = Hands(self.files, self.manifest.table_slots, self.manifest.uuid)
                self._plan()
        finally:
            survey.close()

    def carry_out(self) -> None:
        """Do it."""
        for step in self._steps:
            step()

    def _step(
        self, file: str, what: str, step: Callable[[], None], seq: int | None = None,
        episodes: int = 0, steps: int = 0,
    ) -> None:  # fmt: skip
        self.actions.append(Action(file, what, seq, episodes, steps))
        self._steps.append(step)

    def _refuse_hopeless(self) -> Manifest:
        path, manifest = self.files.path(MANIFEST), self.parts.manifest
        if isinstance(self.survey.refused, NewerVersionError):
            raise self.survey.refused
        if manifest is None:
            raise CorruptError(
                f"{path}: can't be made again, the other files do not say enough; put it back from a backup, or, "
                "if nothing was stored, remove the directory"
            )
        for row in self.survey.live()[-8:] if self.parts.columns else ():
            record = Record.of(row)
            sums = self.survey.sums_in(self.survey.blob(record) or b"")
            count = len(sums)
            if count != len(manifest.files) and combine(sums) == record.rows_sum:
                raise CorruptError(
                    f"{path}: can't be made again: {count} columns were stored, and the files of "
                    f"{len(manifest.files)} are there; put it or the missing ones back from a backup"
                )
        return manifest

    def _plan(self) -> None:
        dropped = self._plan_drops()
        self._plan_folders()
        self._plan_moves()
        for index, part in enumerate(self.parts.columns):
            self._plan_column(index, part)
        self._plan_leftovers(dropped)
        filled = self._plan_table(dropped)
        if self.actions or {finding.file for finding in self.findings} & {MANIFEST, STATE}:
            # Ahead of manifest and state, which say that all is well.
            columns = [part.file for part in self.parts.columns]
            folders = [OPEN, DATA, *([COLUMNS] if columns else []), ""]
            self._steps.append(partial(self.hands.sync, [TABLE, *columns], folders))
            self._plan_manifest(dropped | filled)
            known = [state for state in self.survey.states if state is not None]
            missing = self.parts.state.at is None
            show = partial(self.hands.show, self.survey.reached, known, missing)
            self._step(STATE, "show readers the repaired state", show)

    # -- episodes ----------------------------------------------------------------------------

    def _plan_drops(self) -> set[int]:
        """Flag the records of episodes that are not whole; return their numbers."""
        survey, why, dropped = self.survey, dict[int, str](), set[int]()
        at = self.parts.table.at or TABLE
        for part in self.parts.columns:
            if part.at is None:
                lost = f"{part.file}: {part.faults[0]}"
                why.update(dict.fromkeys(map(int, survey.live()["seq"]), lost))
        gaps = {seq for first, last in survey.broken() for seq in range(first, last + 1)}
        senseless = survey.small_states()[0]
        for finding in self.findings:
            if finding.seq is not None and finding.seq not in gaps:
                why.setdefault(finding.seq, str(finding))
        for seq, fault in sorted(why.items()):
            record = survey.table.read(seq)
            if record is None:
                continue  # a writer took its place: this is a dry run beside it
            if self._plan_small_state(at, record):
                continue
            is_episode = record.kind == EPISODE
            if not is_episode or (senseless.fault and senseless.seq == seq):
                record = replace(record, blob_segment=0, blob_offset=0, blob_size=0, blob_sum=0)
            if is_episode:
                dropped.add(seq)
                changed = replace(record, flags=record.flags | DROPPED)
                what = f"drop the episode of record {seq}: {fault}"
            else:
                changed = record
                what = f"go back to the small state before record {seq}: {fault}"
            write = partial(self.hands.write_records, at, [changed])
            self._step(TABLE, what, write, seq, int(is_episode), record.length * is_episode)
        for seq in survey.misflagged():
            record = survey.table.read(seq)
            if record is not None and seq not in dropped:
                changed = replace(record, flags=record.flags & ~DROPPED)
                write = partial(self.hands.write_records, at, [changed])
                self._step(
                    TABLE, f"mend the flag of record {seq}: its episode is whole", write, seq
                )
        if dropped:
            self._steps.append(partial(self.hands.sync, [at]))
        return dropped

    def _plan_small_state(self, at: str, record: Record) -> bool:
        """Write a record's blob again without its small state, if that alone makes no sense; tell whether it does."""
        small, name = self.survey.small_states()[0], self.survey.segment_file(record.blob_segment)
        told = [finding.what for finding in self.findings if finding.seq == record.seq]
        offset = self.files.size(name)
        if told != [small.fault] or offset > LAST_OFFSET:
            return False
        try:
            sums, _, data = decode_blob(self.survey.blob(record) or b"")
        except ValueError:
            return False
        blob = encode_blob(sums, b"", data)
        check = xxhash.xxh3_64_intdigest(blob)
        changed = replace(record, blob_offset=offset, blob_size=len(blob), blob_sum=check)
        self._steps.append(partial(self.hands.append, name, blob, offset))
        write = partial(self.hands.write_records, at, [changed])
        what = f"write its blob again, without its small state: {small.fault}"
        self._step(TABLE, what, write, record.seq)
        return True

    # -- files -------------------------------------------------------------------------------

    def _plan_folders(self) -> None:
        disk, files = self.files.disk, self.files
        for name in (DATA, OPEN, *([COLUMNS] if self.parts.columns else [])):
            if not disk.exists(files.path(name)):
                self._step(name, "make the folder", partial(disk.make_folder, files.path(name)))

    def _plan_moves(self) -> None:
        """Put back what lies under another name, and set aside what lies there instead."""
        parts, files = self.parts, self.files
        named = [parts.manifest_part, parts.table, parts.state, *parts.columns]
        wanted: dict[str, str | None] = {part.file: part.at for part in named}
        wanted.update(self.survey.find_segments())
        moves = {file: at for file, at in wanted.items() if at is not None and at != file}
        for file, at in wanted.items():
            there = files.is_part(file) or (  # a link to a folder would be in the way of one
                file.endswith(".zarr") and files.disk.exists(files.path(file))
            )
            ours = at == file or file in moves.values() or not there
            if ours or (file == MANIFEST and not self._is_foreign(decode(files, file)[0])):
                continue
            aside = file + ASIDE
            while files.disk.exists(files.path(aside)):
                aside += ASIDE
            what = f"set aside what lies there, as {aside}"
            self._step(file, what, partial(self.hands.move, file, aside))
        # In two turns: files that were swapped are in each other's way.
        for file, at in moves.items():
            self._step(file, f"put it back from {at}", partial(self.hands.move, at, file + _MOVING))
        for file in moves:
            self._steps.append(partial(self.hands.move, file + _MOVING, file))

    def _is_foreign(self, manifest: Manifest | None) -> bool:
        return manifest is not None and manifest.uuid != self.manifest.uuid

    def _plan_column(self, index: int, part: Part) -> None:
        manifest, disk, path = self.manifest, self.files.disk, self.files.path(part.file)
        assert manifest.schema is not None
        spec, rows, label = manifest.schema.columns[index], manifest.rows, manifest.label(index)
        backend = BACKENDS.get(manifest.backends[index])
        if backend is None:
            raise CorruptError(f"{path}: {part.faults[0]}: nothing can be mended")
        if part.at is None:

            def make(path: str) -> None:
                backend.create(disk, path, spec, rows, label)

            self._step(part.file, "make it anew, empty", partial(self.hands.renew, part.file, make))
            return
        at = self.files.path(part.at)
        if words_of(lambda: backend.faults(disk, at, spec, rows, label)):
            mend = partial(backend.mend, disk, path, spec, rows, label)
            self._step(part.file, "give it its size, header and label back", mend)

    def _plan_leftovers(self, dropped: set[int]) -> None:
        disk = self.files.disk
        newest, home = self.survey.newest(dropped), home_of(self.survey)
        for sidecar in SIDECARS:
            name = sidecar.names[0]
            if not sidecar_faults(self.survey, sidecar, newest):
                continue
            mend = sidecar.mend(home, newest) or (
                f"set aside what lies there, as {name + ASIDE}",
                partial(self.hands.move, name, name + ASIDE),
            )
            self._step(name, *mend)
        for finding in self.findings:
            name, path = finding.file, self.files.path(finding.file)
            folder = name.removesuffix(f"/{STREAM}")
            if finding.what == ORPHAN or name.endswith(FRESH):
                self._step(name, "remove it: nothing names it", partial(self.hands.discard, name))
            elif name.startswith(f"{OPEN}/") and folder != name:
                stream = stream_of(self.survey, folder)
                if stream is None or not stream.fault:
                    continue
                if stream.schema is None:
                    remove = partial(disk.remove_folder, self.files.path(folder))
                    self._step(name, "remove it: no step in it can be read", remove)
                else:
                    cut = partial(disk.extend, path, stream.nbytes)
                    self._step(name, f"cut it after its {len(stream.steps)} whole steps", cut)

    # -- table and manifest ------------------------------------------------------------------

    def _plan_table(self, dropped: set[int]) -> set[int]:
        """Mend the table, and fill the gaps in it; return the numbers of the records filled in."""
        slots, at, disk = self.manifest.table_slots, self.parts.table.at, self.files.disk
        runs = missing_records(self.survey, dropped)
        for number in self.survey.strays:
            wipe = partial(self.hands.wipe_record, TABLE, number)
            self._step(
                TABLE, f"wipe the slot of record {number}: it can't be of this ring", wipe, number
            )
        lost = {record.seq for run in runs for record in run}
        write = partial(self.hands.write_records, TABLE)
        if at is None:

            def make(path: str) -> None:
                EpisodeTable.create(disk, path, slots)
                self.hands.write_records(TABLE + FRESH, [record for run in runs for record in run])
                self.hands.sync([TABLE + FRESH])

            self._step(TABLE, "make it anew, empty", partial(self.hands.renew, TABLE, make))
        elif words_of(lambda: EpisodeTable.faults(disk, self.files.path(at), slots)):
            model = MemoryDisk()
            EpisodeTable.create(model, TABLE, slots)
            frame = [(0, model.read_file(TABLE, EpisodeTable.nbytes(0)))]
            reframe = partial(self.hands.reframe, TABLE, EpisodeTable.nbytes(slots), frame)
            self._step(TABLE, "give it its size and header back", reframe)
        for run in runs:
            first, last = run[0], run[-1]
            numbers = (
                f"records {first.seq} to {last.seq}" if len(run) > 1 else f"record {first.seq}"
            )
            steps = f"positions {first.start} to {last.head}"
            what = f"put a dropped episode in the place of {numbers}: what {steps} stored is lost"
            refill = partial(write, run if at is not None else [])
            self._step(TABLE, what, refill, first.seq, len(run), last.head - first.start)
        reached = self.survey.reached
        newest = self.survey.table.read(reached.seq) if reached.seq not in lost else None
        if newest is not None and newest.first != reached.first:
            changed = replace(newest, first=reached.first)
            if newest.seq in dropped:
                changed = replace(changed, flags=newest.flags | DROPPED)
            what = f"let record {newest.seq} name the oldest live one: {reached.first}"
            self._step(TABLE, what, partial(write, [changed]), newest.seq)
        for name in orphans_in(self.survey, lost) if lost else []:
            self._step(
                name, "remove it: no record names it any more", partial(self.hands.discard, name)
            )
        return lost

    def _plan_manifest(self, lost: set[int]) -> None:
        survey, manifest, files = self.survey, self.manifest, self.files
        reached, said = survey.reached, manifest.table
        stale = said.get("seq") == reached.seq and said.get("first") != reached.first
        stale |= said.get("seq", 0) > reached.seq
        if not lost and not stale and not any(f.file == MANIFEST for f in self.findings):
            return
        count = sum(int(seq) not in lost for seq in survey.live()["seq"])
        if manifest.schema is not None:
            described = zip(manifest.schema.columns, manifest.backends, strict=True)
            sizes = [
                BACKENDS[backend].nbytes(spec, manifest.rows, manifest.label(i))
                for i, (spec, backend) in enumerate(described)
            ]
            manifest = replace(manifest, sizes=tuple(sizes))
        counts = {
            "count": count, "first": reached.first, "tail": reached.tail,
            "head": reached.head, "seq": reached.seq,
        }  # fmt: skip
        carried = manifest.carried
        if carried and (self.survey.small_states()[1].fault or carried["seq"] > reached.seq):
            carried = {}
        data = replace(manifest, table=counts, carried=carried).encode()
        what = f"write it again: {count} episodes"
        if self.parts.manifest_part.at is None:
            what = f"make it again from the other files: {count} episodes; settings (history_len ...) are lost"
        write = partial(files.disk.replace_file, files.path(MANIFEST), data)
        self._step(MANIFEST, what, write)
