"""Operations that a capture forbids. They are found before the capture, with their source lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.aclgraph.host_scalars import host_scalars
from npugraph_ex.aclgraph.host_updates import UpdatePlan
from npugraph_ex.graph.memory.aliases import tensor_leaves
from npugraph_ex.graph.source import source_line
from npugraph_ex.graph.streams.ops import RECORDS

_HOST_READS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_index.Tensor)  # noqa: SLF001 - the operator's name
_ELSEWHERE = "a tensor on device"
_READ_ONCE = "would be read once, at capture, and never again; move it to the NPU, or make it there"
_OF_A_PROMPT = (
    "is the length that the static cache of transformers counts on the CPU in the call that makes it; in generate() that is the "
    "prompt, which runs operator by operator, and the steps after it are captured: nothing is to be done"
)
_A_FLOAT = (
    "is what torch makes of a Python float where gradients are needed and its value was another one before; pass it as a tensor "
    "on the NPU"
)
_A_RESULT = (
    "holds a number that the graph returns, as torch makes it of one that is computed from a changing Python float; compute it "
    "outside the function, or pass the float as a tensor on the NPU"
)
_CHECK = torch.ops.aten._linalg_check_errors.default  # noqa: SLF001 - the operator's name
_BRANCHES = (torch.ops.higher_order.cond, torch.ops.higher_order.while_loop)


@dataclass(frozen=True)
class Obstacle:
    """One operation that cannot be captured: the node, the reason, and the user's source line."""

    node: str
    reason: str
    source: str

    def __str__(self) -> str:
        """One line for a message."""
        return f"{self.node}: {self.reason}" + (f" ({self.source})" if self.source else "")


def find_obstacles(
    gm: fx.GraphModule, updates: UpdatePlan | None = None, names: Sequence[str] | None = None
) -> list[Obstacle]:
    """All obstacles, in graph order. Host values that ``updates`` covers are none; ``names`` are Dynamo's for the inputs."""
    known = [re.sub(r"L\['(\w+)'\]", r"\1", name) for name in names or ()]
    inputs = dict(zip(gm.graph.find_nodes(op="placeholder"), known, strict=False))
    return list(_obstacles(gm, updates.hosts if updates is not None else frozenset(), inputs))


def in_lines(obstacles: Sequence[Obstacle]) -> str:
    """The lines of a message: one for all obstacles with the same reason and source line, as the layers of a model have."""
    alike: dict[tuple[str, str], list[Obstacle]] = {}
    for obstacle in obstacles:
        alike.setdefault((obstacle.reason, obstacle.source), []).append(obstacle)
    lines = [f"{first}, and {len(more)} more like it" if more else str(first) for first, *more in alike.values()]
    return "\n  ".join(lines)


def _obstacles(gm: fx.GraphModule, updated: frozenset[fx.Node], inputs: Mapping[fx.Node, str]) -> Iterator[Obstacle]:
    home: torch.device | None = None
    known, elsewhere = updated | host_scalars(gm.graph), set[fx.Node]()
    for node in gm.graph.nodes:
        # The result of a record is a token, not data.
        if node.op == "output" or node.target in RECORDS or node in known or _torch_private.is_effect_token(node):
            continue
        reason = _reason(node, home)
        follows = not elsewhere.isdisjoint(node.all_input_nodes)  # from a tensor that was named
        if reason.startswith(_ELSEWHERE):
            elsewhere.add(node)
        if reason and not (follows and node in elsewhere):
            named = node.all_input_nodes[0] if _widens_an_input(node) else node
            line = _line_of(node)
            if "transformers/cache_utils.py" in line:
                reason = reason.replace(_READ_ONCE, _OF_A_PROMPT)
            yield Obstacle(inputs.get(named) or _effect_name(node) or node.name, reason, line)
        home = home or next((leaf.device for leaf in tensor_leaves(node) if leaf.device.type == "npu"), None)


def _line_of(node: fx.Node) -> str:
    """The line of a node, or of the first one that follows from it: torch makes some operators without saying for which line."""
    here: fx.Node | None = node
    while here is not None:
        line = source_line(here)
        if line:
            return line
        here = next(iter(here.users), None)
    return ""


def _reason(node: fx.Node, home: torch.device | None) -> str:
    """Why ``node`` keeps the graph from being captured on the device ``home``; empty if it does not."""
    effect = _torch_private.ordered_effect(node)
    if effect is not None:
        return _reason_of_effect(*effect)
    if isinstance(node.meta.get("val"), torch.Generator):
        return (
            "a random generator, with which torch.utils.checkpoint repeats its random numbers in the backward; "
            "each replay would repeat the numbers of the capture"
        )
    if node.target in _BRANCHES:
        return "the host has to read a condition from the device"
    if _HOST_READS & set(getattr(node.target, "tags", ())) and not _indexes_by_number(node):
        return "the host has to read its result, or the result's shape, from the device"
    if torch.Tag.inplace_view in getattr(node.target, "tags", ()) and node.all_input_nodes[0].op == "placeholder":
        return "it gives an input other memory, or another shape, which a replay would not do"
    for leaf in tensor_leaves(node):
        if leaf.device.type != "npu":
            why = _A_FLOAT if _widens_an_input(node) else _A_RESULT if _is_a_returned_number(node) else _READ_ONCE
            return f"{_ELSEWHERE} {leaf.device.type!r} {why}"
        if home is not None and leaf.device != home:
            return f"it is on {leaf.device} but the graph began on {home}; a captured graph belongs to one device"
    return ""


def _widens_an_input(node: fx.Node) -> bool:
    """Whether this is the cast by which torch makes a tensor of a Python float that is an input."""
    return node.target is torch.ops.prims.convert_element_type.default and node.all_input_nodes[0].op == "placeholder"


def _is_a_returned_number(node: fx.Node) -> bool:
    """Whether this is a number on the host that only the graph's caller reads."""
    return node.target is torch.ops.aten.scalar_tensor.default and all(user.op == "output" for user in node.users)


def _effect_name(node: fx.Node) -> str:
    """What to call an operator with effects: a check of `torch.linalg` by the function that the program called."""
    effect = _torch_private.ordered_effect(node)
    if effect is None:
        return ""
    operator, arguments = effect
    return f"torch.linalg.{_checked(arguments)}" if operator is _CHECK else str(operator)


def _reason_of_effect(operator: object, arguments: Sequence[object]) -> str:
    if operator is not _CHECK:
        return "torch runs it for its effects, at each call and in order; a replay runs nothing on the host"
    unchecked = f"{_checked(arguments)}_ex"
    return "the host has to read from the device whether it failed (aten._linalg_check_errors)" + (
        f"; torch.linalg.{unchecked} does not ask the host" if unchecked in _ON_THE_DEVICE else ""
    )


_ON_THE_DEVICE = ("cholesky_ex", "inv_ex", "solve_ex")
"""Unchecked functions for which torch_npu has a kernel; it computes the others on the CPU."""


def _checked(arguments: Sequence[object]) -> str:
    """The function of `torch.linalg` whose success is checked; torch writes it with and without its module."""
    return str(arguments[1]).rpartition(".")[2]


def _indexes_by_number(node: fx.Node) -> bool:
    """Whether this is `x[i]` with whole numbers, so that the shape is known; only a mask has to be counted first."""
    if node.target not in _INDEXING:
        return False
    indices = [value.meta.get("val") for value in node.all_input_nodes[1:]]
    return all(isinstance(index, torch.Tensor) and index.dtype not in {torch.bool, torch.uint8} for index in indices)
