"""The group: names, help, lazy loading, errors, exit codes."""

import os
import re
import subprocess
import sys
import warnings
from importlib import import_module
from importlib.metadata import entry_points

import pytest
import typer

import ringmap
import ringmap.cli
from ringmap.cli.app import COMMANDS, HOMES, _load
from ringmap.data import ReplayBuffer
from ringmap.errors import CorruptError, InputError

PYTHON = sys.executable


def run(*words, **options):
    return subprocess.run([PYTHON, *words], capture_output=True, text=True, stdin=subprocess.DEVNULL, **options)


def test_help_lists_every_command_with_the_first_line_of_its_own_help(cli):
    shown = cli("--help").out
    for name, line in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(line)}$", shown, re.MULTILINE)
        own = _load(name).help
        assert own.splitlines()[0] == line
        assert cli(name, "--help").out.splitlines()[2].strip() == line
        assert cli(name, "-h").code == 0


def test_every_command_stands_in_the_reference():
    from tests import ROOT

    page = (ROOT / "docs/reference/cli.md").read_text()
    for name in COMMANDS:
        assert f"\n### {name}\n" in page
        assert f"\n$ ringmap {name}" in page


def test_without_a_command_help_goes_to_stderr(cli):
    done = cli()
    assert (done.code, done.out) == (2, "")
    assert "Usage: ringmap" in done.err


def test_version(cli):
    assert cli("--version").out == f"ringmap {ringmap.__version__}\n" == cli("-V").out


def test_python_m_and_the_script_are_the_same():
    (point,) = (p for p in entry_points(group="console_scripts") if p.name == "ringmap")
    assert point.load() is ringmap.cli.main
    done = run("-m", "ringmap", "--version")
    assert (done.returncode, done.stdout) == (0, f"ringmap {ringmap.__version__}\n")


PROBE = """
import sys
from ringmap.cli import main
sys.argv[1:] = {words}
try:
    main()
except SystemExit:
    print("MODULES", *sys.modules)
"""


def test_help_imports_no_command_and_nothing_heavy():
    modules = run("-c", PROBE.format(words=["--help"])).stdout.partition("MODULES")[2].split()
    heavy = {"numpy", "torch", "gymnasium", "zarr", "h5py", "lance", "matplotlib", "PIL", "rich.console"}
    assert not heavy & set(modules)
    of_commands = {f"ringmap.cli.{HOMES.get(name, name)}" for name in COMMANDS}
    assert not of_commands & set(modules)
    modules = run("-c", PROBE.format(words=["view", "--help"])).stdout.partition("MODULES")[2]
    loaded = of_commands & set(modules.split())
    assert loaded == {"ringmap.cli.view"}
    assert not heavy & set(modules.split())


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(SystemExit) as ended:
        ringmap.cli.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said == (f'ringmap: error: the command line: {missing} is not installed; pip install "ringmap[cli]"\n')


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (InputError("no"), 2, "ringmap: error: no\n"),
        (CorruptError("bad\nbytes"), 1, "ringmap: error: bad\\nbytes\n"),
        (PermissionError(13, "denied", "x"), 1, "ringmap: error: [Errno 13] denied: 'x'\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_codes(cli, monkeypatch, error, code, said):
    module = import_module("ringmap.cli.info")

    def fail(*_):
        raise error

    monkeypatch.setattr(module, "kind_of", fail)
    done = cli("info", "x")
    assert (done.code, done.err) == (code, said)


def test_a_bug_is_no_line(cli, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(import_module("ringmap.cli.info"), "kind_of", fail)
    with pytest.raises(ZeroDivisionError):
        cli("info", "x")


def test_traceback_on_demand(cli, monkeypatch):
    with pytest.raises(FileNotFoundError):
        cli("--traceback", "info", "nothing")
    for value, shown in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("RINGMAP_TRACEBACK", value)
        if shown:
            with pytest.raises(FileNotFoundError):
                cli("info", "nothing")
        else:
            assert cli("info", "nothing").code == 2


def test_warnings_and_the_log_are_lines(cli, monkeypatch):
    def warn(*_):
        warnings.warn("beware\x1b[31m", stacklevel=1)
        import logging

        logging.getLogger("ringmap").warning("logged %s", "\x1b[31m")
        raise typer.Exit

    monkeypatch.setattr(import_module("ringmap.cli.info"), "kind_of", warn)
    shown = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = shown
        done = cli("info", "x")
    assert done.err == ("ringmap: warning: beware\\x1b[31m\nringmap: warning: logged \\x1b[31m\n")
    assert warnings.showwarning is shown


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path):
    buffer = ReplayBuffer(200, path=tmp_path / "replay")
    for _ in range(200):  # more than a pipe holds
        buffer.write_episode({"x": [0.0], "_episode_data": {"note": "n" * 2000}})
    buffer.close()
    command = f'"{PYTHON}" -m ringmap episodes "{tmp_path}/replay" --json | head -c 10'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[\n  {\n    ", "")


@pytest.mark.parametrize(("typed", "found"), [("ringmap e", "episodes"), ("ringmap watch --o", "--once")])
def test_the_shell_completes_commands_and_options(typed, found):
    asked = {"_RINGMAP_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = run("-m", "ringmap", env=os.environ | asked)
    assert done.stdout.split() == [found], done.stderr
