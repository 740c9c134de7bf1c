"""How fast is the viewer? Its first paint, its scrolling, its films, and what a collector pays for one who watches.

python -m ringmap view FOLDER      a process of its own
Chromium                           opens it, scrolls, steps; skipped where there is none
a collector                        a process that is told when to write how much
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from benchmarks.harness.data import fill, states
from benchmarks.harness.place import Place
from benchmarks.harness.processes import process
from benchmarks.harness.table import Table
from ringmap import ReplayBuffer

CHROMIUM = os.environ.get("RINGMAP_CHROMIUM") or shutil.which("chromium") or ""
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
STEPS, LENGTH = 2, 400

FIRST_ROW = """
new MutationObserver((_, me) => {
  if (document.querySelector("#row0")) { window.firstRow = performance.now(); me.disconnect(); }
}).observe(document, { childList: true, subtree: true });
"""
DRAWN = """
window.drawn = [];
const draw = CanvasRenderingContext2D.prototype.drawImage;
CanvasRenderingContext2D.prototype.drawImage = function (...given) {
  draw.apply(this, given);
  for (const call of window.drawn.splice(0)) call(performance.now());
};
window.after = (act) => new Promise((done) => {
  const start = performance.now();
  window.drawn.push((end) => done(end - start));
  act();
});
window.pressed = (key) => window.after(() =>
  document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true })));
window.stepped = async (count, waited) => {
  const times = [];
  for (let i = 0; i < count; i++) {
    times.push(await window.pressed("ArrowRight"));
    await new Promise((done) => setTimeout(done, waited));
  }
  return times;
};
window.jumped = (step) => window.after(() => {
  const slider = document.querySelector("input[type=range]");
  slider.value = String(step);
  slider.dispatchEvent(new Event("input"));
});
"""
SCROLLED = """
by => new Promise((done) => {
  document.querySelector(".grid").scrollTop += by;
  requestAnimationFrame(() => requestAnimationFrame(done));
})
"""


def viewer(place: Place) -> Iterator[Table]:
    """Measure the page, where a browser is installed, and a collector beside one who follows."""
    missing = [n for n in ("starlette", "uvicorn", "typer") if importlib.util.find_spec(n) is None]
    if missing:
        yield Table(f"viewer: left out, not installed: {', '.join(missing)}")
        return
    yield _page(place, place.new_folder())
    yield _collector(place, place.new_folder())


def _page(place: Place, folder: Path) -> Table:
    count, length = place.size(1_000_000, 2_000, 100_000), place.size(LENGTH, 40)
    table = Table(f"the page of a ring of {count:,} episodes, in Chromium; films of {LENGTH} steps")
    if not CHROMIUM or importlib.util.find_spec("playwright") is None:
        table.notes.append("left out: Chromium or Playwright is not installed")
        return table
    from playwright.sync_api import sync_playwright

    ring, rng = folder / "ring", np.random.default_rng(0)
    fill(ReplayBuffer(count * STEPS, path=ring, sync_every_s=0), states(STEPS), count).close()
    for high, wide in ((64, 64), (480, 640)):
        with ReplayBuffer(length, path=folder / f"{high}") as buffer:
            buffer.write_episode({"pixels": _film(rng, length, high, wide)})
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)

        def opened(address: str, what: str = f"p/{_key(ring)}", script: str = "") -> Any:
            page = browser.new_context(viewport={"width": 1100, "height": 800}).new_page()
            page.add_init_script(script)
            page.goto(f"{address}#/{what}")
            return page

        painted: dict[str, list[float]] = {}

        def paint(address: str) -> None:
            for name in ("first paint, the server just started", "first paint, once more"):
                page = opened(address, script=FIRST_ROW)
                page.wait_for_function("() => window.firstRow")
                painted.setdefault(name, []).append(page.evaluate("window.firstRow") / 1000)
                page.context.close()

        for _ in range(place.size(7, 0, 3)):
            with _server(ring) as address:
                paint(address)
        with _server(folder) as address:
            if place.tiny:  # starting one takes longer than all that a tiny one does
                paint(address)
            table.add_all(painted)
            for name in painted:
                table.limit(name, "s", at_most=1)
            page, scrolling = opened(address), "scrolling, script a frame"
            page.wait_for_selector("#row0")
            table.add(scrolling, _scrolled(page, place.size(300, 5, 100)))
            table.limit(scrolling, "ms", at_most=16)
            for high, name, most in ((64, "64x64", 10), (480, "640x480", 40)):
                page = opened(address, f"p/{_key(folder / f'{high}')}/e/0", DRAWN)
                page.wait_for_selector("input[type=range]")
                page.evaluate("window.jumped(0)")
                steps = page.evaluate("([n, w]) => window.stepped(n, w)", [length - 2, 33])
                table.add(f"next frame of {name}, 30 a second", np.array(steps) / 1000)
                table.limit(f"next frame of {name}, 30 a second", "ms", at_most=most)
                page.reload()
                page.wait_for_selector("input[type=range]")
                ahead = range(length // 2, length, max(1, length // 8))
                jumps = [page.evaluate("s => window.jumped(s)", step) for step in ahead]
                table.add(f"a frame of {name} that is not loaded", np.array(jumps) / 1000)
        browser.close()
    table.notes.append(
        "Chromium and the server share the machine's cores; a film is asked for ahead, up to 32 frames at a time; a "
        "frame that is not loaded comes alone"
    )
    return table


def _film(rng: np.random.Generator, length: int, high: int, wide: int) -> Any:
    """Return pictures that compress as a camera's do: soft shapes that move, and a little noise."""
    y, x = np.mgrid[0:high, 0:wide] / high
    film = np.empty((length, high, wide, 3), np.uint8)
    for t in range(length):
        for c in range(3):
            wave = 110 + 80 * np.sin(5 * x + 3 * c + t / 9) * np.cos(4 * y + t / 13)
            film[t, ..., c] = wave + rng.integers(0, 6, (high, wide))
    return film


def _scrolled(page: Any, count: int) -> Any:
    """Return the seconds of script of each frame."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def script() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return float(next(m["value"] for m in metrics if m["name"] == "ScriptDuration"))

    spent = [script()]
    for number in range(count):
        page.evaluate(SCROLLED, 120 if number % 5 else 4000)  # at times past what is loaded
        spent.append(script())
    return np.diff(spent) / 2  # two frames each


def _key(path: Path) -> str:
    return hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:12]


@contextlib.contextmanager
def _server(path: Path) -> Iterator[str]:
    """Serve a folder from a process of its own, and give the address."""
    command = [sys.executable, "-m", "ringmap", "view", str(path), "--no-open", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "300"}) as server:
        found = next((found for line in server.stdout or () if (found := re.search(r"http://\S+", line))), None)
        if found is None:
            raise RuntimeError(f"{' '.join(command)}: ended")
        try:
            yield found[0]
        finally:
            server.terminate()


# -- a collector -------------------------------------------------------------------------------------

_LENGTH, _KEPT = 100, 5_000


class Collector:
    """Writes as many episodes as it is told."""

    def __init__(self, path: Path) -> None:
        self._episodes, self._buffer = states(_LENGTH), ReplayBuffer(_KEPT * _LENGTH, path=path)

    def write(self, episodes: int) -> tuple[float, float]:
        """Write so many; return the seconds of the clock and of the processor."""
        start, began = perf_counter(), process_time()
        fill(self._buffer, self._episodes, episodes)
        return perf_counter() - start, process_time() - began

    def close(self) -> None:
        """Close the ring."""
        self._buffer.close()


def _collector(place: Place, folder: Path) -> Table:
    """Write the same number of episodes in turns, with somebody who follows and without."""
    path, count = folder / "collected", place.size(3_000, 20, 1_500)
    table = Table(f"a collector: {count:,} episodes of {_LENGTH} steps of 64 bytes a turn, one thread")
    beside = "beside one who follows"
    found: dict[str, list[tuple[float, float]]] = {"alone": [], beside: []}
    with process(Collector, path, method=place.method) as collector:
        collector("write", 2 * place.size(_KEPT, 10))  # the ring is full: each episode evicts one
        with _server(path) as address:
            ways: dict[str, Callable[[], Any]] = {"alone": contextlib.nullcontext}
            ways[beside] = partial(_following, address, _key(path))
            for number in range(place.size(40, 1, 16)):
                for name in found if number % 2 else reversed(found):
                    with ways[name]():
                        found[name].append(collector("write", count))
    taken = {name: np.array(both) / count for name, both in found.items()}
    for at, (what, mark) in enumerate((("time", ""), ("processor time", ", processor time"))):
        table.add_all({name + mark: both[:, at] for name, both in taken.items()})
        pairs = taken[beside][:, at] / taken["alone"][:, at]
        # The 95 % interval of the median, by resampling.
        drawn = np.random.default_rng(0).choice(pairs, (2000, len(pairs)))
        low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
        table.fact(f"{what}, interval of the median of pairs", f"{low:.3f} to {high:.3f}")
        table.bar(f"{what} beside one who follows / alone, median of pairs", float(np.median(pairs)), at_most=1.03)
    table.notes.append(
        "the collector writes as fast as it can; the follower reads the events of its page, in no browser"
    )
    return table


@contextlib.contextmanager
def _following(address: str, key: str) -> Iterator[None]:
    """Read the events of a place, and do nothing else."""
    port, token = re.search(r":(\d+)/\?token=(\S+)", address).groups()  # type: ignore[union-attr]
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
    connection.request("GET", f"/api/events?p={key}", headers={"Cookie": f"ringmap-{port}={token}"})
    reply = connection.getresponse()
    assert reply.status == 200

    def read() -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            while reply.readline():
                pass

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    yield
    with contextlib.suppress(OSError, AttributeError):
        connection.sock.shutdown(2)
    thread.join(5)
    connection.close()
