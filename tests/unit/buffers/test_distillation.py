"""Rounds, retention, later labels, epochs and sequences, each against a plain list of rows."""

import numpy as np
import pytest
import torch

from ringmap.buffers.distillation import ExponentialBeta, LinearBeta, episodes_of, pieces_of
from ringmap.data import DistillationBuffer
from ringmap.errors import (
    InputError,
    NoClipsError,
)


@pytest.fixture
def make(buffer):
    """What makes distillation buffers, in RAM and on disk."""
    made = []

    def make(capacity=100, **options):
        if buffer.on_disk:
            options.setdefault("path", buffer.folder / f"buf-{len(made)}")
        buf = DistillationBuffer(capacity, **{"seed": 0, "sync_every_s": 0, **options})
        made.append(buf)
        return buf

    make.on_disk = buffer.on_disk
    yield make
    for buf in made:
        buf.close()


def die(buf):
    """Let go of the files as a kill does: no flush, no close."""
    engine = buf._ring.engine
    engine.owned.abandon()
    engine.is_closed = True


def rows(start, count, label=0):
    """Return observations that are the numbers of their rows, and labels that say whose they are."""
    numbers = np.arange(start, start + count)
    return np.stack([numbers, -numbers], 1).astype("f4"), numbers * 10 + label


def fill(buf, steps, actors=2, episode=5, start=0):
    """Add steps of some actors, each with episodes of a length of its own."""
    for step in range(start, start + steps):
        obs, labels = rows(step * actors, actors)
        dones = [(step + 1) % (episode + actor) == 0 for actor in range(actors)]
        buf.add(obs, labels, dones=dones, hidden={"h": obs[:, :1] + 0.5})


def numbers(batch):
    return np.asarray(batch["student_observations"])[..., 0].astype(int)


def stored(buf):
    """Return the label of each row, by its number."""
    batch = buf.rows(np.concatenate(buf.episodes()))
    return dict(zip(numbers(batch).tolist(), batch["teacher_actions"].tolist(), strict=True))


# -- in and out --------------------------------------------------------------------------------


def test_short_form(make):
    buf = make()
    assert buf.add(*rows(0, 8)).tolist() == list(range(8))
    observations, expert_actions = buf.sample(64)
    assert observations.shape == (64, 2)
    assert (expert_actions == observations[:, 0] * 10).all()
    assert set(observations[:, 0].astype(int)) == set(range(8))
    assert len(buf) == 8
    assert "rows=8/100, round=0, retention='all'" in repr(buf)


def test_all_columns_come_back(make):
    buf = make()
    given = {
        "student_observations": {"eye": np.ones((3, 4, 4), np.uint8), "q": np.zeros((3, 2))},
        "teacher_actions": torch.arange(6.0).reshape(3, 2),
        "teacher_observations": np.full((3, 5), 7.0),
        "executed_actions": np.ones((3, 2)),
        "teacher_log_std": np.full((3, 2), -1.0),
        "teacher_logits": np.full((3, 4), 0.5),
        "actor_id": [5, 6, 7],
        "dones": torch.tensor([0, 1, 0]),
        "hidden": np.full((3, 8), 2.0),
    }
    buf.add(**given, policy_version=9)
    batch = buf.rows([2, 0, 1])
    order = [2, 0, 1]
    assert (batch["student_observations"]["eye"] == 1).all()
    assert batch["teacher_actions"].tolist() == given["teacher_actions"][order].tolist()
    for name in ("teacher_observations", "executed_actions", "teacher_logits", "hidden"):
        assert batch[name].tolist() == given[name][order].tolist()
    assert batch["actor_id"].tolist() == [7, 5, 6]
    assert batch["dones"].tolist() == [False, False, True]
    assert batch["policy_version"].tolist() == [9] * 3
    assert batch["round"].tolist() == batch["label_round"].tolist() == [0] * 3
    assert batch["ids"].tolist() == order
    assert "stamp" not in batch


def test_single_steps(make):
    buf = make(obs_shape=(2,))
    buf.add(np.zeros(2), 3)
    buf.add(np.ones(2), 4)
    buf.add(np.ones((2, 2)), [5, 6])  # a batch is told from a step by now
    assert buf.rows([0, 1, 2, 3])["teacher_actions"].tolist() == [3, 4, 5, 6]
    assert buf.rows([1, 2, 3])["actor_id"].tolist() == [0, 0, 1]
    other = make(obs_shape={"q": (2,)})
    other.add({"q": np.zeros(2)}, np.zeros(3))
    assert other.rows([0])["teacher_actions"].shape == (1, 3)
    plain = make()
    plain.add(np.zeros(2), 1)  # a scalar action is one step
    assert len(plain) == 1


@pytest.mark.parametrize("options", [{"to": "torch"}, {"device": "cpu"}], ids=["to", "device"])
def test_tensors(options, make):
    buf = make(**options)
    fill(buf, 6)
    assert isinstance(buf.sample(4)[0], torch.Tensor)
    (block,) = buf.sequences(3)
    assert block["mask"].dtype == torch.bool
    assert buf.relabel(None, lambda batch: batch["teacher_actions"] + 1) == 12
    assert (buf.batch(5)["teacher_actions"] % 10 == 1).all()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"teacher_actions": np.zeros(4)}, "expected"),
        ({"teacher_observations": np.zeros((3, 2))}, "schema mismatch"),
        ({"student_observations": np.zeros((3, 9))}, "per-step shape"),
        ({"teacher_actions": np.full(3, 0.5)}, "teacher_actions"),
        ({"actor_id": [0.5, 1, 2]}, "actor_id must be integers"),
        ({"policy_version": "new"}, "policy_version must be an integer"),
    ],
)
def test_a_bad_add_changes_nothing(changed, message, make):
    buf = make()
    good = {"student_observations": np.zeros((3, 2)), "teacher_actions": np.arange(3)}
    buf.add(**good)
    with pytest.raises(ValueError, match=message):
        buf.add(**{**good, **changed})
    assert len(buf) == 3
    buf.add(**good)
    assert len(buf) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity must be positive"),
        ({"retention": "newest"}, "retention must be"),
        ({"retention": "last"}, "keep_rounds goes with"),
        ({"keep_rounds": 3}, "keep_rounds goes with"),
        ({"retention": "last", "keep_rounds": 0}, "keep_rounds must be positive"),
        ({"beta": 1.5}, "beta, if it is no function of the round, must lie between"),
        ({"to": "tensordict"}, "to must be one of"),
        ({"to": "numpy", "device": "cpu"}, "are for tensors"),
        ({"device": "nowhere"}, "can.t be used here"),
    ],
)
def test_wrong_arguments(options, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        DistillationBuffer(**{"capacity": 10, "path": tmp_path / "buf", **options})
    assert list(tmp_path.iterdir()) == []


def test_wrong_reads(make):
    buf = make()
    for ask in (lambda: buf.sample(2), lambda: next(buf.epochs(2)), lambda: next(buf.sequences(2))):
        with pytest.raises(NoClipsError, match="nothing is stored"):
            ask()
    assert buf.episodes() == []
    assert buf.relabel(None, None) == 0
    fill(buf, 3)
    for ask in (
        lambda: buf.sample(0),
        lambda: buf.epochs(0),
        lambda: buf.epochs(1, num_epochs=0),
        lambda: buf.sequences(0),
        lambda: buf.sequences(1, batch_size=0),
    ):
        with pytest.raises(ValueError, match="must be positive"):
            ask()
    with pytest.raises(ValueError, match="row 6 is not stored"):
        buf.rows([0, 6])


# -- rounds and retention ----------------------------------------------------------------------


@pytest.mark.parametrize(("retention", "keep"), [("all", None), ("fifo", None), ("last", 1), ("last", 2), ("last", 3)])
def test_retention_is_that_of_a_list(retention, keep, make):
    rng = np.random.default_rng(keep or 0)
    capacity = {"all": 400, "fifo": 37, "last": 90}[retention]
    buf, model, total, round = make(capacity, retention=retention, keep_rounds=keep), [], 0, -1
    for _ in range(8):
        round += 1
        assert buf.start_round() == round == buf.round
        for _ in range(int(rng.integers(0, 6))):
            count = int(rng.integers(1, 6))
            buf.add(*rows(total, count))
            model += [(round, number) for number in range(total, total + count)]
            total += count
        if retention == "fifo":
            model = model[-capacity:]
        if retention == "last":
            model = [one for one in model if one[0] > round - keep]
        assert len(buf) == len(model)
        if model:
            batches = list(buf.epochs(7, shuffle=False))
            found = np.concatenate([np.stack([b["round"], numbers(b)], 1) for b in batches])
            assert found.tolist() == [list(one) for one in model]
            assert {*numbers(buf.batch(400)).tolist()} <= {number for _, number in model}
    assert buf.check() == []


@pytest.mark.parametrize(("retention", "keep"), [("all", None), ("last", 2)])
def test_what_must_fit_is_refused_when_it_does_not(retention, keep, make):
    buf = make(10, retention=retention, keep_rounds=keep)
    for _ in range(2):
        buf.start_round()
        buf.add(*rows(0, 5))
    with pytest.raises(ValueError, match="1 more rows do not fit: 10 rows of .* are kept, and capacity=10"):
        buf.add(*rows(0, 1))
    assert len(buf) == 10
    buf.start_round()
    if retention == "last":
        buf.add(*rows(0, 5))
        assert buf.batch(100)["round"].min() == 1
    else:
        with pytest.raises(InputError):
            buf.add(*rows(0, 1))


def test_retention_is_of_the_handle(tmp_path):
    with DistillationBuffer(10, retention="fifo", path=tmp_path / "buf") as buf:
        buf.start_round()
        buf.add(*rows(0, 9))
        buf.start_round()
        buf.add(*rows(9, 5))
    buf.close()
    with DistillationBuffer(10, retention="last", keep_rounds=2, path=tmp_path / "buf") as buf:
        assert numbers(buf.rows(np.sort(np.concatenate(buf.episodes())))).tolist() == list(range(4, 14))
        assert len(buf) == 10
    buf.close()


def test_versions(make):
    buf = make()
    buf.start_round()
    buf.add(*rows(0, 1))
    buf.start_round(policy_version=70)
    buf.add(*rows(1, 1))
    buf.add(*rows(2, 1), policy_version=71)
    assert buf.policy_version == 70
    batch = buf.rows([0, 1, 2])
    assert batch["policy_version"].tolist() == [0, 70, 71]
    assert batch["round"].tolist() == [0, 1, 1]


def test_beta():
    buf = DistillationBuffer(10, beta=LinearBeta(2), seed=0)
    found = []
    for _ in range(4):
        buf.start_round()
        mixed = buf.mix(np.ones((400, 2)), np.zeros((400, 2)))
        assert (mixed[:, 0] == mixed[:, 1]).all()  # a row is one actor's choice
        found.append((buf.beta, mixed.mean()))
    assert [beta for beta, _ in found] == [1, 0.5, 0, 0]
    assert found[0][1] == 1
    assert 0.4 < found[1][1] < 0.6
    assert found[2][1] == found[3][1] == 0
    assert DistillationBuffer(10).beta == 0
    assert DistillationBuffer(10, beta=0.3).beta == 0.3
    tensor = DistillationBuffer(10, beta=1.0).mix(np.arange(3), torch.zeros(3, dtype=torch.int64))
    assert torch.equal(tensor, torch.arange(3))
    for wrong in (lambda: LinearBeta(0), lambda: LinearBeta(3, 1.5), lambda: ExponentialBeta(-0.1)):
        with pytest.raises(ValueError, match="LinearBeta|ExponentialBeta"):
            wrong()
    assert [ExponentialBeta(0)(n) for n in range(3)] == [1, 0, 0]


# -- epochs and sequences ----------------------------------------------------------------------


def test_epochs(make):
    buf = make()
    fill(buf, 12)  # 24 rows
    seen = [numbers(batch).tolist() for batch in buf.epochs(10, num_epochs=3)]
    assert [len(batch) for batch in seen] == [10, 10, 4] * 3
    orders = [[n for batch in seen[at : at + 3] for n in batch] for at in (0, 3, 6)]
    assert all(sorted(order) == list(range(24)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert [len(b["ids"]) for b in buf.epochs(10, drop_last=True)] == [10, 10]
    assert [len(b["ids"]) for b in buf.epochs(8, drop_last=True)] == [8, 8, 8]
    assert list(buf.epochs(25, drop_last=True)) == []


def model_of_episodes(steps, actors=2, episode=5):
    """Return the numbers of the rows of each episode that `fill` adds, by first row."""
    found, open_ones = [], {}
    for step in range(steps):
        for actor in range(actors):
            if actor not in open_ones:
                open_ones[actor] = []
                found.append(open_ones[actor])
            open_ones[actor].append(step * actors + actor)
            if (step + 1) % (episode + actor) == 0:
                del open_ones[actor]
    return found


@pytest.mark.parametrize("actors", [1, 2, 7])
@pytest.mark.parametrize("steps", [1, 4, 13])
def test_episodes(actors, steps, make):
    buf = make()
    fill(buf, steps, actors)
    assert [part.tolist() for part in buf.episodes()] == model_of_episodes(steps, actors)
    assert buf.num_episodes == len(model_of_episodes(steps, actors))


@pytest.mark.parametrize("length", [1, 3, 4, 20])
def test_sequences(length, make):
    buf = make()
    fill(buf, 13)
    expected = [episode[at : at + length] for episode in model_of_episodes(13) for at in range(0, len(episode), length)]
    firsts = {episode[0] for episode in model_of_episodes(13)}
    found = []
    for block in buf.sequences(length, batch_size=3):
        pieces = block["mask"].shape[1]
        assert block["student_observations"].shape == (length, pieces, 2)
        assert block["hidden"]["h"].shape == (pieces, 1)
        for at in range(pieces):
            mask = block["mask"][:, at]
            piece = numbers(block)[mask, at].tolist()
            assert not mask[len(piece) :].any()
            assert (block["student_observations"][~mask, at] == 0).all()
            assert not block["dones"][~mask, at].any()
            assert block["hidden"]["h"][at] == piece[0] + 0.5
            assert block["is_first"][:, at].tolist() == [
                piece[0] in firsts,
                *[False] * (length - 1),
            ]
            found.append(piece)
    assert sorted(found) == sorted(expected)
    assert found != expected
    (whole,) = buf.sequences(length, shuffle=False)
    assert numbers(whole)[0].tolist() == [piece[0] for piece in expected]
    sizes = [b["mask"].shape[1] for b in buf.sequences(length, batch_size=4, drop_last=True)]
    assert sizes == [4] * (len(expected) // 4)


def test_lanes_of_nothing():
    order, bounds = episodes_of(np.empty(0, int), np.empty(0, bool))
    assert (order.tolist(), bounds.tolist()) == ([], [0])
    assert [part.tolist() for part in pieces_of(bounds, 3)] == [[], []]


# -- later labels ------------------------------------------------------------------------------


def better(by):
    return lambda batch: numbers(batch) * 10 + by


def test_relabel_ids_episodes_and_all(make):
    buf = make()
    fill(buf, 6)
    buf.start_round()
    assert buf.relabel([3, 4, 4, 99], better(1)) == 2
    batch = buf.rows(np.arange(12))
    assert [n for n in range(12) if batch["teacher_actions"][n] % 10] == [3, 4]
    assert [n for n in range(12) if batch["label_round"][n] == 0 and n in (3, 4)] == []
    buf.start_round()
    first = buf.episodes()[1]
    calls = []
    assert buf.relabel([first], lambda b: calls.append(b["ids"].tolist()) or better(2)(b)) == 6
    assert calls == [first.tolist()]
    labels = stored(buf)
    assert all(labels[n] == n * 10 + 2 for n in first.tolist())
    assert labels[4] == 41
    assert buf.relabel(None, better(3)) == 12
    assert all(label == n * 10 + 3 for n, label in stored(buf).items())
    assert all((b["teacher_actions"] % 10 == 3)[b["mask"]].all() for b in buf.sequences(4))
    assert (buf.sample(50)[1] % 10 == 3).all()
    assert buf.check() == []


def test_relabel_is_refused_when_it_does_not_fit(make):
    buf = make()
    fill(buf, 6)
    for wrong, message in (
        (lambda b: b["teacher_actions"][:-1], "labels for"),
        (lambda b: b["teacher_actions"] + 0.5, "teacher_actions"),
        (lambda b: {"teacher_actions": b["teacher_actions"], "extra": b["ids"]}, "schema mismatch"),
        (lambda b: {}, "schema mismatch"),
        (lambda b: b["teacher_actions"].astype(str), "teacher_actions"),
    ):
        with pytest.raises(ValueError, match=message):
            buf.relabel(None, wrong)
    with pytest.raises(ValueError, match="ids are integers"):
        buf.relabel([0.5], better(1))
    assert all(label == n * 10 for n, label in stored(buf).items())


def test_all_the_columns_of_a_teacher_are_relabelled_together(make):
    buf = make()
    buf.add(np.zeros((3, 2)), np.zeros((3, 2)), teacher_log_std=np.zeros((3, 2)))
    with pytest.raises(ValueError, match="teacher_log_std"):
        buf.relabel(None, lambda b: b["teacher_actions"] + 1)
    labels = {"teacher_actions": np.ones((3, 2)), "teacher_log_std": np.full((3, 2), -2.0)}
    assert buf.relabel(None, lambda b: {n: v[: len(b["ids"])] for n, v in labels.items()}) == 3
    assert (buf.batch(5)["teacher_log_std"] == -2).all()
    with pytest.raises(InputError, match="missing columns .'teacher_log_std'"):
        buf.add(np.zeros((3, 2)), np.zeros((3, 2)))


def test_labels_are_those_of_a_dict(make):
    """Adds that evict, relabellings of some, reopenings: against a dict."""
    rng = np.random.default_rng(1)
    capacity, options = 40, {"retention": "fifo"}
    buf = make(capacity, **options)
    model, total = {}, 0
    for turn in range(150):
        count = int(rng.integers(1, 5))
        buf.add(*rows(total, count), dones=rng.random(count) < 0.3)
        model |= {n: n * 10 for n in range(total, total + count)}
        total += count
        model = {n: model[n] for n in sorted(model)[-capacity:]}
        episodes = buf.episodes()
        some = [episodes[i] for i in rng.integers(0, len(episodes), int(rng.integers(0, 4)))]
        if some:
            by = int(rng.integers(1, 10))
            buf.relabel(some, better(by))
            model |= {int(n): int(n) * 10 + by for part in some for n in part}
        assert stored(buf) == model
        if make.on_disk and turn % 25 == 10:
            die(buf)
            buf = make(capacity, path=buf._ring.path, **options)
            assert stored(buf) == model
    assert buf.check() == []


# -- what survives -----------------------------------------------------------------------------


def test_a_state_from_before_the_first_row(make):
    buf = make(beta=0.5)
    buf.load_state_dict(buf.state_dict())
    if make.on_disk:
        buf.flush()
        buf.close()
        buf = make(path=buf._ring.path, beta=0.5)
    assert buf.start_round() == 0
    assert buf.round == 0


def test_a_reader_follows_labels_that_come_again_and_again(tmp_path):
    path = tmp_path / "buf"
    buf = DistillationBuffer(20, path=path, retention="fifo")
    reader = None
    rng = np.random.default_rng(0)
    for turn in range(60):
        fill(buf, int(rng.integers(1, 3)), start=turn * 2)
        buf.relabel(None, better(turn % 10))
        if turn == 0:
            reader = DistillationBuffer.open(path, retention="fifo")
        if turn % 7 == 0:
            assert stored(reader) == stored(buf)
    reader.close()
    buf.close()


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_reader_of_the_last_rounds_that_is_lapped_looks_again(tmp_path, monkeypatch, when):
    path = tmp_path / "buf"
    buf = DistillationBuffer(20, path=path, retention="last", keep_rounds=1)
    for _ in range(3):
        buf.start_round()
        fill(buf, 3)
    buf.flush()
    reader = DistillationBuffer.open(path, seed=0)
    assert reader.round == 2
    rounds = iter(range(3, 20))

    def lap():
        for start in rounds:
            buf.start_round()
            fill(buf, 3, start=start * 6)
        buf.flush()

    if when == "before":
        lap()
        assert reader.round == 19
    ring = reader._ring
    at = ring.id_at
    monkeypatch.setattr(ring, "id_at", lambda age: (at(age), lap())[0])
    assert (reader.batch(50)["round"] == 19).all()
    reader.close()
    buf.close()


# -- rows that go while they are gone over -------------------------------------------------------


def test_what_is_evicted_before_its_turn_is_left_out(make):
    def add(episodes, first):
        for e in range(first, first + episodes):
            for t in range(4):
                buf.add(*rows(4 * e + t, 1), dones=[t == 3])

    buf = make(16, retention="fifo")
    add(4, 0)
    pieces = buf.sequences(4, batch_size=2, shuffle=False)
    assert numbers(next(pieces)).tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    add(3, 4)
    rest = list(pieces)  # episodes 2 and 3: one of them is gone
    assert [numbers(b).tolist() for b in rest] == [[[12], [13], [14], [15]]]
    assert rest[0]["mask"].all()
    assert rest[0]["is_first"].sum() == 1
    epoch = buf.epochs(5, shuffle=False)
    assert numbers(next(epoch)).tolist() == [12, 13, 14, 15, 16]
    add(2, 7)  # up to 19 are gone
    assert [numbers(b).tolist() for b in epoch] == [[20, 21], [22, 23, 24, 25, 26], [27]]


def test_a_teacher_that_takes_its_time_labels_what_is_left(make):
    buf = make(8, retention="fifo")
    buf.add(*rows(0, 8), actor_id=[0] * 8)

    def slow(batch):
        if len(numbers(batch)) == 8:
            buf.add(*rows(8, 5), actor_id=[0] * 5)
        return numbers(batch) * 100

    assert buf.relabel(None, slow) == 3
    assert stored(buf) == {n: n * 100 if n < 8 else n * 10 for n in range(5, 13)}


def test_flags_with_an_axis_too_many(make):
    buf = make()
    for t in range(4):
        buf.add(*rows(2 * t, 2), dones=np.array([[t == 1], [False]]), actor_id=np.array([[0], [1]]))
    assert [part.tolist() for part in buf.episodes()] == [[0, 2], [1, 3, 5, 7], [4, 6]]
    for name in ("dones", "actor_id"):
        with pytest.raises(InputError, match=f"{name} has shape"):
            buf.add(*rows(8, 2), **{name: np.zeros((2, 2), np.int64)})
    assert len(buf) == 8


def test_mixing_takes_like_with_like(make):
    buf = make(beta=0.5)
    for teacher, student in (
        (np.zeros(4), np.ones((4, 1))),
        (np.zeros((1, 2)), np.ones((4, 2))),
        (torch.zeros(3), torch.zeros(4)),
    ):
        with pytest.raises(InputError, match="expected the same"):
            buf.mix(teacher, student)
    with pytest.raises(InputError, match="does not fit"):
        buf.mix([0.5] * 4, np.ones(4, int))
    assert {int(buf.mix(0, 1)) for _ in range(30)} == {0, 1}
    made = buf.mix(np.zeros((50, 2)), torch.ones(50, 2))
    assert made.dtype == torch.float32
    assert {tuple(row) for row in made.tolist()} == {(0.0, 0.0), (1.0, 1.0)}


def test_reopened_before_the_first_row(tmp_path):
    for turn in range(2):
        with DistillationBuffer(100, path=tmp_path / "buf") as buf:
            assert buf.start_round() == turn
        buf.close()
    with DistillationBuffer.open(tmp_path / "buf", "r+") as buf:
        assert (buf.round, len(buf)) == (1, 0)
        buf.add(*rows(0, 2))
    buf.close()
    with DistillationBuffer.open(tmp_path / "buf") as buf:
        assert numbers(buf.rows([0, 1])).tolist() == [0, 1]
    buf.close()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("actor_id", np.array([2**64 - 1, 0], np.uint64), "actor_id"),
        ("dones", [np.nan, 0], "0 or 1"),
        ("teacher_logits", np.array(["left", "right"]), "must be numbers"),
        ("executed_actions", torch.zeros(2, dtype=torch.bfloat16), "can't be made an array"),
    ],
)
def test_values_that_would_be_something_else(make, name, value, message):
    buf = make()
    with pytest.raises(InputError, match=message):
        buf.add(*rows(0, 2), **{name: value})
    assert len(buf) == 0
    buf.close()
    assert "closed" in repr(buf)


def test_which_rows_are_kept_is_remembered(tmp_path):
    buf = DistillationBuffer(100, retention="last", keep_rounds=1, path=tmp_path / "buf")
    for turn in range(3):
        buf.start_round()
        buf.add(*rows(4 * turn, 4))
    buf.flush()
    with DistillationBuffer.open(tmp_path / "buf") as reader:
        assert (reader.retention, reader.keep_rounds) == ("last", 1)
        assert [numbers(b).tolist() for b in reader.epochs(4, shuffle=False)] == [[8, 9, 10, 11]]
    reader.close()
    with DistillationBuffer.open(tmp_path / "buf", retention="all") as reader:
        assert len(reader) == 12
    reader.close()
    buf.close()
    with DistillationBuffer.open(tmp_path / "buf", "r+") as buf:
        assert len(buf) == 4
    buf.close()


def test_a_state_older_than_the_rows(make):
    buf = make(retention="last", keep_rounds=1)
    buf.start_round()
    state = buf.state_dict()
    buf.add(*rows(0, 4))
    buf.start_round()
    buf.add(*rows(4, 4))
    buf.load_state_dict(state)
    assert buf.round == 1
    buf.add(*rows(8, 4))
    assert {int(r) for r in buf.batch(100)["round"]} == {1}
    assert len(buf) == 8
