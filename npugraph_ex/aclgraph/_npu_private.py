"""Private parts of torch_npu. Those of torch stand in `_torch_private`, because passes may not import torch_npu."""

# ruff: noqa: SLF001 - reaching behind underscores is this module's whole purpose

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from npugraph_ex.errors import StaticKernelError


def set_deterministic_level(level: int) -> Callable[[], None]:
    """Set torch_npu's deterministic level and the torch switch that belongs to it; return a function that restores both.

    torch_npu's public setter warns at every call about the switch that it sets itself, and there is no public getter.
    """
    import torch_npu

    switch, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    earlier = torch_npu.npu._get_deterministic_level()

    def restore() -> None:
        torch.use_deterministic_algorithms(switch, warn_only=warn_only)
        torch_npu._C._npu_set_deterministic_level(earlier)

    torch.use_deterministic_algorithms(level > 0, warn_only=warn_only)
    try:
        torch_npu._C._npu_set_deterministic_level(level)
    except BaseException:
        restore()
        raise
    return restore


def deterministic_level() -> int:
    """The deterministic level in force: torch_npu's level, or 1 where only torch's switch is on."""
    import torch_npu

    return int(torch_npu.npu._get_deterministic_level()) or int(torch.are_deterministic_algorithms_enabled())


def group_streams(name: str, device: int) -> list[torch.npu.Stream]:
    """The streams on which torch_npu runs collectives and messages of a group; none if HCCL does not serve the group.

    Args:
        name: of the group in torch.distributed. Names in HCCL belong to operators that run on the caller's stream.
        device: the number of the one whose streams they are.
    """
    from torch.distributed import distributed_c10d as c10d

    known = {str(group.group_name): group for group in c10d._world.pg_map} if c10d.is_initialized() else {}
    if name not in known:
        return []
    backend = known[name]._get_backend(torch.device("npu"))
    if not hasattr(backend, "_get_stream_id"):
        return []
    peers = [(True, peer) for peer in range(backend.size())]
    numbers = {backend._get_stream_id(*kind) for kind in [(False, -1), *peers]} - {-1}  # -1: not used yet
    current = torch.npu.current_stream(device)
    return [
        torch.npu.Stream(stream_id=number, device_index=current.device_index, device_type=current.device_type)
        for number in sorted(numbers)
    ]


def without_ownership(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor at the same address that does not keep the memory alive; a tensor on the host is returned unchanged.

    The graph may free and reuse the memory that a captured call reads; an update of the call needs only the address.
    """
    import torch_npu

    weak: torch.Tensor = torch_npu._C._weak_ref_tensor(tensor) if tensor.device.type == "npu" else tensor
    return weak


def keep_pool(device: int, pool: tuple[int, int]) -> Callable[[], None]:
    """Keep a memory pool until the returned function is called, also where its memory is free and it has no graph."""
    import torch_npu

    torch_npu._C._npu_beginAllocateCurrentThreadToPool(device, pool)
    _end_of_allocations()(device, pool)
    return partial(torch_npu._C._npu_releasePool, device, pool)


@contextmanager
def joining_pool(device: int, pool: tuple[int, int]) -> Iterator[None]:
    """Within the block this thread allocates in a pool, unless it is in an earlier one."""
    import torch_npu

    torch_npu._C._npu_beginAllocateCurrentThreadToPool(device, pool)
    try:
        yield
    finally:
        _end_of_allocations()(device, pool)
        torch_npu._C._npu_releasePool(device, pool)


@contextmanager
def leaving_pool(device: int, pool: tuple[int, int]) -> Iterator[None]:
    """Within the block this thread does not allocate in the pool of its capture; after the block it does so again."""
    import torch_npu

    _end_of_allocations()(device, pool)
    try:
        yield
    finally:
        torch_npu._C._npu_beginAllocateCurrentThreadToPool(device, pool)
        torch_npu._C._npu_releasePool(device, pool)  # the capture holds it


def _end_of_allocations() -> Callable[[int, tuple[int, int]], None]:
    import torch_npu

    name = (
        "_npu_endAllocateToPool"
        if hasattr(torch_npu._C, "_npu_endAllocateToPool")
        else "_npu_endAllocateCurrentStreamToPool"
    )
    end: Callable[[int, tuple[int, int]], None] = getattr(torch_npu._C, name)
    return end


@contextmanager
def describing_operators(folder: Path) -> Iterator[None]:
    """Make CANN describe every operator that runs in the block, in a folder under ``folder``."""
    import torch_npu

    try:
        torch_npu._C._aclop_start_dump(str(folder))
    except RuntimeError as error:
        raise StaticKernelError(f"CANN does not describe operators here: {_first_line(error)}") from error
    try:
        yield
    finally:
        torch_npu._C._aclop_stop_dump()


def cann_version() -> str:
    """The version of CANN; empty if CANN does not say."""
    import torch_npu

    return str(torch_npu.npu.utils.get_cann_version())


def kernels_in_a_folder() -> bool:
    """Whether CANN (since 9.1) can load compiled kernels from a folder that belongs to one process."""
    import torch_npu

    knows = hasattr(torch_npu.npu, "_aclnn_reselect_static_kernel_with_path")
    return knows and bool(torch_npu.npu.utils._is_gte_cann_version("9.1.0", module="CANN"))


def choose_kernels_anew(folder: Path | None) -> None:
    """Make CANN choose kernels again, from ``folder`` or else from CANN's own folder."""
    import torch_npu

    try:
        if folder is None:
            torch_npu.npu._aclnn_reselect_static_kernel()
        else:
            torch_npu.npu._aclnn_reselect_static_kernel_with_path(str(folder))
    except RuntimeError as error:
        raise StaticKernelError(f"CANN does not take installed kernels here: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


# Every call of a compiled function uses the following, so each returns torch_npu's own function without a wrapper.


def stream_question() -> Callable[[int], tuple[int, int, int]]:
    """A function that identifies a device's current stream by id, device and device type, without a Stream object."""
    import torch_npu

    ask: Callable[[int], tuple[int, int, int]] = torch_npu._C._npu_getCurrentStream
    return ask


def address_comparison() -> Callable[[list[Any], list[int | None], list[int]], bool]:
    """A function of inputs, addresses and positions: whether the tensors at these positions have these addresses.

    It compares all addresses in one call: one call for each parameter of a deep model would cost more than the replay.
    """
    import torch_npu

    compare: Callable[[list[Any], list[int | None], list[int]], bool] = torch_npu._C._tensors_data_ptrs_at_indices_equal
    return compare


def format_question() -> Callable[[torch.Tensor], int]:
    """A function that returns a tensor's storage format as a number: the operator without its Python layer."""
    question: Callable[[torch.Tensor], int] = torch.ops.npu.get_npu_format.default._op
    return question


def empty_in_its_format(tensor: torch.Tensor) -> torch.Tensor:
    """New memory in the private format of ``tensor``, with the sizes that were cast, and the same view of it."""
    noted = torch._utils.get_tensor_metadata(tensor)
    sizes = next(key for key in noted if key.startswith("base_sizes_")).split("/")[1:-1]
    base = torch.ops.npu.empty_with_format.default(
        [*map(int, sizes)], dtype=tensor.dtype, device=tensor.device, acl_format=format_question()(tensor)
    )
    view: torch.Tensor = base.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    return view


def launcher(graph: torch.npu.NPUGraph) -> Callable[[], None]:
    """The replay of a captured graph, without torch_npu's method around it, which only writes to the debug log."""
    launch: Callable[[], None] = super(torch.npu.NPUGraph, graph).replay
    return launch
