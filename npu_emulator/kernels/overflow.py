"""The overflow status of chips that compute in saturation mode: the 910A, the 310P, and those that a variable puts there.

In that mode a result out of its dtype's range is the dtype's largest number, and the device's status says that there was one,
until it is cleared (documentation of `aclrtSetDeviceSatMode` and of `torch_npu.npu_get_float_status`). Here a kernel overflows
if it computes an infinity or NaN from finite numbers. Kernels that only place a given number, such as `masked_fill`, compute none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["OverflowStatus"]

_PLACING = ("fill", "full", "where", "scatter", "pad", "index_put")
"""Parts of the names of operators that place numbers which the program gives."""


class OverflowStatus:
    """Whether a kernel has overflowed since the status was cleared, for each device."""

    def __init__(self) -> None:
        """Start without an overflow."""
        self._overflowed: set[int] = set()

    def guard(
        self,
        name: str,
        device: int,
        body: Callable[[], object],
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> Callable[[], object]:
        """The body of a kernel whose results saturate and set the status, or which reads or clears it."""

        def telling() -> None:
            body()
            writes[0].flatten()[0].fill_(device in self._overflowed)

        def clearing() -> None:
            body()
            self._overflowed.discard(device)

        if name == "npu.npu_get_float_status.default":
            return telling
        if name == "npu.npu_clear_float_status.default":
            return clearing
        if name == "aten._amp_foreach_non_finite_check_and_unscale_.default":
            return lambda: writes[-1].add_(1) if self._take(device) else body()
        read, written = _floating(reads), _floating(writes)
        if not read or not written or any(part in name for part in _PLACING):
            return body

        def saturating() -> None:
            from_finite = _all_finite(read)
            body()
            if from_finite and not _all_finite(written):
                self._overflowed.add(device)
                for tensor in written:
                    limits = torch.finfo(tensor.dtype)
                    tensor.clamp_(limits.min, limits.max)

        return saturating

    def _take(self, device: int) -> bool:
        """Whether a kernel has overflowed; clears the status."""
        overflowed = device in self._overflowed
        self._overflowed.discard(device)
        return overflowed


def _floating(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def _all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)
