"""What a user gives arrives with the values that it has, or is refused: lists, masks, text."""

import gc
import sys

import numpy as np
import pytest
import torch

from ringmap.errors import InputError
from ringmap.storage.columns.values import as_array

MASKED = np.ma.masked_array(np.arange(6.0).reshape(3, 2), [[0, 0], [0, 1], [0, 1]])
DATES = [np.datetime64("2020"), np.datetime64("2020-01-02")]


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ([0, 1.5], "f8"),
        ([True, 2], "i8"),
        ([1, 1j], "c16"),
        ([2**63, 2**64 - 1], "u8"),
        ([0, 1.0, np.nan], "f8"),
        ([np.float32(0.1), 0.1], "f8"),
        ([np.zeros(2, np.float16), np.ones(2, np.float32)], "f4"),
        ([(1, 2), np.array([3, 4])], "i8"),
        ([torch.ones(2), torch.zeros(2)], "f4"),
        (["a", "bcd", ""], "U3"),
        ([b"a", b"bc"], "S2"),
        ([np.str_("a"), "bc"], "U2"),
        (DATES, "M8[D]"),
        ([], "f8"),
        ([[], []], "f8"),
        (range(3), "i8"),
        (np.ma.masked_array([1, 2], False), "i8"),
        ([np.ma.masked_array([1, 2])] * 2, "i8"),
        (np.zeros(2).view(np.recarray), "f8"),
        (np.array(["a", "bcd"], object), "U3"),
        (np.array([1, 2.5], object), "f8"),
        (np.array([np.zeros(2), None], object)[:1], "f8"),
        (3, "i8"),
    ],
)
def test_values_that_stay_equal_are_taken(given, dtype):
    made = as_array(given, "here")
    assert type(made) is np.ndarray and made.dtype == dtype
    given = list(given) if getattr(given, "dtype", np.dtype(int)).kind == "O" else given
    assert np.array_equal(made, np.asarray(given), equal_nan=made.dtype.kind == "f")


def test_a_tensor_that_is_conjugated_or_negated_lazily_is_taken():
    given = torch.tensor([1 + 2j, 3])
    assert as_array(given.conj(), "here").tolist() == [1 - 2j, 3]
    assert as_array(given.conj().imag, "here").tolist() == [-2, 0]


@pytest.mark.skipif(not hasattr(np.dtypes, "StringDType"), reason="comes with NumPy 2")
def test_numpys_text_of_any_length_is_taken():
    given = np.array(["a", "bcd", ""], np.dtypes.StringDType())
    assert as_array(given, "here").tolist() == ["a", "bcd", ""]


class Theirs:
    """An array of another library, of which NumPy makes less than it has."""

    def __init__(self, values, kind, **more):
        self.values, self.dtype = np.array(values), kind
        for name, value in more.items():
            setattr(self, name, value)

    def __len__(self):
        return len(self.values)

    def __array__(self, dtype=None, copy=None):
        return self.values


class Zoned:
    tz = "Europe/Berlin"

    def __repr__(self):
        return "datetime64[ns, Europe/Berlin]"


MISSING = "1 of 2 values are missing"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Theirs([1, np.nan], "Int64", isna=lambda: np.array([False, True])), MISSING),  # pandas
        (Theirs([1, np.nan], "Int64", null_count=lambda: 1), MISSING),  # Polars
        (Theirs([1, np.nan], "int64", null_count=1), MISSING),  # Arrow
        (Theirs(["2020"], Zoned()), r"is of datetime64\[ns, Europe/Berlin\].*no time zone"),
    ],
)
def test_what_numpy_would_lose_of_another_library_is_refused(given, message):
    with pytest.raises(InputError, match=f"^here:? {message}"):
        as_array(given, "here")
    np.asarray(given)  # control: NumPy says nothing


def test_arrays_of_another_library_are_taken():
    gaps = Theirs([1, np.nan], np.dtype(float), isna=lambda: np.array([False, True]))
    assert np.array_equal(as_array(gaps, "here"), [1, np.nan], equal_nan=True)
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    assert as_array(pa.array([1, 2]), "here").tolist() == [1, 2]
    with pytest.raises(InputError, match=MISSING):
        as_array(pa.array([1, None]), "here")
    with pytest.raises(InputError, match="no time zone"):
        as_array(pa.array([1], pa.timestamp("us", "UTC")), "here")


def test_an_array_is_taken_as_it_is():
    array = np.arange(3)
    assert as_array(array, "here") is array


REFUSED = [
    ([2**63, 1], "step 0 is 9223372036854775808 of uint64, and would become 9.2"),
    ([[1], [2**63]], "step 0 is .* of int64, and would become .* of float64"),
    ([np.uint64(1), np.int64(1)], "step 0 is 1 of uint64, and would become 1.0 of float64"),
    ([2**53 + 1, 0.5], "step 0 is 9007199254740993 of int64, and would become 9007199254740992.0"),
    ([0.5, np.array(2**53 + 1)], "step 1 is 9007199254740993 of int64"),
    ([0.5, np.int64(2**53 + 1)], "step 1 is 9007199254740993 of int64"),
    ([-1, np.uint64(2**63)], "step 0 is -1 of int64, and would become -1.0 of float64"),
    (["a", 1], "step 1 is 1 of int64, and would become '1' of <U21"),
    ([[1, "a"], [2, "b"]], "step 0: item 0 is 1 of int64"),
    ([True, "x"], "step 0 is True of bool, and would become 'True'"),
    ([b"a", "a"], "step 0 is b'a' of .S1, and would become 'a'"),
    ([b"a\0", b"b"], r"step 0 is b'a\\x00': NumPy cuts NUL"),
    (["b", "a\0"], r"step 1 is 'a\\x00': NumPy cuts NUL"),
    (np.bytes_(b"a\0"), ".*NumPy cuts NUL"),
    (np.array([97, 0x110000], "u4").view("U1"), "holds numbers beyond U.10FFFF, which are no characters"),
    (np.array([97, 0x110000], ">u4").view(">U1"), "holds numbers beyond U.10FFFF, which are no characters"),
    ([np.timedelta64(1, "s"), 3], "step 1 is 3 of int64"),
    ([[1, 2], [3]], "is ragged"),
    ([np.zeros(2), np.zeros((2, 1))], "is ragged"),
    (MASKED, r"step 1 is masked, 2 of 6 values are.*\.filled"),
    ([np.zeros(2), MASKED[1]], r"step 1: item 1 is masked, 1 of 2 values are.*\.filled"),
    ([1.0, np.ma.masked], "step 1 is masked"),
    (np.ma.masked, "is masked"),
    (torch.zeros(2, dtype=torch.bfloat16), ".*a tensor of a dtype that NumPy has"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_values_that_would_change_are_refused(given, message):
    with pytest.raises(InputError, match=f"^here:? ?{message}"):
        as_array(given, "here")


@pytest.mark.filterwarnings("ignore:.*converting a masked element to nan")
def test_control_numpy_changes_them():
    changed = []
    for given, _ in REFUSED:
        try:
            made = np.asarray(given)
        except (ValueError, TypeError):
            continue
        changed += [made.dtype.kind] if made.dtype.kind != "O" else []
    assert len(changed) == len(REFUSED) - 3  # two are ragged, a tensor has no dtype


def test_a_mask_needs_no_import_of_the_module_of_masks(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy.ma")
    assert as_array(np.arange(2).view(np.recarray), "here").shape == (2,)
    assert "numpy.ma" not in sys.modules


@pytest.mark.parametrize(
    "given",
    [
        [0.5, np.float64(1)],
        [np.nan, np.float64(1)],
        [0, np.float32(0.1)],
        [0, np.int64(1)],
        [np.int32(-1), np.uint8(1)],
        [True, np.bool_(False)],
        [np.bool_(True), 0.5],
    ],
)
def test_numbers_of_several_types_take_no_call_each(given):
    def num_calls(values):
        calls = []
        gc.disable()  # its callbacks would be counted, too
        sys.setprofile(lambda frame, event, _: calls.append(event))
        try:
            as_array(values, "here")
        finally:
            sys.setprofile(None)
            gc.enable()
        return calls.count("call")

    assert num_calls(given * 500) == num_calls(given)
