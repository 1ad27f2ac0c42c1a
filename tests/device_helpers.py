"""What tests of compiled programs share: compile, call eagerly and compiled on equal inputs, compare everything at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from functorch.compile import aot_function
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from npugraph_ex import compile_fx

NPU = "npu"


def compiled(function: Callable[..., Any], *, dynamic: bool | None = False, **options: object) -> Callable[..., Any]:
    """Compile with this backend and nothing left over from another test."""
    torch.compiler.reset()
    return torch.compile(function, backend="npugraph_ex", fullgraph=True, dynamic=dynamic, options=options)


def describe(value: torch.Tensor) -> tuple[Any, ...]:
    """What must be equal besides the elements."""
    return tuple(value.shape), value.stride(), value.dtype, value.device


def check(function: Callable[..., Any], calls: Sequence[Sequence[Any]], **how: Any) -> Callable[..., Any]:
    """Call `function` eagerly and compiled on equal inputs, keep every result, and compare all of them at the end."""
    graph = compiled(function, **how)
    kept = []
    with torch.no_grad():
        for arguments in calls:
            twins = [_twin(argument) for argument in arguments]
            expected = function(*twins)
            got = graph(*arguments)
            kept.append((_leaves(expected), _leaves(got), twins, arguments))
            torch.randn(1000, device=NPU)  # unrelated memory, to take what was freed by mistake
    for number, (expected, got, twins, arguments) in enumerate(kept):
        for want, have in zip(expected, got, strict=True):
            assert describe(want) == describe(have), f"call {number}"
            torch.testing.assert_close(have.cpu(), want.cpu(), rtol=0, atol=0, msg=f"result of call {number}")
        for twin, argument in zip(twins, arguments, strict=True):
            if isinstance(argument, torch.Tensor):
                torch.testing.assert_close(argument.cpu(), twin.cpu(), rtol=0, atol=0, msg=f"input after call {number}")
    return graph


Kept = list[tuple[torch.Tensor, torch.Tensor]]
"""Results of several calls with what eager mode gave, all alive until they are compared."""


def agree(kept: Kept) -> None:
    """Compare at the end: every result, as it is now, is what eager mode gave."""
    for number, (have, want) in enumerate(kept):
        torch.testing.assert_close(have.cpu(), want.cpu(), rtol=0, atol=0, msg=f"result of call {number}")


def _twin(argument: Any) -> Any:
    """A tensor of its own with the same values and strides."""
    if not isinstance(argument, torch.Tensor):
        return argument
    storage = argument.untyped_storage().clone()
    return torch.empty(0, dtype=argument.dtype, device=argument.device).set_(
        storage, argument.storage_offset(), argument.size(), argument.stride()
    )


def _leaves(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def random(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that differ in every call, at an address of their own."""
    return torch.randn(*size, device=NPU).to(dtype)


def aot_metadata() -> AbstractContextManager[TracingContext]:
    """Let AOT without Dynamo, within the block, tell its compiler what it found out about a function, as it does with it."""
    return tracing(TracingContext(FakeTensorMode()))  # type: ignore[return-value]  # declared as a generator


def through_aot(function: Callable[..., Any], *inputs: Any, **options: object) -> tuple[Any, list[str]]:
    """Compile without Dynamo, call once, and return the result and the operators of the optimised graph, in order."""
    operators: list[str] = []

    def compiler(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        result = compile_fx(gm, example_inputs, options)
        operators.extend(str(node.target) for node in gm.graph.nodes if node.op == "call_function")
        return result

    with torch.no_grad(), aot_metadata():
        compiled_function = aot_function(function, fw_compiler=compiler, keep_inference_input_mutations=True)
        return compiled_function(*inputs), operators
