"""Projections that read one input, each in a kernel of its own, where one projection with a longer weight would do.

Joining weights costs memory or the model's parameters, so no pass does it by itself: the model's author can, or the option
`join_projections`. A weight that its author joins does not follow a training step, so this is for frozen weights.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from npugraph_ex.graph.inplace import inplace_overload
from npugraph_ex.graph.launches import NOTHING, Launched
from npugraph_ex.graph.source import source_line
from npugraph_ex.graph.written_calls import WrittenCall, calls_at, names_of
from npugraph_ex.lifting import terms
from npugraph_ex.lifting.forms.activation import ELEMENTWISE, gated
from npugraph_ex.lifting.forms.swiglu import GEGLU, SWIGLU
from npugraph_ex.lifting.projections import Projection, projected
from npugraph_ex.lifting.proposal import Proposal
from npugraph_ex.lifting.subgraph import Subgraph

_aten = torch.ops.aten
_GATED = 2
_BETWEEN = 8
"""Operators between a projection and the product of its activation: a GELU that is spelled out has seven, and casts."""
_OPERATORS = {SWIGLU.activation: "npu_swiglu", GEGLU.activation: "npu_geglu"}


@dataclass(frozen=True)
class SharedInput:
    """Projections of one input.

    Attributes:
        source: the lines of the projections.
        times: how often these lines occur.
        saves: kernels and bytes of all of them together.
        change: the lines that join them, for the first of these occurrences.
    """

    source: str
    times: int
    saves: Launched
    change: str


def shared_projections(graph: fx.Graph, names: Mapping[fx.Node, str], *, lifted: bool) -> list[SharedInput]:
    """The groups of projections of one input, those of equal lines together.

    Args:
        graph: of an inference, after the passes; operators in place become those that they stand for.
        names: the user's names of its inputs, as Dynamo writes them.
        lifted: whether the program lifts by judgement, so that joined gate and up become one operator.
    """
    operators = {inplace_overload(one): one for one in (*ELEMENTWISE, *terms.MULTIPLYING)}
    for node in graph.nodes:
        node.target = operators.get(node.target, node.target)
    groups: dict[tuple[object, ...], list[Projection]] = {}
    for node in graph.nodes:
        one = projected(node)
        if one is not None:
            groups.setdefault((one.x, node.target, one.bias is None, one.inputs_first), []).append(one)
    found: dict[str, SharedInput] = {}
    for those in groups.values():
        if len(those) < 2:
            continue
        joined = _joined(those, names, lifted=lifted)
        old = found.get(joined.source)
        found[joined.source] = (
            joined if old is None else SharedInput(joined.source, old.times + 1, old.saves + joined.saves, old.change)
        )
    return list(found.values())


def _joined(those: Sequence[Projection], names: Mapping[fx.Node, str], *, lifted: bool) -> SharedInput:
    pair = _gate_and_up(those)
    # One product instead of several: x is read once.
    saves = Launched(len(those) - 1, (len(those) - 1) * _read(those[0].x))
    source = ", ".join(dict.fromkeys(source_line(one.node) for one in those))
    if pair is None:
        sizes = ", ".join(str(one.size) for one in those)
        split, note = f"split(({sizes}), dim=-1)", ""
    else:
        those = pair.those
        saves += pair.saves if lifted else NOTHING
        split = "chunk(2, dim=-1)"
        note = (
            f"   # {pair.operator} is then lifted, which the row counts"
            if lifted
            else f'   # {{"lift": "judged"}} would then lift {pair.operator}, which the row does not count'
        )
    xs, parts, taken = _as_written(those, names)
    weight, bias, *results = (
        _free(name, taken) for name in ("joined_weight", "joined_bias", *(f"y{at}" for at in range(len(those))))
    )
    inputs_first = those[0].inputs_first
    lines = [_cat(weight, [part.weight for part in parts], ", dim=1" if inputs_first else "")]
    biases = [part.bias for part in parts if part.bias]
    if biases:
        lines.append(_cat(bias, biases))
    added = [bias] if biases else []
    linear = f"torch.nn.functional.linear({', '.join((xs[0], weight, *added))})"
    product = f"({' + '.join((f'{xs[0]} @ {weight}', *added))}).{split}" if inputs_first else f"{linear}.{split}"
    if len(xs) > 1:  # a caller's arguments, perhaps, and other callers may pass different ones
        product = f"{product} if {' is '.join(xs)} else ({', '.join(part.text for part in parts)})"
    lines.append(f"{', '.join(results)} = {product}{note}")
    stand_for = (f"{result} in place of {part.text}" for result, part in zip(results, parts, strict=True))
    lines.append(f"# {', '.join(stand_for)}")
    return SharedInput(source, 1, saves, "\n".join(lines))


@dataclass(frozen=True)
class _WrittenProjection:
    """One projection in words: its expression, weight and bias."""

    text: str
    weight: str
    bias: str
    written: WrittenCall | None = None


def _as_written(
    those: Sequence[Projection], names: Mapping[fx.Node, str]
) -> tuple[Sequence[str], Sequence[_WrittenProjection], frozenset[str]]:
    """The input under each of its names, the projections as the source has them, and the names around them.

    Words in angle brackets, which are no Python, stand for what the source does not tell: where the calls are in several
    functions, one call in a function of its own makes all of the products, or the input is two expressions.
    """
    unwritten = [_WrittenProjection("", _name(one.weight, names), _name(one.bias, names)) for one in those]
    found = [_written(source_line(one.node), part) for one, part in zip(those, unwritten, strict=True)]
    parts = [part for part in found if part is not None]
    calls = [part.written for part in parts if part.written is not None]
    if len({id(one.call) for one in calls}) == len(those) and len({one.function for one in calls}) == 1:
        inputs = {ast.unparse(one.call.args[0]): one.call.args[0] for one in calls}
        named = len(inputs) == 1 or all(map(_is_name, inputs.values()))
        xs = list(inputs) if named else [_unknown_input(parts)]
        return xs, parts, names_of(calls[0].function)
    parts = [
        replace(part, text=f"<the product with {part.weight}{part.bias and f', plus {part.bias}'}>")
        for part in unwritten
    ]
    return [_unknown_input(parts)], parts, frozenset()


def _unknown_input(parts: Sequence[_WrittenProjection]) -> str:
    return f"<the tensor that {parts[0].weight} multiplies>"


def _is_name(expression: ast.expr) -> bool:
    """``x`` or ``self.x``: an object that is the same however often it is asked for."""
    return isinstance(expression, ast.Name) or (isinstance(expression, ast.Attribute) and _is_name(expression.value))


def _written(place: str, part: _WrittenProjection) -> _WrittenProjection | None:
    """The call of a module, or of `linear`, with this weight and bias; None where there is not one such call at its line."""
    best: dict[int, list[_WrittenProjection]] = {}
    for written in calls_at(place):
        call = written.call
        if not call.args or isinstance(call.args[0], ast.Starred):
            continue
        text = ast.unparse(call)
        if _is_linear(call):
            weight, bias, *_ = (
                *map(ast.unparse, call.args[1:3]),
                *(ast.unparse(one.value) for one in call.keywords),
                "",
                "",
            )
            found, agree = _WrittenProjection(text, weight, bias, written), _agreement(weight, part.weight)
            same = bool(bias) == bool(part.bias)
        else:
            module = ast.unparse(call.func)
            found = _WrittenProjection(text, f"{module}.weight", f"{module}.bias" if part.bias else "", written)
            agree = _agreement(module, part.weight.removesuffix(".weight"))
            same = len(call.args) == 1 and not call.keywords
            same &= part.bias in {"", f"{part.weight.removesuffix('.weight')}.bias"}
        if agree and same:
            best.setdefault(agree, []).append(found)
    those = best[max(best)] if best else []
    return those[0] if len({one.text for one in those}) == 1 else None


def _is_linear(call: ast.Call) -> bool:
    named = ast.unparse(call.func).rpartition(".")[2]
    return len(call.args) + len(call.keywords) > 1 and named in {"linear", "matmul", "mm"}


def _agreement(written: str, name: str) -> int:
    """How many parts of ``self.q`` agree with the end of ``model.layers[0].q``; its variable agrees only with the whole."""
    parts, wanted = (text.replace("[", ".[").split(".") for text in (written, name))
    if parts == wanted:
        return len(parts)
    return len(parts) - 1 if len(parts) > 1 and wanted[1 - len(parts) :] == parts[1:] else 0


def _free(name: str, taken: frozenset[str]) -> str:
    return next(one for one in (name, *(f"{name}_{at}" for at in range(1, len(taken) + 2))) if one not in taken)


def _cat(name: str, parameters: Sequence[str], dim: str = "") -> str:
    return f"{name} = torch.cat(({', '.join(parameters)}){dim})   # once, after the last change of the weights"


def _name(parameter: fx.Node | None, names: Mapping[fx.Node, str]) -> str:
    return "" if parameter is None else _attribute_path(names.get(parameter, str(parameter.target)))


def _attribute_path(name: str) -> str:
    """Dynamo's ``L['self'].layers.0.weight`` as the model's code has it: ``self.layers[0].weight``."""
    return re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", re.sub(r"^[LG]\['(\w+)'\]", r"\1", name))


def _read(x: fx.Node) -> int:
    value = terms.tensor(x)
    return 0 if value is None else value.untyped_storage().nbytes() if isinstance(value.numel(), int) else 0


@dataclass(frozen=True)
class _GatedPair:
    """Gate before up, the operator of their halves, and what it saves beside their product: activation and product."""

    those: Sequence[Projection]
    operator: str
    saves: Launched


def _gate_and_up(those: Sequence[Projection]) -> _GatedPair | None:
    """The pair whose activation and product a lift makes one operator of; None where they are no such pair."""
    if len(those) != _GATED or len({one.node.meta["val"].shape[-1] for one in those}) > 1:
        return None
    for product in _products_of(those[0].node):
        found = gated(product)
        operator = _OPERATORS.get(found.activation.operator) if found is not None else None
        if found is None or operator is None:
            continue
        for gate, up in (those, those[::-1]):
            if gate.node in terms.reshaped_from(found.gate) and up.node in terms.reshaped_from(found.up):
                end = next((user for user in product.users if terms.before_a_cast_back(user) is product), product)
                subgraph = Subgraph.of(Proposal((gate.node, up.node), (end,), ()))
                if isinstance(subgraph, Subgraph):
                    made = Launched(1, (len(those) + 1) * _read(end))
                    return _GatedPair((gate, up), operator, Launched.of(subgraph.vanishing) - made)
    return None


def _products_of(node: fx.Node) -> Iterator[fx.Node]:
    """The products that are computed of a node with up to so many operators in between."""
    found, latest = {node}, {node}
    for _ in range(_BETWEEN):
        latest = {user for one in latest for user in one.users} - found
        found |= latest
        yield from sorted(one for one in latest if terms.calls(one, *terms.MULTIPLYING))
