"""The nodes of a graph as JSON, and back: targets are written by names that any process can look up."""

from __future__ import annotations

import base64
import builtins
import math
import operator
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from npugraph_ex import _torch_private
from npugraph_ex.saving.values import Json, Unsaveable, decode, encode

_FUNCTIONS: dict[str, ModuleType] = {
    "operator": operator,
    "_operator": operator,
    "math": math,
    "builtins": builtins,
    "torch": torch,
}
"""The modules of functions that a graph may call besides operators: arithmetic on sizes, and `getitem`."""

_ALLOWED_BUILTINS = frozenset({"abs", "bool", "float", "int", "max", "min", "pow", "round", "sum"})

_LEFT_OUT = frozenset({"val", "tensor_meta", "desc", "example_value"})
"""Metadata that is derived again, or that only the compilation needs."""


def encode_graph(gm: fx.GraphModule, home: torch.device | None) -> list[Json]:
    """Encode every node of ``gm``, in order.

    Raises:
        Unsaveable: a node calls or reads an object that another process does not have.
    """
    spelt: list[Json] = []
    constants: set[str] = set()
    for node in gm.graph.nodes:
        spelt.append(_encode_node(gm, node, home, new=str(node.target) not in constants))
        if node.op == "get_attr":
            constants.add(str(node.target))
    return spelt


def _encode_node(gm: fx.GraphModule, node: fx.Node, home: torch.device | None, *, new: bool) -> Json:
    spelt: dict[str, Json] = {"op": node.op, "name": node.name, "target": _encode_target(gm, node, new=new)}
    try:
        spelt["args"] = [encode(argument, home) for argument in node.args]
        spelt["kwargs"] = {key: encode(argument, home) for key, argument in node.kwargs.items()}
    except Unsaveable as reason:
        raise Unsaveable(f"{node.name}: {reason}") from None
    spelt["meta"] = _encode_meta(node, home)
    return spelt


def _encode_meta(node: fx.Node, home: torch.device | None) -> dict[str, Json]:
    """The metadata that later stages need: stream, limits, source; without torch's own entries."""
    kept: dict[str, Json] = {}
    for key, value in node.meta.items():
        if key in _LEFT_OUT or not isinstance(value, (str, int, float, bool, tuple, list)):
            continue
        try:
            kept[key] = encode(value, home)
        except Unsaveable:
            continue
    return kept


def _encode_target(gm: fx.GraphModule, node: fx.Node, *, new: bool) -> Json:
    target = node.target
    if node.op in ("placeholder", "output"):
        return target
    if node.op == "get_attr":
        return {"constant": {"name": str(target), **(_encode_constant(gm, node) if new else {})}}
    if isinstance(target, OpOverload):
        return {"operator": list(_torch_private.operator_name(target))}
    if node.op == "call_function":
        module, name = getattr(target, "__module__", ""), getattr(target, "__name__", "")
        if _function(module, name) is target:
            return {"function": [module, name]}
    raise Unsaveable(f"{node.name} calls {target}, which only this process knows")


def _function(module: str, name: str) -> object:
    """The function of that name, if a saved graph may call it; otherwise None."""
    if module == "builtins" and name not in _ALLOWED_BUILTINS:
        return None
    if module == "torch" and not name.startswith("sym_"):
        return None
    return getattr(_FUNCTIONS.get(module), name, None)


def _encode_constant(gm: fx.GraphModule, node: fx.Node) -> dict[str, Json]:
    """A constant tensor of the graph, with the bytes from its first to its last element."""
    value: object = operator.attrgetter(str(node.target))(gm)
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or not isinstance(value, torch.Tensor):
        raise Unsaveable(f"{node.name} reads {node.target} of the module, a {type(value).__name__}")
    if value.is_conj() or value.is_neg():
        raise Unsaveable(f"{node.name} reads {node.target} of the module, which is lazily conjugated or negated")
    span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    with _torch_private.real_execution():
        host = value.detach().as_strided((span if value.numel() else 0,), (1,)).cpu()
        data = base64.b64encode(host.view(torch.uint8).numpy().tobytes()) if host.numel() else b""
    return {
        "dtype": str(value.dtype).removeprefix("torch."),
        "size": list(value.shape),
        "stride": list(value.stride()),
        "device": value.device.type,
        "data": data.decode("ascii"),
    }


def decode_graph(spelt: list[Json], home: torch.device) -> fx.GraphModule:
    """Undo `encode_graph`; nodes keep their names, and have no ``meta["val"]`` yet.

    Raises:
        LookupError: an operator that is not registered in this process, by its name.
        KeyError, TypeError, ValueError, AttributeError: ``spelt`` was not written by `encode_graph`.
    """
    graph = fx.Graph()
    constants: dict[str, torch.Tensor] = {}
    nodes: dict[str, fx.Node] = {}
    for entry in spelt:
        args = tuple(decode(argument, nodes, home) for argument in entry["args"])
        kwargs = {key: decode(argument, nodes, home) for key, argument in entry["kwargs"].items()}
        target: Any = _decode_target(entry, constants, home)
        node = graph.create_node(entry["op"], target, args, kwargs, name=entry["name"])
        node.meta.update({key: decode(value, nodes, home) for key, value in entry["meta"].items()})
        nodes[entry["name"]] = node
    graph.lint()
    return _torch_private.lazy_graph_module(constants, graph)


def _decode_target(entry: Json, constants: dict[str, torch.Tensor], home: torch.device) -> str | Callable[..., Any]:
    target = entry["target"]
    if isinstance(target, str):
        return target
    ((kind, content),) = target.items()
    if kind == "constant":
        name = str(content["name"])
        if name not in constants:  # later nodes refer to it by name
            constants[name] = _decode_constant(content, home)
        return name
    if kind == "operator":
        namespace, name, overload = content
        found = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
        if found is None:
            raise LookupError(f"{namespace}::{name}.{overload}")
        return found  # type: ignore[no-any-return]
    function = _function(*content)
    if not callable(function):
        raise TypeError(f"{content} is no function that a saved graph may call")
    return function


def _decode_constant(content: Json, home: torch.device) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, content["dtype"])
    data = bytearray(base64.b64decode(content["data"], validate=True))
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    memory = flat.to(home) if content["device"] == home.type else flat
    return memory.as_strided(content["size"], content["stride"])
