"""A search function's trace has the operators that a compiled program has for the same call, so that a rule finds them."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from device_helpers import NPU
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed, Unsupported, UserError
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,
    ShapeEnv,
    StatelessSymbolicContext,
)
from torch.nn import functional
from torch.testing._internal import common_methods_invocations
from torch.utils import _pytree as pytree

import npugraph_ex
from npugraph_ex.fusion import dispatch_tracer, tracing
from npugraph_ex.graph import noops
from npugraph_ex.graph.memory.aliases import written_by
from npugraph_ex.testing.validation import validate_replacement

OPERATORS = {
    f"{operator.name}.{operator.variant_test_name}".removeprefix("nn.functional.").removesuffix("."): operator
    for operator in common_methods_invocations.op_db
    if operator.name.startswith("nn.functional.") and torch.float32 in operator.supported_dtypes("cpu")
}
"""Those of torch's database, most of which torch composes of others, or takes apart."""
NOT_SEARCHED_FOR = frozenset({"ctc_loss", "gaussian_nll_loss", "instance_norm", "rrelu"})
"""Those that read values or write in every sample, so that no search function can call them."""
Function = Callable[..., Any]


class _GraphSeenError(Exception):
    """Ends the compilation: the graph is there."""


def _calls(name: str) -> Iterator[tuple[Function, list[torch.Tensor]]]:
    """Two samples of an operator, as functions of their tensors; what they return is a computed value."""
    operator = OPERATORS[name]
    torch.manual_seed(0)
    for sample in itertools.islice(operator.sample_inputs_func(operator, "cpu", torch.float32, False), 2):
        leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
        tensors = [leaf.detach().to(NPU) for leaf in leaves if isinstance(leaf, torch.Tensor)]

        def function(*given: torch.Tensor, leaves: Any = leaves, spec: Any = spec) -> list[torch.Tensor]:
            own = iter(given)
            value, args, kwargs = pytree.tree_unflatten(
                [next(own) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
            )
            return [result + 1 for result in pytree.tree_leaves(operator.op(value, *args, **kwargs))]

        yield function, tensors


def _of_aot(function: Function, tensors: list[torch.Tensor], *, dynamic: bool) -> list[str] | None:
    """The operators of the graph that rules see; None where Dynamo takes no such program."""
    graphs: list[fx.Graph] = []

    def see(gm: fx.GraphModule, *_: object) -> None:
        noops.remove(gm.graph)
        gm.graph.eliminate_dead_code()
        graphs.append(gm.graph)
        raise _GraphSeenError

    torch.compiler.reset()
    for tensor in tensors if dynamic else ():
        for dim in range(tensor.dim()):
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
    options: dict[str, Any] = {"post_grad_custom_pre_pass": see}
    try:
        torch.compile(
            function, backend="npugraph_ex", fullgraph=True, dynamic=False if not dynamic else None, options=options
        )(*tensors)
    except (BackendCompilerFailed, _GraphSeenError):
        pass
    except (Unsupported, UserError):
        return None
    return _operators(graphs[0])


def _of_a_rule(function: Function, tensors: list[torch.Tensor], *, dynamic: bool) -> list[str] | None:
    """The operators of the trace; None for a function that writes, which is refused as a search function."""
    with _fakes_of(tensors, dynamic=dynamic) as fakes:
        graph = tracing.trace_with_symbols(function, fakes, dispatch_tracer.inference).graph
    return None if any(map(written_by, graph.nodes)) else _operators(graph)


@contextmanager
def _fakes_of(tensors: list[torch.Tensor], *, dynamic: bool) -> Iterator[list[torch.Tensor]]:
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    kind = DimDynamic.DUCK if dynamic else DimDynamic.STATIC
    fakes: list[torch.Tensor] = [
        mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext([kind] * tensor.dim())) for tensor in tensors
    ]
    with mode:
        yield fakes


def _operators(graph: fx.Graph) -> list[str]:
    """What is done with tensors, in the order of names; sizes are computed in several ways."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    return sorted(
        str(node.target) for node in nodes if not isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat))
    )


def _agree(function: Function, tensors: list[torch.Tensor], *, dynamic: bool) -> bool:
    """Whether both have the same operators; False where either of them takes no such program."""
    rule = _of_a_rule(function, tensors, dynamic=dynamic)
    compiled = _of_aot(function, tensors, dynamic=dynamic) if rule is not None else None
    assert compiled is None or compiled == rule, f"{dynamic=}"
    return compiled is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(OPERATORS.keys() - NOT_SEARCHED_FOR))
def test_a_trace_has_what_a_compiled_program_has(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fixed sizes, and the first sample of symbolic ones."""
    monkeypatch.setattr(common_methods_invocations, "wrapper_set_seed", lambda call, *args, **how: call(*args, **how))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        agreed = [
            _agree(function, tensors, dynamic=dynamic)
            for number, (function, tensors) in enumerate(_calls(name))
            for dynamic in ((False, True) if number == 0 else (False,))
        ]
    assert any(agreed)


def _images() -> torch.Tensor:
    return torch.ones(2, 3, 4, 4, device=NPU)


REPAIRED: dict[str, Function] = {
    "reflect": lambda x: functional.pad(x.to(memory_format=torch.channels_last), (1, 1, 1, 1), mode="reflect") * 2,
    "replicate": lambda x: functional.pad(x.to(memory_format=torch.channels_last), (1, 1, 1, 1), mode="replicate") * 2,
    "drops nothing": lambda x: functional.dropout(x * 2, 0.5, training=False) + 1,
    "drops all": lambda x: functional.dropout(x, 1.0) + 1,
    "draws": lambda x: torch.rand(3, device=NPU).sum() + torch.rand(4, device=NPU) * x,
    "sizes": lambda x: torch.ops.aten.upsample_nearest2d.default(x, [9, 9]) * 2,
    "exact sizes": lambda x: torch.ops.aten._upsample_nearest_exact2d.default(x, [9, 9]) * 2,
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x) * 2,
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["numbers", "symbols"])
@pytest.mark.parametrize("name", REPAIRED)
def test_a_trace_is_repaired_as_a_compiled_program_is(name: str, *, dynamic: bool) -> None:
    """What the database has no sample of: strides, draws, and operators that take sizes."""
    with torch.no_grad():
        assert _agree(REPAIRED[name], [_images()], dynamic=dynamic)


SEARCHED: dict[str, Function] = {
    "nearest": lambda x: functional.interpolate(x, scale_factor=2.0).relu(),
    "bilinear": lambda x: functional.interpolate(x, scale_factor=1.5, mode="bilinear").relu(),
    "size": lambda x: functional.interpolate(x, size=(9, 7), mode="bilinear").relu(),
    "reflect": lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect").relu(),
}


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("dynamic", [False, True], ids=["numbers", "symbols"])
@pytest.mark.parametrize("name", SEARCHED)
def test_a_rule_finds_it(name: str, *, dynamic: bool) -> None:
    """The rule fuses in a compiled program, whose result is eager mode's to the bit."""
    search = SEARCHED[name]
    rule = npugraph_ex.register_replacement(search, lambda x: search(x).clamp_min(0), [_images()])
    x = torch.randn(2, 3, 6, 6, device=NPU)
    with torch.no_grad():
        result = torch.compile(search, backend="npugraph_ex", dynamic=dynamic)(x)
        report = npugraph_ex.last_report()
        assert report is not None
        report.require(1, rule.name)
        assert torch.equal(result, search(x))


@pytest.mark.slow
def test_a_rule_of_an_interpolation_is_proven() -> None:
    """In programs that call the operator by its sizes, too."""
    search = SEARCHED["nearest"]
    validate_replacement(search, lambda x: search(x).clamp_min(0), [_images()], max_examples=8).require()
