"""The file of rows that wait: what it says they are, each fault in it, by life, and rows that are counted meanwhile."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest

from ringmap.storage.columns.schema import Schema
from ringmap.storage.columns.text import Words
from ringmap.storage.commit.group import OpenGroup
from ringmap.storage.disk.checksums import FINISH, HEADER
from ringmap.storage.disk.files import Disk, File
from ringmap.storage.disk.paths import STEPS
from ringmap.storage.records import step_file
from ringmap.storage.records.blobs import encode_data
from ringmap.storage.records.step_file import EARLIER_LIMIT, Heading, OpenRows, StepFile, Unlinked, read_steps
from ringmap.storage.records.table import PartOf
from ringmap.storage.ring.ring import Position

SCHEMA = Schema.of({"n": np.zeros((1, 3), np.int32), "lanes": np.zeros(1, np.int32)})
ROW = sum(spec.row_nbytes for spec in SCHEMA.columns)
UNLINKED = Unlinked(Schema.of({"n": np.zeros((1, 3), np.int32)}), "lanes")
EARLIER = {"rows": np.array([-2, -1]), "n": np.arange(6, dtype=np.int32).reshape(2, 3)}
AFTER = [7, 100, 1 << 63, 5]


def payload(*rows, row=ROW):
    return b"".join(bytes([number + 1]) * row for number in rows)


def numbers(steps):
    """Return the numbers of the rows, each proven by all its bytes."""
    row = steps.heading.row_nbytes
    found = [steps.rows[at : at + row] for at in range(0, len(steps.rows), row)]
    assert len(found) == steps.count
    assert all(set(one) == {one[0]} for one in found)
    return [one[0] - 1 for one in found]


def written(folder, heading, calls, earlier=b""):
    """Write a file with these calls; return its path and where each frame ends."""
    file = StepFile(Disk(), str(folder))
    end = file.begin(heading, earlier)
    ends = [end[0]]
    for rows in calls:
        end = file.write(end, payload(*rows, row=heading.row_nbytes), Words())
        ends.append(end[0])
    file.close()
    return folder / STEPS, ends


def read(path, most=50):
    return read_steps(Disk(), str(path.parent), most)


@pytest.mark.parametrize(
    "heading",
    [
        Heading(SCHEMA),
        Heading(SCHEMA, PartOf(lane=3)),
        Heading(SCHEMA, PartOf(40, 12, number=2), encode_data({"seed": 3}, "test")),
        Heading(SCHEMA, after=[0, 0, 0, 0]),
        Heading(SCHEMA, after=AFTER, unlinked=UNLINKED, earlier=77),
    ],
)
def test_a_heading_says_what_the_rows_are(heading):
    assert Heading.decode(heading.encode()) == heading


def test_two_headings_differ():
    assert Heading(SCHEMA).encode() != Heading(SCHEMA).encode()


FORGED = {
    "three numbers": {"after": AFTER[:3]},
    "a negative number": {"after": [-1, 0, 0, 0]},
    "a truth": {"after": [True, 0, 0, 0]},
    "a huge number": {"after": [1 << 64, 0, 0, 0]},
    "no list": {"after": 7},
    "too much before": {"earlier": EARLIER_LIMIT + 1},
    "values of no column": {"earlier": 5, "unlinked": None},
    "lanes that are no integers": {"unlinked": [[["n", [3], "<i4"]], "n"]},
    "lanes that are none": {"unlinked": [[["n", [3], "<i4"]], "x"]},
    "no column": {"unlinked": [[], "lanes"]},
    "a part of four": {"part": [0, 0, 0, 0]},
    "a part before all": {"part": [-2, 0, 0, 0, 0]},
    "a lane beyond all": {"part": [0, 0, 0, 0, 1 << 32]},
    "data that are none": {"data": "YWJj"},
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_heading_is_refused(name):
    said = json.loads(Heading(SCHEMA, after=AFTER, unlinked=UNLINKED, earlier=9).encode())
    Heading.decode(json.dumps(said).encode())
    said |= FORGED[name]
    said = {key: value for key, value in said.items() if value is not None}
    with pytest.raises(ValueError, match="does not make sense"):
        Heading.decode(json.dumps(said).encode())


def flipped(raw, at, bit=0):
    return raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :]


@pytest.mark.parametrize("life", ["episode", "group"])
def test_rows_end_before_a_frame_that_is_cut_or_damaged(tmp_path, life):
    is_group = life == "group"
    heading = Heading(SCHEMA, after=AFTER if is_group else None)
    path, ends = written(tmp_path / "a", heading, [[0], [1, 2], [3], [4, 5, 6]] if is_group else [[0], [1], [2]])
    counts = [0, 1, 3, 4, 7] if is_group else [0, 1, 2, 3]
    raw = path.read_bytes()
    assert len(raw) == ends[-1] + len(FINISH)
    steps = read(path)
    assert (numbers(steps), steps.fault, steps.nbytes, steps.after) == (
        [*range(counts[-1])],
        "",
        ends[-1],
        heading.after,
    )
    for size in range(ends[0], ends[-1]):  # as a kill leaves it
        path.write_bytes(raw[:size])
        assert (numbers(read(path)), read(path).fault) == ([*range(counts[sum(e <= size for e in ends[1:])])], "")
    for at in range(ends[0], ends[-1]):
        for bit in range(8):
            path.write_bytes(flipped(raw, at, bit))
            steps, calls = read(path), sum(e <= at for e in ends[1:])
            assert (numbers(steps), steps.nbytes) == ([*range(counts[calls])], ends[calls])
            assert steps.fault == f"frame {calls + 1} is damaged"
    path.write_bytes(raw[: ends[1]] + bytes(ends[2] - ends[1]) + raw[ends[2] :])  # a page that was lost
    assert (numbers(read(path)), read(path).fault) == ([0], "frame 2 is damaged")
    path.write_bytes(flipped(raw, ends[1] - 1)[: ends[-1] - 1])  # and a kill has cut the newest
    assert (numbers(read(path)), read(path).fault) == ([], "frame 1 is damaged")
    path.write_bytes(raw)
    most = counts[-2]
    assert (numbers(read(path, most)), read(path, most).fault) == (
        [*range(most)],
        f"holds more than max_steps={most} steps",
    )


def test_a_call_over_a_longer_one_that_failed_is_the_end(tmp_path):
    file = StepFile(Disk(), str(tmp_path / "a"))
    end = file.begin(Heading(SCHEMA, after=AFTER))
    file.write(end, payload(7, 8, 9), Words())
    file.write(end, payload(0), Words())
    file.close()
    steps = read(tmp_path / "a" / STEPS)
    assert (numbers(steps), steps.fault) == ([0], "")


@pytest.mark.parametrize("life", ["episode", "group"])
@pytest.mark.parametrize("text", [False, True])
def test_a_frame_without_whole_rows_is_damaged(tmp_path, life, text):
    """Of a stranger: its checksum is right."""
    schema = Schema.of({"t": np.array(["a"])}) if text else SCHEMA
    heading = Heading(schema, after=AFTER if life == "group" else None)
    for number, more in enumerate((b"", b"x")):
        path = tmp_path / str(number) / STEPS
        file = StepFile(Disk(), str(path.parent))
        file.write(file.begin(heading), bytes(heading.row_nbytes) + more, Words(["a"]))
        file.close()
        steps, rows = read(path), OpenRows(Disk(), str(path))
        rows.catch_up()
        assert (steps.count, steps.fault) == ((0, "frame 1 is damaged") if more else (1, ""))
        assert rows.count == (not more and life == "group")


def test_a_group_of_rows_without_bytes_is_of_a_stranger(tmp_path):
    schema = Schema.of({"e": np.zeros((1, 0), np.int32)})
    path, _ = written(tmp_path / "a", Heading(schema, after=AFTER), [[0]])
    rows = OpenRows(Disk(), str(path))
    rows.catch_up()
    assert (rows.count, read(path).count, read(path).fault) == (0, 0, "frame 1 has rows of 0 bytes")


def test_the_newest_write_of_a_later_group_may_be_cut_as_of_the_first(tmp_path):
    """The file is emptied: nothing longer of the group before ends it."""
    file = StepFile(Disk(), str(tmp_path / "a"))
    for calls in (3, 1):
        end = file.begin(Heading(SCHEMA, after=AFTER))
        for number in range(calls):
            end = file.write(end, payload(number), Words())
    file.file.write(HEADER.pack(ROW, 1), end[0])
    steps = read(tmp_path / "a" / STEPS)
    file.close()
    assert (numbers(steps), steps.fault) == ([0], "")


def test_of_the_next_group_no_frame_of_this_one_counts(tmp_path, monkeypatch):
    """A power cut may leave these behind its frames."""

    def again():
        heading = Heading(SCHEMA, after=AFTER)
        path, _ = written(tmp_path / heading.salt, heading, [[0], [1], [2]])
        before, heading = path.read_bytes(), Heading(SCHEMA, after=AFTER)
        path, ends = written(tmp_path / heading.salt, heading, [[9]])
        path.write_bytes(path.read_bytes()[: ends[-1]] + before[ends[-1] :])
        return numbers(read(path))

    assert again() == [9]
    monkeypatch.setattr(step_file, "seed_of", lambda heading: 0)
    assert again() == [9, 1, 2], "the control: all files have one seed"


@pytest.mark.parametrize("calls", [[], [[0], [1]]])
def test_values_of_rows_before_a_group(tmp_path, calls):
    earlier = encode_data(EARLIER, "test")
    heading = Heading(SCHEMA, after=AFTER, unlinked=UNLINKED, earlier=len(earlier))
    path, ends = written(tmp_path / "a", heading, calls, earlier)
    raw, steps = path.read_bytes(), read(path)
    assert (numbers(steps), steps.fault) == ([n for n, *_ in calls], "")
    assert all((steps.earlier[name] == values).all() for name, values in EARLIER.items())
    for at in range(ends[0] - len(earlier) - HEADER.size, ends[0], 5):
        path.write_bytes(flipped(raw, at))
        assert (read(path).count, read(path).fault) == (0, "frame 1 is damaged")
    for wrong in (
        {"rows": np.array([-1])},
        {**EARLIER, "n": EARLIER["n"][:1]},
        {**EARLIER, "rows": np.array([0.5, 1])},
    ):
        data = encode_data(wrong, "test")
        heading = replace(heading, earlier=len(data), salt=f"{len(data)}{calls}")
        path, _ = written(tmp_path / str(len(os.listdir(tmp_path))), heading, calls, data)
        assert (read(path).count, read(path).fault[:28]) == (0, "frame 1 does not make sense:")


def test_rows_of_a_group_are_counted_while_they_come(tmp_path):
    heading = Heading(SCHEMA, after=AFTER)
    file = StepFile(Disk(), str(tmp_path / "a"))
    rows = OpenRows(Disk(), str(tmp_path / "a" / STEPS))
    rows.catch_up()
    assert (rows.after, rows.count) == (None, 0)
    end = file.begin(heading)
    for count, call in ((1, [0]), (4, [1, 2, 3]), (5, [4])):
        end = file.write(end, payload(*call), Words())
        rows.catch_up()
        rows.catch_up()
        assert (rows.after, rows.count) == (AFTER, count)
    after = file.write(end, payload(5), Words())
    file.file.write(b"\xff", after[0] - 1)  # its end is under way
    rows.catch_up()
    assert rows.count == 5
    file.write(end, payload(5), Words())
    rows.catch_up()
    assert rows.count == 6
    earlier = encode_data(EARLIER, "test")
    end = file.begin(Heading(SCHEMA, None, b"", [8, 0, 0, 0], UNLINKED, len(earlier)), earlier)
    rows.catch_up()
    assert (rows.after, rows.count) == ([8, 0, 0, 0], 0)
    file.write(end, payload(0, 1, row=ROW + 12), Words())
    rows.catch_up()
    assert rows.count == 2
    file.write(file.begin(Heading(SCHEMA)), payload(0), Words())
    rows.catch_up()
    assert (rows.after, rows.count) == (None, 0)
    file.remove()
    with pytest.raises(FileNotFoundError):
        rows.catch_up()


def interrupted_append(folder):
    """Interrupt a call after its frame is written; return what the file then holds, after another call."""
    schema, disk = Schema.of({"n": np.zeros(1, np.int64), "t": np.array(["a"])}), Disk()
    group = OpenGroup(schema, None, Position(0), 8, AFTER)
    os.makedirs(folder)
    group.begin(disk, str(folder))
    group.append([np.array([0]), np.array(["zero"])], 1)
    write = File.write

    def interrupt(self, *args):
        write(self, *args)
        raise KeyboardInterrupt

    for number, name in ((1, "one"), (2, "zero")):  # the first interrupt comes behind a word, the second behind a row
        File.write = interrupt
        try:
            with pytest.raises(KeyboardInterrupt):
                group.append([np.array([9]), np.array([name])], 1)
        finally:
            File.write = write
        assert group.count == number
        group.append([np.array([number]), np.array([name])], 1)
    group.file.close()
    return [values.tolist() for values in read_steps(disk, group.file.folder, 50).arrays()]


def test_a_call_that_was_interrupted_after_its_write_is_written_over(tmp_path):
    assert interrupted_append(tmp_path / "a") == [[0, 1, 2], ["zero", "one", "zero"]]
