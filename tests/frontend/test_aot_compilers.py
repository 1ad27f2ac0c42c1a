"""`get_compiler` as what functorch calls an `fw_compiler`: through `aot_function`, `aot_module_simplified` and `aot_autograd`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import aot_function, aot_module_simplified, make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd

import npugraph_ex
from npugraph_ex.report.captures import capture_records, captures_so_far


def step(x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Write an input, return a view and a new tensor."""
    state.mul_(0.5).add_(x)
    return (x * 2).relu().t(), state + 1


def _plain(compiler: Any) -> Callable[..., Any]:
    return aot_function(step, fw_compiler=compiler, keep_inference_input_mutations=True)


def _dynamo(compiler: Any) -> Callable[..., Any]:
    def boxed(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return make_boxed_func(compiler(gm, inputs))

    return torch.compile(
        step, backend=aot_autograd(fw_compiler=boxed, keep_inference_input_mutations=True), dynamic=False
    )


def _module(compiler: Any) -> Callable[..., Any]:
    class Step(torch.nn.Module):
        def forward(self, x: torch.Tensor, state: torch.Tensor) -> Any:
            return step(x, state)

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return aot_module_simplified(
            gm, inputs, fw_compiler=lambda g, i: make_boxed_func(compiler(g, i)), keep_inference_input_mutations=True
        )

    return torch.compile(Step(), backend=backend, dynamic=False)


@pytest.mark.parametrize("force_eager", [False, True], ids=["captured", "uncaptured"])
@pytest.mark.parametrize(
    "road", [_plain, _dynamo, _module], ids=["aot_function", "aot_autograd", "aot_module_simplified"]
)
def test_get_compiler_is_an_fw_compiler(road: Callable[..., Any], force_eager: bool) -> None:
    """Values, strides and the written input are eager's over four calls, all results alive; the config's options count."""
    config = npugraph_ex.CompilerConfig()
    config.force_eager = force_eager
    compiled, mark, kept = road(npugraph_ex.get_compiler(config)), captures_so_far(), []
    for _ in range(4):
        x, state = torch.randn(3, 4, device="npu"), torch.randn(3, 4, device="npu")
        twin = state.clone()
        kept.append(([*compiled(x, state), state], [*step(x, twin), twin]))
    for got, expected in kept:
        for have, want in zip(got, expected, strict=True):
            assert have.stride() == want.stride()
            torch.testing.assert_close(have.cpu(), want.cpu(), rtol=0, atol=0)
    assert bool(capture_records(after=mark)) is not force_eager
