"""Writes that no kernel of an NPU counts by itself, of lists of tensors and of collectives: autograd follows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from npugraph_ex.frontend.upstream_repairs import version_counters


@pytest.mark.parametrize("write", [torch._foreach_neg_, torch._foreach_exp_])
def test_writes_to_a_list_are_counted_once(write: Callable[..., Any]) -> None:
    """Of each tensor, on each device, with autograd's own checks; what is not counted in inference mode stays so."""
    version_counters.count_writes()
    for device in ("npu", "cpu"):
        tensors, expected = [torch.ones(3, device=device) for _ in range(2)], torch.ones(3)
        write(tensors)
        write([expected])
        assert [one._version for one in tensors] == [1, 1]
        assert all(torch.equal(one.cpu(), expected) for one in tensors)
        with torch.inference_mode():
            write([torch.ones(3, device=device), tensors[0]])
    with torch.enable_grad():
        half = torch.ones(3, requires_grad=True).npu() * 2
        square = half * half
        write([half])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            square.sum().backward()


COLLECTIVES: dict[str, Callable[..., Any]] = {
    "broadcast": lambda out, _: dist.broadcast(out, 0),
    "all_reduce": lambda out, _: dist.all_reduce(out),
    "reduce": lambda out, _: dist.reduce(out, 0),
    "all_gather": lambda out, x: dist.all_gather([out], x),
    "all_gather_into_tensor": dist.all_gather_into_tensor,
    "gather": lambda out, x: dist.gather(x, [out], 0),
    "scatter": lambda out, x: dist.scatter(out, [x], 0),
    "reduce_scatter": lambda out, x: dist.reduce_scatter(out, [x]),
    "reduce_scatter_tensor": dist.reduce_scatter_tensor,
    "all_to_all": lambda out, x: dist.all_to_all([out], [x]),
    "all_to_all_single": dist.all_to_all_single,
}


def test_writes_of_collectives_are_counted() -> None:
    """Of what they write, and not of what they read; over one rank."""
    version_counters.count_writes()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for name, collective in COLLECTIVES.items():
            out, x = torch.zeros(3), torch.arange(3.0)
            collective(out, x)
            assert out._version > 0 == x._version, name
            assert torch.equal(out, x) or name in {"broadcast", "all_reduce", "reduce"}
    finally:
        dist.destroy_process_group()
