"""Hostile directories of `tests/faults/hostile` are shown: the server answers, in little time, and shows nothing from
outside."""

import importlib.util
import json
import os
import time
import warnings

import pytest

from ringmap.buffers.opening import EPISODES
from ringmap.viewer.library import Fleet, Library
from ringmap.viewer.places import PROBLEM
from tests.disks import ram_folder
from tests.faults.hostile.child import prepare, state_of
from tests.faults.hostile.makers import CASES, SECRET
from tests.faults.hostile.sound import KINDS, NEEDS, SUFFIX
from tests.unit.viewer.conftest import fill

SECONDS = 10

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of zarr and h5py, about what they are given
]


@pytest.fixture(scope="module", params=[3, pytest.param(1, marks=pytest.mark.campaign)])
def shelf(request):
    """The paths of every so many hostile things, each in a folder of its own with one outside beside it."""
    made, kept = [], {}
    with ram_folder() as home, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, case in list(enumerate(CASES.values()))[:: request.param]:
            kind = case.kind
            if kind in NEEDS and importlib.util.find_spec(NEEDS[kind]) is None:
                continue
            if kind not in kept:
                kept[kind] = f"{home}/sound {kind}"
                os.mkdir(kept[kind])
                KINDS[kind](f"{kept[kind]}/given{SUFFIX.get(kind, '')}")
            made.append((case, *prepare(f"{home}/{number}", kept[kind], kind, case.harm)))
        yield made


@pytest.mark.slow
def test_each_is_answered(shelf, serve, tmp_path):
    fill(tmp_path / "sound", 2).close()
    before = [state_of(out) for _, _, out in shelf]
    client = serve(tmp_path / "sound", *(at for _, at, _ in shelf if os.path.lexists(at)))
    places = client.json("places")["places"]
    assert len(places) > len(shelf) // 2
    slow, faults = {}, []
    for place in places:
        for name in ("place", "episodes", "spread", "thumb", "episode", "columns", "frames", "text", "download"):
            query = f"p={place['key']}"
            if name in ("episode", "columns", "frames", "text", "download"):
                query += "&e=0&c=pixels&as=hdf5"
            start = time.monotonic()
            status, _, body = client.ask(f"/api/{name}?{query}")
            if (took := time.monotonic() - start) > SECONDS:
                slow[place["name"], name] = took
            if status not in (200, 204, 400, 404, 410, 413, 500, 501) or b"the server failed" in body:
                faults.append((place["name"], name, status, body[:200]))
            if SECRET in body:
                faults.append((place["name"], name, "shows what lies outside"))
    assert faults == []
    assert slow == {}
    assert client.json("episode", p=client.keys()["sound"], e=0)["damaged"] is None  # the others go on
    assert [state_of(out) for _, _, out in shelf] == before


def test_as_rings_of_one_fleet(shelf, tmp_path):
    fill(tmp_path / "sound", 2).close()
    before = [state_of(out) for _, _, out in shelf]
    library = Library([tmp_path / "sound", *(at for _, at, _ in shelf if os.path.lexists(at))])
    places = [place for place in library.places() if place.kind in (EPISODES, PROBLEM)]
    start = time.monotonic()
    fleet = Fleet(str(tmp_path), lambda: places, library.open)
    lines = fleet.follow()["shards"]
    assert len(lines) == len(places) > 10
    assert lines[0]["problem"] is None and any(line["problem"] for line in lines)
    fleet.table.start()
    json.dumps([fleet.follow(), fleet.table.spread(), fleet.columns()], allow_nan=False)
    found = fleet.table.rows(0, 500, "ring = 'sound'", "return", True)
    assert [row["ring"] for row in found["rows"]] == ["sound", "sound"]
    assert fleet.thumbnail() is None or fleet.has_pictures
    library.close()
    assert time.monotonic() - start < SECONDS * 3
    assert [state_of(out) for _, _, out in shelf] == before
