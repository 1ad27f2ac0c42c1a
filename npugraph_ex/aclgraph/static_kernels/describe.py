"""CANN's own descriptions of operators: CANN writes one while an operator runs, so each operator runs once, on new memory.

Only CANN knows the kernels, formats and attributes of a torch operator, so only CANN can write the input of `op_compiler`.
The memory is new and zero. So the program's tensors are neither read nor written, and no custom operator runs.
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
    """Make CANN describe operators.

    Args:
        calls: the calls to describe. A call that cannot run on zeros, or for which memory is short, is left out.
        folder: CANN makes its own folder in it.

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
    for ending in ("_opcompile", "_debug"):  # some versions of CANN raise the latter
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
    """The arguments with tensors of zeros instead of fake tensors. A tensor that is passed twice stays one tensor."""
    made: dict[int, torch.Tensor] = {}

    def scratch(fake: FakeTensor) -> torch.Tensor:
        if id(fake) not in made:
            made[id(fake)] = _zeros_like(fake)
        return made[id(fake)]

    args, kwargs = pytree.tree_map_only(FakeTensor, scratch, (call.args, dict(call.kwargs)))
    return args, kwargs


def _zeros_like(fake: torch.Tensor) -> torch.Tensor:
    """Zeros with the shape and strides of a tensor, in no more memory than the tensor spans; its elements may overlap."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(fake.size(), fake.stride(), strict=True))
    flat = torch.zeros(span if fake.numel() else 0, dtype=fake.dtype, device=fake.device)
    return flat.as_strided(fake.size(), fake.stride())
