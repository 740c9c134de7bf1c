"""What a command refuses: one line on stderr, an exit code, and nothing is made or changed."""

import json
import shlex

import numpy as np
import pytest

from ringmap.data import ReplayBuffer, get_format
from ringmap.storage.disk.checksums import json_checksum
from tests.unit.cli.conftest import fill


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    path = tmp_path_factory.mktemp("home")
    with fill(path / "replay") as replay:
        replay.dump(path / "a.h5", progress=False)
        replay.dump(path / "set", "zarr", progress=False)
    for name, columns in (("other", {"x": np.zeros(5)}), ("grid", {"y": np.zeros((5, 8, 8, 3))}), ("new", None)):
        with ReplayBuffer(50, path=path / name) as buf:
            buf.write_episodes([columns] if columns else [])
    fill(path / "newer").close()
    body = json.loads((path / "newer/manifest.json").read_text()) | {"version": 99}
    del body["checksum"]
    (path / "newer/manifest.json").write_text(json.dumps({**body, "checksum": json_checksum(body)}))
    for name in ("empty", "foreign"):
        (path / name).mkdir()
    (path / "text.txt").write_text("hello")
    (path / "foreign/manifest.json").write_text('{"name": "an app"}')
    (path / "mine.png").write_bytes(b"mine")
    with get_format("zarr").open_writer(path / "z.zarr") as writer:
        writer.write_episode({"x": np.zeros(2)})
    (path / "z.zarr").rename(path / "wrong.h5")
    return path


COLLECT = "--path fleet --episodes 3 --max-steps 100 --collectors 1"
TO = {"dump": "dump replay {}", "convert": "convert a.h5 {}", "merge": "merge a.h5 -o {}"}
REFUSED = {
    "chek x": "error: No such command 'chek'. Did you mean 'check'?\nTry 'ringmap --help'.\n",
    "info --bogus x": "Try 'ringmap info --help'.\n",
    "info nothing": "error: No dataset 'nothing': the path nothing does not exist in ",
    "check nothing": "error: check: nothing: nothing is there\n",
    "repair nothing": "error: repair: nothing: nothing is there\n",
    "watch nothing": "error: watch: nothing: nothing is there\n",
    "check nowhere.h5": "nothing is there",
    "repair newer": "upgrade ringmap",
    "watch replay --interval 0": "--interval",
    **{
        f"{command} {place}{' dest' * (command == 'snapshot')}": "error: "
        for command in ("info", "watch", "check", "repair", "snapshot", "episodes")
        for place in ("empty", "text.txt", "foreign")
    },
    "snapshot replay set": "something is at",
    "episodes replay --where seed": "--where: expected one of < <= > >= = != contains in is at character 5",
    "episodes replay --where nope=1": "--where: no value 'nope'; there are 'episode', 'length'",
    "episodes replay --where 'seed < 5 seed'": "--where: expected `and`, `or` or the end at character 10",
    "episodes replay --where seed=left": "--where: 'seed' is a number, and not text",
    "episodes replay --where \"seed=__import__('os').mkdir('made')\"": "at character",
    "episodes replay --sort nope": "--sort names 'nope'",
    "episodes replay --last -1": "--last",
    "episodes replay --min-length x": "--min-length",
    f"collect rooms {COLLECT}": "collect: expected 'module:name', got 'rooms'",
    f"collect json:make {COLLECT}": "has no attribute 'make'",
    "merge a.h5": "say at least one source",
    "merge replay other -o no.h5": "sources must have the same columns",
    **{
        f"{words.format(dest)} {more}": said
        for words in TO.values()
        for dest, more, said in (
            ("somewhere", "", "say which: --format NAME"),
            ("x", "-f nope", "unknown format 'nope'"),
            ("x", "-f ringmap", "format 'ringmap' is read-only"),
            ("y.h5", "-O nonsense=1", "unknown option 'nonsense'; known: ['mode', 'compression'"),
            ("y.h5", "-O level", "-O level: expected KEY=VALUE"),
            ("y.h5", "-O mode=append", "-O mode=append: expected KEY=VALUE"),
            ("y.h5", "--mode sideways", "write mode must be one of"),
            ("set", "", "already exists"),
            ("set", "--mode append -f folder", "holds a dataset of format 'zarr'"),
            ("wrong.h5", "--mode append", "holds a dataset of format 'zarr'"),
        )
    },
    **{f"preview replay -e {n}": f"preview: --episode {n}: replay has 4 episodes, 0 to 3" for n in ("4", "-5")},
    "preview other": "has no pictures",
    "preview grid --column y": "holds no pictures",
    "preview grid --column z": "has no column 'z'",
    **{
        f"{command} {words}": said.format(command)
        for command in ("plot", "preview")
        for words, said in (
            ("new", "no episodes are stored yet"),
            ("replay -o no/x.png", "{}: --output no/x.png: there is no folder no; make it first"),
            ("replay -o mine.png", "error: {}: mine.png exists; choose another --output, or say --force\n"),
            ("replay -o x.gif", "a .png"),
        )
    },
}


def states(home):
    return {p: (p.stat().st_size, p.stat().st_mtime_ns) for p in home.rglob("*") if p.name != "lock"}


@pytest.mark.parametrize("words", REFUSED)
def test_it_is_one_line_and_nothing_changes(cli, home, monkeypatch, words):
    monkeypatch.chdir(home)
    before = states(home)
    done = cli(*shlex.split(words))
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("ringmap: error: ") and REFUSED[words] in done.err
    assert done.err.count("\n") == (2 if "Try 'ringmap" in done.err else 1)
    assert states(home) == before
