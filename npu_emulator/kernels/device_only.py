"""ATen operators with a device kernel and no CPU kernel, as functions of CPU tensors.

Matrix products with another result type, the parts of batch normalisation across processes (`torch.nn.SyncBatchNorm`), and
two small ones. Small floats are computed in float32 and rounded once. Batch statistics are float32, over all dimensions
except the second; `count` is the number of values of each process.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["DEVICE_ONLY"]

_Tensor = torch.Tensor


def _wide(tensor: _Tensor) -> _Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _product(a: _Tensor, b: _Tensor, out_dtype: torch.dtype) -> _Tensor:
    return (_wide(a) @ _wide(b)).to(out_dtype)


def _sum_and_product(
    base: _Tensor, a: _Tensor, b: _Tensor, out_dtype: torch.dtype, *, beta: float = 1, alpha: float = 1
) -> _Tensor:
    return (beta * _wide(base) + alpha * (_wide(a) @ _wide(b))).to(out_dtype)


def _into_out(compute: Callable[..., _Tensor]) -> Callable[..., _Tensor]:
    """The out form of a function that returns one tensor."""

    def run(*args: Any, out: _Tensor, **kwargs: Any) -> _Tensor:
        return out.copy_(compute(*args, **kwargs))

    return run


def _other_dimensions(x: _Tensor) -> list[int]:
    return [dimension for dimension in range(x.dim()) if dimension != 1]


def _by_channel(values: _Tensor, x: _Tensor) -> _Tensor:
    """[C] as [1, C, 1 ...], to go with [N, C, ...]."""
    return values.reshape(1, -1, *[1] * (x.dim() - 2))


def _stats(x: _Tensor, eps: float) -> tuple[_Tensor, _Tensor]:
    variance, mean = torch.var_mean(_wide(x), _other_dimensions(x), correction=0)
    return mean, (variance + eps).rsqrt()


def _normalised(
    x: _Tensor, weight: _Tensor | None, bias: _Tensor | None, mean: _Tensor, invstd: _Tensor, eps: float
) -> _Tensor:
    del eps
    out = (_wide(x) - _by_channel(mean, x)) * _by_channel(invstd, x)
    out = out if weight is None else out * _by_channel(_wide(weight), x)
    out = out if bias is None else out + _by_channel(_wide(bias), x)
    return torch.empty_like(x).copy_(out)


def _gathered(  # noqa: PLR0913, PLR0917 - the operator's own arguments
    x: _Tensor,
    mean: _Tensor,
    invstd: _Tensor,
    running_mean: _Tensor | None,
    running_var: _Tensor | None,
    momentum: float,
    eps: float,
    counts: _Tensor,
) -> tuple[_Tensor, _Tensor]:
    """Mean and inverse deviation over all processes, from those of each process [processes, C]; writes running statistics."""
    del x
    share = counts.to(mean.dtype).reshape(-1, 1)
    total = share.sum()
    together = (mean * share).sum(0) / total
    squares = ((invstd**-2 - eps + (mean - together) ** 2) * share).sum(0)
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(together, alpha=momentum)
    if running_var is not None:
        running_var.mul_(1 - momentum).add_(squares / (total - 1), alpha=momentum)
    return together, (squares / total + eps).rsqrt()


_gathered.writes = ("running_mean", "running_var")


def _reduced(  # noqa: PLR0913, PLR0917 - the operator's own arguments
    gradient: _Tensor,
    x: _Tensor,
    mean: _Tensor,
    invstd: _Tensor,
    weight: _Tensor | None,
    input_g: bool,  # noqa: FBT001
    weight_g: bool,  # noqa: FBT001
    bias_g: bool,  # noqa: FBT001
) -> tuple[_Tensor | None, ...]:
    """Sums over this process's values: dy, dy * (x - mean), and the gradients of weight and bias."""
    dy = _wide(gradient).sum(_other_dimensions(x))
    dy_xmu = (_wide(gradient) * (_wide(x) - _by_channel(mean, x))).sum(_other_dimensions(x))
    of = mean.dtype if weight is None else weight.dtype
    return (
        dy if input_g else None,
        dy_xmu if input_g else None,
        (dy_xmu * invstd).to(of) if weight_g else None,
        dy.to(of) if bias_g else None,
    )


def _gradient(  # noqa: PLR0913, PLR0917 - the operator's own arguments
    gradient: _Tensor,
    x: _Tensor,
    mean: _Tensor,
    invstd: _Tensor,
    weight: _Tensor | None,
    sum_dy: _Tensor,
    sum_dy_xmu: _Tensor,
    count: _Tensor,
) -> _Tensor:
    """The gradient of the input, from the sums over all processes."""
    total = count.sum()
    centred = (_wide(x) - _by_channel(mean, x)) * _by_channel(invstd**2 * sum_dy_xmu / total, x)
    scale = invstd if weight is None else invstd * _wide(weight)
    out = (_wide(gradient) - _by_channel(sum_dy / total, x) - centred) * _by_channel(scale, x)
    return torch.empty_like(x).copy_(out)


def _depthwise(  # noqa: PLR0913, PLR0917 - the operator's own arguments
    x: _Tensor, weight: _Tensor, kernel_size: Any, bias: _Tensor | None, stride: Any, padding: Any, dilation: Any
) -> _Tensor:
    del kernel_size
    return functional.conv2d(x, weight, bias, stride, padding, dilation, groups=x.shape[1])


def _masked_scale(x: _Tensor, mask: _Tensor, scale: float) -> _Tensor:
    return (_wide(x) * mask * scale).to(x.dtype)


DEVICE_ONLY: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        **{f"aten::{name}.dtype": _product for name in ("mm", "bmm")},
        **{f"aten::{name}.dtype_out": _into_out(_product) for name in ("mm", "bmm")},
        **{f"aten::{name}.dtype": _sum_and_product for name in ("addmm", "baddbmm")},
        **{f"aten::{name}.dtype_out": _into_out(_sum_and_product) for name in ("addmm", "baddbmm")},
        "aten::batch_norm_stats": _stats,
        "aten::batch_norm_elemt": _normalised,
        "aten::batch_norm_elemt.out": _into_out(_normalised),
        "aten::batch_norm_gather_stats_with_counts": _gathered,
        "aten::batch_norm_backward_reduce": _reduced,
        "aten::batch_norm_backward_elemt": _gradient,
        "aten::_conv_depthwise2d": _depthwise,
        "aten::_conv_depthwise2d.out": _into_out(_depthwise),
        "aten::_masked_scale": _masked_scale,
    }
)
