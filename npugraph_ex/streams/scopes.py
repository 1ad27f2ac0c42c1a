"""Scopes in a graph: from `scope_enter` and `scope_exit` nodes to labels on nodes, and back.

While passes work, a node's scope is in its metadata: `core_limit` (cube cores, vector cores), `deterministic_level`,
`stream_label`. Labels travel with nodes that move, and fusion refuses to join nodes that differ in them; enclosing
nodes in the list could not say that. At the end the limits and levels become enclosing nodes again, for the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from npugraph_ex.errors import ScopeError
from npugraph_ex.observe.graphs import launches
from npugraph_ex.observe.report import source_line
from npugraph_ex.passes.pass_ import PassContext
from npugraph_ex.streams.ops import ENTERS, EXITS

CUBE, VECTOR = "_op_aicore_num", "_op_vectorcore_num"
LEVEL = "_deterministic_level"
STREAM, PRIORITY = "_user_stream_label", "_user_stream_priority"

KEPT = -1
"""A core number that leaves what the scope around it says."""

Labels = dict[str, Any]


def labels_of(keys: Sequence[str], values: Sequence[str], outer: Mapping[str, Any]) -> Labels:
    """What one scope says of the nodes in it, as `node.meta` entries.

    Args:
        keys: the first argument of `scope_enter`.
        values: the second, one for each key.
        outer: the labels that are in force around it.

    Raises:
        ScopeError: an unknown key, a value that is no number, or not one value a key.
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


def label(gm: fx.GraphModule, context: PassContext) -> None:
    """Turn enclosing nodes into labels. A label that a node already has came from further inside, and stays.

    Raises:
        ScopeError: a scope is closed that was not opened, or left open at the end of the graph.
    """
    del context
    opened: list[tuple[fx.Node, Labels]] = []
    for node in list(gm.graph.nodes):
        if node.target in ENTERS:
            around = opened[-1][1] if opened else {}
            keys, values = _strings(node, 0), _strings(node, 1)
            opened.append((node, {**around, **labels_of(keys, values, around)}))
        elif node.target in EXITS:
            if not opened:
                raise ScopeError(
                    f"{_at(node)} closes a scope, and none is open; every exit needs its scope_enter before it"
                )
            gm.graph.erase_node(opened.pop()[0])
            gm.graph.erase_node(node)
        elif node.op == "call_function" and opened:
            for key, value in opened[-1][1].items():
                node.meta.setdefault(key, value)
    if opened:
        raise ScopeError(
            f"{_at(opened[-1][0])} opens a scope that the graph does not close. A scope must end in the graph in which "
            "it begins: add the scope_exit, or keep graph breaks out of the `with` block"
        )


def _strings(node: fx.Node, position: int) -> list[str]:
    """One argument of a `scope_enter` node, however it is passed."""
    name = ("keys", "values")[position]
    given: Any = node.args[position] if position < len(node.args) else node.kwargs.get(name)
    return list(given)


def lower(gm: fx.GraphModule, context: PassContext) -> None:
    """Enclose each run of nodes under one core limit and level, so that running the graph sets and resets them."""
    del context
    current: tuple[tuple[str, str], ...] = ()
    for node in list(gm.graph.nodes):
        if node.op != "output" and not launches(node):
            continue
        wanted = () if node.op == "output" else _spelt(node)
        if wanted == current:
            continue
        with gm.graph.inserting_before(node):
            if current:
                gm.graph.call_function(EXITS[0])
            if wanted:
                keys, values = zip(*wanted, strict=True)
                gm.graph.call_function(ENTERS[0], (list(keys), list(values)))
        current = wanted


def _spelt(node: fx.Node) -> tuple[tuple[str, str], ...]:
    """The limits and the level of a node as `scope_enter` takes them."""
    said: list[tuple[str, str]] = []
    if "core_limit" in node.meta:
        cube, vector = node.meta["core_limit"]
        said += [(CUBE, str(cube)), (VECTOR, str(vector))]
    if "deterministic_level" in node.meta:
        said.append((LEVEL, str(node.meta["deterministic_level"])))
    return tuple(said)


def _at(node: fx.Node) -> str:
    source = source_line(node)
    return f"{node.name} ({source})" if source else node.name
