"""The pages in Chromium: what they show, keys, what comes and goes, names that attack, a phone's width, axe-core."""

import importlib.util
import os
import re
import shutil
import urllib.parse
from pathlib import Path

import h5py
import numpy as np
import pytest

from ringmap.data import ReplayBuffer
from tests.unit.viewer.conftest import add_transitions, episode, fill, fill_transitions, until

CHROMIUM = os.environ.get("RINGMAP_CHROMIUM") or shutil.which("chromium") or ""
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
MISSING = [name for name in ("playwright", "axe_playwright_python") if importlib.util.find_spec(name) is None]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CHROMIUM, reason="no browser is installed: apt-get install chromium"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {MISSING}"),
    pytest.mark.xdist_group("browser"),
]


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture
def visit(browser):
    """Opens pages; each must be without an error in the console."""
    contexts, wrong = [], []

    def open_page(client, where="", **options):
        context = browser.new_context(viewport={"width": 1100, "height": 800}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda m: wrong.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        outside = []
        page.on(
            "request",
            lambda r: (
                outside.append(r.url)
                if urllib.parse.urlparse(r.url).port != client.port and not r.url.startswith("blob:")
                else None
            ),
        )
        page.outside = outside
        page.goto(client.server.address + where)
        return page

    yield open_page
    for context in contexts:
        context.close()
    # Chromium itself notes replies of 4xx: a filter that can't be parsed, an episode that was evicted.
    assert [text for text in wrong if "responded with a status of 4" not in text] == []


@pytest.fixture
def shown(serve, visit):
    """Opens a page of the only place."""

    def open_page(where=""):
        client = serve()
        return visit(client, f"#/p/{client.one()}{where}")

    return open_page


def axe(page):
    """Return what axe-core finds that is serious."""
    import axe_playwright_python

    source = (Path(axe_playwright_python.__file__).parent / "axe.min.js").read_text()
    session = page.context.new_cdp_session(page)
    session.send("Runtime.evaluate", {"expression": source})
    found = page.evaluate("axe.run().then(r => r.violations)")
    return [
        (v["id"], v["nodes"][0]["html"][:200], v["nodes"][0].get("failureSummary", "")[:300])
        for v in found
        if v["impact"] in ("serious", "critical")
    ]


def fits(page):
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_from_the_start_page_to_an_episode(tmp_path, serve, visit):
    fill(tmp_path / "fleet/a", 12).close()
    fill(tmp_path / "fleet/b", 2).close()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/manifest.json").write_text("{")
    client = serve()
    page = visit(client)
    page.locator(".place").nth(3).wait_for()
    assert "token" not in page.url
    assert "check" in page.locator(".place", has_text="broken").inner_text()
    assert axe(page) == []
    page.get_by_role("link", name="fleet", exact=False).first.click()
    page.get_by_role("heading", name="Rings").wait_for()
    assert axe(page) == []
    page.get_by_role("link", name="a", exact=True).click()
    page.get_by_role("heading", name="fleet/a").wait_for()
    page.locator("#row0").wait_for()
    page.wait_for_function("() => document.querySelector('#row0').innerText.includes('terminated')")
    assert page.locator(".row").count() == 12
    assert axe(page) == []
    page.fill("#where", "seed >= 103 and room = 'left'")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('.row').length == 5")
    page.fill("#where", "seed >")
    page.keyboard.press("Enter")
    page.get_by_text("at character 7").wait_for()
    page.fill("#where", "")
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('.row').length == 12")
    page.get_by_role("button", name="return").click()
    page.locator(".grid").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")  # the one with the second greatest return
    page.get_by_role("heading", name="Episode 10").wait_for()
    page.locator(".u-over").first.wait_for()
    assert axe(page) == []
    assert page.outside == []


def test_one_cursor_moves_everything_and_is_in_the_address(tmp_path, shown):
    fill(tmp_path / "ring", 3).close()
    page = shown("/e/20?t=4")
    page.locator(".u-over").first.wait_for()

    def seen(step):
        page.wait_for_function(
            """step => { const c = document.querySelector(".films canvas");
              const p = c.getContext("2d").getImageData(3, 3, 1, 1).data;
              return p[0] == 1 && p[1] == step && document.querySelector(".said").textContent == `go ${step}`
                && [...document.querySelectorAll(".read")].every(r => r.textContent.startsWith(`step ${step}:`)); }""",
            arg=step,
        )

    seen(4)
    page.keyboard.press("ArrowRight")
    seen(5)
    page.keyboard.press("Shift+ArrowRight")
    seen(15)
    page.keyboard.press("ArrowLeft")
    seen(14)
    page.wait_for_url("**t=14")
    page.keyboard.press("Home")
    seen(0)
    assert page.locator(".read").nth(1).text_content() == "step 0: \N{EN DASH}"  # the reward of a reset is a gap
    for _ in range(4):
        page.keyboard.press(".")
    page.keyboard.press("Space")
    seen(19)  # played to its end
    page.locator(".u-over").first.click(position={"x": 5, "y": 20})
    page.wait_for_function("() => document.querySelector('.read').textContent.startsWith('step 0:')")
    page.get_by_role("button", name="1", exact=True).first.click()
    page.get_by_role("link", name="newer").click()
    page.get_by_role("heading", name="Episode 2").wait_for()


def large(path, length=60, **more):
    """A ring of one episode whose pictures are sent as JPEG, in several blocks."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (length, 200, 256, 3), np.uint8)
    pixels[:, :16, :16] = np.arange(length)[:, None, None, None]
    with ReplayBuffer(1000, path=path) as buffer:
        buffer.write_episode({"pixels": pixels, "reward": np.arange(length, dtype=np.float32), **more})
    return pixels


SEEN = """step => { const c = document.querySelector(".films canvas");
  return c && Math.abs(c.getContext("2d").getImageData(5, 5, 1, 1).data[0] - step) <= 1; }"""


def test_a_frame_that_is_not_loaded_comes_alone(tmp_path, shown):
    large(tmp_path / "ring", 500)
    page = shown("/e/0")
    page.locator(".u-over").first.wait_for()
    page.wait_for_function(SEEN, arg=0)
    page.wait_for_load_state("networkidle")
    asked, kept = [], []

    def hold(route):
        query = dict(urllib.parse.parse_qsl(urllib.parse.urlparse(route.request.url).query))
        asked.append((int(query["start"]), int(query["n"])))
        route.continue_() if query["n"] == "1" else kept.append(route)

    page.route("**/api/frames?*", hold)
    page.evaluate("""() => { const slider = document.querySelector("input[type=range]");
      for (const step of [100, 150, 200, 210]) { slider.value = step; slider.dispatchEvent(new Event("input")); } }""")
    page.wait_for_function(SEEN, arg=210)  # while no block has come
    while len(asked) < 4:
        page.wait_for_timeout(20)
    # Of a slider that is dragged: where it was first, and where it is by then.
    assert asked == [(100, 1), (210, 1), (192, 32), (224, 32)]
    page.keyboard.press("ArrowRight")
    page.wait_for_function(SEEN, arg=211)
    for route in kept:
        route.continue_()
    for step in range(212, 256):
        count = len(asked)
        page.keyboard.press("ArrowRight")
        page.wait_for_function(SEEN, arg=step)
        if len(asked) == count:
            break  # its block was there
    else:
        raise AssertionError(asked)
    page.wait_for_timeout(500)  # a request that was under way when its block came is told of later
    count = len(asked)
    page.keyboard.press("ArrowLeft")
    page.wait_for_function(SEEN, arg=step - 1)
    page.wait_for_timeout(500)
    assert len(asked) == count


def test_every_pixel_on_demand(tmp_path, shown):
    pixels = large(tmp_path / "ring")
    page = shown("/e/0?t=7")
    page.wait_for_function(SEEN, arg=7)
    page.wait_for_load_state("networkidle")
    drawn = """() => [...document.querySelector(".films canvas").getContext("2d").getImageData(0, 0, 256, 200).data]"""

    def differs():
        shown = np.array(page.evaluate(drawn)).reshape(200, 256, 4)[..., :3]
        return int((shown != pixels[7]).sum())

    assert differs() > 1000
    page.get_by_role("button", name="exact").click()
    until(differs, lambda count: count == 0)
    assert axe(page) == []


def test_charts_are_zoomed_and_read_with_the_mouse(tmp_path, shown):
    reward = np.arange(5000, dtype=np.float32)
    reward[2000:3000] = np.nan
    with ReplayBuffer(10_000, path=tmp_path / "ring") as buffer:
        buffer.write_episode({"reward": reward})
    page = shown("/e/0?t=4000")
    chart, read = page.locator(".u-over").first, page.locator(".read").first
    chart.wait_for()
    page.wait_for_function("() => /step (4,00|3,99)/.test(document.querySelector('.read').textContent)")
    at_rest = read.inner_text()
    box = chart.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.1, box["y"] + 40)
    page.wait_for_function("before => document.querySelector('.read').textContent !== before", arg=at_rest)
    step, value = (float(part.replace(",", "")) for part in read.inner_text().removeprefix("step ").split(": "))
    assert abs(step - 500) < 10 and abs(value - step) < 6  # thinned: least and greatest of each part
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40)
    page.wait_for_function("() => document.querySelector('.read').textContent.endsWith(': \\u2013')")
    page.mouse.move(5, 5)
    page.wait_for_function("before => document.querySelector('.read').textContent === before", arg=at_rest)

    # Dragged over, each step is asked for, and read.
    with page.expect_request(lambda r: "/api/columns" in r.url) as asked:
        page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 60, steps=4)
        page.mouse.up()
    low, high = edges(asked.value)
    assert abs(low - 1000) < 20 and abs(high - 1500) < 20
    page.wait_for_load_state("networkidle")
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 40)
    page.wait_for_function(
        "() => { const [, s, v] = /step ([\\d,]+): (\\d+)/.exec(document.querySelector('.read').textContent) || []; "
        "return s && s.replace(',', '') === v; }"
    )
    with page.expect_request(lambda r: "/api/columns" in r.url) as asked:
        page.mouse.wheel(0, -100)
    closer = edges(asked.value)
    assert low < closer[0] < 1250 < closer[1] < high
    page.wait_for_load_state("networkidle")
    with page.expect_request(lambda r: "/api/columns" in r.url) as asked:
        page.mouse.wheel(0, 100)
    assert edges(asked.value)[0] < closer[0]
    page.wait_for_load_state("networkidle")
    with page.expect_request(lambda r: "/api/columns" in r.url and "end=5000" in r.url):
        chart.dblclick()
    page.locator("h1").click()
    page.evaluate(
        """() => { const slider = document.querySelector("input[type=range]"); slider.value = 4000;
        slider.dispatchEvent(new Event("input")); }"""
    )
    for key_, expected in (("+", (2000, 4501)), ("-", (0, 5000)), ("=", (2000, 4501)), ("0", (0, 5000))):
        with page.expect_request(lambda r: "/api/columns" in r.url) as asked:
            page.keyboard.press(key_)
        assert all(abs(a - b) < 3 for a, b in zip(edges(asked.value), expected, strict=True)), key_


def edges(request):
    query = dict(urllib.parse.parse_qsl(urllib.parse.urlparse(request.url).query))
    return int(query["start"]), int(query["end"])


def test_downloads_on_the_page(tmp_path, monkeypatch, shown):
    pixels = large(tmp_path / "ring")
    page = shown("/e/0")
    page.locator(".u-over").first.wait_for()
    starts = {"HDF5": b"\x89HDF", "mp4": None, "PNG strip": b"\x89PNG"}
    if importlib.util.find_spec("av") is None:
        del starts["mp4"]
    for name, start in starts.items():
        with page.expect_download() as got:
            page.get_by_role("link", name=name).click()
        suffix = {"HDF5": "h5", "mp4": "mp4", "PNG strip": "png"}[name]
        assert got.value.suggested_filename == f"episode-0.{suffix}"
        body = Path(got.value.path()).read_bytes()
        if name == "HDF5":
            with h5py.File(got.value.path()) as file:
                np.testing.assert_array_equal(file["pixels"][:], pixels)
        assert body[4:8] == b"ftyp" if start is None else body.startswith(start)
    monkeypatch.setattr("ringmap.viewer.app.MOST_NBYTES", 1000)
    page.get_by_role("link", name="HDF5").click()
    page.get_by_text("use `ringmap convert`").wait_for()  # the page says why there is no file


def test_a_tab_in_the_back_asks_nothing(tmp_path, shown):
    buffer = fill(tmp_path / "ring", 3)
    page = shown()
    page.get_by_text("● live").wait_for()
    hidden = (
        "is => { Object.defineProperty(document, 'hidden', { get: () => is, configurable: true }); "
        "document.dispatchEvent(new Event('visibilitychange')); }"
    )
    page.wait_for_function("() => document.querySelectorAll('.row').length == 3")
    page.evaluate(hidden, True)
    page.wait_for_timeout(1000)  # what was asked before comes
    opened = []
    page.on("request", lambda r: opened.append(r.url) if "/api/" in r.url else None)
    buffer.write_episode(episode(3))
    page.wait_for_timeout(1500)
    assert opened == [] and page.locator(".row").count() == 3
    page.evaluate(hidden, False)
    page.wait_for_function("() => document.querySelectorAll('.row').length == 4")
    buffer.close()


def test_a_ring_that_vanishes_while_it_is_shown(tmp_path, serve, visit):
    fill(tmp_path / "runs/ring", 3).close()
    client = serve(tmp_path / "runs")
    key = client.one()
    page, other = visit(client, f"#/p/{key}"), visit(client, f"#/p/{key}/e/20?t=5")
    page.locator("#row2").wait_for()
    other.locator(".u-over").first.wait_for()
    (tmp_path / "runs/ring").rename(tmp_path / "elsewhere")
    for one in (page, other):
        one.locator("main .note", has_text="ring: was removed or renamed").first.wait_for()  # rows asked for say so too
        assert one.locator("#live").inner_text() == "not read"
    other.keyboard.press("ArrowRight")  # what was loaded stays
    other.wait_for_function("() => document.querySelector('.read').textContent.startsWith('step 6:')")
    fill(tmp_path / "new", 5).close()
    (tmp_path / "new").rename(tmp_path / "runs/ring")  # another one in its place
    page.locator("#row4").wait_for()
    page.get_by_text("● live").wait_for()
    assert page.locator("main .note").count() == 0


def test_a_writer_that_pauses_or_ends_is_seen(tmp_path, shown):
    buffer = fill_transitions(tmp_path / "ring", 30)
    page = shown()
    page.get_by_text("● live").wait_for()
    page.locator("dd", has_text=f"writer alive {os.getpid()}").wait_for()
    rate = page.locator(".facts div", has_text="steps per second").locator("dd")
    add_transitions(buffer, 30, 40)
    until(rate.inner_text, lambda text: text.isdigit() and text != "0")
    until(rate.inner_text, lambda text: text == "0")  # not the last one for ever
    buffer.close()
    page.locator("dd", has_text="no writer").wait_for()


def test_the_first_columns_come_without_a_reload(tmp_path, shown):
    buffer = ReplayBuffer(1000, path=tmp_path / "ring")
    page = shown()
    page.get_by_text("No columns before the first episode").wait_for()
    page.get_by_text("● live").wait_for()
    buffer.write_episode(episode(0))
    page.get_by_role("region", name="Columns").get_by_text("proprio").wait_for()
    page.locator("#row0 img").wait_for()
    buffer.close()


@pytest.mark.parametrize(
    "where", ["#/p/%", "#/p/nothing", "#/p/nothing/e/0", "#/what", "#/p/KEY/e/x", "#/p/KEY/e/7", "#/p/KEY/compare"]
)
def test_addresses_that_lead_nowhere_say_so(tmp_path, serve, visit, where):
    fill(tmp_path / "ring", 1).close()
    client = serve()
    key = client.one()
    page = visit(client, where.replace("KEY", key))
    page.locator("main h1").wait_for()
    assert page.locator("main a, main .note").count() > 0


def test_compare(tmp_path, shown):
    buffer = fill(tmp_path / "ring", 3)
    buffer.write_episode(episode(3, length=35))
    buffer.close()
    page = shown()
    page.locator("#row2").wait_for()
    page.get_by_role("button", name="Choose").click()
    page.locator("#row0").click()
    page.locator("#row1").click()
    page.get_by_role("button", name="Choose", pressed=True).click()
    page.locator("#row1").click(modifiers=["Shift"])
    page.locator("#row2").click(modifiers=["Shift"])
    page.get_by_role("button", name="Compare 2").click()
    page.get_by_role("heading", name="Episodes 3, 1").wait_for()
    page.get_by_role("link", name="1", exact=True).click()
    page.get_by_role("heading", name="Episode 1").wait_for()
    page.go_back()
    page.get_by_role("heading", name="Episodes 3, 1").wait_for()
    page.locator(".u-over").first.wait_for()
    assert page.locator(".films canvas").count() == 2
    page.keyboard.press("End")
    page.wait_for_function("() => document.querySelector('.bar').innerText.includes('step 34 of 35')")
    assert axe(page) == []


def test_live_and_evicted_while_watched_in_two_tabs(tmp_path, serve, visit):
    buffer = fill(tmp_path / "live", 3, max_steps=100)
    client = serve()
    key = client.one()
    table, watched = visit(client, f"#/p/{key}"), visit(client, f"#/p/{key}/e/0?t=3")
    table.locator("#row2").wait_for()
    watched.locator(".u-over").first.wait_for()
    watched.get_by_text("● live").wait_for()
    table.get_by_text("● live").wait_for()
    buffer.write_episode(episode(3))
    table.wait_for_function(
        "() => document.querySelectorAll('.row').length == 4 && "
        "document.querySelector('#row0').innerText.includes('103')"
    )
    for number in range(4, 9):
        buffer.write_episode(episode(number))
    table.wait_for_function(
        "() => document.querySelectorAll('.row').length == 5 && "
        "document.querySelector('#row0').innerText.includes('108')"
    )
    watched.get_by_text("was evicted").wait_for()
    watched.keyboard.press("ArrowRight")  # what was loaded stays
    watched.wait_for_function("() => document.querySelector('.read').textContent.startsWith('step 4:')")
    assert (
        watched.evaluate("document.querySelector('.films canvas').getContext('2d').getImageData(3, 3, 1, 1).data[1]")
        == 4
    )
    buffer.close()


def fleet_page(client, visit, counts):
    """Open the page of a fleet of two rings. Before, its card on the home page must show these counts and a picture.

    One of the rings has a writer.
    """
    page = visit(client)
    card = page.locator(".place", has_text="2 rings, 1 writer alive")
    card.get_by_text(counts).wait_for()
    assert card.locator("img").evaluate("img => img.decode().then(() => img.naturalWidth)") > 0
    page.goto(f"http://127.0.0.1:{client.port}/#/p/{client.keys()['fleet']}")
    page.get_by_text("● live").wait_for()
    return page


def test_a_fleet_is_live(tmp_path, serve, visit):
    buffer = fill(tmp_path / "fleet/a", 3)
    fill(tmp_path / "fleet/b", 2).close()
    page = fleet_page(serve(), visit, "5 episodes, 100 steps")
    page.locator("#row4").wait_for()
    assert page.locator("#row4").inner_text().split()[:2] == ["a", "0"]
    page.get_by_role("link", name="a", exact=True).focus()
    buffer.write_episode(episode(3))
    page.locator("dd", has_text="120").first.wait_for()
    page.wait_for_function("() => document.querySelector('#row1').innerText.includes('103')")
    assert page.locator("tbody tr").first.inner_text().split()[:3] == ["a", "4", "80"]
    assert page.evaluate("document.activeElement.textContent") == "a"  # the row stays
    page.locator("#row0").click(modifiers=["Shift"])
    page.locator("#row1").click(modifiers=["Shift"])
    page.get_by_role("button", name="Compare 2").click()
    page.get_by_role("heading", name="Episodes b #1, a #3").wait_for()
    page.locator(".u-over").first.wait_for()
    assert page.locator(".films canvas").count() == 2
    page.go_back()
    page.locator("#row1").click()
    page.get_by_role("heading", name="Episode 3").wait_for()
    page.get_by_role("link", name="fleet").click()
    page.locator("#row5").wait_for()
    shutil.rmtree(tmp_path / "fleet/b")
    page.get_by_text("b: the ring was removed").wait_for()
    page.wait_for_function("() => document.querySelectorAll('.row').length == 4")
    assert axe(page) == []
    buffer.close()


def test_a_fleet_of_transitions_is_live(tmp_path, serve, visit):
    buffer = fill_transitions(tmp_path / "fleet/a", 30, policy_step=5)
    fill_transitions(tmp_path / "fleet/b", 20).close()
    page = fleet_page(serve(), visit, "50 transitions")
    page.get_by_text("5 steps between rings").wait_for()
    heads = page.locator("thead").first.inner_text().split("\t")
    assert heads[:4] == ["ring", "transitions", "fill", "written"]
    add_transitions(buffer, 30, 90, policy_step=9)
    page.locator("dd", has_text="120").first.wait_for()  # 100 of a, whose ring is full
    assert page.locator("tbody tr").first.inner_text().split("\t")[:4] == ["a", "100", "100.0 %", "120"]
    page.get_by_text("9 steps between rings").wait_for()
    assert axe(page) == [] and fits(page)
    page.get_by_role("link", name="a", exact=True).click()
    page.get_by_role("img", name="The ring: 100 of 100 steps").wait_for()
    page.get_by_text("● live").wait_for()
    add_transitions(buffer, 120, 10)
    page.get_by_role("img", name="positions 30 to 130").wait_for()
    assert page.get_by_role("heading", name="Episodes").count() == 0
    assert axe(page) == []
    page.set_viewport_size({"width": 380, "height": 800})
    assert fits(page)
    buffer.close()


ATTACK = '"><img src=x onerror="document.title=1"><script>document.title=2</script>${7*7}'


def test_names_that_attack_stay_text(tmp_path, serve, visit):
    name = ATTACK.replace("/", "|")
    for ring in (name, "b"):
        with ReplayBuffer(100, path=tmp_path / name / ring) as buffer:
            buffer.write_episode({ATTACK: np.zeros(9), "s": np.array([ATTACK] * 9), "_episode_data": {ATTACK: ATTACK}})
    (tmp_path / name / f"{name} c").mkdir()
    (tmp_path / name / f"{name} c/manifest.json").write_text("{")
    client = serve()
    places = client.json("places")["places"]
    fleet, key = (next(p["key"] for p in places if p["kind"] == k) for k in ("fleet", "episodes"))
    page = visit(client)
    page.locator(".place").nth(3).wait_for()
    for where in (
        f"#/p/{fleet}",
        f"#/p/{fleet}/compare?e={key}-0",
        f"#/p/{key}",
        f"#/p/{key}/e/0",
        f"#/p/{key}/compare?e=0",
        f"#/p/{urllib.parse.quote(ATTACK, safe='')}",
    ):
        page.goto(f"http://127.0.0.1:{client.port}/{where}")
        page.locator("main h1").wait_for()
        page.wait_for_timeout(200)
        assert page.locator("main img[src=x], main script").count() == 0
        assert "1" != page.title() != "2"
        if "e=" in where or "/e/" in where:
            assert page.locator("h3").first.text_content() == ATTACK
        if where == f"#/p/{fleet}":
            assert name in page.locator("tbody").first.inner_text()
            assert f"{name} c: " in page.locator(".note").inner_text()


def test_a_phone_and_the_dark(tmp_path, serve, visit):
    fill(tmp_path / "fleet/a", 12).close()
    fill(tmp_path / "fleet/b", 2).close()
    client = serve()
    keys = client.keys()
    page = visit(client, color_scheme="dark")
    page.set_viewport_size({"width": 380, "height": 800})
    waits = {
        "": ".place",
        f"#/p/{keys['fleet']}": "table",
        f"#/p/{keys['a']}": "#row0",
        f"#/p/{keys['a']}/e/20": ".u-over",
        f"#/p/{keys['a']}/compare?e=0,20": ".u-over",
    }
    for where, there in waits.items():
        page.goto(f"http://127.0.0.1:{client.port}/{where}")
        page.locator(there).first.wait_for()
        assert fits(page), where
        assert axe(page) == [], where
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"


def test_lines_that_hardly_change_have_a_chart(tmp_path, shown):
    large = 5 * 10**18
    columns = {
        "id": np.full(20, large),
        "clock": large + 1024 * np.arange(20),
        "still": np.full(20, 0.5),
        "reward": np.ones(20),
    }
    with ReplayBuffer(1000, path=tmp_path / "ring") as buffer:
        buffer.write_episode(columns)
    page = shown("/e/0?t=10")
    for name in columns:
        chart = page.get_by_role("region", name=name, exact=True)
        chart.locator(".u-over").wait_for()
        assert "step 10" in chart.locator(".read").inner_text()


WORDS = """() => {
window.words = [];
const write = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  write.call(this, text, x, y);
  if (text === "tail" || text === "head") {
    const wide = this.measureText(text).width, left = this.textAlign === "right" ? x - wide : x;
    window.words.push([left, left + wide, this.canvas.clientWidth]);
  }
};
}"""


def test_the_words_below_the_ring_stand_apart(tmp_path, serve, visit):
    with ReplayBuffer(1000, path=tmp_path / "ring") as buffer:
        buffer.write_episodes({"reward": np.ones(21)} for _ in range(48))
        client = serve()
        key = client.one()
        page = visit(client, f"#/p/{key}")
        page.locator("#row0").wait_for()
        page.evaluate(WORDS)
        for _ in range(2):  # head at 29 of 1000 and tail at 42; then head at 50 and tail at 63
            page.evaluate("() => { window.words = []; }")
            buffer.write_episode({"reward": np.ones(21)})
            page.wait_for_function("() => window.words.length >= 2")
            one, other = sorted(page.evaluate("window.words.slice(-2)"))
            assert one[0] >= 0 and one[1] < other[0] and other[1] <= other[2]


def test_only_rows_in_view_are_made(tmp_path, shown):
    buffer = ReplayBuffer(20_000, path=tmp_path / "ring")
    buffer.write_episodes({"reward": np.full(2, float(n))} for n in range(5000))
    buffer.close()
    page = shown()
    page.locator("#row0").wait_for()
    page.evaluate("document.querySelector('.grid').scrollTop = 34 * 4000")
    page.locator("#row4005").wait_for()
    assert page.locator(".row").count() < 60
    page.locator(".grid").focus()
    page.keyboard.press("End")
    page.locator("#row4999.at").wait_for()


def test_the_page_is_small_and_whole():
    import hashlib
    from importlib.resources import files

    folder = files("ringmap.viewer").joinpath("static")
    sizes = {f.name: len(f.read_bytes()) for f in folder.iterdir()}
    assert sum(sizes.values()) < 150_000
    said = folder.joinpath("uPlot.VENDORED").read_text()
    for name in ("uPlot.js", "uPlot.css"):
        assert hashlib.sha256(folder.joinpath(name).read_bytes()).hexdigest() in said
    page = folder.joinpath("index.html").read_text()
    assert "<script>" not in page and "http" not in page and not re.search(r"\son\w+=", page)
