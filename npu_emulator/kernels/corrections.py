"""Corrects what the CPU's kernels leave out, or compute in another way on some processors.

A backward operator reads auxiliary results in their full sizes: where the CPU leaves them out, it would read unwritten memory.
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["CORRECTED"]


def _completed(bags: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Complete `bags`, a form of `_embedding_bag`: the bag of each index [indices] and one size for each offset [offsets]."""

    def run(
        weight: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, ...]:
        # The CPU reads both as if they were contiguous: `embedding_bag` makes them so before it calls this operator.
        indices, offsets = indices.contiguous(), offsets.contiguous()
        out, bag_of_index, sizes, largest = bags(weight, indices, offsets, *args, **kwargs)
        if bag_of_index.numel() != indices.numel():  # a fast path of the CPU, which leaves them out
            places = torch.arange(indices.numel(), dtype=offsets.dtype)
            bag_of_index = torch.searchsorted(offsets, places, right=True) - 1
        if sizes.numel() != offsets.numel():  # the optional last offset is an end and begins no bag
            sizes = torch.nn.functional.pad(sizes, (0, offsets.numel() - sizes.numel()))
        return out, bag_of_index, sizes, largest

    return run


def _gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    """With oneDNN, which torch takes on some processors, gelu of infinity is NaN; it is infinity."""
    return torch.where(x == math.inf, x, torch.nn.functional.gelu(x, approximate=approximate))


def _qr(matrix: torch.Tensor, mode: str = "reduced", **out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The CPU asks whether `R` shares the storage in which it factors; all views of a device's memory share one."""
    q, r = torch.linalg.qr(matrix, mode)
    # New memory of the host, in the place of the caller's, has no shape yet.
    return out["Q"].resize_(q.shape).copy_(q), out["R"].resize_(r.shape).copy_(r)


def _of_own_elements(median: Callable[..., Any]) -> Callable[..., Any]:
    """The CPU gives numbers that nobody wrote for rows whose elements are one place in memory, as `expand` makes them."""
    return lambda x, *args, **kwargs: median(x.contiguous(), *args, **kwargs)


def _multiply(tensors: Sequence[torch.Tensor], numbers: Sequence[float]) -> None:
    for x, number in zip(tensors, numbers, strict=True):
        x.mul_(number)


CORRECTED: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "aten::gelu": _gelu,
        "aten::gelu_": lambda x, **how: x.copy_(_gelu(x, **how)),
        "aten::linalg_qr.out": _qr,
        "aten::median.dim": _of_own_elements(torch.ops.aten.median.dim),
        "aten::nanmedian.dim": _of_own_elements(torch.ops.aten.nanmedian.dim),
        # The CPU's round the number to 16 bits first; their forms out of place do not.
        "aten::mul_.Scalar": torch.Tensor.mul_,
        "aten::_foreach_mul_.Scalar": lambda tensors, number: _multiply(tensors, [number] * len(tensors)),
        "aten::_foreach_mul_.ScalarList": _multiply,
        "aten::_embedding_bag": _completed(torch.ops.aten._embedding_bag.default),  # noqa: SLF001 - an operator's name
        "aten::_embedding_bag_forward_only": _completed(torch.ops.aten._embedding_bag_forward_only.default),  # noqa: SLF001
    }
)
