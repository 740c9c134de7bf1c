"""The server's answers: what is stored, who may ask, what is refused, and what one request may take."""

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from ringmap.data import ReplayBuffer
from ringmap.errors import LockedError, NotFoundError, RoleError
from ringmap.viewer import drawing
from ringmap.viewer.library import Library
from ringmap.viewer.places import find
from ringmap.viewer.serve import Access, Server, listen, tunnel_line
from tests.unit.viewer.conftest import Client, episode, fill, until


def unpacked(body):
    size = struct.unpack("<I", body[:4])[0]
    head = json.loads(body[4 : 4 + size])
    values = np.frombuffer(body[4 + size :], np.float64).reshape(-1, head["points"])
    return head, values


@pytest.fixture
def ring(tmp_path):
    fill(tmp_path / "ring", 30, max_steps=500).close()  # the newest 25 are stored: 5 to 29
    return tmp_path / "ring"


def indexed(client, key, **query):
    return until(lambda: client.json("episodes", p=key, **query), lambda t: t["indexed"] == t["total"])


def test_places_and_their_pages(tmp_path, serve, ring):
    fill(tmp_path / "fleet/a", 3).close()
    fill(tmp_path / "fleet/b", 2).close()
    ReplayBuffer.open(ring).dump(tmp_path / "set.h5", progress=False)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/manifest.json").write_text("{")
    (tmp_path / "notes.txt").write_text("no data")
    client = serve()
    found = {p["name"].rpartition("/")[2]: p for p in client.json("places")["places"]}
    kinds = {name: place["kind"] for name, place in found.items()}
    assert kinds == {
        "ring": "episodes",
        "fleet": "fleet",
        "a": "episodes",
        "b": "episodes",
        "set.h5": "dataset",
        "broken": "problem",
    }
    assert "check" in found["broken"]["problem"]
    assert (found["ring"]["episodes"], found["ring"]["steps"], found["ring"]["writer"]["alive"]) == (25, 500, False)
    about = client.json("place", p=found["ring"]["key"])
    assert (about["head"], about["tail"], about["commits"], about["max_steps"]) == (600, 100, 30, 500)
    columns = {c["name"]: c for c in about["columns"]}
    assert columns["proprio"]["range"] == [-1.0, 29.0] or columns["proprio"]["range"][1] == 29.0
    assert (columns["pixels"]["kind"], columns["instruction"]["kind"]) == ("picture", "text")
    fleet = client.json("place", p=found["fleet"]["key"])
    assert [(r["name"], r["episodes"], r["key"]) for r in fleet["shards"]] == [
        ("a", 3, found["a"]["key"]),
        ("b", 2, found["b"]["key"]),
    ]
    assert client.json("place", p="0123456789ab", status=404)["error"]


def test_table_sorts_and_filters_over_all_episodes(serve, ring):
    client = serve(ring)
    key = client.one()
    table = indexed(client, key, n=3)
    assert [row["return"] for row in table["rows"]] == [19 * 5.0, 19 * 6.0, 19 * 7.0]
    first = table["rows"][0]
    assert (first["length"], first["ended"], first["data"], first["id"]) == (
        20,
        "terminated",
        {"seed": 105, "room": "left"},
        "100",
    )
    newest = client.json("episodes", p=key, sort="return", desc=1, n=2)["rows"]
    assert [row["episode"] for row in newest] == [24, 23]
    found = client.json("episodes", p=key, where="return > 190 and not (seed < 120 or room = 'left')", sort="seed")
    assert [row["data"]["seed"] for row in found["rows"]] == [120, 122, 124, 126, 128]
    assert found["matching"] == 5
    for where, said in [
        ("return >", "character 9"),
        ("nope = 1", "no value 'nope'"),
        ("(seed", "character 6"),
        ("seed ~ 3", "character 6"),
        ("x" * 3000, "3,000 characters"),
    ]:
        assert said in client.json("episodes", p=key, where=where, status=400)["error"], where
    spread = client.json("spread", p=key)
    assert (spread["length"]["least"], spread["return"]["most"], sum(spread["return"]["counts"])) == (20, 19 * 29, 25)


def test_numbers_come_before_texts_and_episodes_without_a_value_last(tmp_path, serve):
    """Infinities are numbers."""
    values = [None, "b", np.inf, 2.0, "a", -np.inf, None, 7]
    with ReplayBuffer(100, path=tmp_path / "ring") as buffer:
        for value in values:
            buffer.write_episode({"x": np.zeros(2), "_episode_data": {} if value is None else {"score": value}})
    client = serve(tmp_path / "ring")
    key = client.one()
    indexed(client, key)
    for descending, expected in ((0, [5, 3, 7, 2, 4, 1, 0, 6]), (1, [2, 7, 3, 5, 1, 4, 0, 6])):
        rows = client.json("episodes", p=key, sort="score", desc=descending)["rows"]
        assert [row["episode"] for row in rows] == expected
    assert [row["data"]["score"] for row in rows[:4]] == ["inf", 7, 2.0, "-inf"]
    assert client.json("episodes", p=key, where="score > 2")["matching"] == 2


def test_episode_columns_pictures_and_text(serve, ring):
    client = serve(ring)
    key = client.one()
    one = client.json("episode", p=key, e=200)
    assert (one["episode"], one["length"], one["verified"], one["before"], one["after"]) == (5, 20, True, "180", "220")
    head, values = unpacked(client.api("columns", p=key, e=200, c=["proprio", "reward"], start=5))
    assert (head["thinned"], [c["lines"] for c in head["columns"]]) == (False, [2, 1])
    stored = episode(10)
    np.testing.assert_array_equal(values[0], np.arange(5, 20))
    np.testing.assert_array_equal(values[1:3], stored["proprio"][5:].T)
    head, values = unpacked(client.api("columns", p=key, e=200, c="reward"))
    assert np.isnan(values[1, 0])  # a gap, not a zero
    from PIL import Image

    body = client.api("frames", p=key, e=200, c="pixels", start=3, n=4)
    start, count, *sizes = struct.unpack_from("<6I", body)
    assert (start, count) == (3, 4)

    picture = np.asarray(Image.open(io.BytesIO(body[24 : 24 + sizes[0]])))
    np.testing.assert_array_equal(picture, stored["pixels"][3])
    assert client.json("text", p=key, e=200, c="instruction", start=18)["values"] == ["go 18", "go 19"]
    assert client.api("thumb", p=key, e=200)[:4] == b"\x89PNG"


def test_long_episodes_are_thinned_to_least_and_greatest(tmp_path, serve):
    values = np.random.default_rng(0).normal(size=50_000).astype(np.float32)
    values[1234], values[2000:3000] = 99.0, np.nan
    buffer = ReplayBuffer(60_000, path=tmp_path / "long")
    buffer.write_episode({"x": values})
    buffer.close()
    client = serve()
    key = client.one()
    head, (steps, thin) = unpacked(client.api("columns", p=key, e=0, c="x", points=1000))
    assert (head["thinned"], head["points"]) == (True, 1000)
    assert np.nanmax(thin) == 99.0
    assert np.nanmin(thin) == np.nanmin(values)
    assert np.isnan(thin[(steps > 2100) & (steps < 2900)]).all()
    assert (np.diff(steps) > 0).all()


def test_only_what_has_a_checksum_is_called_verified(tmp_path, serve, ring):
    ReplayBuffer.open(ring).dump(tmp_path / "set.h5", progress=False)
    client = serve()
    keys = client.keys()
    assert client.json("episode", p=keys["set.h5"], e=0)["verified"] is False
    assert client.json("episode", p=keys["ring"], e=200)["verified"] is True


def test_a_damaged_episode_is_shown_as_damaged_and_others_go_on(serve, ring):
    with open(ring / "columns/001-proprio.npy", "r+b") as file:
        file.seek(-8, os.SEEK_END)
        end = file.tell()
        file.seek(4096 + 8 * 210)
        file.write(b"\xff\xfe")
        assert end > 4096 + 8 * 210
    client = serve(ring)
    key = client.one()
    states = {e: client.json("episode", p=key, e=e)["damaged"] for e in (180, 200, 220)}
    assert "damaged" in states[200]
    assert (states[180], states[220]) == (None, None)
    assert client.api("columns", p=key, e=200, c="reward")


# -- who may ask ------------------------------------------------------------------------------------


def refused(reply):
    status, headers, body = reply
    return status == 403 and body == b"403 Forbidden\n"


def test_only_with_the_token(serve, ring):
    client = serve(ring)
    key = client.one()
    token = client.server.token
    status, headers, _ = client.ask(f"/?token={token}", cookie=False)
    assert (status, headers["location"]) == (303, "/")
    assert "HttpOnly" in headers["set-cookie"] and "SameSite=Strict" in headers["set-cookie"]
    for path in (
        "/",
        "/static/app.js",
        "/api/places",
        f"/api/place?p={key}",
        "/?token=wrong",
        f"/?token={token}x",
        f"/t/{token}/",
        "/nothing",
    ):
        assert refused(client.ask(path, cookie=False)), path
    assert refused(client.ask("/", cookie=False, Cookie=f"ringmap-{client.port}=wrong"))
    status, headers, body = client.ask("/")
    assert status == 200 and b"<script src" in body
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:PORT"},
        {"Host": "127.0.0.1:1"},
        {"Host": "127.0.0.1"},
        {"Host": "192.168.0.1:PORT"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://127.0.0.1:PORT"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"},
        {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "cors"},
    ],
    ids=str,
)
def test_other_hosts_and_sites_are_refused(serve, ring, headers):
    client = serve(ring)
    given = {name: value.replace("PORT", str(client.port)) for name, value in headers.items()}
    assert refused(client.ask("/api/places", **given))
    assert client.ask("/api/places", Origin=f"http://127.0.0.1:{client.port}")[0] == 200  # control


@pytest.mark.parametrize(
    ("path", "query", "headers"),
    [
        ("/", b"", {b"host": "127.0.0.1:\u00b2".encode("latin-1")}),
        ("/", b"", {b"host": b"127.0.0.1:" + b"1" * 5000}),
        ("/", b"", {b"host": b"[::1]:\xb9\xb2"}),
        ("/", b"", {b"host": b":"}),
        ("/", b"token=%ff%00", {}),
        ("/", b"\xff;&&=", {b"cookie": b'ringmap-7="\\377\xff'}),
        ("/", b"", {b"cookie": b"ringmap-7=\xb2\x00; $Path"}),
        ("/t/\udcff\u00b2/", b"", {}),
    ],
)
def test_whatever_a_stranger_sends_is_refused(path, query, headers):
    """Digits that are none of ASCII, thousands of them, cookies of any bytes: 403, and no error of the server."""
    sent = []

    async def app(scope, receive, send):
        raise AssertionError("it was admitted")

    async def send(message):
        sent.append(message)

    given = {b"host": b"127.0.0.1:7"} | headers
    scope = {"type": "http", "method": "GET", "path": path, "query_string": query, "headers": list(given.items())}
    asyncio.run(Access(app, "secret", 7, frames=True)(scope, None, send))
    assert sent[0]["status"] == 403


def test_a_frame_has_the_token_in_its_path(serve, ring):
    client = serve(ring, frames=True)
    token = client.server.token
    status, headers, _ = client.ask(f"/t/{token}/api/places", cookie=False)
    assert status == 200 and "http://localhost:*" in headers["content-security-policy"]
    assert refused(client.ask("/t/wrong/", cookie=False))
    assert refused(client.ask("/", cookie=False))


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/static/../app.py",
        "/static/..%2fapp.py",
        "/static/%2e%2e/app.py",
        "/static/uPlot.LICENSE/x",
        "/api/place?p=../../etc",
        "/api/thumb?p=%2fetc",
    ],
)
def test_no_request_is_a_path(serve, ring, path):
    client = serve(ring)
    status, _, body = client.ask(path)
    assert status in (400, 404)
    assert b"ringmap" not in body.replace(b"ringmap view", b"")


def test_links_out_of_the_given_paths_are_not_followed(tmp_path, serve, ring):
    shown = tmp_path / "shown"
    shown.mkdir()
    (shown / "out").symlink_to(ring)
    fill(shown / "own", 2).close()
    (shown / "again").symlink_to(shown / "own")
    os.mkfifo(shown / "pipe.h5")
    found = {p["name"].rpartition("/")[2]: p for p in serve(shown).json("places")["places"]}
    assert "leads out" in found["out"]["problem"]
    assert sorted(found) in (["again", "out"], ["out", "own"])  # one of two names of one ring


ATTACK = "<img src=x onerror=alert(1)>\x1b]0;x\x07\u202e../../etc"


def test_names_and_values_of_data_are_json_alone(tmp_path, serve):
    buffer = ReplayBuffer(100, path=tmp_path / "ring")
    buffer.write_episode(
        {ATTACK: np.zeros(9), "_episode_data": {ATTACK: ATTACK, "many": np.zeros(1000), "huge": 2**60}}
    )
    buffer.close()
    client = serve()
    key = client.one()
    status, headers, body = client.ask(f"/api/episode?p={key}&e=0")
    assert headers["content-type"] == "application/json" and headers["x-content-type-options"] == "nosniff"
    assert json.loads(body)["data"] == {ATTACK: ATTACK, "many": "float64 (1000,)", "huge": str(2**60)}
    assert b"\x1b" not in body and all(byte < 128 for byte in body)


# -- bounds -----------------------------------------------------------------------------------------


def test_what_one_request_may_take(tmp_path, serve, monkeypatch):
    buffer = ReplayBuffer(400, path=tmp_path / "ring")
    buffer.write_episode({"map": np.zeros((200, 20, 20), np.float32), "pixels": np.zeros((200, 64, 64, 3), np.uint8)})
    buffer.close()
    client = serve()
    key = client.one()
    told = {c["name"]: c for c in client.json("episode", p=key, e=0)["columns"]}
    assert told["map"]["reason"] == "20 x 20 = 400 values a step; at most 64 are drawn as lines"
    assert "400 values" in client.json("columns", p=key, e=0, c="map", status=400)["error"]
    assert struct.unpack_from("<II", client.api("frames", p=key, e=0, c="pixels", n=10**9))[1] == drawing.FRAMES
    assert len(client.json("episodes", p=key, n=10**12)["rows"]) == 1
    for query in ({"start": -1}, {"start": 300}, {"start": 5, "end": 3}, {"start": "x"}, {"n": "1e3"}):
        assert client.json("frames", p=key, e=0, c="pixels", status=400, **query)["error"]
    for query in ({"e": 7}, {"e": 2**62}):
        assert client.json("episode", p=key, status=410, **query)["error"]
    monkeypatch.setattr("ringmap.viewer.app.MOST_NBYTES", 100_000)
    assert "ringmap convert" in client.json("download", p=key, e=0, **{"as": "hdf5"}, status=413)["error"]
    assert "expected hdf5" in client.json("download", p=key, e=0, **{"as": "exe"}, status=400)["error"]


def test_a_ring_that_vanished_before_it_is_followed_says_so_and_comes_back(tmp_path, serve):
    fill(tmp_path / "runs/ring", 3).close()
    client = serve(tmp_path / "runs")
    key = client.one()
    (tmp_path / "runs/ring").rename(tmp_path / "elsewhere")
    with contextlib.ExitStack() as stack:
        for _ in range(2):  # the second asks when the server knows that it is gone
            lines = stack.enter_context(client.events(key)).makefile("rb")
            assert lines.readline().startswith(b"HTTP/1.1 200")  # a browser does not ask again after an error
            states = (json.loads(line[5:]) for line in lines if line.startswith(b"data:"))
            assert "was removed or renamed" in next(states)["problem"]
        (tmp_path / "elsewhere").rename(tmp_path / "runs/ring")
        assert next(states)["episodes"] == 3
    client.api("events", status=404, p="nothing")


def test_a_slow_client_keeps_nobody_waiting(serve, ring):
    client = serve(ring)
    key = client.one()
    slow = [client.events(key) for _ in range(12)]  # they ask, and never read
    assert client.json("episodes", p=key)["total"] == 25
    for connection in slow:
        connection.close()


# -- its life ---------------------------------------------------------------------------------------


def test_a_port_in_use_takes_the_next():
    taken = listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    other = listen("127.0.0.1", port)
    assert port < other.getsockname()[1] < port + 50
    taken.close()
    other.close()


def nodelay(bound):
    """Return whether a server on a socket sends small replies at once."""

    async def accepted():
        found = asyncio.get_running_loop().create_future()

        def connected(_, writer):
            sock = writer.get_extra_info("socket")
            found.set_result(bool(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)))
            writer.close()

        async with await asyncio.start_server(connected, sock=bound):
            with socket.create_connection(bound.getsockname()):
                return await found

    return asyncio.run(accepted())


def test_a_small_reply_is_sent_at_once():
    assert nodelay(listen("127.0.0.1", 0))
    control = socket.socket(socket.AF_INET)  # its protocol is not named
    control.bind(("127.0.0.1", 0))
    control.listen()
    assert not nodelay(control)


def test_behind_ssh_it_prints_the_tunnel(monkeypatch):
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    assert tunnel_line(7777) is None
    monkeypatch.setenv("SSH_CONNECTION", "10.0.0.1 5000 10.0.0.2 22")
    monkeypatch.setenv("USER", "me")
    for host in ("127.0.0.1", "localhost", "0.0.0.0", "::"):
        assert tunnel_line(7777, host) == "ssh -N -L 7777:127.0.0.1:7777 me@10.0.0.2"
    assert tunnel_line(7777, "10.0.0.9") == "ssh -N -L 7777:10.0.0.9:7777 me@10.0.0.2"
    assert tunnel_line(7777, "fe80::1") == "ssh -N -L 7777:[fe80::1]:7777 me@10.0.0.2"


def test_on_all_addresses_the_token_stays(ring, serve):
    server = Server(Library([ring]), host="0.0.0.0", port=0)
    server.start()
    client, name = Client(server), socket.gethostname()
    try:
        assert server.address_outside == f"http://{name}:{client.port}/?token={server.token}"
        hosts = {
            f"{name}:{client.port}": 200,
            f"192.168.0.1:{client.port}": 200,
            f"evil.example:{client.port}": 403,
            f"{name}:1": 403,
        }
        for host, expected in hosts.items():
            assert client.ask("/", Host=host)[0] == expected, host
            assert refused(client.ask("/", cookie=False, Host=host))
            assert refused(client.ask("/?token=wrong", cookie=False, Host=host))
    finally:
        server.stop()
    assert serve(ring).server.address_outside is None


def test_the_command_until_ctrl_c(ring):
    words = [sys.executable, "-m", "ringmap", "view", str(ring), "--no-open", "--port", "0"]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}  # the address comes at once
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    line = process.stdout.readline()
    assert line.startswith("1 place at http://127.0.0.1:") and "?token=" in line
    port, token = int(line.split(":")[2].split("/")[0]), line.strip().rpartition("=")[2]
    connection = Client(SimpleNamespace(port=port, token=token)).events(Library([ring]).places()[0].key)
    assert connection.recv(100).startswith(b"HTTP/1.1 200")
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    connection.close()
    assert (process.returncode, said) == (0, "")
    assert time.monotonic() - start < 5  # within a second on a machine that is not busy


def test_a_path_with_nothing_readable_says_what_was_found(tmp_path, serve):
    for name in ("notes.txt", "more.txt", "deep/er/code.py", "Makefile"):
        (tmp_path / "runs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / name).write_text("no data")
    (tmp_path / "empty").mkdir()
    client = serve(tmp_path / "runs", tmp_path / "runs/notes.txt", tmp_path / "empty")
    (place,) = client.json("places")["places"]
    assert (place["name"], place["kind"]) == (str(tmp_path / "runs"), "problem")
    assert place["problem"].endswith("but other files: 2 .txt, 1 no suffix, 1 .py")
    (place,) = serve(tmp_path / "runs/notes.txt").json("places")["places"]
    assert "a file of no format that ringmap reads" in place["problem"]
    fill(tmp_path / "runs/ring", 1).close()
    found = until(lambda: client.json("places")["places"], lambda p: p[0]["kind"] != "problem")
    assert [p["kind"] for p in found] == ["episodes"]


def test_a_search_that_is_cut_says_so(tmp_path, monkeypatch):
    for number in range(6):
        fill(tmp_path / f"ring{number}", 1).close()
    monkeypatch.setattr("ringmap.viewer.places._MOST_ENTRIES", 4)
    *found, cut = find([tmp_path])
    assert len(found) >= 3 and "only the first 4 entries" in cut.problem
    monkeypatch.setattr("ringmap.viewer.places._MOST_ENTRIES", 7)
    assert [place.problem for place in find([tmp_path])] == [None] * 7  # the fleet, its rings


def test_marks_need_a_folder_and_a_library_what_is_there(tmp_path):
    with pytest.raises(NotFoundError, match="there is no folder"):
        Library([tmp_path], marks=str(tmp_path / "none/marks.json"))
    Library([tmp_path], marks=str(tmp_path / "marks.json")).close()
    with pytest.raises(NotFoundError, match="nothing is there"):
        Library([tmp_path / "none"])


@pytest.mark.slow
def test_the_command_names_what_it_can_not_show(tmp_path):
    for number in range(7):
        (tmp_path / f"broken{number}").mkdir()
        (tmp_path / f"broken{number}/manifest.json").write_text("{")
    words = [sys.executable, "-m", "ringmap", "view", str(tmp_path), "--no-open", "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("0 places at http://")
    process.send_signal(signal.SIGINT)
    lines = process.communicate(timeout=30)[1].splitlines()
    assert [line.partition("broken")[2][:1] for line in lines[:5]] == list("01234")
    assert "2 places more can't be read" in lines[5] and "no buffers or datasets" in lines[6]


def waited(give_way):
    """Return whether an index that is about to go on waits for a request."""
    from ringmap.viewer.open_dataset import RequestCounter

    requests, order = RequestCounter(), []

    def background():
        give_way(requests)
        order.append("index")

    with requests:
        thread = threading.Thread(target=background)
        thread.start()
        thread.join(0.05)
        order.append("request")
    thread.join()
    return order


def test_the_index_gives_way_to_requests():
    from ringmap.viewer.open_dataset import RequestCounter

    assert waited(RequestCounter.give_way) == ["request", "index"]
    assert waited(lambda requests: None) == ["index", "request"]  # control


def test_places_are_opened_before_they_are_asked_for(tmp_path):
    fill(tmp_path / "ring", 2).close()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/manifest.json").write_text("{")
    library = Library([tmp_path])
    library.prepare()
    (key,) = [p.key for p in library.places() if p.kind == "episodes"]
    until(lambda: library.num_open, lambda count: count == 1)
    opened = library.open(key)
    assert opened.state()["episodes"] == 2
    library.close()
    with pytest.raises(RoleError, match="ended"):
        library.open(key)


@pytest.mark.parametrize("name", ["set.h5", "set.zarr"])
def test_an_idle_view_lets_a_dataset_be_written(tmp_path, serve, monkeypatch, name):
    """A moment after the last read its files are closed; what was appended, or put in its place, is shown at the next
    look."""
    monkeypatch.setattr("ringmap.viewer.sources._REST_S", 0.05)
    path = tmp_path / name

    def write(numbers, **how):
        buf = ReplayBuffer(1000)
        buf.write_episodes([episode(n) for n in numbers])
        try:
            buf.dump(path, progress=False, **how)
        except LockedError:  # the view reads it now
            return False
        return True

    assert write([0, 1])
    client = serve(path)
    key = client.one()
    assert indexed(client, key)["total"] == 2
    until(lambda: write([2], mode="append"), bool)
    assert until(lambda: client.json("place", p=key), lambda p: "episodes" in p)["episodes"] == 3
    assert indexed(client, key)["total"] == 3
    until(lambda: write([7], mode="overwrite"), bool)
    assert until(lambda: client.json("place", p=key), lambda p: "episodes" in p)["episodes"] == 1
    rows = indexed(client, key)["rows"]
    assert [row["data"]["seed"] for row in rows] == [107]
