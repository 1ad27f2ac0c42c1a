"""What stands for the Triton kernels of the client, which have no driver here: Triton's interpreter or torch operators."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

import npu_emulator
import npugraph_ex_autoload

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FUSED", "replace_triton_kernels"]

FUSED = "vllm::qkv_rmsnorm_rope"
"""The fused operator of the client's QKNormRope, a Triton kernel on hardware."""

_LIBRARIES: list[torch.library.Library] = []


class _SlotMapping:
    """vLLM's `_compute_slot_mapping_kernel`: where in the cache the key and value of each token are stored."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        requests = grid[0] - 1

        def run(  # noqa: PLR0917 - the kernel's arguments
            tokens: int, most_tokens: int, starts: torch.Tensor, positions: torch.Tensor, blocks: torch.Tensor,
            _stride: int, block_size: int, slots: torch.Tensor, *, PAD_ID: int, TOTAL_CP_WORLD_SIZE: int, **_: Any,  # noqa: N803
        ) -> None:  # fmt: skip
            if TOTAL_CP_WORLD_SIZE != 1:
                raise NotImplementedError("the slots of context parallelism need Triton")
            number = torch.arange(tokens, device=slots.device, dtype=starts.dtype)
            request = torch.searchsorted(starts[1 : requests + 1].contiguous(), number, right=True)
            position = positions[:tokens]
            block = blocks[request.clamp(max=requests - 1), position // block_size].to(slots.dtype)
            slot = block * block_size + position % block_size
            slots[:tokens] = torch.where(number < starts[requests], slot, slots[:tokens])
            slots[tokens:most_tokens].fill_(PAD_ID)

        return run


def _slot_mapping(module: Any) -> Any:
    """The kernel itself in Triton's interpreter if Triton is installed, which vLLM does not use without a driver."""
    if find_spec("triton") is None:
        return _SlotMapping()
    triton: Any = import_module("triton")
    module.tl = import_module("triton.language")
    return triton.jit(module._compute_slot_mapping_kernel)


def _fused(record: Any) -> tuple[Callable[..., Any], str]:
    """The client's kernel in Triton's interpreter if Triton is installed, else the record's formula; and which of them."""
    if find_spec("triton") is None:
        return record.formula, "its record"
    interpreted = import_module("npugraph_ex_conformance.vllm_ascend.interpreted")
    return interpreted.fused_kernel(FUSED), "the client's kernel in Triton's interpreter"


def replace_triton_kernels() -> Callable[..., Any]:
    """Give vLLM its kernel of slots, and define the fused operator that the client defines where Triton is; return its kernel."""
    from vllm.v1.worker import block_table

    slots = block_table._compute_slot_mapping_kernel = _slot_mapping(block_table)
    record: Any = npugraph_ex_autoload.KERNELS[FUSED]  # also where the bundled backend has the name
    fused, which = _fused(record)
    print(f"{FUSED} by {which}; vLLM's kernel of slots by {type(slots).__module__}", flush=True)
    library = torch.library.Library("vllm", "FRAGMENT")
    library.define(f"qkv_rmsnorm_rope{record.schema}")
    torch.library.register_fake(FUSED, record.fake, lib=library)
    npu_emulator.register_kernel(FUSED, fused)
    _LIBRARIES.append(library)
    return fused
