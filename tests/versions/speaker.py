"""One version of the library, at the other end of a pipe: `python speaker.py DIR`, with its `src` on the path.

A line of JSON is a call, a line of JSON the answer. It asks for nothing that the first version had not.
"""

import json
import sys

import numpy as np

from ringmap import ReplayBuffer


def episode(number, length):
    t = np.arange(length)
    return {
        "number": np.full(length, number),
        "t": t,
        "noise": ((number * 37 + t[:, None] * 11 + np.arange(300) * 53) % 251).astype(np.uint8),
        "_episode_data": {"number": number},
    }


def seen_in(buf):
    """Return `[[number, length], ...]`, having compared every byte."""
    found = []
    for got in buf.episodes():
        number, length = int(got["number"][0]), len(got["t"])
        for name, expected in episode(number, length).items():
            if name == "_episode_data":
                assert got[name]["number"] == number, got[name]
            else:
                assert (np.array(got[name]) == expected).all(), (number, name)
        found.append([number, length])
    return found


def prove(batch):
    """Every clip is of one episode, in order, with the bytes of it."""
    assert (batch["number"] == batch["number"][:, :1]).all()
    assert (np.diff(batch["t"], axis=1) == 1).all()
    wanted = (batch["number"] * 37 + batch["t"] * 11)[..., None] + np.arange(300) * 53
    assert (batch["noise"] == wanted % 251).all()


class Speaker:
    def __init__(self, path):
        self.path, self.buf = path, None

    def open(self, mode, options):
        if mode == "new":
            self.buf = ReplayBuffer(64, 2, path=self.path, spare_rows=8, seed=1, **options)
        else:
            self.buf = ReplayBuffer.open(self.path, mode, **options)

    def write(self, number, length):
        self.buf.write_episode(episode(number, length))

    def clear(self):
        self.buf.clear()

    def flush(self):
        self.buf.flush()

    def seen(self):
        if self.buf.mode == "r":
            self.buf.refresh()
        return seen_in(self.buf)

    def sample(self, times):
        for _ in range(times):
            prove(self.buf.sample(8))

    def check(self):
        return [str(finding) for finding in self.buf.check()]

    def close(self):
        self.buf.close()


def main(path):
    speaker = Speaker(path)
    for line in sys.stdin:
        name, *args = json.loads(line)
        try:
            answer = ["returned", getattr(speaker, name)(*args)]
        except Exception as error:
            answer = ["raised", f"{type(error).__name__}: {error}"]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
