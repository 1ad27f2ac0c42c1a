"""Counts the writes of functions that write lists of tensors, as the fused optimisers do, and of collectives.

Torch leaves the versions of lists to the kernels of each device: those of CPU and CUDA count, torch_npu's do not. Collectives count
nowhere. So after an optimiser's step or a broadcast a parameter on an NPU has the version that it had before. Whoever tells by
versions whether a weight was written calls `count_writes` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private
from npugraph_ex.versions.repair import NOT_REPORTED, Repair

REPAIR = Repair(
    fault="A tensor that a `torch._foreach_*_` on an NPU or a collective has written has the version from before.",
    threads=NOT_REPORTED,
    test="tests/frontend/test_version_counters.py",
)

_COLLECTIVES = (
    "_allgather_base_", "_reduce_scatter_base_", "allgather_", "allgather_coalesced_", "allgather_into_tensor_coalesced_",
    "allreduce_", "allreduce_coalesced_", "alltoall_", "alltoall_base_", "broadcast_", "gather_", "recv_", "recv_any_source_",
    "reduce_", "reduce_scatter_", "reduce_scatter_tensor_coalesced_", "scatter_",
)  # fmt: skip
"""Torch's operators behind the functions of torch.distributed. Their schemas do not say so, but each writes its first argument."""


@cache
def count_writes() -> None:
    """From now on each such function gives what it writes a new version; a second call does nothing."""
    for namespace, writers in (("aten", _of_lists()), ("c10d", _of_collectives())):
        library = torch.library.Library(namespace, "IMPL")
        for operator, places in writers:
            library.impl(operator, _counting(operator, places), "ADInplaceOrView")
        _libraries.append(library)


_libraries: list[torch.library.Library] = []  # which take their kernels back when they are gone


def _of_lists() -> Iterator[tuple[OpOverload, list[int]]]:
    """The operators that write lists of tensors, with the positions of these."""
    for name in sorted(dir(torch)):
        if not name.startswith(("_foreach_", "_fused_", "_amp_foreach_")) or not name.endswith("_"):
            continue
        for operator in _overloads(getattr(torch.ops.aten, name)):
            arguments = enumerate(_torch_private.schema(operator).arguments)
            places = [place for place, argument in arguments if _is_written_list(argument)]
            if places:
                yield operator, places


def _of_collectives() -> Iterator[tuple[OpOverload, list[int]]]:
    """The operators of this torch, each with its first position."""
    if torch.distributed.is_available():
        for name in _COLLECTIVES:
            for operator in _overloads(getattr(torch.ops.c10d, name)):
                yield operator, [0]


def _overloads(packet: Any) -> list[OpOverload]:
    return [getattr(packet, name) for name in packet.overloads()]


def _is_written_list(argument: torch.Argument) -> bool:
    alias = argument.alias_info
    return alias is not None and alias.is_write and isinstance(argument.type, torch.ListType)


def _counting(operator: OpOverload, places: list[int]) -> Callable[..., Any]:
    """The operator, with a new version of each tensor in the arguments at ``places``."""
    names = [argument.name for argument in _torch_private.schema(operator).arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _torch_private.below_version_counting():
            result = operator(*args, **kwargs)
        written = [args[place] if place < len(args) else kwargs[names[place]] for place in places]
        counted = [one for one in pytree.tree_leaves(written) if not one.is_inference()]
        torch.autograd.graph.increment_version(counted)
        return result

    return kernel
