"""Is what a victim left one of the states that it may leave? Looks as a user would: reader, writer, NumPy."""

import os
from contextlib import closing

import numpy as np
import xxhash

from ringmap.errors import NotFoundError, UnknownFormatError
from tests.crash.kill.script import DROPPED, PROBE, episode

EPISODE = 1


class Violation(AssertionError):
    pass


def must(holds, what, *seen):
    if not holds:
        raise Violation(" ".join([what, *(repr(s) for s in seen)]))


def observe(buffer, without=()):
    """Return `((number, steps, whether it has data), ...)` of the stored episodes, after comparing every byte of them,
    but for the columns `without`."""
    return tuple((k, steps, has_data) for k, steps, _, has_data in observe_rows(buffer, without))


def observe_rows(buffer, without=()):
    """Return what `observe` does, with the number of each episode's first step."""
    seen, lengths = [], []
    for index, found in enumerate(buffer.episodes()):
        data = found.pop("_episode_data", None)
        for name in without:
            found.pop(name)
        must(list(found) == ["obs", "action"], "columns are", list(found))
        (k, first), steps = found["obs"][0].tolist(), len(found["obs"])
        made = episode(k, first + steps)
        must((data or {}).pop("first_step", 0) == first, "first_step of", k, "is not", first)
        data = data or None
        for name, values in found.items():
            got, rows = np.stack(values), made[name][first:]
            same = got.dtype == rows.dtype and got.tobytes() == rows.tobytes()
            must(same, f"column {name} of episode {k} at {index} differs")
        expected = made["_episode_data"]
        if data is not None:
            same = data["k"] == k and data["name"] == expected["name"]
            must(same and np.array_equal(data["grid"], expected["grid"]), "data of", k, "is", data)
        seen.append((k, steps, first, data is not None))
        lengths.append(steps)
    must(buffer.num_episodes == len(seen), "num_episodes", buffer.num_episodes, "of", seen)
    must(buffer.lengths.tolist() == lengths, "lengths", buffer.lengths, "of", seen)
    must(buffer.num_steps_stored == sum(lengths), "num_steps_stored", buffer.num_steps_stored)
    return tuple(seen)


def seen_of(model):
    """Return what `observe` must return for a model."""
    return model.seen()


def live(model):
    return [e for e in model.episodes if not e[2] & DROPPED]


def table_of(folder, retired):
    """Return the live episodes by the table alone, as anybody with NumPy sees them, and the segments named."""
    table = np.load(os.path.join(folder, "episodes.npy"), mmap_mode="r")
    used = np.flatnonzero(table.view(np.uint8).reshape(len(table), -1).any(axis=1))
    if not len(used):
        return [], set()
    records = table[used]
    newest = records[np.argmax(records["seq"])]
    must((records["seq"] % len(table) == used).all(), "a torn record is left in the table")
    live = records[(records["seq"] >= newest["first"]) & (records["start"] >= newest["tail"])]
    live = np.sort(live[live["kind"] == EPISODE], order="seq")
    live = live[live["flags"] & DROPPED == 0]
    if not retired:
        records = records[records["seq"] >= newest["first"]]
    stored = list(zip(live["length"].tolist(), live["flags"].tolist(), strict=True))
    return stored, set(records["blob_segment"].tolist())


def check_tidy(folder, model, retired=False):
    """Compare the table with the model, and find what a recovery should have removed.

    `retired`: segments of records that were just retired may be there, as no sync came since.
    """
    table, named = table_of(folder, retired)
    must(model.is_in(table), "the table says", table, model)
    must(os.listdir(os.path.join(folder, "open")) == [], "streams are left in open/")
    segments = {int(name.split(".")[0]) for name in os.listdir(os.path.join(folder, "data"))}
    must(segments <= named, "segments that no record names are left:", segments - named)


def check_clips(buffer, model):
    """Draw clips, each of which must prove itself."""
    lengths = {k: n for k, n, _ in live(model)}
    if not lengths:
        return
    batch = buffer.sample(8)
    for (k, t), action in zip(batch["obs"][:, 0].tolist(), batch["action"][:, 0, 0], strict=True):
        fits = t < lengths.get(k, 0) and action == episode(k, t + 1)["action"][t]
        must(fits, "a clip of episode", k, "step", t, "action", action, "of", lengths)


def check_sound(buffer):
    """Ask the buffer itself."""
    found = buffer.check()
    must(not found, "check() finds", *found)


def verify(hands, allowed, sampling, birth, keep, torn_state=False):
    """Open what is left and compare.

    Args:
        hands: how the buffer is opened.
        allowed: the models that may be there; the first is that before the call.
        sampling: the sampling state after each call of the script, by number.
        birth: whether it was being born, so that a reader may find nothing yet.
        keep: whether open streams become episodes.
        torn_state: whether state.bin is torn, as no kill leaves it: a reader then asks for a writer.

    Returns:
        The model that was there once opened.
    """
    folder = hands.folder
    reader = before = None
    try:
        reader = None if torn_state else hands.open_reader()
    except (NotFoundError, UnknownFormatError):
        must(birth, "a reader finds no buffer")
    if reader is not None:
        before = hands.see(reader)
        now = [m for m in allowed if seen_of(m) == before]
        must(now, "a reader sees", before, "allowed:", list(map(seen_of, allowed)))
        hands.check_clips(reader, now[0])
    with closing(hands.open()) as writer:
        seen = hands.see(writer)
        ends = [(m, (m.settled(keep) or [m])[-1]) for m in allowed]
        fitting = [(m, end) for m, end in ends if seen_of(end) == seen]
        must(fitting, "the writer sees", seen, "allowed:", [seen_of(end) for _, end in ends])
        given = hands.given(writer)
        agreeing = [(m, end) for m, end in fitting if hands.agrees(given, end)]
        must(agreeing, "there is", given, "allowed:", [end.also for _, end in fitting])
        fitting = agreeing
        if before is not None:  # never more than what the writer then finds
            least = min(i for i, m in enumerate(allowed) if seen_of(m) == before)
            most = max(i for i, m in enumerate(allowed) if any(m is f for f, _ in fitting))
            must(least <= most, "a reader saw", before, "and the writer", seen)
        state = hands.state_of(writer)
        stored = {sampling[m.saved] for m, _ in fitting}
        must(state in stored, "sampling state", state, "expected one of", stored)
        found, model = fitting[0]
        check_tidy(hands.home, model, retired=model is not found)
        check_reader(hands, reader, model)
        hands.write(writer, PROBE, 3)
        model_after = model.stored(PROBE, 3)
        must(hands.see(writer) == seen_of(model_after), "after one more episode", hands.see(writer))
        check_reader(hands, reader, model_after)
        hands.check_clips(writer, model_after)
        state = hands.state_of(writer)
    if reader is not None:
        reader.close()
    with closing(hands.open()) as writer:
        must(hands.see(writer) == seen_of(model_after), "opened again, it has", hands.see(writer))
        must(hands.state_of(writer) == state, "opened again, it samples otherwise")
        check_tidy(hands.home, model_after)
        check_sound(writer)
    left = [name for name in os.listdir(folder) if name.endswith(".tmp")]
    must(not left, "left behind:", left)
    return model


def check_reader(hands, reader, model):
    if reader is not None:
        reader.refresh()
        seen = hands.see(reader)
        must(seen == seen_of(model), "a reader of before sees", seen, model)
        hands.check_clips(reader, model)


def fingerprint(folder):
    """Return a hash of all names and bytes in a directory, but for who holds the lock."""
    sums = xxhash.xxh3_128()
    for root, folders, files in os.walk(folder):
        folders.sort()
        sums.update(os.path.relpath(root, folder).encode() + b"/\0")
        for name in sorted(files):
            sums.update(name.encode() + b"\0")
            if name != "lock":
                with open(os.path.join(root, name), "rb") as file:
                    data = file.read()
                sums.update(len(data).to_bytes(8, "little") + data)
    return sums.hexdigest()
