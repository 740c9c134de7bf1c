"""The commit protocol of a ring, on a memory of words, as storage/commit, storage/read and the page of the format say.

A word is a row of one of the two columns A and B, or a part of a record, a state, a blob or a frame, that a kill, or a
reader in between, may see without the rest. A checksum is the value that it covers.

`variant` names a fault that is planted: see `VARIANTS` in check.py. Not here: mutable columns (values.py), power cuts
(tests/faults/crash/test_power.py tries these with the code), what an error of the disk does.
"""

from typing import NamedTuple

from tests.faults.crash.model.explore import Choice, Read, Seen

EPISODE, RETIRE, CLEAR = 1, 2, 3
PART, END = 1, 2
NONE = -1
SHOWN = ("shown", 0, 0)
"""No word of the disk: the newest state whose write has ended, for the test."""
THREADS = ("threads", 0, 0)
"""What threads of the writer's process read: its tail and its episodes, changed under one lock."""


class Shape(NamedTuple):
    max_steps: int
    spare: int
    slots: int

    @property
    def rows(self):
        return self.max_steps + self.spare


class State(NamedTuple):
    generation: int
    seq: int = 0
    first: int = 1
    tail: int = 0
    head: int = 0
    synced: int = 0
    era: int = 1
    boot: bool = True


class Record(NamedTuple):
    seq: int
    start: int
    values: tuple
    tail: int
    first: int
    segment: int
    kind: int = EPISODE
    chain: int = NONE
    step: int = 0
    previous: int = NONE
    number: int = 0
    part: int = 0

    @property
    def head(self):
        return self.start + len(self.values)

    @property
    def place(self):
        return self.start, len(self.values), self.seq, self.chain


def words_of(value):
    """Return a record or a state as three words: its number, the rest, the checksum."""
    return value[0], value[1:], value


def state_in(words, slot, variant=""):
    generation, body, check = words
    if variant == "no check of a state":
        return State(generation, *body) if body else None
    return check if check == (generation, *(body or ())) and generation % 2 == slot else None


def record_in(words, seq, variant=""):
    number, body, check = words
    if variant == "no check of a record":
        return Record(number, *body) if number == seq and body else None
    return check if number == seq and check == (number, *(body or ())) else None


def birth(shape):
    """Return the memory of a buffer that was just made and opened, without a record."""
    memory = {}
    for generation in (2, 3):
        for at, word in enumerate(words_of(State(generation, boot=generation == 3))):
            memory["state", generation % 2, at] = word
    memory[SHOWN], memory[THREADS] = State(3), (0, ())
    return memory


class Writer:
    """A handle that writes: `effects` are the words that it puts, `changes` the calls of the disk that they belong to.

    `acks`: after how many effects which call had returned, with the newest record and the head that count then;
    `states`: by number, what each record makes true; `contents`: what is stored at each position.
    """

    def __init__(self, shape, variant="", memory=None, before=None, at=0, power=False):
        self.shape, self.variant, self.power = shape, variant, power
        self.memory = birth(shape) if memory is None else dict(memory)
        self.effects, self.changes, self.acks = [], [], []
        self.states = {0: (1, 0, 0, ())}
        self.contents = {}
        self.group, self.spent, self.fails, self.unshown = None, False, False, False
        self.chains = {}
        """By name, of those that go on: the first position, steps, the newest part's position, parts."""
        self.last = {}
        """Segment -> newest record that names it."""
        self.next_segment = 1
        if before is None:
            self.seq, self.first, self.tail, self.head, self.live = 0, 1, 0, 0, []
            self.state = State(3)
            self.synced = (0, 1)
        else:
            self.states, self.contents = dict(before.states), dict(before.contents)
            self._recover()
        self.ack()

    # -- the disk ------------------------------------------------------------------------------

    def put(self, address, word):
        self.effects.append((address, word))
        self.memory[address] = word

    def write(self, kind, place, words):
        """One `pwrite`."""
        self.changes.append((len(self.effects), "write", kind, place, tuple(words)))
        for at, word in enumerate(words):
            self.put((kind, place, at), word)

    def change(self, name, kind, place=0):
        self.changes.append((len(self.effects), name, kind, place, ()))

    def ack(self):
        self.acks.append((len(self.effects), self.seq, self.head))

    def record(self, seq):
        return record_in([self.memory.get(("record", seq % self.shape.slots, at), 0) for at in range(3)], seq)

    def slot(self, slot):
        return state_in([self.memory.get(("state", slot, at), 0) for at in range(3)], slot)

    # -- commits -------------------------------------------------------------------------------

    def run(self, script):
        for name, *args in script:
            if name not in ("append", "state_fails"):
                self.commit_group()
            getattr(self, name)(*args)
            self.ack()
        return self

    def _ready(self):
        """Show a state that an earlier call could not show, before anything is written over."""
        if self.unshown and self.variant != "rows before a state that is late":
            self.state = self.state._replace(generation=self.state.generation + 1)
            self._show(self.state)
            self.unshown = False

    def part(self, chain, *values):
        """Commit the next part of the chain of this name."""
        self.write_episode(*values, chain=chain)

    def write_episode(self, *values, chain=None, group=None):
        """Commit an episode; `group`: rows stored alone, from their first position on."""
        self._ready()
        part = None if chain is None else self.chains.get(chain, (NONE, 0, NONE, 0))
        shape, start = self.shape, self.head if group is None else group[0]
        need = start + len(values) - shape.rows
        if self.variant == "spare rows ignored":
            need = self.tail
        if need > self.tail:
            self._retire(need)
        seq = self.seq + 1
        tail, first = self._after(seq, start + len(values), self.tail)
        self._protect(need, seq)
        segment = self.next_segment
        if part is None:
            record = Record(seq, start, values, tail, first, segment)
        else:
            begun, step, previous, number = part
            begun = start if begun == NONE else begun
            record = Record(seq, start, values, tail, first, segment, EPISODE, begun, step, previous, number, PART)
            self.chains[chain] = begun, step + len(values), start, number + 1
        if self.variant == "state before rows":
            self._append(record)
        elif self.variant == "record before rows":
            self._plan(record)
            self.write("record", seq % shape.slots, words_of(record))
        self._rows(start, values)
        self._blob(seq)
        if self.power:
            self.change("sync", "rows")
        if self.variant != "state before rows":
            self._append(record)
        self._remember(record)
        if self.power:
            self._synced()

    def joined(self, *episodes):
        """Commit several episodes: their rows together, then a record and a state for each."""
        self._ready()
        start, values = self.head, tuple(v for one in episodes for v in one)
        need = start + len(values) - self.shape.rows
        assert need <= self.tail
        self._protect(need, self.seq + 1)
        self._rows(start, values)
        segment = self.next_segment
        self._blob(self.seq + len(episodes))
        for one in episodes:
            seq = self.seq + 1
            tail, first = self._after(seq, self.head + len(one), self.tail)
            self._protect(0, seq)
            record = Record(seq, self.head, one, tail, first, segment)
            if self.variant == "states of joined episodes left out" and one is not episodes[-1]:
                self._plan(record)
                self.write("record", seq % self.shape.slots, words_of(record))
            else:
                self._append(record)
            self._remember(record)

    def _rows(self, start, values):
        rows = self.shape.rows
        for column in "AB":
            at = start
            while at < start + len(values):
                stop = min(start + len(values), at + rows - at % rows)
                piece = values[at - start : stop - start]
                self.changes.append((len(self.effects), "write", column, at % rows, piece))
                for i, value in enumerate(piece):
                    self.put((column, at % rows + i, 0), value)
                at = stop

    def _blob(self, seq):
        number = self.next_segment
        self.next_segment, self.last[number] = number + 1, seq
        self.put(("blob", number, 0), "empty")
        self.write("blob", number, (number,))

    def _append(self, record):
        """Write the record, which is the commit, then the state."""
        self._plan(record)
        self.write("record", record.seq % self.shape.slots, words_of(record))
        if self.power:
            self.change("sync", "table")
        old = self.state
        synced = record.seq if self.power else old.synced
        self.state = State(
            old.generation + 1, record.seq, record.first, record.tail, record.head, synced, old.era, old.boot
        )
        if self.variant == "segments deleted before the state":
            self._synced(self.state)
        if self.fails:  # the disk refuses this write
            self.fails, self.unshown = False, True
            self.state = self.state._replace(generation=old.generation)
        else:
            self._show(self.state)

    def _plan(self, record):
        """Note what a record will make true."""
        tail = record.tail
        live = [p for p in (*self.live, record.place) if p[0] >= tail and p[1]]
        self.states[record.seq] = record.first, tail, record.head, tuple(live)
        self.contents |= dict(enumerate(record.values, record.start))

    def _show(self, state):
        slot = 0 if self.variant == "one slot" else state.generation % 2
        self.write("state", slot, words_of(state))
        self.put(SHOWN, state)

    def _remember(self, record):
        self.live = list(self.states[record.seq][3])
        self.seq, self.first, self.tail, self.head = record.seq, record.first, record.tail, record.head
        self.put(THREADS, (self.tail, tuple(self.live)))

    def _retire(self, need):
        tail = next((start for start, *_ in self.live if start >= need), self.head)
        self.fails = self.variant == "rows over before a retirement is shown"
        self._mark(RETIRE, tail)
        self.unshown = False
        if not self.power:
            self.sync_table()

    def _mark(self, kind, tail, chain=(NONE, 0, NONE, 0), part=0):
        """Commit a record without rows."""
        seq = self.seq + 1
        tail, first = self._after(seq, self.head, tail)
        self._protect(0, seq)
        begun, step, previous, number = chain
        record = Record(seq, self.head, (), tail, first, self.next_segment, kind, begun, step, previous, number, part)
        self._blob(seq)
        if self.power:
            self.change("sync", "rows")
        self._append(record)
        self._remember(record)
        if self.power:
            self._synced()

    def clear(self):
        self._ready()
        if self.live:
            self._mark(CLEAR, self.head)

    def end_chain(self, chain):
        self._ready()
        self._mark(RETIRE, self.tail, self.chains[chain], PART | END)

    def state_fails(self):
        """Let the write of the next state fail."""
        self.fails = True

    def _after(self, seq, head, tail):
        """Return tail and oldest live record once record `seq` ends at `head`."""
        shape, first = self.shape, self.first
        if head - tail > shape.max_steps:
            tail = max(tail, next((p[0] for p in self.live if head - p[0] <= shape.max_steps), self.head))
        first = self._first_live(first, seq, tail)
        most = shape.slots + (self.variant == "a slot that the state still names")
        while seq + 1 - first >= most:
            first = self._first_live(first + 1, seq, tail)
            tail = self.record(first).start if first < seq else self.head
        return tail, first

    def _first_live(self, first, stop, tail):
        while first < stop:
            record = self.record(first)
            if record.start >= tail and record.kind == EPISODE:
                break
            first += 1
        return first

    # -- syncs ---------------------------------------------------------------------------------

    def _protect(self, need, seq):
        if need > self.synced[0] or seq - self.shape.slots >= self.synced[1]:
            self.sync_table()

    def sync_table(self):
        self.change("sync", "table")
        self._synced()

    def _synced(self, upto=None):
        state = upto or self.state
        self.synced = max(self.synced[0], state.tail), max(self.synced[1], state.first)
        if not self.unshown:
            for number, last in sorted(self.last.items()):
                if last >= self.synced[1]:
                    break
                if last != state.seq and number != self.next_segment - 1:
                    self._delete(number)

    def _delete(self, number):
        del self.last[number]
        self.change("remove", "blob", number)
        self.put(("blob", number, 0), None)

    def flush(self):
        self._ready()
        self.change("sync", "all")
        self._synced()
        if self.seq > self.state.synced:
            self.state = self.state._replace(generation=self.state.generation + 1, synced=self.seq)
            self._show(self.state)

    # -- rows stored alone ---------------------------------------------------------------------

    def append(self, *values):
        if self.group is None:
            self._ready()
            if not self.spent:
                self.change("make", "frame")
            self.group = [self.head, [], 0]
            after, salt = self._follows(), values[0]
            self.write("frame", 0, ((after, salt), (after, salt)))
        start, stored, number = self.group
        number += 1
        salt = self.memory["frame", 0, 1][1]
        self.write("frame", number, ((salt, number, values), values))
        self.contents |= dict(enumerate(values, start + len(stored)))
        self.group = [start, [*stored, *values], number]
        self.head = start + len(stored) + len(values)

    def commit_group(self):
        if self.group is not None:
            group, self.group, self.spent = self.group, None, True
            if self.variant == "a group removed before its commit":
                self._remove_group()
            self.write_episode(*group[1], group=group)

    def _follows(self):
        newest = self.record(self.seq) if self.seq else None
        return None if newest is None else (newest.seq, newest.head, newest.values, newest.segment)

    def _remove_group(self):
        self.spent = False
        self.change("remove", "frame")
        for address in [a for a in self.memory if a[0] == "frame"]:
            self.put(address, 0)

    # -- recovery ------------------------------------------------------------------------------

    def _recover(self):
        found = [s for s in (self.slot(0), self.slot(1)) if s is not None]
        shown = max(found, default=None)
        assert shown is not None or self.variant, "neither state is valid"
        shown = shown or State(0, boot=False)
        newest, wipe = self._walk(shown) if shown.boot else self._scan()
        self.seq, self.first, self.tail, self.head = newest
        records = [self.record(seq) for seq in range(self.first, self.seq + 1)]
        assert None not in records, "a live record is missing"
        self.live = [r.place for r in records if r.kind == EPISODE and r.start >= self.tail]
        self.recovered = self.seq, self.first, self.tail, self.head, tuple(self.live)
        for slot in wipe:
            self.write("record", slot, (0, 0, 0))
        self.change("sync", "all")
        generation = shown.generation - 2 * (self.variant == "generations given again")
        for boot in (False, True):
            generation += 1
            self.state = State(generation, *newest, self.seq, shown.era + 1, boot)
            self._show(self.state)
        self.change("sync", "state")
        self.synced = self.tail, self.first
        named = {r.segment: r.seq for r in records}
        numbers = [a[1] for a, word in self.memory.items() if a[0] == "blob" and word]
        self.last = {n: named.get(n, 0) for n in sorted(numbers)}
        self.next_segment = max([0, *numbers, *named]) + 1
        for number in [n for n, last in self.last.items() if not last]:
            self._delete(number)
        self._finish_group()
        ended = {r.chain for r in records if r.part & END}
        for one in records:
            if one.part == PART and one.chain not in ended and one.start >= self.tail:
                self.chains[one.chain] = one.chain, one.step + len(one.values), one.start, one.number + 1
        for chain in list(self.chains) if self.variant != "open chains stay open" else ():
            if any(p[3] == chain for p in self.live):
                self.end_chain(chain)

    def _walk(self, shown):
        at, record = shown.seq, self.record(shown.seq)
        newest = shown[1:5]
        assert not at or (record and (record.seq, record.first, record.tail, record.head) == newest), "damage"
        if self.variant == "the state alone counts":
            return newest, []
        while (record := self.record(at + 1)) is not None:
            at, newest = at + 1, (record.seq, record.first, record.tail, record.head)
        slot, slots = (at + 1) % self.shape.slots, self.shape.slots
        is_empty = not any(self.memory.get(("record", slot, word), 0) for word in range(3))
        return newest, [] if is_empty or (at + 1 >= slots and self.record(at + 1 - slots)) else [slot]

    def _scan(self):
        slots = self.shape.slots
        words = {s: [self.memory.get(("record", s, at), 0) for at in range(3)] for s in range(slots)}
        records = {w[0]: record_in(w, w[0]) for s, w in words.items() if w[0] and w[0] % slots == s}
        whole = {n for n, r in records.items() if r is not None}
        good = [n for n in whole if {*range(records[n].first, n)} <= whole]
        newest = (0, 1, 0, 0)
        if good:
            record = records[max(good)]
            newest = record.seq, record.first, record.tail, record.head
        torn = [s for s, w in words.items() if any(w) and w[0] not in whole]
        return newest, sorted({*torn, *(n % slots for n in whole if n > newest[0])})

    def _finish_group(self):
        get = self.memory.get
        check, frame = get(("frame", 0, 0), 0), get(("frame", 0, 1), 0)
        if not any(word for address, word in self.memory.items() if address[0] == "frame"):
            return
        values, number = (), 1
        while check == frame and frame:
            check, payload = get(("frame", number, 0), 0), get(("frame", number, 1), 0)
            if self.variant == "frames without a check":
                check = frame[1], number, payload
            if not payload or check != (frame[1], number, payload):
                break
            values, number = (*values, *payload), number + 1
            check = frame
        if values and (frame[0] == self._follows() or self.variant == "a group that follows anything"):
            self.write_episode(*values)
            self.flush()
        self._remove_group()


STATE = tuple(("state", slot, at) for slot in (0, 1) for at in range(3))
GENERATIONS = STATE[0], STATE[3]


class Known(NamedTuple):
    """What a reader has in memory. `peeked`: generations, and the state of the peek that followed; `step`: of its
    plan; `newest`: the newest record, to tell whether it is stored still.
    """

    shown: State = State(0, era=0, boot=False)
    peeked: tuple = (None, None)
    seq: int = 0
    first: int = 1
    tail: int = 0
    head: int = 0
    live: tuple = ()
    newest: Record | None = None
    step: int = 0


def _data_of(words):
    """Return the words of both slots; None if they never stood in the file together, so that they can't again."""
    for generation, body, check in (words[:3], words[3:]):
        is_older = check and generation == check[0] + 2  # it is written over just now
        if not check or not (is_older or (generation, body) == (check[0], check[1:])):
            return None
    return words if abs(words[0] - words[3]) == 1 else None


class Reader:
    """A handle that only reads, in another process: opens the buffer, then does what `plan` says: "read" the rows of
    any episode, "load" one with record and blob, "refresh". `hashed`: whether it compares the checksums of
    all records, as of a small table, or of the newest alone.
    """

    def __init__(self, shape, plan, variant="", hashed=True):
        self.shape, self.plan, self.variant, self.hashed = shape, plan, variant, hashed
        self.start = self._load(Known())

    # -- peeks ---------------------------------------------------------------------------------

    def _peek(self, then, *args):
        """Go on with the newest state that both slots say; None if one stays torn."""
        return Read(STATE[:3], self._first_slot, (then, args))

    def _first_slot(self, words, then, args):
        one = state_in(words, 0, self.variant)
        if one is None and self.variant != "one slot is enough":
            return Choice((self._peek(then, *args), then(None, *args)))
        return Read(STATE[3:], self._second_slot, (one, then, args))

    def _second_slot(self, words, one, then, args):
        found = [s for s in (one, state_in(words, 1, self.variant)) if s is not None]
        if len(found) == 2 or (found and self.variant == "one slot is enough"):
            return then(max(found), *args)
        return Choice((self._peek(then, *args), then(None, *args)))

    def _newest(self, then, known, *args):
        """Go on with the newest state: that of the last peek while no generation has changed."""
        return Read(GENERATIONS, self._unchanged, (then, known, args))

    def _unchanged(self, words, then, known, args):
        if words == known.peeked[0]:
            return then(known.peeked[1], known, *args)
        return self._peek(self._peeked, words, then, known, args)

    def _peeked(self, shown, words, then, known, args):
        if shown is None:
            return Seen(("torn",))
        if self.variant == "generations loaded after the peek":
            return Read(GENERATIONS, self._newest_late, (shown, then, known, args))
        return self._newest_late(words, shown, then, known, args)

    def _newest_late(self, words, shown, then, known, args):
        can_recur = abs(words[0] - words[1]) == 1  # the writer was two states further before the second load, else
        return then(shown, known._replace(peeked=(words, shown) if can_recur else (None, None)), *args)

    # -- records -------------------------------------------------------------------------------

    def _record(self, seq, then, *args):
        """Go on with a record; None if it is not there, or not whole."""
        slot = seq % self.shape.slots
        return Read(tuple(("record", slot, at) for at in range(3)), self._as_record, (seq, then, args))

    def _as_record(self, words, seq, then, args):
        return then(record_in(words, seq, self.variant), *args)

    def _load(self, known):
        """Read the whole state again."""
        return Read(STATE, self._loaded, (known,))

    def _loaded(self, words, known):
        found = [s for s in (state_in(words[:3], 0), state_in(words[3:], 1)) if s is not None]
        shown, data = max(found, default=None), _data_of(words)
        if shown is not None and shown.boot:
            on = self._record(shown.seq + 2, self._beyond, shown, data, known)
        elif data is None:
            return self._load(known)  # whatever the table is like: the state will have changed
        else:
            on = self._scan(shown, data, known, ())
        return on if len(found) == 2 else Choice((self._load(known), on))

    def _beyond(self, record, shown, data, known):
        """More is stored than the one commit that a killed writer may not have shown: an old copy of state.bin."""
        if record is None:
            return self._follow(shown, shown.first, True, known)
        return Read(STATE, self._old, (shown, data, known))

    def _old(self, words, shown, data, known):
        if words == data:
            return Seen(("damage", "state.bin is an old copy"))
        return self._follow(shown, shown.first, True, known)

    def _scan(self, shown, data, known, slots):
        """The state is not of this boot: examine the table as a recovery does, between two peeks at the same state."""
        at = len(slots)
        if at < self.shape.slots:
            addresses = tuple(("record", at, word) for word in range(3))
            return Read(addresses, self._scanned, (shown, data, known, slots))
        return Read(STATE, self._scan_ended, (shown, data, known, slots))

    def _scanned(self, words, shown, data, known, slots):
        record = record_in(words, words[0]) if words[0] and words[0] % self.shape.slots == len(slots) else None
        return self._scan(shown, data, known, (*slots, record))

    def _scan_ended(self, words, shown, data, known, slots):
        if words != data:
            return self._load(known)
        records = {r.seq: r for r in slots if r is not None}
        good = [n for n, r in records.items() if {*range(r.first, n)} <= {*records}]
        newest = records[max(good)] if good else Record(0, 0, (), 0, 1, 0)
        found = tuple(records[n] for n in range(newest.first, newest.seq + 1)) if good else ()
        shown = shown or State(0, era=0, boot=False)
        return self._take(shown, newest, True, known, found)

    def _follow(self, shown, fresh, anew, known, records=(), torn=None):
        """Read the records from `fresh` on into memory. `torn`: the first one whose checksum does not hold."""
        at = fresh + len(records)
        if at <= shown.seq:
            addresses = tuple(("record", at % self.shape.slots, word) for word in range(3))
            return Read(addresses, self._followed, (shown, fresh, anew, known, records, torn))
        heads = [r.start for r in records[1:]] + ([shown.head] if records else [])
        if [r.head for r in records] != heads or (records and records[-1].tail != shown.tail):
            if torn is not None:
                return self._peek(self._overtaken, shown, torn, anew, known)
            return Seen(("damage", "records contradict the state or each other"))
        if self.hashed or not records:
            return self._take(shown, shown, anew, known, records)
        return self._peek(self._confirmed, shown, fresh, anew, known, records)

    def _followed(self, words, shown, fresh, anew, known, records, torn):
        at = fresh + len(records)
        record = record_in(words, at, self.variant)
        if record is None and not self.hashed and at < shown.seq and words[0] == at and words[1]:
            record, torn = Record(at, *words[1]), torn or at
        if record is None:
            if self.variant == "what is read over is damage":
                return Seen(("damage", "a record"))
            return self._peek(self._overtaken, shown, at, anew, known)
        return self._follow(shown, fresh, anew, known, (*records, record), torn)

    def _confirmed(self, again, shown, fresh, anew, known, records):
        """What was not hashed counts if no slot can have been taken for another record meanwhile."""
        if again is None or again.era != shown.era or again.seq + 1 - self.shape.slots >= fresh:
            return self._load(known) if anew else self._refresh(known)
        return self._take(shown, shown, anew, known, records)

    def _overtaken(self, again, shown, at, anew, known):
        if again is not None and again.era == shown.era and again.first <= at:
            return Seen(("damage", "a live record"))
        return self._load(known) if anew else self._refresh(known)

    def _take(self, shown, newest, anew, known, records):
        old = () if anew else tuple(p for p in known.live if p[0] >= newest.tail)
        live = (*old, *(r.place for r in records if r.kind == EPISODE and r.start >= newest.tail))
        last = records[-1] if records else (None if anew else known.newest)
        known = Known(shown, known.peeked, newest.seq, newest.first, newest.tail, newest.head, live, last, known.step)
        report = ("state", newest.seq, newest.first, newest.tail, newest.head, live)
        return Seen(report, self._next(known))

    # -- what is read --------------------------------------------------------------------------

    def _next(self, known):
        if known.step == len(self.plan):
            return None
        if self.plan[known.step] == "refresh":
            return self._refresh(known._replace(step=known.step + 1))
        if not known.live:
            return self._next(known._replace(step=known.step + 1))
        chains = {p[3] for p in known.live}
        episodes = [(p,) for p in known.live if p[3] == NONE]
        episodes += [tuple(p for p in known.live if p[3] == chain) for chain in sorted(chains - {NONE})]
        if self.plan[known.step] == "load":
            return Choice(tuple(self._record(e[-1][2], self._find, known, e, False) for e in episodes))
        return Choice(tuple(self._copy(None, known, episode) for episode in episodes))

    def _refresh(self, known):
        return self._newest(self._refreshed, known)

    def _refreshed(self, shown, known):
        if (shown.seq, shown.era) == (known.shown.seq, known.shown.era):
            return self._next(known)
        if shown.era != known.shown.era:
            return self._load(known)
        return self._follow(shown, max(known.seq + 1, shown.first), False, known)

    def _find(self, record, known, episode, again):
        """Load the record of an episode; where it is gone, the episode was evicted."""
        if record is None:
            return self._validate(self._not_found, known, episode, again)
        return self._copy(record, known, episode)

    def _not_found(self, tail, known, episode, again):
        if episode[0][0] < tail:
            return self._refresh(known)
        if again:
            return Seen(("damage", "the record of a live episode"))
        return self._record(episode[-1][2], self._find, known, episode, True)

    def _copy(self, record, known, episode):
        """Copy the rows, column by column, and then the blob; then validate."""
        positions = [start + i for start, length, *_ in episode for i in range(length)]
        addresses = [(column, p % self.shape.rows, 0) for column in "AB" for p in positions]
        addresses += [("blob", record.segment, 0)] if record is not None else []
        if self.variant == "loads reordered" and record is None:
            return self._validate(self._copy_late, known, tuple(addresses), tuple(positions))
        return Read(tuple(addresses), self._copied, (known, tuple(positions), record))

    def _copy_late(self, tail, known, addresses, positions):
        return Read((SHOWN, *addresses), self._copied_late, (tail, known, positions))

    def _copied_late(self, words, tail, known, positions):
        return self._judge(tail, known, words[1:], positions, None, words[0])

    def _copied(self, words, known, positions, record):
        if self.variant == "no validation":
            return self._judge(known.tail, known, words, positions, record, State(0))
        return Read((SHOWN,), self._copied_and_marked, (known, words, positions, record))

    def _copied_and_marked(self, ghost, known, words, positions, record):
        return self._validate(self._judge, known, words, positions, record, ghost[0])

    def _validate(self, then, known, *args):
        """Go on with the position below which rows may have been overwritten by now."""
        return self._newest(self._tail_of, known, then, args)

    def _tail_of(self, shown, known, then, args):
        if shown == known.shown:
            return then(known.tail, known, *args)
        if shown.era != known.shown.era and known.newest is not None:
            return self._record(known.newest.seq, self._is_stored, shown, known, then, args)
        return then(shown.tail, known, *args)

    def _is_stored(self, record, shown, known, then, args):
        return then(shown.tail if record == known.newest else max(known.head, shown.tail), known, *args)

    def _judge(self, tail, known, words, positions, record, ghost):
        lowest = max(positions) if self.variant == "only the newest row is compared" else min(positions)
        if lowest < tail - (self.variant == "a tail that is one too low"):
            return self._refresh(known)
        count = len(positions)
        if record is not None and words[-1] != record.segment:
            return Seen(("damage", "the blob of a live episode"))
        report = ("rows", tuple(zip(positions, words[:count], words[count:], strict=False)), ghost.tail)
        return Seen(report, self._next(known._replace(step=known.step + 1)))


class Thread:
    """A thread of the writer's process: chooses an episode from memory, copies its rows, and reads the tail again."""

    def __init__(self, shape, variant=""):
        self.shape, self.variant = shape, variant
        self.start = Read((THREADS,), self._choose)

    def _choose(self, words):
        return Choice(tuple(self._copy(place) for place in words[0][1]))

    def _copy(self, place):
        positions = tuple(range(place[0], place[0] + place[1]))
        addresses = tuple((column, p % self.shape.rows, 0) for column in "AB" for p in positions)
        return Read((*addresses, THREADS), self._judge, (positions,))

    def _judge(self, words, positions):
        *words, (tail, _) = words
        count = len(positions)
        if positions[0] < tail and self.variant != "no validation":
            return self.start
        return Seen(("rows", tuple(zip(positions, words[:count], words[count:], strict=True)), tail))


def verdict(report, run):
    """Return why a reader was told something wrong, or None."""
    kind, *what = report
    if kind == "damage":
        return f"damage reported: {what[0]}"
    if kind == "state":
        seq, *state = what
        if run.states.get(seq) != tuple(state):
            return f"record {seq} is taken for {state}, it is {run.states.get(seq)}"
    if kind == "rows":
        rows, tail = what
        for position, a, b in rows:
            if not a == b == run.contents.get(position):
                return f"position {position} has {a}, {b}: it is {run.contents.get(position)}"
            if position < tail:
                return f"position {position} was evicted when its validation began: the tail was {tail}"
    return None


def after_a_kill(new, run, at):
    """Return why what a new writer found is none of the states that it may find, or None."""
    acked = next(a for a in reversed(run.acks) if a[0] <= at)
    after = next((a for a in run.acks if a[0] > at), acked)
    new.acks.insert(0, (0, *acked[1:]))
    seq, *state = new.recovered
    if seq < acked[1]:
        return f"record {acked[1]} was acknowledged, {seq} is the newest"
    if run.states.get(seq) != tuple(state):
        return f"record {seq} is recovered as {state}, it was {run.states.get(seq)}"
    heads = {acked[2], after[2], *(run.states[n][2] for n in range(acked[1] + 1, after[1] + 1))}
    if new.head not in heads:
        return f"the head is {new.head}, not one of {sorted(heads)}"
    for start, length, number, chain in new.live:
        record = new.record(number)
        if new.memory.get(("blob", record.segment, 0)) != record.segment:
            return f"the blob of record {number} is gone"
        for p in range(start, start + length):
            found = {new.memory.get((column, p % new.shape.rows, 0)) for column in "AB"}
            if found != {run.contents.get(p)}:
                return f"position {p} has {found}: it was {run.contents.get(p)}"
        if chain >= 0 and not any(
            new.record(n).part & END and new.record(n).chain == chain for n in range(new.first, new.seq + 1)
        ):
            return f"the chain {chain} is open"
    return None
