"""The extra rule split + norms + rotary embedding: which graphs fuse, which do not, and what they compute."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: D103

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fusion_cases import Table, TableTests, edits_at, tensors
from fx_helpers import aot_graph, optimise, targets

from npugraph_ex.testing.generator.client_operators import client_operators

RULE = "qk_norm_rope"
FUSED = "qkv_rmsnorm_rope"
BF16, HALF = torch.bfloat16, torch.float16
D = 128
# The projection of 2 query heads and 1 key head, both weights, the table; positions are made of it.
SPECS = [((5, 4 * D), BF16), ((D,), BF16), ((D,), BF16), ((16, D), BF16)]
EQUAL_HEADS = [((5, 3 * D), BF16), *SPECS[1:]]

rms = torch.ops.npu.npu_rms_norm


@pytest.fixture(autouse=True, scope="module")
def _operators() -> Iterator[None]:
    """The client's operators exist while this module is tested, and two that read a value as it lies in memory."""
    library = torch.library.Library("test_kept", "DEF")
    library.define("attend(Tensor q, Tensor k, Tensor v, Tensor(a!) out) -> ()")
    library.define("strides(Tensor x) -> Tensor")
    library.impl("attend", _attend, "CompositeExplicitAutograd")
    library.impl("strides", _strides, "CompositeExplicitAutograd")
    torch.library.register_fake("test_kept::strides", lambda x: x.new_empty(2, dtype=torch.int64), lib=library)
    torch.library.register_fake("test_kept::attend", lambda *_: None, lib=library)
    with client_operators():
        yield
    library._destroy()


def _attend(q: Any, k: Any, v: Any, out: Any) -> None:
    """Every query head over all keys of its group, tokens attending to all others."""
    groups = q.shape[1] // k.shape[1]
    keys, values = (part.repeat_interleave(groups, dim=1).transpose(0, 1) for part in (k, v))
    scores = torch.softmax(q.transpose(0, 1) @ keys.transpose(1, 2) / D, dim=-1)
    out.copy_((scores @ values).transpose(0, 1))


def _strides(x: Any) -> Any:
    return torch.tensor([x.stride(0), x.storage_offset()], device=x.device)


def positions(x: Any) -> Any:
    return torch.arange(x.shape[0], device=x.device).flip(0)


def heads(x: Any, weight: Any, bias: Any = None, eps: float = 1e-6, size: int = D) -> Any:
    """Normalised heads as vLLM's attention layers write them."""
    by_head = x.view(*x.shape[:-1], x.shape[-1] // size, size)
    normed = rms(by_head, weight, eps)[0]
    return (normed if bias is None else normed + bias).view(x.shape)


def rope(p: Any, q: Any, k: Any, c: Any, *, neox: bool = True) -> Any:
    return torch.ops.vllm.npu_rotary_embedding(p, q, k, c, D, D, neox)


def split(x: Any, q: int = 2 * D, kv: int = D) -> Any:
    return x.split([q, kv, kv], dim=-1)


def plain(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, v = split(x)
    return (*rope(positions(x), heads(q, qw), heads(k, kw), c), v * 2)


def value_is_a_result(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, v = split(x)
    return (*rope(positions(x), heads(q, qw), heads(k, kw), c), v)


def value_unused(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, _ = split(x)
    return rope(positions(x), heads(q, qw), heads(k, kw), c)


def key_unused(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, v = split(x)
    return rope(positions(x), heads(q, qw), heads(k, kw), c)[0], v + 1


def other_epsilon(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, v = split(x)
    return (*rope(positions(x), heads(q, qw, eps=1e-5), heads(k, kw, eps=1e-5), c), v.neg())


def positive_dim(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, v = x.split([2 * D, D, D], dim=1)
    return (*rope(positions(x), heads(q, qw), heads(k, kw), c), v.abs())


def biased(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, v = split(x)
    return (*rope(positions(x), heads(q, qw, kw), heads(k, kw, qw), c), v * 2)


def one_weight_for_both(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, v = split(x)
    return (*rope(positions(x), heads(q, qw), heads(k, qw), c), v * 2)


def as_many_key_heads(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, v = split(x, D, D)
    return (*rope(positions(x), heads(q, qw), heads(k, kw), c), v * 2)


def two_layers(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, v = split(x)
    p = positions(x)
    q, k = rope(p, heads(q, qw), heads(k, kw), c)
    q2, k2, v2 = split(torch.cat((q, k, v), dim=-1))
    return (*rope(p, heads(q2, qw, eps=1e-5), heads(k2, kw, eps=1e-5), c), v2 * 2)


def value_used_early(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, v = split(x)
    early = v * 3
    return (*rope(positions(x) * 1, heads(q, qw), heads(k, kw), c * 0.5), early)


def projection_written_after(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, v = split(x)
    q, k = rope(positions(x), heads(q, qw), heads(k, kw), c)
    x[:, : 2 * D].copy_(q)
    return k, v * 2


def projection_written_first(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    """AOT's functionalization splits a tensor that was written anew for each part that is used."""
    x = x.clone()
    q, k, v = split(x)
    x.mul_(x)
    return (*rope(positions(x), heads(q, qw), heads(k, kw), c), v * 2)


def part_of_a_buffer_written_first(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    """The same where what is split is a view of what was written."""
    buffer = torch.cat((x, x))
    x = buffer[: x.shape[0]]
    q, k, v = split(x)
    buffer.mul_(buffer)
    return (*rope(positions(x), heads(q, qw), heads(k, kw), c), v * 2)


def heads_by_unflatten(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, v = split(x)
    q = rms(q.unflatten(-1, (2, D)), qw)[0].flatten(-2)
    return (*rope(positions(x), q, rms(k.view(-1, 1, D), kw, 1e-6)[0].flatten(-2), c), v * 2)


def query_part_used_elsewhere(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, v = split(x)
    return (*rope(positions(x), heads(q, qw), heads(k, kw), c), v * 2, q * 2)


def attended(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    """As vLLM's attention layers end: a custom operator reads heads of all three, and writes its argument."""
    q, k, v = split(x)
    q, k = rope(positions(x), heads(q, qw), heads(k, kw), c)
    attention = torch.empty_like(q)
    q, k, v = (part.view(part.shape[0], -1, D) for part in (q, k, v))
    torch.ops.test_kept.attend(q, k, v, attention.view(attention.shape[0], -1, D))
    return attention


def strides_of_the_value(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    """Readers whose results depend on how the value lies in memory."""
    q, k, v = split(x)
    beyond = v.as_strided((2, 2), (v.stride(0), 1), 1)
    return (*rope(positions(x), heads(q, qw), heads(k, kw), c), beyond * 2, torch.ops.test_kept.strides(v))


def value_written_after(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    """A write to the value is seen through the caller's projection."""
    q, k, v = split(x)
    q, k = rope(positions(x), heads(q, qw), heads(k, kw), c)
    v.mul_(3)
    return q, k


def weight_depends_on_the_value(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    """A value that the fused operator made would close a cycle."""
    q, k, v = split(x)
    return (*rope(positions(x), heads(q, qw + v[0]), heads(k, kw), c), v * 2)


MUST_FUSE: dict[Callable[..., Any], int] = {
    query_part_used_elsewhere: 1, attended: 1, strides_of_the_value: 1, value_written_after: 1,
    weight_depends_on_the_value: 1,
    plain: 1, value_is_a_result: 1, value_unused: 1, key_unused: 1, other_epsilon: 1, positive_dim: 1, biased: 1,
    one_weight_for_both: 1, as_many_key_heads: 1, two_layers: 2, value_used_early: 1, projection_written_after: 1,
    heads_by_unflatten: 1, projection_written_first: 1, part_of_a_buffer_written_first: 1,
}  # fmt: skip


def two_epsilons(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, v = split(x)
    return (*rope(positions(x), heads(q, qw, eps=1e-5), heads(k, kw, eps=1e-3), c), v * 2)


def pairs_of_neighbours(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, v = split(x)
    return (*rope(positions(x), heads(q, qw), heads(k, kw), c, neox=False), v * 2)


def partly_embedded(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, v = split(x)
    c = c[:, :64].contiguous()
    return (*torch.ops.vllm.npu_rotary_embedding(positions(x), heads(q, qw), heads(k, kw), c, D, 64, True), v)


def norm_used_elsewhere(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, v = split(x)
    q = heads(q, qw)
    return (*rope(positions(x), q, heads(k, kw), c), v * 2, q * 2)


def deviation_used(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, v = split(x)
    y, deviation = rms(q.view(-1, 2, D), qw)
    return (*rope(positions(x), y.view(q.shape), heads(k, kw), c), v * 2, deviation)


def swapped_query_and_key(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, v = split(x)
    return (*rope(positions(x), heads(k, kw), heads(q, qw), c), v * 2)


def key_and_value_exchanged(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, v, k = split(x)
    return (*rope(positions(x), heads(q, qw), heads(k, kw), c), v * 2)


def bias_on_the_query_alone(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, v = split(x)
    return (*rope(positions(x), heads(q, qw, kw), heads(k, kw), c), v * 2)


def something_in_between(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, v = split(x)
    return (*rope(positions(x), heads(q, qw) * 2, heads(k, kw), c), v * 2)


def no_key_norm(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, v = split(x)
    return (*rope(positions(x), heads(q, qw), k.contiguous(), c), v * 2)


def norm_over_all_heads(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, v = split(x)
    return (*rope(positions(x), rms(q, torch.cat((qw, qw)))[0], rms(k, kw)[0], c), v * 2)


MUST_NOT_FUSE: dict[Callable[..., Any], str] = {
    two_epsilons: "eps would stand for two different values",
    pairs_of_neighbours: "is_neox_style is False, the pattern has True",
    partly_embedded: "head_size would stand for two different values",
    norm_used_elsewhere: "is also used by mul",
    deviation_used: "output 1 of npu_rms_norm is also a result of the graph",
    swapped_query_and_key: "getitem_1 is output 1 of split_with_sizes, the pattern has output 0",
    key_and_value_exchanged: "is output 2 of split_with_sizes, the pattern has output 1",
    bias_on_the_query_alone: "add",
    something_in_between: "mul is not a call of aten.view.default",
    no_key_norm: "clone is not a call of aten.view.default",
    norm_over_all_heads: "",
}
EDITS = edits_at(plain, "npu_rotary_embedding")
TABLE = Table(RULE, FUSED, MUST_FUSE, MUST_NOT_FUSE, EDITS, SPECS, other_specs={as_many_key_heads: EQUAL_HEADS})


class TestTable(TableTests):
    """Counts, reasons and values of every graph."""

    table = TABLE


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        ([(shape, HALF) for shape, _ in SPECS], "qkv is torch.float16; the fused operator computes in torch.bfloat16"),
        ([((0, 4 * D), BF16), *SPECS[1:]], "there may be no tokens"),
        ([SPECS[0], ((2, D), BF16), *SPECS[2:]], "q_weight has 2 dimensions; the fused operator takes one vector"),
    ],
    ids=["float16", "empty", "one norm of all heads"],
)
def test_undocumented_operands_are_refused(specs: Any, reason: str) -> None:
    """The kernel rounds float16 to bfloat16, takes no empty tensors, and norms each head by itself."""
    TABLE.check_refused(plain, reason, specs=specs)


def small_heads(x: Any, qw: Any, kw: Any, c: Any) -> Any:
    q, k, v = split(x, 128, 64)
    q, k = heads(q, qw, size=64), heads(k, kw, size=64)
    q, k = torch.ops.vllm.npu_rotary_embedding(positions(x), q, k, c, 64, 64, True)
    return q, k, v * 2


def test_heads_of_another_size_are_refused() -> None:
    """The fused operator is used with heads of 128 elements only."""
    specs = [((5, 256), BF16), ((64,), BF16), ((64,), BF16), ((16, 64), BF16)]
    TABLE.check_refused(small_heads, "the last dim of q_weight is 64; the fused operator has heads of 128", specs=specs)


@pytest.mark.slow
def test_the_value_stays_a_view() -> None:
    """The fused operator's query and key are used; the value's node is the one that was there."""
    gm = aot_graph(value_is_a_result, *tensors(SPECS))
    value = gm.graph.output_node().args[0][2]  # type: ignore[index]
    optimise(gm, fusion_rules={RULE: True})
    assert gm.graph.output_node().args[0][2] is value  # type: ignore[index]
    assert targets(gm).count("split_with_sizes") == targets(gm).count(FUSED) == 1
