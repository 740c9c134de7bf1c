"""All interleavings of one writer and one reader, as single effects on a memory of words.

    writer   ---put--put--put---X            X: killed here, and before and after every other effect
    reader   ---load------load---            \\---put--put---   a new writer: it recovers, and goes on
                                     memory: {address: word}

A writer is a list of effects: each puts one word. Its effects do not depend on readers, since readers change nothing;
and what one reader loads does not depend on another, so one stands for any number. What a kill leaves is the memory
before the next effect. So the states of the whole are the pairs of a point of a writer's list and a state of a reader,
and all of them that can be reached are visited. A reader is a value (`Read`): what it loads next, in order, and the
function that goes on with the words.

Where the writer puts a word, only a reader that is about to load this word can do anything that it could not do before.
So the others are carried over from point to point, and not walked again.
Not here: what the words mean (ring.py, values.py).
"""

from typing import NamedTuple


class Read(NamedTuple):
    """Load the words at these addresses, one by one; then go on with what `then(words, *args)` returns."""

    addresses: tuple
    then: object
    args: tuple = ()


class Choice(NamedTuple):
    """Go on with any one of these."""

    options: tuple


class Seen(NamedTuple):
    """Tell the test what was read, and go on; with None: end."""

    report: tuple
    then: object = None


class Readers:
    """All states that a reader can be in, at one point of a writer's list, and the memory there.

    `waiting`: address -> numbers of the states that load it next; `count`: how many states there are; `memory`:
    address -> number of the word.
    """

    def __init__(self, waiting, count, memory):
        self.waiting, self.count, self.memory = waiting, count, memory

    def copy(self):
        waiting = {address: set(states) for address, states in self.waiting.items()}
        return Readers(waiting, self.count, dict(self.memory))


class Explorer:
    """Visits the states of a reader that begins with `start`. Each state and each step of it is computed once.

    States and words have numbers, since it takes long to compare them.
    """

    def __init__(self, start):
        self._numbers, self._reads, self._addresses, self._steps = {}, [], [], []
        self._words, self._word_numbers = [0], {0: 0}
        self._first, _ = self._flat(start)
        self.visited = 0
        """Pairs of a point of a writer's list and a state of the reader."""

    def _flat(self, node):
        """Return the numbers of the states that a node is, and what it reports."""
        if node is None:
            return (), ()
        if isinstance(node, Seen):
            states, reports = self._flat(node.then)
            return states, (node.report, *reports)
        if isinstance(node, Choice):
            parts = [self._flat(option) for option in node.options]
            return tuple(s for states, _ in parts for s in states), tuple(r for _, reports in parts for r in reports)
        return (self._number(node, ()),), ()

    def _number(self, read, words):
        number = self._numbers.setdefault((read, words), len(self._reads))
        if number == len(self._reads):
            self._reads.append((read, words))
            self._addresses.append(read.addresses[len(words)])
            self._steps.append({})
        return number

    def _step(self, state, word):
        """Return what a state becomes when it loads a word: the next states, and reports."""
        read, words = self._reads[state]
        words = (*words, word)
        if len(words) < len(read.addresses):
            return (self._number(read, words),), ()
        return self._flat(read.then(words, *read.args))

    def _of(self, word):
        number = self._word_numbers.setdefault(word, len(self._words))
        if number == len(self._words):
            self._words.append(word)
        return number

    def begin(self, memory, check):
        """Return the states of a reader that begins at any moment from now on. `check(report)` judges what it reads."""
        readers = Readers({}, 0, {address: self._of(word) for address, word in memory.items()})
        fresh = []
        self._add(readers, self._first, fresh)
        self._go(readers, fresh, check)
        return readers

    def put(self, readers, address, word, check):
        """Let the writer put a word: move to the next point of its list."""
        readers.memory[address] = self._of(word)
        self._go(readers, list(readers.waiting.get(address, ())), check)
        self.visited += readers.count

    def _add(self, readers, states, fresh):
        for state in states:
            waiting = readers.waiting.setdefault(self._addresses[state], set())
            if state not in waiting:
                waiting.add(state)
                readers.count += 1
                fresh.append(state)

    def _go(self, readers, todo, check):
        """Let these states load, and all that come of them."""
        memory, addresses, steps = readers.memory, self._addresses, self._steps
        while todo:
            state = todo.pop()
            number = memory.get(addresses[state], 0)
            found = steps[state].get(number)
            if found is None:
                found = steps[state][number] = self._step(state, self._words[number])
            states, reports = found
            for report in reports:
                check(report)
            self._add(readers, states, todo)
