"""Conditions on episodes: `return > 100 and seed < 50`, parsed by hand and computed on whole columns.

    text -> tokens -> a tree of and, or, not, comparisons -> one bool per episode

    condition   either or either ...        either   both and both ...      both   not both | ( condition ) | name op
    value op          < <= > >= = == !=  contains

`contains` looks for a part of a text, and for a whole flag: `flags contains bad` is not met by `badly_lit`.
Invariants: nothing of the text is evaluated as Python; an error says at which character; an episode that lacks a value
meets no comparison with it but `!=`.
Not here: where the columns come from.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ringmap.errors import InputError

__all__ = ["Values", "names_in", "select"]

Array = np.ndarray[Any, np.dtype[Any]]

FLAGS = "flags"
"""The name whose values are words: it contains whole ones."""

MOST = 2000
"""Characters of a condition."""
DEEPEST = 50

_TOKEN = re.compile(r"\s*(?:(?P<op><=|>=|==|!=|<|>|=|\(|\))|(?P<text>'[^']*'|\"[^\"]*\")|(?P<word>[^\s<>=!()'\"]+))")
_NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "<": np.less,
    "<=": np.less_equal,
    ">": np.greater,
    ">=": np.greater_equal,
    "=": np.equal,
    "==": np.equal,
    "!=": np.not_equal,
}


class Values(NamedTuple):
    """A value of each episode: `numbers`, NaN where it is none; `texts`, None where it is none, or None if none is
    text."""

    numbers: Array
    texts: Array | None = None


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


class _Parser:
    def __init__(self, text: str, where: str, columns: Mapping[str, Values], count: int) -> None:
        self.text, self.where, self.columns, self.count = text, where, columns, count
        self.tokens: list[_Token] = list(_tokens(text, where))
        self.at = 0
        self.depth = 0

    def fail(self, what: str) -> InputError:
        at = self.tokens[self.at].at if self.at < len(self.tokens) else len(self.text)
        return InputError(f"{self.where}: {what} at character {at + 1} of {self.text!r}")

    def next_is(self, *words: str) -> bool:
        if self.at < len(self.tokens):
            token = self.tokens[self.at]
            return token.kind != "text" and token.text.lower() in words
        return False

    def take(self, what: str) -> _Token:
        if self.at >= len(self.tokens):
            raise self.fail(f"expected {what}")
        self.at += 1
        return self.tokens[self.at - 1]

    def condition(self) -> Array:
        found = self.both()
        while self.next_is("or"):
            self.at += 1
            found = found | self.both()
        return found

    def both(self) -> Array:
        found = self.one()
        while self.next_is("and"):
            self.at += 1
            found = found & self.one()
        return found

    def one(self) -> Array:
        self.depth += 1
        if self.depth > DEEPEST:
            raise self.fail(f"more than {DEEPEST} levels of brackets and `not`")
        try:
            if self.next_is("not"):
                self.at += 1
                return ~self.one()
            if self.next_is("("):
                self.at += 1
                found = self.condition()
                if not self.next_is(")"):
                    raise self.fail("expected `)`")
                self.at += 1
                return found
            return self.comparison()
        finally:
            self.depth -= 1

    def comparison(self) -> Array:
        if self.next_is("and", "or", ")"):
            raise self.fail("expected a name, `not` or `(`")
        name = self.take("a name, `not` or `(`")
        if name.kind == "op":
            self.at -= 1
            raise self.fail("expected a name, `not` or `(`")
        known = name.text in self.columns
        if not known:
            self.at -= 1
            raise self.fail(f"no value {name.text!r}; there are {', '.join(map(repr, self.columns))};")
        if not self.next_is(*_NUMBERS, "contains"):
            raise self.fail("expected one of < <= > >= = != contains")
        how = self.take("an operator").text.lower()
        if self.next_is(*_NUMBERS, "(", ")"):
            raise self.fail("expected a value")
        value = self.take("a value")
        return _compared(self.columns[name.text], how, value, name.text == FLAGS)


def _tokens(text: str, where: str) -> Iterator[_Token]:
    at, end = 0, len(text.rstrip())
    while at < end:
        found = _TOKEN.match(text, at)
        if found is None:
            at += len(text[at:]) - len(text[at:].lstrip())
            raise InputError(f"{where}: can't read {text[at]!r} at character {at + 1} of {text!r}")
        kind = str(found.lastgroup)
        value = found[kind]
        yield _Token(kind, value[1:-1] if kind == "text" else value, found.start(kind))
        at = found.end()


def _compared(values: Values, how: str, value: _Token, words: bool) -> Array:
    numbers, texts = values
    none = np.zeros(len(numbers), np.bool_)
    if how == "contains":
        wanted = value.text.lower()
        if texts is None:
            return none
        within = (None if t is None else t.lower().split() if words else t.lower() for t in texts)
        return np.fromiter((t is not None and wanted in t for t in within), np.bool_, len(texts))
    number = _number(value) if value.kind == "word" else None
    if number is not None:
        found: Array = _NUMBERS[how](numbers, number)
        return found
    if texts is None:
        return ~none if how == "!=" else none
    compare = _NUMBERS[how]
    return np.fromiter(
        (bool(compare(t, value.text)) if t is not None else how == "!=" for t in texts), np.bool_, len(texts)
    )


def _number(value: _Token) -> float | None:
    word = value.text.lower()
    if word in ("true", "false"):
        return float(word == "true")
    try:
        return float(word)
    except ValueError:
        return None


def select(text: str, columns: Mapping[str, Values], count: int, where: str) -> Array:
    """Return of each of `count` episodes whether it meets a condition; an empty one is met by all.

    Args:
        text: such as `return > 100 and not (seed < 50 or room = "left")`. True and false count as 1 and 0.
        columns: name -> values, one for each episode.
        count: of episodes.
        where: the caller to name in an error.

    Raises:
        InputError: the text can't be parsed, or names what no episode has; the message says at which character.

    Example:
        >>> columns = {"seed": Values(np.array([1.0, 2.0, np.nan]))}
        >>> select("seed < 2 or seed = 7", columns, 3, "example").tolist()
        [True, False, False]
    """
    if len(text) > MOST:
        raise InputError(f"{where}: a condition of {len(text):,} characters; at most {MOST:,}")
    if not text.strip():
        return np.ones(count, np.bool_)
    parser = _Parser(text, where, columns, count)
    found = parser.condition()
    if parser.at < len(parser.tokens):
        raise parser.fail("expected `and`, `or` or the end")
    return found


def names_in(text: str, where: str) -> list[str]:
    """Return the names in a condition: what stands before an operator."""
    tokens = list(_tokens(text[:MOST], where))
    return [
        token.text
        for token, after in itertools.pairwise(tokens)
        if token.kind != "op" and after.kind != "text" and after.text.lower() in (*_NUMBERS, "contains")
    ]
