"""Marks in the viewer: who may give them, what is refused, what the table makes of them, and notes that attack."""

import json

import pytest

from ringmap import Marks, ReplayBuffer
from tests.unit.viewer.conftest import fill
from tests.unit.viewer.test_pages import ATTACK, axe, browser, pytestmark, visit  # noqa: F401

OF_BROWSERS = [mark for mark in pytestmark if mark.name in ("skipif", "slow")]
pytestmark = [mark for mark in pytestmark if mark not in OF_BROWSERS]


def in_browser(test):
    for mark in OF_BROWSERS:
        test = mark(test)
    return test


def post(client, body, cookie=True, **headers):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Origin": f"http://127.0.0.1:{client.port}", **headers}
    status, _, reply = client.ask("/api/mark", "POST", cookie, data, **{k: v for k, v in headers.items() if v})
    return status, reply


def test_a_mark_is_given_filtered_and_sorted(tmp_path, serve):
    fill(tmp_path / "ring", 6).close()
    client = serve()
    key = client.one()
    status, reply = post(client, {"p": key, "e": "20", "flags": ["slow", "bad"], "note": ATTACK})
    assert (status, json.loads(reply)["flags"]) == (200, ["bad", "slow"])
    assert post(client, {"p": key, "e": "40", "note": "fine"})[0] == 200
    for where, rows in {
        "flags contains bad": ["20"],
        "note = fine": ["40"],
        "flags != '' or note != ''": ["20", "40"],
        "not flags contains bad": ["0", "40", "60", "80", "100"],
    }.items():
        found = client.json("episodes", p=key, where=where)
        assert ([row["id"] for row in found["rows"]], found["marked"]) == (rows, 2)
    assert client.json("episodes", p=key, sort="flags")["rows"][0]["id"] == "20"
    one = client.json("episode", p=key, e=20)
    assert (one["flags"], one["note"]) == (["bad", "slow"], ATTACK)
    with ReplayBuffer.open(tmp_path / "ring", "r") as buf:
        assert Marks(buf).get(20).note == ATTACK
        Marks(buf).set(20, flags=())  # by another process, say
    assert post(client, {"p": key, "e": "40", "note": ""})[0] == 200
    client.json("place", p=key)
    found = client.json("episodes", p=key, where="flags != '' or note != ''")
    assert [(row["flags"], row["note"]) for row in found["rows"]] == [([], ATTACK)]


def test_only_our_own_page_may(tmp_path, serve):
    fill(tmp_path / "ring", 2).close()
    client = serve()
    key = client.one()
    body = {"p": key, "e": "0", "flags": ["bad"]}
    refused = [
        {"Origin": None},
        {"Origin": "null"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": f"https://127.0.0.1:{client.port}"},
        {"cookie": False},
        {"Cookie": f"ringmap-{client.port}=x"},
        {"Host": "evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ]
    for headers in refused:
        assert post(client, body, **headers) == (403, b"403 Forbidden\n"), headers
    status, _, reply = client.ask(
        f"/api/mark?token={client.server.token}", "POST", False, b"{}", Origin=f"http://127.0.0.1:{client.port}"
    )
    assert (status, reply) == (403, b"403 Forbidden\n")
    assert not (tmp_path / "ring/marks.json").exists()
    assert post(client, body)[0] == 200  # the same, from our page
    assert client.ask("/api/mark")[0] == 405  # a link changes nothing


def test_control_without_the_checks_another_site_may(tmp_path, serve, monkeypatch):
    from ringmap.viewer.serve import Access

    monkeypatch.setattr(Access, "_is_ours", lambda *_: True)
    with pytest.raises(AssertionError):
        test_only_our_own_page_may(tmp_path, serve)


def test_what_is_refused_changes_nothing(tmp_path, serve):
    fill(tmp_path / "ring", 6, max_steps=100).close()  # the first was evicted
    client = serve()
    key = client.one()
    cases = [
        (b"{", 400),
        (b"[]", 400),
        (b"[" * 60_000, 400),
        (b"x" * 70_000, 413),
        ({"p": key}, 400),
        ({"p": key, "e": "../1"}, 400),
        ({"p": key, "e": "0", "note": "x"}, 410),
        ({"p": key, "e": "23", "note": "x"}, 410),
        ({"p": "no", "e": "20", "note": "x"}, 404),
        ({"p": key, "e": "20", "flags": ["<b>"]}, 400),
        ({"p": key, "e": "20", "flags": 7}, 400),
        ({"p": key, "e": "20", "note": ["x"]}, 400),
        ({"p": key, "e": "20", "note": "x" * 4001}, 400),
    ]
    for body, expected in cases:
        status, reply = post(client, body)
        assert (status, b"error" in reply) == (expected, True), (body, reply)
    assert not (tmp_path / "ring/marks.json").exists()


def test_read_only_and_a_file_elsewhere(tmp_path, serve):
    from ringmap.viewer.library import Library
    from ringmap.viewer.serve import Server
    from tests.unit.viewer.conftest import Client

    buffer = fill(tmp_path / "ring", 3)
    for options, expected in (({"read_only": True}, 403), ({"marks": str(tmp_path / "m.json")}, 200)):
        server = Server(Library([tmp_path / "ring"], **options), port=0)
        server.start()
        try:
            client = Client(server)
            key = client.one()
            status, reply = post(client, {"p": key, "e": "20", "flags": ["bad"]})
            assert status == expected, reply
            assert client.json("place", p=key)["can_mark"] == (expected == 200)
        finally:
            server.stop()
    assert not (tmp_path / "ring/marks.json").exists()
    assert list(Marks(buffer, path=tmp_path / "m.json").all()) == [20]
    buffer.close()


@pytest.mark.parametrize("data", [b"{", b"[" * 100_000, b'{"format": "ringmap marks", "version": 9}'])
def test_damaged_marks_are_said_and_the_rest_goes_on(tmp_path, serve, data):
    fill(tmp_path / "ring", 3).close()
    (tmp_path / "ring/marks.json").write_bytes(data)
    client = serve()
    key = client.one()
    about = client.json("place", p=key)
    assert "marks.json" in about["marks_problem"] and about["episodes"] == 3
    status, reply = post(client, {"p": key, "e": "20", "flags": ["bad"]})
    assert (status, b"marks.json" in reply) == (409, True)
    assert (tmp_path / "ring/marks.json").read_bytes() == data
    (tmp_path / "ring/marks.json").unlink()
    assert client.json("place", p=key)["marks_problem"] is None


def test_a_dataset_is_marked_beside_it(tmp_path, serve):
    with fill(tmp_path / "ring", 3) as buffer:
        buffer.dump(tmp_path / "set.h5", progress=False)
    client = serve(tmp_path / "set.h5")
    key = client.one()
    assert post(client, {"p": key, "e": "1", "flags": ["bad"]})[0] == 200
    assert (tmp_path / "set.h5.marks.json").exists()
    assert client.json("episodes", p=key, where="flags = bad")["rows"][0]["id"] == "1"
    assert list(serve().keys()) == ["ring", "set.h5"]  # marks are no place of their own


@in_browser
def test_marks_on_the_page(tmp_path, serve, visit):  # noqa: F811
    fill(tmp_path / "ring", 6).close()
    client = serve()
    key = client.one()
    page = visit(client, f"#/p/{key}/e/20")
    page.locator(".u-over").first.wait_for()
    page.keyboard.press("b")
    page.get_by_text("Saved", exact=True).wait_for()
    assert page.locator("#flags").input_value() == "bad"
    page.fill("#flags", "bad, slow")
    page.fill("#note", ATTACK)
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelector('#flags').value == 'bad slow'")
    page.fill("#flags", "<b>")
    page.keyboard.press("Enter")
    page.get_by_text("a flag is a word").wait_for()
    assert axe(page) == [] and page.locator("main img[src=x], main script").count() == 0
    page.set_viewport_size({"width": 380, "height": 800})
    page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")
    page.set_viewport_size({"width": 1100, "height": 800})
    page.goto(f"http://127.0.0.1:{client.port}/#/p/{key}")
    page.get_by_role("button", name="Marked: 1").click()
    page.wait_for_function("() => document.querySelectorAll('.row').length == 1")
    assert ATTACK in page.locator("#row0").inner_text()
    assert axe(page) == [] and page.locator("main img[src=x], main script").count() == 0
    page.get_by_role("button", name="Marked: 1").click()
    page.wait_for_function("() => document.querySelectorAll('.row').length == 6")
    page.locator(".grid").focus()
    page.keyboard.press("Home")
    page.keyboard.press("b")  # the newest
    page.get_by_role("button", name="Marked: 2").wait_for()
    with ReplayBuffer.open(tmp_path / "ring", "r") as buf:
        assert {at: mark.flags for at, mark in Marks(buf).all().items()} == {20: ("bad", "slow"), 100: ("bad",)}
