"""Operators of torch_npu that update a cache in place, which their schema does not say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch_npu
from device_helpers import NPU, check, random
from functorch.compile import aot_function
from other_kernels import kernels_in_their_place

from npugraph_ex import get_compiler
from npugraph_ex.graph.operators import may_alias, written_by

OPERATOR = "npu::npu_kv_rmsnorm_rope_cache"


@pytest.fixture(scope="module", autouse=True)
def _kernel() -> Iterator[None]:
    """An operator that stores rows in two caches, as the real one does with what it computes, which is more."""

    def store(kv: torch.Tensor, gamma: torch.Tensor, cos: torch.Tensor, *others: torch.Tensor, **_: Any) -> Any:
        _, slots, k_cache, ckv_cache = others
        normed, turned = kv[..., : len(gamma)] * gamma, kv[..., len(gamma) :] * cos
        k_cache[slots], ckv_cache[slots] = turned[:, 0, 0], normed[:, 0, 0]
        return k_cache.clone(), ckv_cache.clone(), turned.clone(), normed.clone()

    with kernels_in_their_place({OPERATOR: store}):
        yield


def caches(kv: torch.Tensor, gamma: torch.Tensor, cos: torch.Tensor, *others: torch.Tensor) -> Any:
    """Reads what the operator returns for the caches."""
    k_cache, ckv_cache, _, _ = torch_npu.npu_kv_rmsnorm_rope_cache(kv, gamma, cos, *others)
    return k_cache + 1, ckv_cache * 2


def rows(kv: torch.Tensor, gamma: torch.Tensor, cos: torch.Tensor, *others: torch.Tensor) -> Any:
    """Reads what was stored."""
    _, _, turned, normed = torch_npu.npu_kv_rmsnorm_rope_cache(kv, gamma, cos, *others)
    return turned + 1, normed * 2


def nothing(kv: torch.Tensor, gamma: torch.Tensor, cos: torch.Tensor, *others: torch.Tensor) -> Any:
    """Uses no result, and the caches themselves before and after."""
    before = others[2] + 1
    torch_npu.npu_kv_rmsnorm_rope_cache(kv, gamma, cos, *others)
    return before, others[2] * 2, others[3] + 1


def inputs(slot: int) -> tuple[torch.Tensor, ...]:
    """Rows for a slot and two more, and the caches."""
    slots, cos = torch.tensor([slot, 4, 5], device=NPU), random(3, 1, 1, 4)
    return random(3, 1, 1, 12), random(8), cos, cos, slots, random(6, 4), random(6, 8)


@pytest.mark.parametrize("program", [caches, rows, nothing])
def test_caches_are_updated_where_they_are(program: Callable[..., Any]) -> None:
    """Replays write the caller's caches, as eager mode does, and keep what they held elsewhere."""
    check(program, [inputs(slot) for slot in range(3)])


def test_aot_is_told_by_every_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call whose results nobody uses stays also where a caller runs AOT with a compiler of this library."""
    monkeypatch.setattr(torch.fx.node, "_side_effectful_functions", set(torch.fx.node._side_effectful_functions))
    torch.fx.node._side_effectful_functions.discard(torch.ops.npu.npu_kv_rmsnorm_rope_cache.default)
    mine = inputs(1)
    eager = [tensor.clone() for tensor in mine]
    with torch.no_grad():
        aot_function(nothing, fw_compiler=get_compiler())(*mine)
        nothing(*eager)
    assert torch.equal(mine[5].cpu(), eager[5].cpu())


def test_a_list_of_outs_is_written() -> None:
    """The `.out` of an operator with several results writes all that it is given."""
    graph = torch.fx.Graph()
    query, first, second = (graph.placeholder(name) for name in ("query", "first", "second"))
    overload = torch.ops.npu.npu_fused_infer_attention_score.out
    node = graph.call_function(overload, (query, query, query), {"out": [first, second]})
    assert written_by(node) == (first, second)
    assert may_alias(node) == [first, second]
