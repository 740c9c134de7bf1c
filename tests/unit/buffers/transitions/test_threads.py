"""One thread adds while another samples: each transition proves that its next observation is its own.

An observation is (lane and episode, step), so that the one that a step led to is known beforehand. The races depend on
the
scheduler: the campaign runs 300,000 transitions of each, the default suite strikes between two copies as well.
"""

import numpy as np
import pytest

from ringmap import TransitionReplayBuffer
from ringmap.buffers.transitions.lanes import NextObservations
from ringmap.errors import RoleError
from ringmap.storage.columns.memmap import MemmapColumn
from ringmap.storage.commit.group import OpenGroup

LANES, EPISODE, GAMMA = 4, 7, 0.5


class Proof:
    """Adds calls that prove themselves."""

    def __init__(self, path=None, n_step=1, capacity=64):
        self.buf = TransitionReplayBuffer(
            capacity,
            (2,),
            device=None,
            obs_dtype=np.int64,
            path=path,
            seed=0,
            n_step=n_step,
            gamma=GAMMA,
            sync_every_s=0,
        )
        self.calls = 0
        self.add(2 * capacity // LANES)

    def add(self, calls=1):
        for _ in range(calls):
            episode, t = divmod(self.calls, EPISODE)
            now = np.stack([np.arange(LANES) + 1000 * episode, np.full(LANES, t)], 1)
            done = np.full(LANES, t == EPISODE - 1)
            self.buf.add(now, np.zeros(LANES), np.ones(LANES), now + np.array([0, 1]), done)
            self.calls += 1


def num_wrong(batch):
    """Return how many transitions have the next observation of another one."""
    steps = np.round(np.log2(1 / (1 - batch["rewards"].astype(float) * (1 - GAMMA)))).astype(int)
    expected = batch["observations"] + np.stack([np.zeros_like(steps), steps], 1)
    return int((batch["next_observations"] != expected).any(axis=1).sum())


def test_the_proof_finds_what_is_wrong():
    batch = Proof(n_step=3).buf.sample(64)
    assert num_wrong(batch) == 0
    for leaf in range(2):
        batch["next_observations"][5, leaf] += 1
        assert num_wrong(batch) == 1
        batch["next_observations"][5, leaf] -= 1


# -- calls come exactly between two copies -------------------------------------------------------


def struck(monkeypatch, proof, at, calls, settled=False):
    """Return how many of a batch are wrong if calls come after its copy number `at`, and are committed, and whether it
    was reached."""
    takes, kept = [0], MemmapColumn.take
    proof.buf.engine.commit_pending("a test")  # rows that are pending are copied from memory

    def take(column, slots, out=None, head=0):
        taken = kept(column, slots, out, head)
        takes[0] += 1
        if takes[0] == at:
            proof.add(calls)
            if settled:
                proof.buf.engine.commit_pending("a test")
        return taken

    with monkeypatch.context() as patched:
        patched.setattr(MemmapColumn, "take", take)
        batch = proof.buf.sample(64)
    return num_wrong(batch), takes[0] >= at


def strikes(monkeypatch, n_step, settled=False):
    wrong = 0
    for calls in (1, 2, 5):
        proof, at, reached = Proof(n_step=n_step), 0, True
        while reached:
            at += 1
            found, reached = struck(monkeypatch, proof, at, calls, settled)
            wrong += found
    return wrong


@pytest.mark.parametrize("settled", [False, True])
@pytest.mark.parametrize("n_step", [1, 3])
def test_a_call_between_any_two_copies(monkeypatch, n_step, settled):
    assert strikes(monkeypatch, n_step, settled) == 0


def test_the_strikes_find_what_is_handed_out_for_another_head(monkeypatch):
    """The control: what the newest call led to, whatever the head at which the rows were read."""

    def whatever(self, source, head):
        return self.newest(source)._replace(stop=head)  # as if it were of the asked head

    monkeypatch.setattr(NextObservations, "_of_newest", whatever)
    assert strikes(monkeypatch, 1, settled=True) > 0


def test_the_newest_call_is_read_again_not_drawn_anew(monkeypatch):
    proof = Proof()
    assert struck(monkeypatch, proof, 3, 1) == (0, True)
    assert proof.buf.num_redraws == 0


def test_a_clear_in_the_middle_of_a_batch(monkeypatch):
    """Nothing is left to draw from, and the error says so."""
    proof, kept = Proof(), MemmapColumn.take
    proof.buf.engine.commit_pending("a test")

    def take(column, slots, out=None, head=0):
        if len(proof.buf):
            proof.buf.clear()
        return kept(column, slots, out, head)

    monkeypatch.setattr(MemmapColumn, "take", take)
    with pytest.raises(RuntimeError, match="no rows are left"):
        proof.buf.sample(64)


@pytest.mark.parametrize("call", ["add", "clear"])
def test_a_handler_in_the_middle_of_an_add_is_refused(call, monkeypatch):
    """Between what the newest rows led to and their commit, another call of the same thread would part the two."""
    proof, errors = Proof(), []
    real = OpenGroup.append

    def interrupted(self, *args):
        monkeypatch.setattr(OpenGroup, "append", real)
        with pytest.raises(RoleError, match=f"{call}: called in the middle of another call") as e:
            proof.buf.clear() if call == "clear" else proof.add()
        errors.append(e)
        real(self, *args)

    monkeypatch.setattr(OpenGroup, "append", interrupted)
    before = proof.calls
    proof.add()
    assert len(errors) == 1
    assert proof.calls == before + 1
    assert num_wrong(proof.buf.sample(60)) == 0
