"""What a rule's functions trace to by dispatch alone is what make_fx traces them to."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._inductor.pattern_matcher import fwd_only
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.nn import functional
from torch.utils import _pytree as pytree

from npugraph_ex._torch_private import forget_fake_results
from npugraph_ex.fusion import dispatch_tracer, tracing
from npugraph_ex.fusion.registry import USER_RULES, register_replacement
from npugraph_ex.fusion.rule import FusionRule
from npugraph_ex.fusion.rules import BUILT_IN
from npugraph_ex.testing.generator.client_operators import client_operators
from npugraph_ex.testing.generator.patterns import pattern_of
from npugraph_ex.testing.generator.strategies import planted_programs, sample
from npugraph_ex.testing.oracle import tracing as program_tracing
from npugraph_ex.testing.oracle.case import Case

RULES = sorted(BUILT_IN, key=lambda rule: rule.name)
COMPUTE_WITH_SIZES = frozenset({"add_rms_norm_dynamic_quant", "qk_norm_rope"})
"""The rules of which a variant's functions do arithmetic on symbolic sizes, which is make_fx's."""
aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _operators() -> Iterator[None]:
    with client_operators():
        yield


def _symbolic(examples: list[Any]) -> list[Any]:
    """The examples with one symbol for every size that is the first one of a matrix."""
    environment = ShapeEnv()
    tensors = [value for value in examples if isinstance(value, torch.Tensor)]
    symbols = {}
    for size in {tensor.shape[0] for tensor in tensors if tensor.dim() > 1}:
        source = ConstantSource(f"size_{size}")
        symbol = environment.create_symbol(size, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        symbols[size] = environment.create_symintnode(symbol, hint=size, source=source)
    with FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True):
        return [
            torch.empty([symbols.get(size, size) for size in value.shape], dtype=value.dtype, device="npu")
            if isinstance(value, torch.Tensor)
            else value
            for value in examples
        ]


def _examples(rule: FusionRule, *, symbolic: bool) -> list[Any]:
    given = iter(rule.example_inputs())
    names = inspect.signature(rule.search).parameters
    examples = [rule.scalars[name] if name in rule.scalars else next(given) for name in names]
    return _symbolic(examples) if symbolic else examples


def _shown(gm: fx.GraphModule) -> list[object]:
    """Every node and what its fake tensors are; inputs are called by their number.

    What an input that is a plain number has as its value is left out: make_fx notes it from torch 2.14 on, and nothing reads it.
    """
    for position, node in enumerate(gm.graph.find_nodes(op="placeholder")):
        node.name = node.target = f"input_{position}"
    return [
        (node.op, node.name, str(node.target), str(node.args), str(node.kwargs), str(_meta(node.meta.get("val"))))
        for node in gm.graph.nodes
    ]


def _numbered(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with its nodes called by their number: numbers and tensors that nothing uses leave gaps in make_fx's names."""
    for position, node in enumerate(gm.graph.nodes):
        node.name = f"node_{position}"
    return gm


def _meta(value: Any) -> Any:
    if isinstance(value, (bool, int, float)):
        return None
    return pytree.tree_map_only(
        torch.Tensor, lambda leaf: (leaf.shape, leaf.dtype, leaf.stride(), leaf.storage_offset(), leaf.device), value
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(RULES)))
def test_programs_are_traced_as_make_fx_traces_them(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the oracle checks: views, results of several parts, symbols, and writes, which are left to make_fx."""
    for seed in range(4):
        case = Case.of(sample(planted_programs(pattern=pattern_of(RULES[number])), seed))

        def shown(case: Case = case) -> list[object]:
            forget_fake_results()  # what torch 2.13 has kept of `aten.copy` has another offset than at first
            return _shown(
                program_tracing.trace(
                    case.function(), case.inputs, case.sizes[0], dynamic=case.dynamic, functional=case.functional
                )
            )

        found = shown()
        with monkeypatch.context() as patch:
            patch.setattr(dispatch_tracer, "recorded", _never)
            assert shown() == found


def _never(*_: Any, **__: Any) -> Any:
    raise AssertionError("make_fx was asked")


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("number", range(len(RULES)))
def test_built_in_rules_are_recorded_as_make_fx_traces_them(
    number: int, symbolic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes, names and metadata are equal, and make_fx is needed only for arithmetic on symbolic sizes."""
    rule = RULES[number]
    with ExitStack() as stack:
        tracing.registration_mode(stack)
        examples = _examples(rule, symbolic=symbolic)
        mode = next(value for value in examples if isinstance(value, torch.Tensor)).fake_mode
        stack.enter_context(mode)
        for function in (rule.search, rule.replace):
            wanted = tracing.trace_with_symbols(function, examples, fwd_only)
            with monkeypatch.context() as patch:
                if not (symbolic and rule.name in COMPUTE_WITH_SIZES):
                    patch.setattr(dispatch_tracer, "fwd_only", _never)
                found = tracing.trace_with_symbols(function, examples, dispatch_tracer.forward)
            assert _shown(found) == _shown(wanted)


def _twice(x: Any, y: Any) -> Any:
    return aten.add.Tensor(x, y), aten.mul.Tensor(x, x)


def _writes(x: Any, y: Any) -> Any:
    z = x + y
    z.add_(1)
    return z * 2


def _asks_sizes(x: Any, y: Any) -> Any:
    return x.view(x.shape[0] * x.shape[1]), y.expand(x.shape[0], *y.shape[1:])


def _computes_with_sizes(x: Any, y: Any) -> Any:
    return x / (1 / x.shape[0]), y * x.shape[0]


def _several(x: Any, y: Any) -> Any:
    halves = x.split([2, 2], dim=-1)
    return {"a": halves[1], "b": [torch.max(y, dim=-1)[1], y]}


def _composed(x: Any, y: Any) -> Any:
    """What torch composes of operators, in one way by the Python dispatcher and in another without it."""
    rows, weight = torch.stack([x, y]), torch.cat([y.t(), x.t()], dim=-1)
    return (
        rows @ weight,
        functional.linear(rows, y),
        torch.einsum("bij,kj->bik", rows, y),
        functional.layer_norm(x, (4,)),
        functional.scaled_dot_product_attention(rows, rows, rows),
        functional.cross_entropy(x, y),
        rows.chunk(2)[1].reshape(-1).var(),
    )


def _of_its_own(x: Any, y: Any) -> Any:
    """Numbers, randomness, and tensors that it makes."""
    kept = torch.where(x > 0, x, torch.zeros_like(y) + torch.rand(4, device=x.device))
    return kept.to(torch.bfloat16).float(), x.detach(), torch.arange(4, device=y.device) * 0.5


def _constant(x: Any, y: Any) -> Any:
    return x + torch.tensor(2.0), y


FUNCTIONS = [_twice, _writes, _asks_sizes, _computes_with_sizes, _several, _composed, _of_its_own, _constant]


@pytest.mark.parametrize("symbolic", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_what_cannot_be_recorded_is_left_to_make_fx(function: Callable[..., Any], symbolic: bool) -> None:
    """Writes, arithmetic on sizes, views and results of several parts: the graph is make_fx's."""

    def shown(trace_fn: Callable[..., Any]) -> list[object]:
        with ExitStack() as stack:
            tracing.registration_mode(stack)
            examples = [torch.empty(3, 4, device="npu"), torch.empty(3, 4, device="npu")]
            if symbolic:
                examples = _symbolic(examples)
                stack.enter_context(examples[0].fake_mode)
            return _shown(_numbered(tracing.trace(function, examples, trace_fn)))

    assert shown(dispatch_tracer.inference) == shown(fwd_only)


def test_functions_of_users_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what makes their rules as cheap as the built-in ones: make_fx takes five times as long."""
    monkeypatch.setattr(dispatch_tracer, "fwd_only", _never)
    examples = [torch.empty(3, 4, device="npu")] * 2
    with register_replacement(_composed, _composed, examples), register_replacement(_of_its_own, _of_its_own, examples):
        assert len(USER_RULES.snapshot()) == 2


def test_one_tensor_given_twice_is_two_inputs() -> None:
    """A pattern must not demand the same tensor where the example happened to be one."""
    with ExitStack() as stack:
        tracing.registration_mode(stack)
        example = torch.empty(3, 4, device="npu")
        wanted = tracing.trace(aten.sub.Tensor, [example, example], fwd_only)
        assert _shown(tracing.trace(aten.sub.Tensor, [example, example], dispatch_tracer.forward)) == _shown(wanted)


def test_errors_are_the_functions_own() -> None:
    """What the function raises is raised."""

    def refuses(x: Any) -> Any:
        raise ValueError("no such size")

    with ExitStack() as stack:
        tracing.registration_mode(stack)
        with pytest.raises(ValueError, match="no such size"):
            tracing.trace(refuses, [torch.empty(3, device="npu")], dispatch_tracer.forward)
