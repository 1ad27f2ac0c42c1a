"""Attention by heads whose size is an expression of symbols: values and gradients are eager mode's to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from device_helpers import NPU, check, compiled
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional

import npugraph_ex
from npugraph_ex.errors import GraphVerificationError

SIZES = (256, 128, 256)


def _heads(x: torch.Tensor) -> torch.Tensor:
    batch, rows, width = x.shape
    return x.view(batch, rows, 4, width // 4).transpose(1, 2)


def _plain(x: torch.Tensor) -> torch.Tensor:
    heads = _heads(x)
    return functional.scaled_dot_product_attention(heads, heads, heads)


def _causal(x: torch.Tensor) -> torch.Tensor:
    heads = _heads(x)
    return functional.scaled_dot_product_attention(heads, heads.sin(), heads.cos(), is_causal=True)


def _masked(x: torch.Tensor) -> torch.Tensor:
    heads = _heads(x)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
    found: torch.Tensor = torch.ops.aten.scaled_dot_product_attention(heads, heads, heads, mask)
    return found


def _grouped(x: torch.Tensor) -> torch.Tensor:
    heads = _heads(x)
    return functional.scaled_dot_product_attention(heads, heads[:, :2], heads[:, 2:], enable_gqa=True)


def _scaled(x: torch.Tensor) -> torch.Tensor:
    heads = _heads(x)
    return functional.scaled_dot_product_attention(heads, heads, heads, scale=heads.shape[-1] ** -0.75)


def _multi_head(x: torch.Tensor) -> torch.Tensor:
    width = x.shape[-1]
    weights, last = (torch.ones(size, width, device=x.device).cumsum(0).sin() / 16 for size in (3 * width, width))
    found, _ = functional.multi_head_attention_forward(
        x, x, x, width, 4, weights, None, None, None, False, 0.0, last, None, need_weights=False
    )  # fmt: skip
    return found


PROGRAMS = (_plain, _causal, _masked, _grouped, _scaled, _multi_head)


def _rows(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(2, 16, size, device=NPU).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS)
def test_values(program: Callable[..., torch.Tensor]) -> None:
    """Of several head sizes, all of them captured."""
    check(program, [(_rows(size),) for size in SIZES], dynamic=True, require_capture=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("program", PROGRAMS)
@torch.enable_grad()  # type: ignore[untyped-decorator]
def test_gradients(program: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    """By the input, under autocast where it has 32 bits."""
    graph = compiled(program, dynamic=True)
    with torch.autocast(NPU, enabled=dtype == torch.float32):
        for size in SIZES:
            x = _rows(size, torch.float32 if program is _multi_head else dtype).requires_grad_()
            found, wanted = graph(x), program(x)
            assert torch.equal(found, wanted)
            assert torch.isfinite(wanted).all()
            gradients = [torch.autograd.grad(result.float().square().sum(), x)[0] for result in (found, wanted)]
            torch.testing.assert_close(*gradients)  # a sum of several parts, in another order


@pytest.mark.slow
def test_a_dimension_that_is_marked() -> None:
    """By `mark_dynamic`, and in inference mode."""
    graph = compiled(_plain, dynamic=None)
    for size in SIZES:
        x = _rows(size)
        torch._dynamo.mark_dynamic(x, 2)
        with torch.inference_mode():
            assert torch.equal(graph(x), _plain(x))


@pytest.mark.slow
def test_graphs_that_others_traced() -> None:
    """AOT alone traces NaN: the compiler refuses the graph, and says what to do."""

    def traced(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return torch._dynamo.backends.common.aot_autograd(fw_compiler=npugraph_ex.compile_fx)(gm, inputs)

    torch.compiler.reset()
    with torch.no_grad(), pytest.raises(BackendCompilerFailed, match=r"scale of NaN: .* Pass scale=") as caught:
        torch.compile(_plain, backend=traced, dynamic=True)(_rows(256))
    assert isinstance(caught.value.inner_exception, GraphVerificationError)
