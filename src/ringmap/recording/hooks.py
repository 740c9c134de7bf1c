"""Hooks: the user's functions between a step and a buffer.

    transition_builder    raw values of a step ─► the columns of a buffer
    validate_transition   is each of them in its space?
    context_fn            info, options, seed of a reset ─► what is constant in the episode

Invariants: a hook receives copies; its exception is raised unchanged, and cuts only its own slot.
Not here: what happens after that (recorder.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from ringmap.errors import InputError
from ringmap.recording.adapters import Sink
from ringmap.recording.keys import Keys, nested
from ringmap.storage.columns.schema import ColumnSpec
from ringmap.storage.columns.values import as_array, cast, flattened

__all__ = ["Hooks"]


class Hooks:
    """The hooks of a wrapper."""

    def __init__(
        self,
        keys: Keys,
        transition_builder: Any,
        validate: bool,
        context_fn: Callable[..., Any] | None,
    ) -> None:
        where = keys.where
        transforms = hasattr(transition_builder, "transform")
        if transition_builder is not None and not transforms and not callable(transition_builder):
            raise InputError(
                f"{where}: transition_builder must be callable, or have transform(dict) -> dict, got "
                f"{transition_builder!r}"
            )
        if context_fn is not None and not callable(context_fn):
            raise InputError(f"{where}: context_fn must be callable, got {context_fn!r}")
        self.keys, self.context_fn = keys, context_fn
        self.builder, self._transforms = transition_builder, transforms
        self.builds, self.validates = transition_builder is not None, bool(validate)
        self._spaces: dict[int, Any] = {}

    def check(self, sink: Sink) -> None:
        """Raise if transitions are to be validated, and the sink has no columns to validate them against."""
        if self.validates and sink.columns is None:
            raise InputError(
                f"{self.keys.where}: validate_transition=True with a transition_builder needs a buffer with a schema; "
                "give the buffer one"
            )

    def build(self, raw: Mapping[str, Any], context: Any, sink: Sink) -> Any:
        """Return the transition of a step for a sink, from its flat values (copies) and the episode's context."""
        if not self.builds:
            self._check_raw(raw)
            return None
        keys = self.keys
        whole = {
            "obs": nested(keys.obs, keys.observation_space, raw),
            "next_obs": nested(keys.obs, keys.observation_space, raw, "next_"),
            "action": nested(keys.action, keys.action_space, raw),
        }
        if self._transforms:
            rest = {name: value for name, value in raw.items() if name.split("/")[0] not in whole}
            made = self.builder.transform({**whole, **rest, "context": context})
        else:
            made = self.builder(
                cached_obs=whole["obs"],
                cached_context=context,
                action=whole["action"],
                next_obs=whole["next_obs"],
                reward=raw["reward"],
                terminated=raw["terminated"],
                truncated=raw["truncated"],
                env_index=raw["env_index"],
                rb_single_space=self.space_of(sink),
            )
        if not isinstance(made, Mapping):
            raise InputError(
                f"{keys.where}: transition_builder returned {type(made).__name__}, expected column -> value"
            )
        where = f"{keys.where}: transition_builder"
        made = {
            name: np.array(as_array(value, f"{where}: {name!r}", "item"))  # a copy
            for name, value in flattened(made, where).items()
        }
        if self.validates:
            self._check_built(made, sink)
        return made

    def _check_raw(self, raw: Mapping[str, Any]) -> None:
        """Raise unless observations, action and reward are in the environment's own spaces."""
        for name, (_, _, space) in self.keys.known.items():
            if space is not None:
                self._contains(name, space, raw[name])
        if np.isnan(raw["reward"]):
            raise InputError(f"{self.keys.where}: validate_transition: 'reward' is NaN")

    def _check_built(self, made: Mapping[str, Any], sink: Sink) -> None:
        known = self.space_of(sink).spaces
        if set(made) != set(known):
            raise InputError(f"{self.keys.where}: validate_transition: expected columns {[*known]}, got {[*made]}")
        for name, value in made.items():
            space = known[name]
            array = np.asarray(value)
            if array.dtype != space.dtype and array.shape == space.shape:
                whose = f"{self.keys.where}: validate_transition: {name!r}"
                array = cast(array[None], space.dtype, sink.casting, whose)[0]
            self._contains(name, space, array)

    def _contains(self, name: str, space: Any, value: Any) -> None:
        value = np.asarray(value)
        if not space.contains(value.item() if isinstance(space, spaces.Text) and not value.ndim else value):
            raise InputError(
                f"{self.keys.where}: validate_transition: {name!r} is not in {space}: "
                f"{np.array2string(value, threshold=8)}"
            )

    def space_of(self, sink: Sink) -> Any:
        """Return the space of one transition in a sink: a Dict of its columns."""
        if id(sink) not in self._spaces:
            columns = self.keys.default() if sink.columns is None else sink.columns
            self._spaces[id(sink)] = spaces.Dict({c.name: self._space(c) for c in columns})
        return self._spaces[id(sink)]

    def _space(self, column: ColumnSpec) -> Any:
        shape, dtype, space = self.keys.known.get(column.name, (None, None, None))
        if space is not None and (shape, dtype) == (column.shape, column.dtype):
            return space
        kind = column.dtype.kind
        if kind == "f":
            return spaces.Box(-np.inf, np.inf, column.shape, column.dtype.type)
        if kind == "b":
            return spaces.Box(0, 1, column.shape, np.bool_)
        if kind in "iu":
            whole = np.iinfo(column.dtype)
            return spaces.Box(whole.min, whole.max, column.shape, column.dtype.type)
        raise InputError(
            f"{self.keys.where}: column {column.name!r} of {column.dtype} has no Gymnasium space; leave it out of the "
            "schema"
        )
