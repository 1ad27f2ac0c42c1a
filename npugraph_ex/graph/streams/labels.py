"""The keys of a scope: turns the strings of `scope_enter` into labels of nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from npugraph_ex.errors import ScopeError

CUBE, VECTOR = "_op_aicore_num", "_op_vectorcore_num"
LEVEL = "_deterministic_level"
STREAM, PRIORITY = "_user_stream_label", "_user_stream_priority"

KEPT = -1
"""A core number that keeps the outer scope's value."""

MAIN = ""
"""The label of nodes without a stream label: the stream on which the graph is captured or called."""

Labels = dict[str, Any]


def labels_of(keys: Sequence[str], values: Sequence[str], outer: Mapping[str, Any]) -> Labels:
    """The labels that one scope gives its nodes, as `node.meta` entries.

    Args:
        keys: the first argument of `scope_enter`.
        values: the second, one for each key.
        outer: the labels of the outer scopes.

    Raises:
        ScopeError: an unknown key, a value that is no number, or not one value for each key.
    """
    if len(keys) != len(values):
        raise ScopeError(f"scope_enter takes one value for each key, got {list(keys)} and {list(values)}")
    said = dict(zip(keys, values, strict=True))
    known = (CUBE, VECTOR, LEVEL, STREAM, PRIORITY)
    unknown = sorted(set(said) - set(known))
    if unknown:
        raise ScopeError(f"scope_enter knows the keys {', '.join(known)}; got {', '.join(unknown)}")
    found: Labels = {}
    if CUBE in said or VECTOR in said:
        around = outer.get("core_limit", (KEPT, KEPT))
        inner = (_number(said, CUBE), _number(said, VECTOR))
        found["core_limit"] = tuple(new if new != KEPT else old for new, old in zip(inner, around, strict=True))
    if LEVEL in said:
        found["deterministic_level"] = _number(said, LEVEL)
    if STREAM in said:
        if not said[STREAM]:
            raise ScopeError("a stream's tag takes a text that is not empty; got ''")
        found["stream_label"] = said[STREAM]
    if PRIORITY in said:
        found["stream_priority"] = _number(said, PRIORITY)
    return found


def _number(said: Mapping[str, str], key: str) -> int:
    text = said.get(key, str(KEPT))
    try:
        return int(text)
    except ValueError:
        raise ScopeError(f"the scope key {key} takes a whole number as text, got {text!r}") from None
