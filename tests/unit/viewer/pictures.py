"""Make the pictures of the guide: `python -m tests.unit.viewer.pictures`.

TwoRoom, a random policy -> runs/fleet (three rings with a pace), runs/live, runs/expert.h5 -> Chromium ->
docs/assets/view-*.png
"""

import os
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

import ringmap
from ringmap.data import ReplayBuffer
from ringmap.viewer.library import Library
from ringmap.viewer.serve import Server
from tests import ROOT
from tests.unit.viewer.test_pages import ARGUMENTS, CHROMIUM

ASSETS = ROOT / "docs" / "assets"
COLLECTORS, EPISODES = 3, 40
STALE = (0, 200, 1000)
"""How many steps each collector's policy is behind."""


def make(runs: Path) -> None:
    """Write what is shown."""
    world = ringmap.World("ringmap/TwoRoom-v1", num_envs=4, image_shape=(64, 64), max_episode_steps=60)
    world.set_policy(ringmap.policy.RandomPolicy(seed=0))
    with (
        ReplayBuffer(100_000) as played,
        ringmap.Pace(runs / "fleet", 8, min_steps=1000, slack=1) as pace,
        ReplayBuffer(1_500, path=runs / "live", history_len=4) as live,
    ):
        world.collect(writer=played, episodes=COLLECTORS * EPISODES, seed=0, progress=False)
        rings = [ReplayBuffer(2_000, path=runs / f"fleet/collector-{n}") for n in range(COLLECTORS)]
        for number, steps in enumerate(played.episodes()):
            turn, whose = divmod(number, COLLECTORS)
            data = {"seed": number, "policy_step": max(0, 200 * (turn // 4) - STALE[whose])}
            steps["_episode_data"] = data
            with pace.insert(len(steps["reward"])):
                rings[whose].write_episode(steps)
            live.write_episode({**steps, "_episode_data": {"seed": number}})
        for ring in rings:
            ring.close()
        new = pace.inserted - pace.min_steps
        while pace.drawn < 7.5 * new:
            pace.draw(256)
        live.dump(runs / "expert.h5", progress=False)
    world.close()


def main() -> None:
    """Draw the pages."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        os.chdir(folder)
        make(Path("runs"))
        server = Server(Library(["runs"]), port=0)
        server.start()
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = browser.new_context(viewport={"width": 1100, "height": 760}).new_page()
        page.goto(server.address)
        page.locator(".place").nth(5).wait_for()
        keys = {place.name: place.key for place in server.library.places()}
        shown = {
            "home": ("#/", ".place img"),
            "ring": (f"#/p/{keys['runs/live']}", "#row9"),
            "fleet": (f"#/p/{keys['runs/fleet']}", "#row9"),
            "episode": (f"#/p/{keys['runs/expert.h5']}/e/3?t=20", ".u-over"),
        }
        for name, (where, wanted) in shown.items():
            page.goto(f"http://127.0.0.1:{server.port}/{where}")
            page.locator(wanted).last.wait_for()
            page.wait_for_load_state("networkidle") if name == "episode" else page.wait_for_timeout(2000)
            page.set_viewport_size({"width": 1100, "height": 980 if name == "fleet" else 760})
            page.screenshot(path=ASSETS / f"view-{name}.png")
        browser.close()
        server.stop()


if __name__ == "__main__":
    main()
