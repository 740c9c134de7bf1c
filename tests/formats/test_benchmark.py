"""The benchmark of formats runs, at tiny sizes: it asserts that both readers return the same."""

from benchmarks.formats import CASES, main
from ringmap.data import list_formats


def test_it_runs(capsys):
    main(["--tiny", "--no-table"])
    printed = capsys.readouterr().out
    assert all(
        f"| {case} |" in printed for case, (name, _) in CASES.items() if name in list_formats()
    )
