"""Calls that a device takes, or answers, in another way than the CPU: wrappers around the kernels of their operators."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from npu_emulator.errors import CallRefusedError
from npu_emulator.kernels.refusals import INVALID_PARAMETER

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["as_on_the_device"]

_NARROW = frozenset({torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2})
_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of float4_e2m1, by their codes."""


def _one_hot(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The result has the dtype of the indices; the CPU takes int64 alone, and gives it."""

    def run(indices: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
        if type(indices) is not torch.Tensor or torch._is_functional_tensor(indices):  # noqa: SLF001 - a compiler traces
            # As torch_npu composes it, so that a compiled graph has plain operators.
            return (indices.unsqueeze(-1) == torch.arange(num_classes, device=indices.device)).long()
        return kernel(indices.long(), num_classes).to(indices.dtype)  # type: ignore[no-any-return]

    return run


def _padded(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Floats of 8 and 4 bits are padded, and never cut; a byte holds two of 4 bits, which the last dimension pads in pairs."""

    def run(given: torch.Tensor, pad: Sequence[int], value: complex = 0) -> Any:
        if given.dtype in _NARROW and any(width < 0 for width in pad):
            raise RuntimeError(f"constant_pad_nd: {given.dtype} takes no negative widths; pad is {list(pad)}")
        if given.dtype != torch.float4_e2m1fn_x2:
            return kernel(given, pad, value)
        if any(width % 2 for width in pad[:2]):
            raise RuntimeError(f"constant_pad_nd: the last dimension of {given.dtype} holds pairs; pad is {list(pad)}")
        if isinstance(value, complex) or abs(value) not in _LEVELS:
            raise RuntimeError(
                f"constant_pad_nd: {given.dtype} has no number {value}; it has 0, 0.5, 1, 1.5, 2, 3, 4 and 6"
            )
        code = _LEVELS.index(abs(value)) | (8 if value < 0 else 0)
        pairs = [width // 2 for width in pad[:2]]
        return kernel(given.view(torch.uint8), [*pairs, *pad[2:]], code * 0x11).view(given.dtype)

    return run


def _gather_backward(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """With `sparse_grad` the gradient is a sparse tensor, which torch composes."""

    def run(grad: torch.Tensor, self_size: Sequence[int], dim: int, index: torch.Tensor, sparse_grad: bool) -> Any:  # noqa: FBT001 - the operator's signature
        if not sparse_grad:
            return kernel(grad, self_size, dim, index, sparse_grad)
        return torch.ops.aten._gather_sparse_backward(grad.new_empty(self_size), dim, index, grad)  # noqa: SLF001 - an operator's name

    return run


def _softmax(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """float16 in and float32 out in one step."""

    def run(given: torch.Tensor, dim: int, half_to_float: bool) -> Any:  # noqa: FBT001 - the operator's signature
        return kernel(given.float() if half_to_float else given, dim, False)  # noqa: FBT003 - as above

    return run


def _softmax_backward(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A gradient of float32 for values of float16."""

    def run(grad: torch.Tensor, output: torch.Tensor, dim: int, input_dtype: torch.dtype) -> Any:
        return kernel(grad, output, dim, grad.dtype).to(input_dtype)

    return run


def _searchsorted(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """An `out` of another dtype than the call asks for is refused, as torch does on the CPU."""

    def run(*args: Any, out: torch.Tensor, out_int32: bool = False, **kwargs: Any) -> Any:
        if out.dtype != (torch.int32 if out_int32 else torch.int64):
            raise RuntimeError(f"searchsorted: output tensor's dtype is wrong: {out.dtype} with out_int32={out_int32}")
        return kernel(*args, out=out, out_int32=out_int32, **kwargs)

    return run


def _rotary(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Chips before the Ascend950 turn halves and pairs alone."""

    def run(given: torch.Tensor, r1: torch.Tensor, r2: torch.Tensor, rotary_mode: str = "half", *rest: Any) -> Any:
        if rotary_mode not in {"half", "interleave"} and not torch.npu.get_device_name().startswith("Ascend950"):
            raise CallRefusedError(
                f"The rotary_mode of npu_rotary_mul should be half or interleave, but got {rotary_mode}, which needs an Ascend950. "
                f"NPU function error: call npu_rotary_mul failed, error code is {INVALID_PARAMETER}.",
                INVALID_PARAMETER,
            )
        return kernel(given, r1, r2, rotary_mode, *rest)

    return run


def _in_its_own_shape(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The CPU's `addbmm_` makes a smaller tensor larger; a device's does not."""

    def run(given: torch.Tensor, batch1: torch.Tensor, batch2: torch.Tensor, **factors: Any) -> Any:
        shape = (batch1.size(1), batch2.size(2))
        if given.size() != shape:
            raise RuntimeError(
                f"output with shape {list(given.size())} doesn't match the broadcast shape {list(shape)}"
            )
        return kernel(given, batch1, batch2, **factors)

    return run


def _quotient_in_place(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Chips before the Ascend950 cut the quotient of an integer by a number; torch_npu's average of integers relies on it."""

    def run(given: torch.Tensor, divisor: float) -> Any:
        if (
            given.dtype.is_floating_point
            or given.dtype.is_complex
            or torch.npu.get_device_name().startswith("Ascend950")
        ):
            return kernel(given, divisor)
        return given.div_(divisor, rounding_mode="trunc")

    return run


def _two_quantisations(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The results of a quantisation that is not wanted have one element; torch_npu's meta function gives them none."""

    def run(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        results = kernel(*args, **kwargs)
        if not results[2].numel():
            return results  # type: ignore[no-any-return]
        return tuple(result if result.numel() else result.new_empty(()) for result in results)

    return run


_WRAPPERS: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = MappingProxyType(
    {
        "aten::one_hot": _one_hot,
        "aten::constant_pad_nd": _padded,
        "aten::addbmm_": _in_its_own_shape,
        "aten::div_.Scalar": _quotient_in_place,
        "aten::searchsorted.Tensor_out": _searchsorted,
        "aten::_softmax": _softmax,
        "aten::_log_softmax": _softmax,
        "aten::_softmax_backward_data": _softmax_backward,
        "aten::_log_softmax_backward_data": _softmax_backward,
        "npu::npu_gather_backward": _gather_backward,
        "npu::npu_rotary_mul": _rotary,
        "npu::npu_add_rms_norm_dynamic_quant": _two_quantisations,
    }
)


def as_on_the_device(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the kernel of an operator, or its wrapper."""
    return _WRAPPERS[name](kernel) if name in _WRAPPERS else kernel
