"""CANN's own descriptions of operators: it writes them while an operator runs, so each runs once, on memory of its own.

Which kernels an operator of torch becomes, with which formats and attributes, only CANN knows; nobody else could write what
`op_compiler` reads. The memory is new and zero: the program's tensors are neither read nor written, and no operator of the
program's own runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private
from npugraph_ex.aclgraph import _npu_private, scopes
from npugraph_ex.aclgraph.static_kernels.calls import OperatorCall
from npugraph_ex.observe.logger import logger


def describe(calls: Sequence[OperatorCall], folder: Path) -> list[Path]:
    """Have CANN describe operators.

    Args:
        calls: what to describe; one that cannot run on zeros, or for which there is no memory, is left out.
        folder: where CANN makes a folder of its own.

    Returns:
        The files, in no order.

    Raises:
        StaticKernelError: this CANN does not describe operators.
    """
    # Operators of torch_npu may draw random numbers without a tag that says so: attention with dropout does.
    drawn = torch.npu.get_rng_state()
    try:
        with torch.no_grad(), _torch_private.unobserved_execution():
            for call in calls:
                _describe(call, folder)
    finally:
        torch.npu.set_rng_state(drawn)
    for ending in ("_opcompile", "_debug"):  # the latter of a CANN that knows no better
        files = [file for made in folder.glob(f"*{ending}") for file in made.glob("*.json")]
        if files:
            return files
    return []


def _describe(call: OperatorCall, folder: Path) -> None:
    with ExitStack() as around:
        try:
            args, kwargs = _on_scratch(call)
            if call.scope:
                scopes.enter(*zip(*call.scope, strict=True))
                around.callback(scopes.leave)
            torch.npu.current_stream().synchronize()
        except RuntimeError as error:  # no memory
            _left_out(call, error)
            return
        with _npu_private.describing_operators(folder):
            try:
                call.target(*args, **kwargs)
                torch.npu.current_stream().synchronize()
            except (RuntimeError, ValueError, IndexError) as error:
                _left_out(call, error)


def _left_out(call: OperatorCall, why: Exception) -> None:
    logger.info("No static kernel for %s: %s", call.target, str(why).partition("\n")[0])


def _on_scratch(call: OperatorCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with real tensors of zeros for fake ones; one tensor that is passed twice stays one."""
    made: dict[int, torch.Tensor] = {}

    def scratch(fake: FakeTensor) -> torch.Tensor:
        if id(fake) not in made:
            made[id(fake)] = _zeros_like(fake)
        return made[id(fake)]

    args, kwargs = pytree.tree_map_only(FakeTensor, scratch, (call.args, dict(call.kwargs)))
    return args, kwargs


def _zeros_like(fake: torch.Tensor) -> torch.Tensor:
    """Zeros with the shape and strides of a tensor, which may overlap, in no more memory than it spans."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(fake.size(), fake.stride(), strict=True))
    flat = torch.zeros(span if fake.numel() else 0, dtype=fake.dtype, device=fake.device)
    return flat.as_strided(fake.size(), fake.stride())
