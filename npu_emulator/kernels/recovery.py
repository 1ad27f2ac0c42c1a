"""torch_npu's recovery from faults: its allocator marks memory whose contents a fault may have changed, and operators refuse it.

`torch_npu.npu._recovery` sets the marks and the flag that switches the check on. On hardware torch_npu checks where it launches
CANN's operators; here the emulator's kernels do. A copy of safe data makes its destination safe.
"""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_leaves

from npu_emulator.kernels.arguments import is_npu

__all__ = ["refuse_unsafe", "refuse_unsafe_copy"]


def refuse_unsafe(*arguments: object) -> None:
    """Raise if one of the device tensors lies in memory that is marked.

    Raises:
        RuntimeError: torch_npu's own words.
    """
    from torch_npu._C import _check_npu_data_ptr
    from torch_npu.utils._error_code import ErrCode, pta_error

    for leaf in tree_leaves(arguments):
        if isinstance(leaf, torch.Tensor) and is_npu(leaf) and not _check_npu_data_ptr(leaf.untyped_storage()):
            raise RuntimeError("There is unsafe data in the input tensor." + pta_error(ErrCode.VALUE))


def refuse_unsafe_copy(destinations: object, sources: object) -> None:
    """Raise if one of the sources is marked; else take the marks of the destinations away."""
    from torch_npu._C import _update_npu_data_ptr

    refuse_unsafe(sources)
    for leaf in tree_leaves(destinations):
        if isinstance(leaf, torch.Tensor) and is_npu(leaf):
            _update_npu_data_ptr(leaf.untyped_storage())
