"""The viewer: its first paint, its scrolling, its films, and what a collector pays for one who watches.

python -m ringmap view FOLDER      a process of its own
Chromium                           opens it, scrolls, steps; skipped where there is none
python -m benchmarks.questions.viewer DIR    a collector, which is told when to write how much
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
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

from benchmarks.harness.data import fill, states
from benchmarks.harness.place import Place
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
window.pressed = (key) => new Promise((done) => {
  const start = performance.now();
  window.drawn.push((end) => done(end - start));
  document.body.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
});
window.stepped = async (count, waited) => {
  const times = [];
  for (let i = 0; i < count; i++) {
    times.push(await window.pressed("ArrowRight"));
    await new Promise((done) => setTimeout(done, waited));
  }
  return times;
};
window.jumped = (step) => new Promise((done) => {
  const start = performance.now(), slider = document.querySelector("input[type=range]");
  window.drawn.push((end) => done(end - start));
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


def run(place: Place) -> list[Table]:
    """Measure the page, where a browser is installed, and a collector beside one who follows."""
    missing = [n for n in ("starlette", "uvicorn", "typer") if importlib.util.find_spec(n) is None]
    if missing:
        return [Table(f"viewer: left out, not installed: {', '.join(missing)}")]
    with place.folder() as folder:
        return [_page(place, folder), _collector(place, folder)]


def _page(place: Place, folder: Path) -> Table:
    count = place.size(1_000_000, 2_000, 100_000)
    table = Table(f"the page of a ring of {count:,} episodes, in Chromium; films of {LENGTH} steps")
    if not CHROMIUM or importlib.util.find_spec("playwright") is None:
        table.notes.append("left out: Chromium or Playwright is not installed")
        return table
    from playwright.sync_api import sync_playwright

    ring, small, large = folder / "ring", folder / "small", folder / "large"
    with ReplayBuffer(count * STEPS, path=ring, sync_every_s=0) as buffer:
        fill(buffer, states(STEPS), count)
    rng = np.random.default_rng(0)
    length = place.size(LENGTH, 40)
    for path, (high, wide) in ((small, (64, 64)), (large, (480, 640))):
        with ReplayBuffer(length, path=path) as buffer:
            buffer.write_episode({"pixels": _film(rng, length, high, wide)})
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        painted: dict[str, list[float]] = {}

        def paint(address: str) -> None:
            for name in ("first paint, the server just started", "first paint, once more"):
                context = browser.new_context(viewport={"width": 1100, "height": 800})
                page = context.new_page()
                page.add_init_script(FIRST_ROW)
                page.goto(f"{address}#/p/{_key(ring)}")
                page.wait_for_function("() => window.firstRow")
                painted.setdefault(name, []).append(page.evaluate("window.firstRow") / 1000)
                context.close()

        for _ in range(place.size(7, 0, 3)):
            with _server(ring) as address:
                paint(address)
        with _server(folder) as address:
            if place.tiny:  # starting one takes longer than all that a tiny one does
                paint(address)
            table.add_all(painted)
            for name in painted:
                table.bar(f"{name}, median s", table.times[name]["median"], at_most=1)
            page = browser.new_context(viewport={"width": 1100, "height": 800}).new_page()
            page.goto(f"{address}#/p/{_key(ring)}")
            page.wait_for_selector("#row0")
            table.add("scrolling, script a frame", _scrolled(page, place.size(300, 5, 100)))
            table.bar(
                "scrolling, script a frame, median ms",
                1000 * table.times["scrolling, script a frame"]["median"],
                at_most=16,
            )
            for name, path, most in (("64x64", small, 10), ("640x480", large, 40)):
                page = browser.new_context().new_page()
                page.add_init_script(DRAWN)
                page.goto(f"{address}#/p/{_key(path)}/e/0")
                page.wait_for_selector("input[type=range]")
                page.evaluate("window.jumped(0)")
                steps = page.evaluate("([n, w]) => window.stepped(n, w)", [length - 2, 33])
                table.add(f"next frame of {name}, 30 a second", np.array(steps) / 1000)
                table.bar(f"next frame of {name}, median ms", float(np.median(steps)), at_most=most)
                page.reload()
                page.wait_for_selector("input[type=range]")
                jumps = [
                    page.evaluate("s => window.jumped(s)", step)
                    for step in range(length // 2, length, max(1, length // 8))
                ]
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
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def script() -> float:
        metrics = session.send("Performance.getMetrics")["metrics"]
        return float(next(m["value"] for m in metrics if m["name"] == "ScriptDuration"))

    times, before = [], script()
    for number in range(count):
        page.evaluate(SCROLLED, 120 if number % 5 else 4000)  # at times past what is loaded
        now = script()
        times.append((now - before) / 2)  # two frames each
        before = now
    return np.array(times)


def _key(path: Path) -> str:
    return hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:12]


@contextlib.contextmanager
def _server(path: Path) -> Iterator[str]:
    """Serve a folder from a process of its own, and give the address."""
    command = [sys.executable, "-m", "ringmap", "view", str(path), "--no-open", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "300"}) as server:
        assert server.stdout is not None
        found = None
        while found is None:
            line = server.stdout.readline()
            if not line:
                raise RuntimeError(f"{' '.join(command)}: ended")
            found = re.search(r"http://\S+", line)
        try:
            yield found[0]
        finally:
            server.terminate()


# -- a collector -------------------------------------------------------------------------------------


def _collector(place: Place, folder: Path) -> Table:
    """Write the same number of episodes in turns, with somebody who follows and without."""
    path, count = folder / "collected", place.size(3_000, 20, 1_500)
    table = Table(f"a collector: {count:,} episodes of {_LENGTH} steps of 64 bytes a turn, one thread")
    command = [sys.executable, "-m", "benchmarks.questions.viewer", str(path)]
    walls: dict[str, list[float]] = {"alone": [], "beside one who follows": []}
    works: dict[str, list[float]] = {name: [] for name in walls}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdin is not None
        assert child.stdout is not None

        def turn(episodes: int) -> tuple[float, float]:
            assert child.stdin is not None
            assert child.stdout is not None
            print(episodes, file=child.stdin, flush=True)
            wall, work = child.stdout.readline().split()
            return float(wall), float(work)

        turn(2 * place.size(_KEPT, 10))  # the ring is full: each episode evicts one
        with _server(path) as address:
            for number in range(place.size(40, 1, 16)):
                for name in walls if number % 2 else reversed(walls):
                    with _Follower(address, _key(path)) if name != "alone" else contextlib.nullcontext():
                        wall, work = turn(count)
                    walls[name].append(wall / count)
                    works[name].append(work / count)
        child.stdin.close()
    table.add_all(walls)
    table.add_all({f"{name}, processor time": times for name, times in works.items()})
    for what, times in (("time", walls), ("processor time", works)):
        alone, beside = (np.array(times[name]) for name in walls)
        pairs = beside / alone
        low, high = _interval(pairs)
        table.fact(f"{what}, interval of the median of pairs", f"{low:.3f} to {high:.3f}")
        table.bar(f"{what} beside one who follows / alone, median of pairs", float(np.median(pairs)), at_most=1.03)
    table.notes.append(
        "the collector writes as fast as it can; the follower reads the events of its page, in no browser"
    )
    return table


def _interval(pairs: Any) -> tuple[float, float]:
    """Return the 95 % interval of the median, by resampling."""
    drawn = np.random.default_rng(0).choice(pairs, (2000, len(pairs)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(low), float(high)


class _Follower:
    """A client that reads the events of a place, and nothing else."""

    def __init__(self, address: str, key: str) -> None:
        port, token = re.search(r":(\d+)/\?token=(\S+)", address).groups()  # type: ignore[union-attr]
        self.connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
        self.connection.request("GET", f"/api/events?p={key}", headers={"Cookie": f"ringmap-{port}={token}"})
        self.reply = self.connection.getresponse()
        assert self.reply.status == 200
        self.events = 0
        self.thread = threading.Thread(target=self._read, daemon=True)

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            while self.reply.readline():
                self.events += 1

    def __enter__(self) -> _Follower:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        sock = self.connection.sock
        with contextlib.suppress(OSError, AttributeError):
            sock.shutdown(2)
        self.thread.join(5)
        self.connection.close()


_LENGTH, _KEPT = 100, 5_000


def collect(path: str) -> None:
    """Write as many episodes as each line says, and tell the seconds."""
    episodes = states(_LENGTH)
    with ReplayBuffer(_KEPT * _LENGTH, path=path) as buffer:
        for line in sys.stdin:
            start, began = perf_counter(), process_time()
            for _ in range(int(line)):
                buffer.write_episode(next(episodes))
            print(perf_counter() - start, process_time() - began, flush=True)


if __name__ == "__main__":
    collect(sys.argv[1])
