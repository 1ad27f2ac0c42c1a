"""Operators of the ATB library: attention against torch's own in float64, caches by hand.

Masks, pages, packed rows, bad arguments.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention

from npugraph_ex.operators import OPERATORS, UnsupportedArgumentError

N, KV, D, SIZE = 4, 2, 8, 4
TABLE = torch.tensor([[5, 0, 2], [1, 4, 3]], dtype=torch.int32)


def formula(name: str, *args: object, **kwargs: object) -> object:
    """The formula of ``atb::name`` called with these arguments."""
    return OPERATORS[f"atb::{name}"].formula(*args, **kwargs)


def caches(width: int = D) -> tuple[torch.Tensor, torch.Tensor]:
    """A key cache and a value cache of six blocks in float64."""
    return torch.randn(6, SIZE, KV, D).double(), torch.randn(6, SIZE, KV, width).double()


def sequence(cache: torch.Tensor, b: int, length: int) -> torch.Tensor:
    """The tokens of one sequence, [Nkv, S, D]."""
    return torch.cat([cache[block] for block in TABLE[b].tolist()])[:length].transpose(0, 1)


def expected(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Torch's attention of one sequence: query [S, N, D], result [S, N, Dv]."""
    return attention(query.transpose(0, 1), key, value, mask, scale=scale, enable_gqa=True).transpose(0, 1)


def lower(rows: int, columns: int) -> torch.Tensor:
    """What a causal mask lets through, the last row at the last column."""
    return torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)


@pytest.mark.parametrize("width", [D, 3])
def test_paged_attention_is_attention_of_each_sequence(width: int) -> None:
    """Blocks are read in the table's order and no further than the length; a sequence of length 0 leaves its row."""
    (keys, values), query = caches(width), torch.randn(2, N, D).double()
    for lengths in ([9, 4], [0, 11]):
        out = torch.full((2, N, width), 7.0).double()
        formula("_npu_paged_attention", query, keys, values, KV, N, 0.3, TABLE, torch.tensor(lengths), out)
        for b, length in enumerate(lengths):
            right = torch.full((1, N, width), 7.0).double()
            if length:
                right = expected(query[b : b + 1], sequence(keys, b, length), sequence(values, b, length), 0.3)
            torch.testing.assert_close(out[b : b + 1], right)


def test_latent_attention_takes_its_values_from_the_keys() -> None:
    """The first elements of a key are the value."""
    (keys, _), query, out = caches(), torch.randn(2, N, D).double(), torch.empty(2, N, 5).double()
    formula("_npu_paged_attention_mla", query, keys, KV, N, 0.3, TABLE, torch.tensor([9, 4]), 5, out)
    right = expected(query[:1], sequence(keys, 0, 9), sequence(keys[..., :5], 0, 9), 0.3)
    torch.testing.assert_close(out[:1], right)


def in_nz(cache: torch.Tensor) -> torch.Tensor:
    """The same cache in layout NZ, the elements of a token in parts of 8: [blocks, parts, size, 8]."""
    return cache.flatten(2).unflatten(2, (-1, 8)).transpose(1, 2).contiguous()


@pytest.mark.parametrize("nz", [False, True])
@pytest.mark.parametrize(
    "name", ["_npu_paged_attention_splitfuse", "_npu_paged_attention_splitfuse_v2", "_npu_flash_attention_qlens"]
)
def test_rows_behind_a_prefix_are_causal(name: str, nz: bool) -> None:
    """The last row of a sequence sees all of its cache, the row before one key less; a mask of packed rows says the same."""
    (keys, values), query, out = caches(), torch.randn(5, N, D).double(), torch.empty(5, N, D).double()
    rows, lengths = torch.tensor([3, 2]), torch.tensor([9, 4])
    tile = torch.ones(128, 128).triu(1)
    if name == "_npu_paged_attention_splitfuse":
        tile = torch.zeros(5, 9).double()
        tile[:3], tile[3:, :4] = ~lower(3, 9) * -1e9, ~lower(2, 4) * -1e9
    pair = (in_nz(keys), in_nz(values)) if nz else (keys, values)
    if name == "_npu_flash_attention_qlens":
        formula(name, query, *pair, TABLE, tile, rows, lengths, KV, N, 0.3, out)
    else:
        formula(name, query, *pair, TABLE, lengths, tile, rows, KV, N, 0.3, out=out)
    for b, (part, length, count) in enumerate(((slice(0, 3), 9, 3), (slice(3, 5), 4, 2))):
        right = expected(query[part], sequence(keys, b, length), sequence(values, b, length), 0.3, lower(count, length))
        torch.testing.assert_close(out[part], right)


@pytest.mark.parametrize("filled", [-10000.0, float("-inf"), 1.0])
def test_a_given_mask_adds_or_excludes(filled: float) -> None:
    """Large negative values and ones leave a key out alike; without a mask each row sees its whole sequence."""
    query, keys, values = (torch.randn(5, heads, D).double() for heads in (N, KV, KV))
    mask, lengths = torch.zeros(3, 3).masked_fill(~lower(3, 3), filled), torch.tensor([2, 3])
    outs = [torch.empty(5, N, D).double() for _ in range(3)]
    formula("_npu_flash_attention", query, keys, values, mask, lengths, 0.3, N, KV, outs[0])
    formula("_npu_flash_attention_v3", query, keys, values, mask, lengths, 0.3, N, KV, out=outs[1])
    formula("_npu_flash_attention_unpad_v2", query, keys, values, lengths, 0.3, N, KV, out=outs[2])
    for part, count in ((slice(0, 2), 2), (slice(2, 5), 3)):
        operands = (query[part], keys[part].transpose(0, 1), values[part].transpose(0, 1), 0.3)
        causal = expected(*operands, lower(count, count))
        torch.testing.assert_close([out[part] for out in outs], [causal, causal, expected(*operands)])


@pytest.mark.parametrize("kind", [1, 3])
def test_a_quantised_cache_is_near_the_exact_one(kind: int) -> None:
    """Descaled int8 keys and values give the attention of their values; int8 weights are off by at most half a step of 1/127."""
    keys, values = (torch.randint(-9, 9, (6, SIZE, KV, D), dtype=torch.int8) for _ in range(2))
    query, out = torch.randint(-9, 9, (2, N, D)).double(), torch.empty(2, N, D).double()
    factors = [torch.rand(KV * D if kind == 1 else N).double() / 9 for _ in range(2)]
    formula(
        "_npu_paged_attention_quant",
        query,
        keys,
        values,
        KV,
        N,
        0.3,
        TABLE,
        torch.tensor([9, 4]),
        kind,
        1,
        *factors,
        out,
    )
    key, value = (sequence(cache.double(), 0, 9) for cache in (keys, values))
    if kind == 1:
        key, value = (part * factor.view(KV, 1, D) for part, factor in zip((key, value), factors, strict=True))
        torch.testing.assert_close(out[:1], expected(query[:1], key, value, 0.3))
    else:
        right = expected(query[:1] * factors[0].view(N, 1), key, value, 0.3) * factors[1].view(N, 1)
        assert 0 < (out[:1] - right).abs().max() < 9 * 9 / 254


def test_tokens_are_written_to_their_slots() -> None:
    """Slot 6 is token 2 of block 1; a negative slot is left out; in layout NZ a token lies in pieces of 32 bytes."""
    key, value = torch.arange(12.0).view(3, 2, 2), torch.arange(3.0).view(3, 1, 1)
    key_cache, value_cache, slots = torch.zeros(2, 4, 2, 2), torch.zeros(2, 4, 1, 1), torch.tensor([6, -1, 0])
    formula("_npu_reshape_and_cache", key, value, key_cache, value_cache, slots)
    assert key_cache[1, 2].tolist() == [[0, 1], [2, 3]]
    assert key_cache[0, 0].tolist() == [[8, 9], [10, 11]]
    assert value_cache.flatten().tolist() == [2, 0, 0, 0, 0, 0, 0, 0]
    assert key_cache.count_nonzero() == 7
    wide, split = torch.arange(64.0).half().view(1, 4, 16), torch.zeros(2, 4, 3, 16).half()
    formula("_npu_reshape_and_cache_siso", wide, split, torch.tensor([4]))
    assert split[1, :, 1].flatten().tolist() == [*range(64)]
    assert split.count_nonzero() == 63


def test_sequences_are_read_from_pages() -> None:
    """From the block that holds the start on, through the table; running totals give the same lengths."""
    cache = torch.arange(24.0).view(6, 4, 1, 1)
    starts = torch.tensor([5, 0])
    key, value = formula("npu_paged_cache_load", cache, -cache, TABLE, torch.tensor([3, 5]), seq_starts=starts)
    assert key.flatten().tolist() == [0, 1, 2, 4, 5, 6, 7, 16]
    assert torch.equal(value, -key)
    again = formula(
        "npu_paged_cache_load", cache, -cache, TABLE, torch.tensor([0, 3, 8]), seq_starts=starts, cumsum=True
    )
    assert torch.equal(again[0], key)


def test_the_best_groups_stay() -> None:
    """By its best expert the last group wins, by its two best the first; the others become 0."""
    scores = torch.tensor([[3.0, 3.0, 1.0, 0.5, 4.0, 1.0]])
    for n, right in ((1, [0, 0, 0, 0, 4, 1]), (2, [3, 3, 0, 0, 0, 0])):
        given = scores.clone()
        formula("_npu_group_topk", given, k=1, group_num=3, n=n)
        assert given.tolist() == [right]


def test_a_product_is_added_to_the_sum() -> None:
    """C + x^T weight, by hand."""
    total = torch.ones(2, 1)
    formula("_npu_matmul_add_fp32", torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0], [6.0]]), total)
    assert total.tolist() == [[24.0], [35.0]]


def test_positions_are_embedded_in_place() -> None:
    """Query and key change to what ``vllm::npu_rotary_embedding`` gives."""
    positions, query, key = torch.tensor([2, 0]), torch.randn(2, 12), torch.randn(2, 6)
    table = torch.randn(3, 6)
    right = OPERATORS["vllm::npu_rotary_embedding"].formula(positions, query, key, table, 6, 6, False)
    formula("_npu_rotary_embedding", positions, query, key, 6, table, False)
    assert torch.equal(query, right[0])
    assert torch.equal(key, right[1])


def test_what_is_not_covered_is_named() -> None:
    """Other masks and quantisations raise with the argument's name."""
    query, lengths = torch.randn(2, N, D), torch.tensor([2])
    with pytest.raises(UnsupportedArgumentError, match="mask_type=4"):
        formula("_npu_flash_attention_v3", query, query, query, query, lengths, 0.3, N, KV, mask_type=4, out=query)
    with pytest.raises(UnsupportedArgumentError, match="quant_type=2"):
        formula(
            "_npu_paged_attention_quant", query, query, query, KV, N, 0.3, TABLE, lengths, 2, 1, query, query, query
        )


def test_biases_are_added_to_paged_scores() -> None:
    """Alibi: the second version of paged attention adds its mask head by head, cut at each sequence's length."""
    (keys, values), query, bias = caches(), torch.randn(2, N, D).double(), torch.randn(N, 1, 9).double()
    out, how = torch.empty(2, N, D).double(), {"num_kv_heads": KV, "num_heads": N, "scale_value": 0.3}
    formula(
        "_npu_paged_attention_v2.out",
        query,
        keys,
        TABLE,
        [9, 4],
        value_cache=values,
        mask=bias,
        mask_type=2,
        out=out,
        **how,
    )
    for b, length in enumerate((9, 4)):
        sequences = sequence(keys, b, length), sequence(values, b, length)
        torch.testing.assert_close(out[b : b + 1], expected(query[b : b + 1], *sequences, 0.3, bias[..., :length]))


def test_latent_attention_joins_both_parts_of_query_and_key() -> None:
    """The values are the plain part of the keys; the statistics are the logarithms of the summed exponentials."""
    plain, rope = torch.randn(3, N, D).double(), torch.randn(3, N, 3).double()
    latent, turned = torch.randn(6, SIZE, 1, D).double(), torch.randn(6, SIZE, 1, 3).double()
    given = plain, rope, latent, turned, TABLE, [9, 4], N, 0.3, 1
    output, lse = formula("npu_multi_head_latent_attention.lse", *given, True, qseqlen=[1, 2])
    for part, b, length in ((slice(0, 1), 0, 9), (slice(1, 3), 1, 4)):
        query, value = torch.cat((plain, rope), -1)[part], sequence(latent, b, length)
        key = torch.cat((value, sequence(turned, b, length)), -1)
        torch.testing.assert_close(output[part], expected(query, key, value, 0.3))
        scores = query.transpose(0, 1) @ key.mT * 0.3
        torch.testing.assert_close(lse[part], scores.logsumexp(-1, keepdim=True).transpose(0, 1))
    assert torch.equal(formula("npu_multi_head_latent_attention", *given, qseqlen=[1, 2]), output)
    with pytest.raises(UnsupportedArgumentError, match="cache_mode='int8_nzcache'"):
        formula("npu_multi_head_latent_attention", *given, cache_mode="int8_nzcache")


@pytest.mark.parametrize("root", [False, True])
def test_slopes_by_distance(root: bool) -> None:
    """A key at distance d adds slope times d, or its root, behind a prefix, too; a given mask of heads says the same."""
    slopes, at = torch.tensor([-1.0, -0.5, -0.25, -0.125]).double(), torch.arange(9.0).double()
    tile = (torch.arange(16.0)[:, None] - torch.arange(16.0)).clamp(min=0)
    tile = (tile.sqrt() if root else tile) + torch.full((16, 16), torch.inf).triu(1).nan_to_num(0.0, torch.inf)
    far = (at[:, None] - at).clamp(min=0)
    added = slopes[:, None, None] * (far.sqrt() if root else far)
    added = added.masked_fill(~lower(9, 9), -torch.inf)
    (keys, values), query, out = caches(), torch.randn(3, N, D).double(), torch.empty(3, N, D).double()
    kind = {"mask_type": 5 if root else 4, "num_heads": N, "num_kv_heads": KV, "scale_value": 0.3}
    formula(
        "_npu_flash_attention_prefix_v2.out", query, keys, values, TABLE, tile, [3], [9], slopes=slopes, out=out, **kind
    )
    key, value = sequence(keys, 0, 9), sequence(values, 0, 9)
    torch.testing.assert_close(out, expected(query, key, value, 0.3, added[:, 6:]))
    query, outs = torch.randn(9, N, D).double(), [torch.empty(9, N, D).double() for _ in range(2)]
    rows = (query, key.transpose(0, 1), value.transpose(0, 1), [9])
    formula("_npu_flash_attention_v2.out", *rows, mask=tile, slopes=slopes, out=outs[0], **kind)
    formula("_npu_flash_attention_v2.out", *rows, mask=added, out=outs[1], **{**kind, "mask_type": 2})
    for found in outs:
        torch.testing.assert_close(found, expected(query, key, value, 0.3, added))
    with pytest.raises(UnsupportedArgumentError, match="distances"):
        formula("_npu_flash_attention_v2.out", *rows, mask=tile + 1, slopes=slopes, out=outs[0], **kind)


def test_quantised_by_channel() -> None:
    """Rounded to even before the offset, saturated behind it; no offset is an empty tensor."""
    x, scale, y = torch.tensor([[2.5, -300.0, 3.0]]), torch.tensor([1.0, 2.0, 0.5]), torch.zeros(1, 3, dtype=torch.int8)
    formula("_npu_quantize_per_tensor", x, scale, torch.tensor([1, -9, 125], dtype=torch.int8), y)
    assert y.tolist() == [[3, -128, 127]]
    formula("_npu_quantize_per_tensor", x, scale, torch.zeros(0, dtype=torch.int8), y)
    assert y.tolist() == [[2, -128, 6]]
