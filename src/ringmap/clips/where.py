"""Conditions on episodes: `return > 100 and seed in (1, 2)`, parsed by hand and computed on whole columns.

    text -> tokens -> Condition: the names in it, and a function of their values -> one bool per episode

    condition = both , { "or" , both } ;                  both = one , { "and" , one } ;
    one       = "not" , one | "(" , condition , ")" | test ;
    test      = name , ( op , value | "contains" , value | "in" , "(" , value , { "," , value } , ")"
                       | "is" , [ "not" ] , "null" ) ;
    op        = "<" | "<=" | ">" | ">=" | "=" | "==" | "!=" ;
    value     = number | "true" | "false" | word | "'" text "'" | '"' text '"' ;

`contains` looks for a part of a text, and for a whole flag: `flags contains bad` is not met by `badly_lit`.
Invariants: nothing of the text is evaluated as Python; an error says at which character; integers compare as integers,
whatever their size; an episode that lacks a value meets `is null` and `!=` alone.
Not here: where the values come from (datasets/episode_table.py).
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ringmap.errors import InputError

__all__ = ["Condition", "Values"]

Array = np.ndarray[Any, np.dtype[Any]]

FLAGS = "flags"
"""The name whose values are words: it contains whole ones."""

MOST = 2000
"""Characters of a condition."""
DEEPEST = 50

_EXACT = 2**53
"""From here on not every integer is a float64."""

_TOKEN = re.compile(r"\s*(?:(?P<op><=|>=|==|!=|[<>=(),])|(?P<text>'[^']*'|\"[^\"]*\")|(?P<word>[^\s<>=!(),'\"]+))")
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
}
_WORDS = ("contains", "in", "is")
_HOW = "one of < <= > >= = != contains in is"


class Values:
    """A value of each episode: a number, a text, or none.

    Attributes:
        numbers: float64 `(n,)`, NaN where it is no number.
        texts: None where it is no text, `(n,)`; None if none is.
        exact: episode -> the integer that it has, where no float64 is as large.
    """

    __slots__ = ("exact", "numbers", "texts")

    def __init__(self, numbers: Array, texts: Array | None = None) -> None:
        self.numbers, self.texts = numbers, texts
        self.exact: dict[int, int] = {}

    @classmethod
    def none(cls, count: int) -> Values:
        """Return those of `count` episodes that have none."""
        return cls(np.full(count, np.nan))

    @classmethod
    def of(cls, values: Collection[Any]) -> Values:
        """Return these, None where there is none."""
        made = cls.none(len(values))
        for row, value in enumerate(values):
            if value is not None:
                made.put(row, value)
        return made

    @classmethod
    def same(cls, text: str, count: int) -> Values:
        """Return those of `count` episodes that have the same text."""
        return cls(np.full(count, np.nan), np.full(count, text, object))

    @classmethod
    def joined(cls, parts: Sequence[Values | None], counts: Sequence[int], order: Array | None) -> Values:
        """Return those of several tables of so many episodes, in an order; a table may have none."""
        given = [cls.none(n) if part is None else part for part, n in zip(parts, counts, strict=True)]
        order = np.arange(sum(counts)) if order is None else order
        made = cls(np.concatenate([part.numbers for part in given])[order])
        if any(part.texts is not None for part in given):
            nothing = (np.full(n, None, object) for n in counts)
            texts = [n if part.texts is None else part.texts for part, n in zip(given, nothing, strict=True)]
            made.texts = np.concatenate(texts)[order]
        if any(part.exact for part in given):
            begins, places = np.cumsum([0, *counts]).tolist(), np.argsort(order)
            for part, begin in zip(given, begins, strict=False):
                made.exact |= {int(places[begin + row]): value for row, value in part.exact.items()}
        return made

    def put(self, row: int, value: Any) -> None:
        """Set that of an episode: a number, a flag, an array or a list of one of these; of all else its text."""
        if isinstance(value, np.ndarray | np.generic | list | tuple) and np.size(value) == 1:
            value = np.asarray(value).reshape(-1)[0]
            value = value.item() if isinstance(value, np.generic) else value
        if isinstance(value, int | float):
            if abs(value) >= _EXACT and isinstance(value, int):
                self.exact[row] = value
            with contextlib.suppress(OverflowError):
                self.numbers[row] = value
                return
            self.numbers[row] = math.inf if value > 0 else -math.inf
            return
        if self.texts is None:
            self.texts = np.full(len(self.numbers), None, object)
        self.texts[row] = str(value)

    def get(self, row: int) -> Any:
        """Return that of an episode, None if it has none."""
        if row in self.exact:
            return self.exact[row]
        if self.texts is not None and self.texts[row] is not None:
            return self.texts[row]
        number = float(self.numbers[row])
        return None if math.isnan(number) else int(number) if number.is_integer() else number

    def keep(self, drop: int, add: int) -> None:
        """Drop those of the first episodes, and add episodes that have none."""
        self.numbers = np.concatenate([self.numbers[drop:], np.full(add, np.nan)])
        if self.texts is not None:
            self.texts = np.concatenate([self.texts[drop:], np.full(add, None, object)])
        self.exact = {row - drop: value for row, value in self.exact.items() if row >= drop}

    def are_numbers(self) -> Array:
        """Tell which are numbers."""
        return ~np.isnan(self.numbers)

    def are_texts(self) -> Array:
        """Tell which are texts."""
        found: Array = np.zeros(len(self.numbers), np.bool_)
        if self.texts is not None:
            found = self.texts != None  # noqa: E711 - one by one
        return found

    def are_null(self) -> Array:
        """Tell which episodes have none."""
        found: Array = ~(self.are_numbers() | self.are_texts())
        return found

    def compared(self, how: str, wanted: Any) -> Array:
        """Return which compare so with a number or a text; what is of the other kind, or none, does with != alone."""
        compare, none = _OPERATORS[how], how == "!="
        if isinstance(wanted, str):
            if self.texts is None:
                return np.full(len(self.numbers), none)
            met = (none if text is None else compare(text, wanted) for text in self.texts)
            return np.fromiter(met, np.bool_, len(self.numbers))
        if abs(wanted) < _EXACT:
            found: Array = compare(self.numbers, wanted)
        else:  # Python compares integers with floats as they are
            found = np.fromiter((compare(n, wanted) for n in self.numbers.tolist()), np.bool_, len(self.numbers))
        for row, value in self.exact.items():
            found[row] = compare(value, wanted)
        return found

    def contain(self, wanted: str, words: bool) -> Array:
        """Return which contain a text, in whatever case; with `words` as one of their words."""
        wanted, texts = wanted.lower(), [None] * len(self.numbers) if self.texts is None else self.texts
        within = (None if t is None else t.lower().split() if words else t.lower() for t in texts)
        return np.fromiter((t is not None and wanted in t for t in within), np.bool_, len(self.numbers))


Lookup = Callable[[str], Values | None]
Node = Callable[[Lookup], Array]
"""Returns which episodes meet a part of a condition, by the values of a name."""


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


class Condition:
    """A condition, parsed; an empty one is met by all.

    Args:
        text: such as `return > 100 and not (seed < 50 or room = "left")`. True and false count as 1 and 0.
        where: the caller to name in an error.

    Attributes:
        names: the names in it, each once.

    Raises:
        InputError: the text can't be parsed; the message says at which character.

    Example:
        >>> condition = Condition("seed < 2 or seed = 7", "example")
        >>> condition.names, condition.select(["seed"], {"seed": Values.of([1, 2, None])}.get, 3).tolist()
        (['seed'], [True, False, False])
    """

    def __init__(self, text: str, where: str) -> None:
        if len(text) > MOST:
            raise InputError(f"{where}: a condition of {len(text):,} characters; at most {MOST:,}")
        self.text, self._where = text, where
        self.names: list[str] = []
        self._known: Collection[str] = ()
        self._tokens = list(self._read(text))
        self._at = self._depth = 0
        self._node: Node | None = None
        if self._tokens:
            self._node = self._condition()
            if self._at < len(self._tokens):
                raise self._fail("expected `and`, `or` or the end")

    @classmethod
    def all_of(cls, texts: Collection[str], where: str) -> Condition:
        """Return the condition that all of these are met; an empty one is by all."""
        texts = [text for text in texts if text.strip()]
        for text in texts:  # each by itself: a bracket ends where it began, and an error names its own characters
            cls(text, where)
        return cls(" and ".join(f"({text})" for text in texts) if len(texts) > 1 else "".join(texts), where)

    def __reduce__(self) -> Any:
        return Condition, (self.text, self._where)

    def select(self, known: Collection[str], values: Lookup, count: int) -> Array:
        """Return of each of `count` episodes whether it meets the condition.

        Args:
            known: the names that there are.
            values: returns the values of a name.
            count: of episodes.

        Raises:
            InputError: it names what no episode has, or compares text with a number; the message says at which
                character.
        """
        self._known = known
        return np.ones(count, np.bool_) if self._node is None else self._node(values)

    def _read(self, text: str) -> Iterator[_Token]:
        at, end = 0, len(text.rstrip())
        while at < end:
            found = _TOKEN.match(text, at)
            if found is None:
                at += len(text[at:]) - len(text[at:].lstrip())
                raise InputError(f"{self._where}: can't read {text[at]!r} at character {at + 1} of {text!r}")
            kind = str(found.lastgroup)
            value = found[kind]
            yield _Token(kind, value[1:-1] if kind == "text" else value, found.start(kind))
            at = found.end()

    def _fail(self, what: str, at: int | None = None) -> InputError:
        if at is None:
            at = self._tokens[self._at].at if self._at < len(self._tokens) else len(self.text)
        return InputError(f"{self._where}: {what} at character {at + 1} of {self.text!r}")

    def _next_is(self, *words: str) -> bool:
        if self._at < len(self._tokens):
            token = self._tokens[self._at]
            return token.kind != "text" and token.text.lower() in words
        return False

    def _accept(self, *words: str) -> bool:
        """Tell whether one of these comes next, and pass it."""
        found = self._next_is(*words)
        self._at += found
        return found

    def _expect(self, word: str) -> None:
        if not self._accept(word):
            raise self._fail(f"expected `{word}`")

    def _take(self, what: str, *others: str) -> _Token:
        """Return the next token, which is neither an operator nor one of these words."""
        if self._at >= len(self._tokens) or self._tokens[self._at].kind == "op" or self._next_is(*others):
            raise self._fail(f"expected {what}")
        self._at += 1
        return self._tokens[self._at - 1]

    def _condition(self) -> Node:
        nodes = [self._both()]
        while self._accept("or"):
            nodes.append(self._both())
        return (
            nodes[0] if len(nodes) == 1 else lambda values: functools.reduce(np.logical_or, (n(values) for n in nodes))
        )

    def _both(self) -> Node:
        nodes = [self._one()]
        while self._accept("and"):
            nodes.append(self._one())
        return (
            nodes[0] if len(nodes) == 1 else lambda values: functools.reduce(np.logical_and, (n(values) for n in nodes))
        )

    def _one(self) -> Node:
        self._depth += 1
        if self._depth > DEEPEST:
            raise self._fail(f"more than {DEEPEST} levels of brackets and `not`")
        if self._accept("not"):
            inner = self._one()
            made: Node = lambda values: ~inner(values)  # noqa: E731 - a node, as the others
        elif self._accept("("):
            made = self._condition()
            self._expect(")")
        else:
            made = self._test()
        self._depth -= 1
        return made

    def _test(self) -> Node:
        token = self._take("a name, `not` or `(`", "and", "or")
        name = token.text
        if name not in self.names:
            self.names.append(name)
        if not self._next_is(*_OPERATORS, *_WORDS):
            raise self._fail(f"expected {_HOW}")
        how = self._tokens[self._at].text.lower()
        self._at += 1
        if how == "is":
            wanted = not self._accept("not")
            self._expect("null")
            return lambda values: self._values(values, token, []).are_null() == wanted
        if how == "contains":
            part = self._take("a value")
            return lambda values: self._values(values, token, [part.text]).contain(part.text, name == FLAGS)
        given = [self._value()] if how != "in" else self._list()
        compare = "=" if how == "in" else how

        def met(values: Lookup) -> Array:
            found = self._values(values, token, given)
            return functools.reduce(np.logical_or, (found.compared(compare, one) for one in given))

        return met

    def _list(self) -> list[Any]:
        self._expect("(")
        given = [self._value()]
        while self._accept(","):
            given.append(self._value())
        self._expect(")")
        return given

    def _value(self) -> Any:
        """Return the next value: a number, or a text."""
        token = self._take("a value")
        word = token.text.lower()
        if token.kind == "word":
            if word in ("true", "false"):
                return int(word == "true")
            for kind in (int, float):
                with contextlib.suppress(ValueError):
                    number = kind(word)
                    return token.text if math.isnan(number) else number
        return token.text

    def _values(self, values: Lookup, name: _Token, given: Collection[Any]) -> Values:
        """Return the values of a name, if they can be compared with what is given."""
        found = values(name.text) if name.text in self._known else None
        if found is None:
            raise self._fail(f"no value {name.text!r}; there are {', '.join(map(repr, self._known))};", name.at)
        for wanted in given:
            is_text = isinstance(wanted, str)
            mine, others = found.are_texts(), found.are_numbers()
            if not (mine if is_text else others).any() and (others if is_text else mine).any():
                what = "a number, and not text" if is_text else "text, and not a number: put it in quotes"
                raise self._fail(f"{name.text!r} is {what}; it is compared with {wanted!r}", name.at)
        return found
