"""Lets AOT record `torch.nn.functional.interpolate` as the one operator that eager mode calls.

While a program is traced, torch takes `upsample_bilinear2d` and its like apart by kernels in Python: gathers, products and sums,
10 kernels for "nearest", 36 for "bilinear" and 158 for "bicubic". The sums round otherwise than eager mode's one kernel.

Of symbolic sizes torch has no metadata for most gradients; a program that is trained so is taken apart as before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload

from npugraph_ex import _torch_private
from npugraph_ex.versions.repair import Repair

REPAIR = Repair(
    fault="`interpolate` is taken apart into up to 158 kernels, whose sums round otherwise than eager mode's one kernel.",
    threads=("pytorch#175154", "pytorch#185894"),
    test="tests/frontend/test_whole_upsampling.py",
)

_aten = torch.ops.aten
_NEAREST = tuple(
    getattr(_aten, f"{kind}{dims}d") for kind in ("upsample_nearest", "_upsample_nearest_exact") for dims in (1, 2, 3)
)
_WEIGHTED = (_aten.upsample_linear1d, _aten.upsample_bilinear2d, _aten.upsample_trilinear3d, _aten.upsample_bicubic2d)


def kept() -> AbstractContextManager[None]:
    """Within the block AOT records these operators as they are."""
    by_scales = {
        packet.vec: partial(_whole_by_scales, packet.default, _torch_private.python_kernel(packet.vec))
        for packet in (*_NEAREST, *_WEIGHTED)
    }
    by_sizes = {
        packet.default: partial(_whole, packet.default, _torch_private.python_kernel(packet.default))
        for packet in _NEAREST
    }
    return _torch_private.python_kernels(by_scales | by_sizes)


def _whole(
    operator: OpOverload,
    apart: Callable[..., torch.Tensor],
    x: torch.Tensor,
    sizes: Sequence[int],
    *settings: Any,
    **scales: Any,
) -> torch.Tensor:
    if not _has_gradient_metadata(x, sizes):
        return apart(x, sizes, *settings, **scales)
    with _torch_private.python_kernels({operator: None}):
        return operator(x, sizes, *settings, **scales)  # type: ignore[no-any-return]


def _has_gradient_metadata(x: torch.Tensor, wanted: Sequence[int]) -> bool:
    """Whether nothing asks for the metadata of a gradient, or torch has it."""
    known = all(isinstance(size, int) for size in (*x.shape, *wanted))
    return known or not (torch.is_grad_enabled() and x.requires_grad)


def _whole_by_scales(
    operator: OpOverload,
    apart: Callable[..., torch.Tensor],
    x: torch.Tensor,
    sizes: Sequence[int] | None,
    *settings: Any,
) -> torch.Tensor:
    """The operator, or the parts in its place where its gradient has no metadata.

    Args:
        operator: takes the sizes of the result.
        apart: takes what the rest of the arguments are.
        x: the input.
        sizes: of the result, or None where scales are given.
        settings: `align_corners` of those that weigh, and the scales or None.
    """
    *corners, scales = settings
    wanted = _torch_private.upsampled_sizes(x.size(), sizes, scales)
    if not _has_gradient_metadata(x, wanted):
        return apart(x, sizes, *settings)
    with _torch_private.python_kernels({operator: None}):
        return operator(x, wanted, *corners, *(scales or [None] * len(wanted)))  # type: ignore[no-any-return]
