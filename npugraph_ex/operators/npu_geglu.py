"""GeGLU activation and its gradient.

Formula (CANN operator documentation, aclnnGeGluV3 and aclnnGeGluV3Backward)::

    A, B   = the halves of the input along dim; the activated half is A with activate_left, else B
    gelu   = gelu(activated)                        approximate=0: by erf; 1: by tanh
    output = gelu * other

    gradient of the activated half: grad_output * other * gelu'(activated)
    gradient of the other half:     grad_output * gelu
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import FLOATS, compute_dtype, gelu, refused, stored_like, unsupported
from npugraph_ex.operators._record import Call, Operator, call

_APPROXIMATIONS = {0: "none", 1: "tanh"}


def _split(
    operator: str, x: torch.Tensor, dim: int, approximate: int, *, activate_left: bool
) -> tuple[torch.Tensor, torch.Tensor, str]:
    """The activated half, the other one, and torch's word for the approximation."""
    if approximate not in _APPROXIMATIONS:
        raise unsupported(operator, "approximate", approximate, "0 (erf) and 1 (tanh)")
    if x.shape[dim] % 2:
        raise ValueError(
            f"{operator}: the size along dim={dim} must be even to be split in two; input has shape {tuple(x.shape)}."
        )
    first, second = x.chunk(2, dim=dim)
    return (*((first, second) if activate_left else (second, first)), _APPROXIMATIONS[approximate])


def _refuse_odd(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    dim: int = -1,
    approximate: int = 1,
    activate_left: bool = False,
) -> None:
    del approximate, activate_left
    if -input.dim() <= dim < input.dim() and input.shape[dim] % 2:
        raise refused("npu_geglu", f"input's size along dim={dim}", input.shape[dim], "even")


@Operator(
    name="npu::npu_geglu",
    dtypes=FLOATS,
    floats_only=True,
    source="CANN operator documentation, aclnnGeGluV3",
    constraints=_refuse_odd,
    examples=(
        lambda: call(torch.randn(3, 16).half()),
        lambda: call(torch.randn(3, 4, 6).bfloat16(), 1, 0, activate_left=True),
    ),
)
def npu_geglu(
    input: torch.Tensor,  # noqa: A002 - the schema's name
    dim: int = -1,
    approximate: int = 1,
    activate_left: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(output, gelu)``: both contiguous, of the dtype of ``input`` and half its size along ``dim``."""
    wide = input.to(compute_dtype(input))
    activated, other, kind = _split("npu_geglu", wide, dim, approximate, activate_left=activate_left)
    active = gelu(activated, kind)
    return (active * other).to(input.dtype).contiguous(), active.to(input.dtype).contiguous()


def _gradient_example() -> Call:
    x = torch.randn(3, 16).half()
    return call(torch.randn(3, 8).half(), x, npu_geglu(x)[1])


@Operator(
    name="npu::npu_geglu_grad",
    dtypes=FLOATS,
    floats_only=True,
    source="CANN operator documentation, aclnnGeGluV3Backward",
    alike=Alike(shape=("grad_output", "gelu"), dtype=("grad_output", "input", "gelu")),
    examples=(_gradient_example,),
)
def npu_geglu_grad(
    grad_output: torch.Tensor,
    input: torch.Tensor,  # noqa: A002 - the schema's name
    gelu: torch.Tensor,
    dim: int = -1,
    approximate: int = 1,
    activate_left: bool = False,
) -> torch.Tensor:
    """Like ``input``; ``gelu`` is the second result of ``npu_geglu``."""
    dtype = compute_dtype(grad_output, input)
    gradient = grad_output.to(dtype)
    activated, other, kind = _split("npu_geglu_grad", input.to(dtype), dim, approximate, activate_left=activate_left)
    to_activated = torch.ops.aten.gelu_backward(gradient * other, activated.contiguous(), approximate=kind)
    to_other = gradient * gelu.to(dtype)
    halves = (to_activated, to_other) if activate_left else (to_other, to_activated)
    return stored_like(input, torch.cat(halves, dim=dim), input.dtype)
