"""Newer values of rows in two copies, beside a ring, on a memory of words: what the page of the format says of
mutable.bin, with kills and power cuts.

The ring is two rows, of which one is live: the row is one word, and so is what is shown of the ring, since ring.py has
the rest. A copy is four words: checksum, generation, position, value. A header is three: number, fields, checksum.
"""

import itertools
from typing import NamedTuple

from tests.faults.crash.model.explore import Read, Seen

ROWS, MAX_STEPS, SESSION = 2, 1, 10
SHOWN = ("shown", 0, 0)
ACKED = ("acked", 0, 0)
"""No word of the disk: for each position how many of its values were acknowledged, for the test."""


class Header(NamedTuple):
    number: int
    highest: int
    synced: int
    boot: int


class Copy(NamedTuple):
    generation: int
    position: int
    value: int


HEADERS = tuple(("header", slot, at) for slot in (0, 1) for at in range(3))


def copy_addresses(plane, slot, variant=""):
    order = (0, 2, 1, 3) if variant == "the position before the generation" else range(4)
    return tuple(("copy", (plane, slot), at) for at in order)


def copy_in(words, position, variant=""):
    """Return a copy if it is whole and of this position."""
    check, *fields = words
    whole = check == tuple(fields) or (variant == "no check of a copy" and fields[0])
    return Copy(*fields) if whole and fields[1] == position else None


def header_in(words):
    found = [Header(*w[2]) for w in (words[:3], words[3:]) if w[2] and w[2] == (w[0], *(w[1] or ()))]
    return max(found, default=None)


def is_covered(header, generation, boot):
    """Tell whether a copy of this generation was whole once."""
    covered = 0 < generation <= header.synced or generation > header.highest
    return covered and (header.synced == header.highest or header.boot == boot)


def newest_in(copies, position, header, boot, variant=""):
    """Return the plane and the newest copy of a position, both None without one; and whether a newer one is damaged."""
    found = [(copy_in(words, position, variant), plane) for plane, words in enumerate(copies)]
    copy, plane = max([one for one in found if one[0] is not None], default=(None, None))
    newest = 0 if copy is None else copy.generation
    damaged = any(w[2] == position and w[1] > newest and is_covered(header, w[1], boot) for w in copies)
    return plane, copy, damaged


def birth(shape=None):
    memory = {SHOWN: (0, 0), ACKED: ()}
    for number in (0, 1):
        for at, word in enumerate(_words(Header(number, 0, 0, 0))):
            memory["header", number, at] = word
    return memory


def _words(header):
    return header.number, header[1:], tuple(header)


class Writer:
    """As `ring.Writer`. `had`: position -> its values in order, the stored one first; `syncs`: after how many effects
    all were durable."""

    def __init__(self, shape=None, variant="", memory=None, before=None, at=0, power=False, boot=1):
        self.variant, self.power, self.boot = variant, power, boot
        self.memory = birth() if memory is None else dict(memory)
        self.effects, self.acks, self.syncs = [], [], []
        self.tail, self.head = self.memory[SHOWN]
        self.had = {}
        if before is not None:
            counts = before.counts(at)
            self.had = {p: had[: counts.get(p, 0) + 1] for p, had in before.had.items() if p < self.head}
        self.synced_number = header_in([self.memory[a] for a in HEADERS]).number
        self.generation = 0
        self._begin()
        for p, had in self.had.items():
            if len(had) > counts.get(p, 0) > 0 and p >= self.tail and self.value_of(p) != had[-1]:
                had.pop()  # the update was under way
        self._ack()

    def put(self, address, word):
        self.effects.append((address, word))
        self.memory[address] = word

    def _sync(self):
        self.syncs.append(len(self.effects))
        self.synced_number, self.durable = self.header.number, self.generation

    def _ack(self):
        counts = tuple(sorted((p, len(v)) for p, v in self.had.items()))
        self.put(ACKED, counts)
        self.acks.append((len(self.effects), counts, self.head))

    def run(self, script):
        for name, *args in script:
            getattr(self, name)(*args)
            self._ack()
        return self

    def counts(self, at):
        """Return how many values of which positions were acknowledged after so many effects."""
        return next((dict(counts) for index, counts, _ in reversed(self.acks) if index <= at), {})

    # -- the ring ------------------------------------------------------------------------------

    def store(self, value):
        position = self.head
        self.put(("row", position % ROWS, 0), value)
        self.had[position] = [value]
        self.head, self.tail = position + 1, max(self.tail, position + 1 - MAX_STEPS)
        self.put(SHOWN, (self.tail, self.head))

    # -- the values ----------------------------------------------------------------------------

    def _copies(self, slot):
        planes = range(1 if self.variant == "one copy" else 2)
        return [[self.memory.get(("copy", (plane, slot), at), 0) for at in range(4)] for plane in planes]

    def update(self, value):
        """Store a newer value of the newest row."""
        position, slot = self.head - 1, (self.head - 1) % ROWS
        if self.head == self.tail:  # a cut took all rows
            return
        self.had[position].append(value)
        if not self.memory.get(("mark", slot, 0), 0):
            self.put(("mark", slot, 0), 1)
        copies = self._copies(slot)
        plane = self.newest.get(slot)
        if plane is None:
            plane = newest_in(copies, position, self.header, self.boot)[0] or 0
        if self.variant != "the newest copy is written over":
            plane = 1 - plane if len(copies) == 2 else 0
        self.newest[slot] = plane
        self.generation += 1
        copy = Copy(self.generation, position, value)
        words = (tuple(copy), *copy)
        for address in copy_addresses(plane, slot, self.variant):
            self.put(address, words[address[2]])
        if self.power and self.variant != "power without a sync":
            self._sync()

    def sync(self):
        if self.generation == self.durable:
            return
        self._sync()
        self._put_header(self.header._replace(synced=self.generation))

    def reopen(self):
        """Close the file, and open it again."""
        self.sync()
        self._put_header(self.header._replace(synced=self.header.highest))
        self._sync()
        self._begin()

    def _put_header(self, header):
        number = header.number + 1
        if (number - self.synced_number) % 2 == 0 and self.variant != "a header over the synced one":
            number += 1
        self.header = header._replace(number=number)
        for at, word in enumerate(_words(self.header)):
            self.put(("header", number % 2, at), word)

    def _begin(self):
        """Blank what is torn and what belongs to rows that were lost, and take generations that no copy has."""
        self.newest = {}
        """The plane of each slot's newest copy, where known."""
        header = self.header = header_in([self.memory[a] for a in HEADERS])
        assert header is not None, "neither header is valid"
        is_lost, is_closed = header.boot != self.boot, header.synced == header.highest
        for slot in range(ROWS):
            marked = self.memory.get(("mark", slot, 0), 0)
            for plane, words in enumerate(self._copies(slot)):
                check, generation, position, value = words
                torn = check != (generation, position, value)
                wrong = is_lost and position >= self.head and self.variant != "values of lost rows stay"
                if self.variant != "torn copies stay":
                    wrong |= is_lost and not is_closed and (torn or not marked)
                    wrong |= not is_lost and torn and header.synced < generation <= header.highest
                if generation and wrong:
                    for at in range(3):
                        self.put(("copy", (plane, slot), at), 0)
        self._sync()
        highest = header.highest + (0 if self.variant == "generations given again" else SESSION)
        self.generation = header.synced if self.variant == "generations given again" else header.highest
        header = Header(header.number, max(highest, SESSION), header.highest, self.boot)
        for _ in range(2):
            self._put_header(header)
            header = self.header
            self._sync()

    def value_of(self, position):
        """Return what a handle that opens now reads, None for damage."""
        slot = position % ROWS
        if self.memory.get(("mark", slot, 0), 0):
            _, copy, damaged = newest_in(self._copies(slot), position, self.header, self.boot, self.variant)
            if damaged or copy is not None:
                return None if damaged else copy.value
        return self.memory[("row", slot, 0)]


def after_a_kill(new, run, at):
    """Return why what a new writer found is none of the states that it may find, or None."""
    counts = run.counts(at)
    new.acks.insert(0, (0, tuple(counts.items()), new.head))
    for position in range(new.tail, new.head):
        value, had = new.value_of(position), run.had[position]
        if value not in had[max(0, counts.get(position, 1) - 1) :]:
            return f"position {position} has the value {value}: it had {had}, {counts.get(position)} are acknowledged"
    return None


def verdict(report, run):
    kind, *what = report
    if kind == "damage":
        return f"damage reported: position {what[0]}"
    position, value, acked = what
    had, least = run.had.get(position, []), dict(acked).get(position, 1)
    if value not in had[least - 1 :]:
        return f"position {position} has the value {value}: it had {had}, {least} were acknowledged before"
    return None


class Reader:
    """Reads the newest row as it stands in memory: its row, then newer values, then the tail again."""

    def __init__(self, shape=None, plan=(), variant="", hashed=True, boot=1):
        self.variant, self.boot = variant, boot
        self.start = Read((ACKED, SHOWN), self._choose)

    def _choose(self, words):
        acked, (tail, head) = words
        if tail == head:
            return None
        slot = (head - 1) % ROWS
        return Read((("row", slot, 0), ("mark", slot, 0)), self._marked, (head - 1, acked))

    def _marked(self, words, position, acked):
        row, mark = words
        if not mark:
            return self._validate(row, position, acked)
        slot = position % ROWS
        addresses = tuple(("copy", (plane, slot), at) for plane in (0, 1) for at in (1, 2))
        return Read(addresses, self._heads, (addresses, None, row, position, acked))

    def _heads(self, words, addresses, before, row, position, acked):
        generations, positions = words[::2], words[1::2]
        good = [(g, plane) for plane, (p, g) in enumerate(zip(positions, generations, strict=True)) if p == position]
        top, plane = max(good, default=(0, 0))
        if not top and before is None and self.variant != "heads read once":
            # One may be that of before an update, and the other that of a copy that was blanked after it.
            return Read(addresses, self._heads, (addresses, words, row, position, acked))
        if not top:
            again = before is not None and before != words
            return self._peek(row, position, acked) if again else self._validate(row, position, acked)
        addresses = tuple(("copy", (plane, position % ROWS), at) for at in range(4))
        return Read(addresses, self._taken, (top, row, position, acked))

    def _taken(self, words, top, row, position, acked):
        copy = copy_in(words, position, self.variant)
        if copy is not None and copy.generation >= top:
            return self._validate(copy.value, position, acked)
        return self._peek(row, position, acked)

    def _peek(self, row, position, acked):
        """Take both copies twice, and the header before and after: they are those of one moment, or again."""
        return Read(HEADERS, self._header, (row, position, acked))

    def _header(self, words, row, position, acked):
        header = header_in(words)
        if header is None:
            return self._peek(row, position, acked)
        slot = position % ROWS
        addresses = tuple(("copy", (plane, slot), at) for plane in (0, 1) for at in range(4))
        return Read(addresses, self._once, (addresses, header, row, position, acked))

    def _once(self, words, addresses, header, row, position, acked):
        if self.variant == "copies taken once":
            return self._still(words, (), words, header, row, position, acked)
        return Read(addresses, self._twice, (words, header, row, position, acked))

    def _twice(self, again, words, header, row, position, acked):
        if again != words:
            return self._peek(row, position, acked)
        if self.variant == "the header is read once":
            return self._still((), None, words, header, row, position, acked)
        return Read(HEADERS, self._still, (again, words, header, row, position, acked))

    def _still(self, last, again, words, header, row, position, acked):
        if again is not None and again != () and header_in(last) != header:
            return self._peek(row, position, acked)
        _, copy, damaged = newest_in((words[:4], words[4:]), position, header, self.boot, self.variant)
        value = row if copy is None else copy.value
        return self._validate(value, position, acked, damaged)

    def _validate(self, value, position, acked, damaged=False):
        if self.variant == "no validation":
            return self._judge(((position, 0),), value, position, acked, damaged)
        return Read((SHOWN,), self._judge, (value, position, acked, damaged))

    def _judge(self, words, value, position, acked, damaged):
        if position < words[0][0]:
            return self.start
        return Seen(("damage", position) if damaged else ("value", position, value, acked))


def cuts(run, start):
    """Yield what a power cut may leave at each point of a writer's list: `(point, memory)`.

    What was written since the last sync is there or not, each word for itself. A copy whose checksum or value is of
    another one than the rest is torn, as is a header: which of their words are old makes no difference. The ring is as
    shown or one record before: a row is only written over when a sync has made the record durable that allows it.
    """
    durable, since = dict(start), []
    for at in range(len(run.effects) + 1):
        fates = {}
        for address, word in since:
            kind, place, number = address
            if kind == "row":  # what it is written over is no longer live on the disk
                durable |= {address: word, SHOWN: fates.pop(SHOWN, [{SHOWN: durable[SHOWN]}])[-1][SHOWN]}
            elif kind == "acked":
                durable[address] = word
            elif kind == "header" and number == 2:
                fates.setdefault(address, [_header_words(place, durable[address]), {address: None}])
                fates[address].append(_header_words(place, word))
            elif kind == "copy" and number == 3:
                check = (kind, place, 0)
                whole = {address: durable.get(address, 0), check: durable.get(check, 0)}
                fates.setdefault(address, [whole, {address: None, check: None}])
                fates[address].append({address: word, check: next(w for a, w in reversed(since) if a == check)})
            elif not (kind == "header" or (kind == "copy" and number == 0)):
                fates.setdefault(address, [{address: durable.get(address, 0)}]).append({address: word})
        if SHOWN in fates:
            fates[SHOWN] = fates[SHOWN][-2:]
        for fate in itertools.product(*fates.values()):
            disk = dict(durable)
            for words in fate:
                disk |= words
            yield at, disk
        if at in run.syncs:
            durable, since = durable | dict(since), []
        since += run.effects[at : at + 1]


def _header_words(slot, header):
    return {("header", slot, at): word for at, word in enumerate(_words(Header(*header)))}


def after_a_cut(run, at, disk, script, variant):
    """Open a buffer after a power cut, with a reader and with a writer, and let this one go on; return the first thing
    that is wrong, or None.
    """
    counts, (tail, head) = run.counts(at), disk[SHOWN]
    reader = Writer.__new__(Writer)  # a handle that only reads, before any writer
    reader.memory, reader.boot, reader.variant = disk, 2, variant
    reader.header = header_in([disk[a] for a in HEADERS])
    if reader.header is None:
        return "neither header is valid"
    reader.had, reader.tail, reader.head = run.had, tail, head
    for number, call in enumerate([None, None, *script]):
        if number == 1:
            reader = Writer(None, variant, disk, run, at, run.power, boot=2)
        if call is not None:
            reader.run([call])
        for p in range(reader.tail, reader.head):
            value, had = reader.value_of(p), reader.had[p]
            least = counts.get(p, 1) - 1 if run.power else 0
            if call is not None and (p >= head or call[0] == "update"):
                least = len(had) - 1
            if value not in had[least:]:
                return f"{call}: position {p} has the value {value}: it had {had}"
    return None
