import http.client
import json
import socket
import time
from urllib.parse import quote, urlencode

import numpy as np
import pytest

from ringmap import TransitionReplayBuffer
from ringmap.data import ReplayBuffer
from ringmap.viewer.library import Library
from ringmap.viewer.serve import Server


def episode(number, length=20, side=16, **data):
    """An episode whose values follow from its number."""
    t = np.arange(length)
    pixels = np.zeros((length, side, side, 3), np.uint8)
    pixels[..., 0] = number
    pixels[..., 1] = t[:, None, None]
    return {
        "pixels": pixels,
        "proprio": np.stack([np.sin(t / 8), np.full(length, number)], 1).astype(np.float32),
        "reward": np.r_[np.nan, np.full(length - 1, number)].astype(np.float32),
        "terminated": (t == length - 1) & bool(number % 2),
        "truncated": (t == length - 1) & (not number % 2),
        "instruction": np.array([f"go {i}" for i in range(length)]),
        "_episode_data": {"seed": 100 + number, "room": "left" if number % 2 else "right", **data},
    }


def fill(path, episodes=6, max_steps=1000, **options):
    buffer = ReplayBuffer(max_steps, path=path, **options)
    for number in range(episodes):
        buffer.write_episode(episode(number))
    return buffer


def fill_transitions(path, count=30, capacity=100, policy_step=0, side=8):
    """A ring of transitions of one lane, whose reward is the number of the step."""
    buffer = TransitionReplayBuffer(
        capacity,
        obs_shape=(side, side, 3),
        obs_dtype=np.uint8,
        path=path,
        device=None,
        extra={"policy_step": ((), np.int64)},
    )
    add_transitions(buffer, 0, count, policy_step)
    return buffer


def add_transitions(buffer, first, count, policy_step=0):
    for t in range(first, first + count):
        now, after = (np.full(buffer.schema.columns[0].shape, n % 256, np.uint8) for n in (t, t + 1))
        buffer.add(now, t % 3, float(t), after, t % 10 == 9, extra={"policy_step": policy_step})
    buffer.flush()


def until(call, wanted, seconds=20):
    """Call until what it returns is wanted; fail if it never is."""
    end = time.monotonic() + seconds
    while not wanted(found := call()):
        assert time.monotonic() < end, found
        time.sleep(0.02)
    return found


class Client:
    """A client that was given the token; `headers` replace its own."""

    def __init__(self, server):
        self.server, self.port = server, server.port

    def ask(self, path, method="GET", cookie=True, body=None, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        own = {"Host": f"127.0.0.1:{self.port}"}
        if cookie:
            own["Cookie"] = f"ringmap-{self.port}={self.server.token}"
        own |= {k.replace("_", "-"): v for k, v in headers.items()}
        try:
            connection.request(method, path, body, own)
            reply = connection.getresponse()
            return reply.status, dict(reply.getheaders()), reply.read()
        finally:
            connection.close()

    def api(self, name, status=200, **query):
        got, _, body = self.ask(f"/api/{name}?{urlencode(query, doseq=True, quote_via=quote)}")
        assert got == status, body[:500]
        return body

    def json(self, name, status=200, **query):
        return json.loads(self.api(name, status, **query))

    def one(self):
        """Return the key of the only place."""
        (key,) = self.keys().values()
        return key

    def events(self, key):
        """Ask for the events of a place; return the connection, which nobody reads yet."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        cookie = f"ringmap-{self.port}={self.server.token}"
        head = f"GET /api/events?p={key} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nCookie: {cookie}\r\n\r\n"
        connection.sendall(head.encode())
        return connection

    def keys(self):
        return {p["name"].rpartition("/")[2]: p["key"] for p in self.json("places")["places"]}


@pytest.fixture
def serve(tmp_path):
    """Serves paths; all servers end with the test."""
    made = []

    def start(*paths, **options):
        server = Server(Library(paths or [tmp_path]), port=0, **options)
        made.append(server)
        server.start()
        return Client(server)

    yield start
    for server in made:
        server.stop()
