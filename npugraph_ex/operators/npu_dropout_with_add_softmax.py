"""Scaled sum, softmax and dropout in one operator, and its gradient.

Formula (operator documentation of ``torch_npu.npu_dropout_with_add_softmax``; op-plugin's kernel)::

    softmax  = softmax(x1 + alpha * input)          over dim
    dropout  = softmax / (1 - prob) where the mask is 1, else 0

    gradient of input = alpha * softmax * (g - sum(g * softmax))        g = grad / (1 - prob) where the mask is 1, else 0

The document lists what the operator takes: both tensors [N, C, H, W] of one shape, H and W 128, 256, 384 or 512, N * C a multiple
of 32, and the last dimension as -1. The mask is drawn for ``x1`` and applied to both, so that nothing broadcasts.

The device seeds this mask with a constant, so no generator moves on. As gradient of ``x1`` it hands out ``grad`` itself. The mask
has a byte for each element, rounded up to 128.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._dropout import drawn
from npugraph_ex.operators._precision import compute_dtype, refused, stored_like
from npugraph_ex.operators._record import Operator, call

_SEED, _ALIGNED = 2, 128
_DTYPES = (torch.float16, torch.float32)
_SIDES = (128, 256, 384, 512)
_IMAGES = 32


def _refuse(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    x1: torch.Tensor,
    alpha: float,
    prob: float,
    dim: int,
) -> None:
    """What the document rules out beside two shapes."""
    del x1, alpha, prob
    name = "npu_dropout_with_add_softmax"
    if input.dim() != 4 or any(all(size != side for side in _SIDES) for size in input.shape[2:]):
        sides = ", ".join(map(str, _SIDES))
        raise refused(name, "input's shape", input.shape, f"[N, C, H, W] with H and W of {sides}")
    if input.shape[0] * input.shape[1] % _IMAGES:
        raise refused(name, "input's shape", input.shape, f"[N, C, H, W] with N * C a multiple of {_IMAGES}")
    if dim != -1:
        raise refused(name, "dim", dim, "-1")


def _kept(x: torch.Tensor, mask: torch.Tensor, prob: float) -> torch.Tensor:
    """``x / (1 - prob)`` where the mask of bytes is 1, else 0."""
    chosen = mask[: x.numel()].reshape(x.shape).bool()
    return torch.where(chosen, x / (1 - prob) if prob < 1.0 else 0.0, 0.0)


@Operator(
    name="npu::npu_dropout_with_add_softmax",
    source="operator documentation of torch_npu.npu_dropout_with_add_softmax",
    dtypes=_DTYPES,
    alike=Alike(shape=("input", "x1")),
    constraints=_refuse,
    examples=(lambda: call(*(torch.randn(2, 16, 128, 128).half() for _ in range(2)), 0.5, 0.3, -1),),
)
def npu_dropout_with_add_softmax(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    x1: torch.Tensor,
    alpha: float,
    prob: float,
    dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(mask, softmax, dropout)``: mask uint8, a byte for each element; softmax like ``x1``, dropout like ``input``."""
    _refuse(input, x1, alpha, prob, dim)
    dtype = compute_dtype(input, x1)
    softmax = torch.softmax(x1.to(dtype) + alpha * input.to(dtype), dim=dim)
    kept = drawn((x1.numel(),), prob, generator=torch.Generator().manual_seed(_SEED)).to(torch.uint8).to(x1.device)
    mask = torch.nn.functional.pad(kept, (0, -x1.numel() % _ALIGNED))
    return mask, softmax.to(x1.dtype).contiguous(), _kept(softmax, mask, prob).to(input.dtype).contiguous()


@Operator(
    name="npu::npu_dropout_with_add_softmax_backward",
    source="op-plugin, aclops/DropoutWithAddSoftmaxKernelNpu.cpp",
    dtypes=_DTYPES,
    alike=Alike(shape=("softmax_out", "grad")),
    examples=(
        lambda: call(
            torch.randn(8, 16).half(),
            torch.randint(2, (128,), dtype=torch.uint8),
            torch.rand(8, 16).half(),
            0.5,
            0.3,
            -1,
        ),
    ),
)
def npu_dropout_with_add_softmax_backward(
    grad: torch.Tensor, mask: torch.Tensor, softmax_out: torch.Tensor, alpha: float, prob: float, dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of input and x1, like ``softmax_out`` and ``grad``; the second is ``grad`` copied."""
    if mask.numel() < softmax_out.numel():
        expected = f"of a byte for each of the {softmax_out.numel()} elements of softmax_out, rounded up to {_ALIGNED}"
        raise refused("npu_dropout_with_add_softmax_backward", "mask's shape", mask.shape, expected)
    dtype = compute_dtype(grad, softmax_out)
    softmax, g = softmax_out.to(dtype), _kept(grad.to(dtype), mask, prob)
    to_input = alpha * softmax * (g - (g * softmax).sum(dim, keepdim=True))
    return stored_like(softmax_out, to_input, softmax_out.dtype), torch.empty_like(grad).copy_(grad)
