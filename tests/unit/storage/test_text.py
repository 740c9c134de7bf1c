"""Text: words and codes, alone and beside rows that are not committed."""

from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringmap.storage.columns.schema import TEXT, ColumnSpec, Schema
from ringmap.storage.columns.text import Words, coded, decoded, put, unpack
from ringmap.storage.disk.checksums import framed
from ringmap.storage.disk.files import Disk
from ringmap.storage.read.handle import Texts
from ringmap.storage.records.step_file import Heading, StepFile, read_steps, seed_of
from ringmap.storage.ring.live import LiveEpisodes

texts = st.lists(st.text(st.characters(), max_size=9).map(lambda s: s.rstrip("\0")), max_size=12)


@given(parts=st.lists(texts, max_size=3))
def test_what_was_encoded_comes_back(parts):
    words, codes = Words(), []
    for part in parts:
        codes.append(words.encode(np.array(part, np.str_)))
    assert len({*words.words}) == len(words)
    again = Words(unpack(words.pack()))
    assert [again.decode(each).tolist() for each in codes] == parts
    assert words.pack(len(words)) == b""


def test_surrogates_keep_apart():
    """JSON would join these two; UTF-16 too."""
    pair = ["\ud83d\ude00", "\U0001f600"]
    assert unpack(Words(pair).pack()) == pair


@pytest.mark.parametrize(
    "wrong",
    [
        b"\0",
        b"\0\0\0\0",
        b"\2\0\0\0",
        b"\1\0\0\0\2\0\0\0a",
        b"\1\0\0\0\1\0\0\0ab",
        b"\1\0\0\0\1\0\0\0\xff",
        b"\2\0\0\0\1\0\0\0\1\0\0\0aa",
        b"\1\0\0\0\2\0\0\0a\0",
        b"\xff\xff\xff\xff" * 3,
    ],
)
def test_words_that_make_no_sense(wrong):
    with pytest.raises(ValueError, match=r"words|word |bytes|codec"):
        unpack(wrong)


def test_codes_without_a_word():
    with pytest.raises(ValueError, match="row 1 has a code for none of 2 words"):
        Words(["a", "b"]).decode(np.array([0, 2]))
    found, bad = decoded(np.array([[1, 0], [0, -1], [0, 2]]), np.array([0, 0, 1]), [["a", "b"], ["c"]])
    assert found.tolist() == [["b", "a"], ["a", ""], ["c", ""]]
    assert bad.tolist() == [False, True, True]


def test_each_commit_has_words_of_its_own():
    schema = Schema((ColumnSpec("n", (), np.dtype("i8")), ColumnSpec("t", (), TEXT)))
    arrays = [np.arange(4), np.array(["a", "b", "b", "c"])]
    (n, codes), words = coded(schema, arrays, [2, 2])
    assert n is arrays[0]
    assert codes.tolist() == [0, 1, 0, 1]
    assert [own.words for own in words] == [["a", "b"], ["b", "c"]]


def test_put_never_cuts():
    into = np.array(["a", "b"])
    assert put(into, np.array([0]), np.array(["z"])) is into
    assert put(into, np.array([1]), np.array(["longer"])).tolist() == ["z", "longer"]


@pytest.mark.parametrize(
    ("packed", "codes"), [(b"", [0]), (Words(["a"]).pack(), [1]), (Words(["a"]).pack(), [-1]), (b"\1\0\0\0", [0])]
)
def test_a_file_of_rows_whose_words_a_stranger_wrote(tmp_path, packed, codes):
    disk, heading = Disk(), Heading(Schema((ColumnSpec("t", (), TEXT),)))
    file = StepFile(disk, str(tmp_path / "rows"))
    end = file.begin(heading)
    rows = np.array(codes, "<i4").tobytes()
    forged = framed(len(rows).to_bytes(4, "little") + rows + packed, end[1], seed_of(heading.encode()))
    file.file.write(forged, end[0])
    file.close()
    steps = read_steps(disk, str(tmp_path / "rows"), 50)
    assert steps.count == 0
    assert "does not make sense" in steps.fault or "is damaged" in steps.fault


class Gap:
    """A handle of two episodes, between which a third was dropped."""

    lock = nullcontext()

    def __init__(self):
        self.live = LiveEpisodes(np.array([0, 10]), np.array([3, 3], np.int32))

    def record_at(self, start):
        raise AssertionError(f"position {start} is asked for")


def test_a_row_of_no_live_episode_gets_no_words_of_the_one_before():
    handle = Gap()
    assert Texts(handle)(np.array([5, 13]), np.array([0, 0], np.int32)).tolist() == ["", ""]
