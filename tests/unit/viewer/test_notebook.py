"""A buffer in a notebook: a card, and the page in a frame, without a cookie."""

import json
import re

import numpy as np
import pytest

from ringmap.data import ReplayBuffer, ShardedReplayBuffer
from ringmap.errors import InputError
from ringmap.viewer.serve import show
from tests.unit.viewer.conftest import Client, episode, fill, fill_transitions


@pytest.fixture
def buffer():
    made = ReplayBuffer(100)
    for number in range(3):
        made.write_episode(episode(number))
    return made


def test_a_frame_of_a_buffer_in_ram_that_is_written(buffer):
    shown = buffer.show(height=300)
    try:
        where = re.search(r'src="http://127.0.0.1:(\d+)(/t/[\w-]+/)#/p/(\w+)"', shown._repr_html_())
        port, path, key = where.groups()
        client = Client.__new__(Client)
        client.port = int(port)
        status, _, page = client.ask(path, cookie=False)
        assert (status, b"ringmap" in page) == (200, True)
        assert client.ask("/", cookie=False)[0] == 403
        status, _, body = client.ask(f"{path}api/episodes?p={key}", cookie=False)
        assert b'"total": 3' in body
        buffer.write_episode(episode(3))
        client.ask(f"{path}api/places", cookie=False)
        assert b'"total": 4' in client.ask(f"{path}api/episodes?p={key}", cookie=False)[2]
    finally:
        shown.close()
    with pytest.raises(ConnectionRefusedError):
        client.ask(path, cookie=False)
    assert buffer.num_episodes == 4  # what was given stays open


def test_the_card_shows_names_as_text():
    buffer = ReplayBuffer(10)
    buffer.write_episode({"<script>": np.zeros(3)})
    card = buffer._repr_html_()
    assert "&lt;script&gt;" in card and "<script>" not in card and "3 of 10" in card
    buffer.close()
    assert "closed" in buffer._repr_html_()


def test_cards_of_transitions_and_of_fleets(tmp_path):
    ring = fill_transitions(tmp_path / "steps/a", 30)
    assert "30 of 100" in ring._repr_html_() and "observations" in ring._repr_html_()
    with ShardedReplayBuffer(tmp_path / "steps") as fleet:
        assert "<td style='text-align:left'>30</td>" in fleet._repr_html_()
    ring.close()
    assert "closed" in ring._repr_html_()
    fill(tmp_path / "<b>/a", 2).close()
    with ShardedReplayBuffer(tmp_path / "<b>") as fleet:
        card = fleet._repr_html_()
        assert "pixels" in card and "&lt;b&gt;" in card and "<b>" not in card
    assert "closed" in fleet._repr_html_()


def test_transitions_in_ram_and_fleets_of_them_are_shown(tmp_path):
    ring = fill_transitions(None, 30)
    fill_transitions(tmp_path / "a", 20).close()
    fill_transitions(tmp_path / "b", 10).close()
    fleet = ShardedReplayBuffer(tmp_path)
    for buffer, kind in ((ring, "transitions"), (fleet, "fleet")):
        shown = buffer.show()
        try:
            port, token, key = re.search(r":(\d+)/\?token=([\w-]+)#/p/(\w+)", shown.address).groups()
            client = Client.__new__(Client)
            client.port = int(port)
            about = json.loads(client.ask(f"/t/{token}/api/place?p={key}", cookie=False)[2])
            assert (about["kind"], about["episodes"], about["steps"]) == (kind, None, 30)
        finally:
            shown.close()
    fleet.close()
    assert len(ring) == 30


def test_a_fleet_is_shown_as_one_and_rings_of_a_list_one_by_one(tmp_path):
    for name in "ab":
        fill(tmp_path / name, 2).close()
    for paths, where in ((tmp_path, r"#/p/\w+$"), ([tmp_path / "a", tmp_path / "b"], "#/$")):
        with ShardedReplayBuffer(paths) as fleet:
            shown = fleet.show()
            try:
                assert re.search(where, shown.address)
                port, token, page = re.search(r":(\d+)/\?token=([\w-]+)#/(.*)", shown.address).groups()
                client = Client.__new__(Client)
                client.port = int(port)
                body = client.ask(f"/t/{token}/api/{page.replace('p/', 'episodes?p=') or 'places'}", cookie=False)[2]
                assert b'"total": 4' in body if page else body.count(b'"episodes": 2') == 2
            finally:
                shown.close()


def test_only_buffers_and_datasets():
    with pytest.raises(InputError, match="got list"):
        show([1])
