"""Attention over int8 caches, in mixed layouts, merged from parts and over chosen keys: against torch's own in float64."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as attention

from npugraph_ex.operators import OPERATORS, UnsupportedArgumentError
from npugraph_ex.operators._hifloat8 import decode, encode


def formula(name: str, *args: object, **kwargs: object) -> object:
    """The formula of ``npu::npu_name`` called with these arguments."""
    return OPERATORS[f"npu::npu_{name}"].formula(*args, **kwargs)


B, N, KV, S, D = 2, 4, 2, 6, 8
TABLE = torch.tensor([[3, 0, 1], [4, 2, 5]])
SHAPES = {0: (KV, D), 1: (1, B, S), 2: (KV,), 3: (B, KV, S), 4: (6, 2), 5: (6, KV, 2)}


def spread(scale: torch.Tensor, mode: int) -> torch.Tensor:
    """A scale of a mode as [B, Nkv, S, D] or what broadcasts to it."""
    paged = scale[TABLE] if mode > 3 else scale
    return {
        0: lambda: scale[None, :, None],
        1: lambda: scale[0, :, None, :, None],
        2: lambda: scale[None, :, None, None],
        3: lambda: scale[..., None],
        4: lambda: paged.reshape(B, 1, S, 1),
        5: lambda: paged.transpose(1, 2).reshape(B, KV, S, 1),
    }[mode]()


@pytest.mark.parametrize("mode", SHAPES)
def test_codes_are_brought_back_by_the_scale_of_their_mode(mode: int) -> None:
    """(code + offset) * scale of each channel, token or head, in pages too; both versions of the operator."""
    codes = [torch.randint(-9, 9, (B, KV, S, D), dtype=torch.int8) for _ in range(2)]
    scales, offsets = ([torch.rand(SHAPES[mode]).double() for _ in range(2)] for _ in range(2))
    key, value = (
        (code + spread(offset, mode)) * spread(scale, mode)
        for code, scale, offset in zip(codes, scales, offsets, strict=True)
    )
    query = torch.randn(B, N, 1, D).double()
    expected = attention(query, key, value, scale=0.3, enable_gqa=True)
    how = {"num_key_value_heads": KV, "input_layout": "BNSD"}
    if mode > 3:
        order = TABLE.flatten().argsort()
        codes = [code.unflatten(2, (3, 2)).transpose(1, 2).flatten(0, 1)[order] for code in codes]
        how |= {"block_table": TABLE}
    first = {"num_heads": N, "scale": 0.3, "actual_seq_lengths_kv": [S, S]}
    second = {"num_query_heads": N, "softmax_scale": 0.3, "actual_seq_kvlen": [S, S]}
    for i, name in enumerate(("key", "value")):
        first |= {
            f"{name}_antiquant_scale": scales[i],
            f"{name}_antiquant_offset": offsets[i],
            f"{name}_antiquant_mode": mode,
        }
        second |= {f"dequant_scale_{name}": scales[i], f"dequant_offset_{name}": offsets[i], f"{name}_quant_mode": mode}
    torch.testing.assert_close(formula("fused_infer_attention_score", query, *codes, **first, **how)[0], expected)
    torch.testing.assert_close(formula("fused_infer_attention_score_v2", query, *codes, **second, **how)[0], expected)


@pytest.mark.parametrize(
    ("layout", "order"), [("BNSD_NBSD", (1, 0, 2, 3)), ("BSND_BNSD", (0, 1, 2, 3)), ("BNSD_BSND", (0, 2, 1, 3))]
)
def test_outputs_have_a_layout_of_their_own(layout: str, order: tuple[int, ...]) -> None:
    """The first part of the name is the query's, the second the output's; the result may be int8."""
    operands = [torch.randn(B, n, S, D).double() for n in (N, KV, KV)]
    expected = attention(*operands, scale=0.3, enable_gqa=True).permute(order)
    given = [x.transpose(1, 2) if layout.startswith("BSND") else x for x in operands]
    how = {"num_heads": N, "num_key_value_heads": KV, "scale": 0.3, "input_layout": layout}
    torch.testing.assert_close(formula("fused_infer_attention_score", *given, **how)[0], expected)
    codes, _ = formula("fused_infer_attention_score", *given, **how, quant_scale2=torch.tensor([40.0]))
    assert torch.equal(codes, (expected * 40).round().clamp(-128, 127).to(torch.int8))


def test_packed_heads_first_and_sinks() -> None:
    """Layout NTD, both ways; a sink takes a share of each row, and stays out of a row's output."""
    operands, sink = [torch.randn(n, 5, D).double() for n in (N, KV, KV)], torch.randn(N).double()
    how = {"num_query_heads": N, "num_key_value_heads": KV, "actual_seq_qlen": [2, 5], "actual_seq_kvlen": [2, 5]}
    results = []
    for layout in ("NTD", "NTD_TND"):
        output, _ = formula(
            "fused_infer_attention_score_v2",
            *operands,
            **how,
            input_layout=layout,
            softmax_scale=0.3,
            learnable_sink=sink,
        )
        results.append(output if layout == "NTD" else output.transpose(0, 1))
    expected = []
    for part in (slice(0, 2), slice(2, 5)):
        q, k, v = (x[:, part] for x in operands)
        k, v = (x.repeat_interleave(N // KV, 0) for x in (k, v))
        scores = torch.cat((q @ k.mT * 0.3, sink.view(N, 1, 1).expand(N, q.shape[1], 1)), -1)
        expected.append(torch.softmax(scores, -1)[..., :-1] @ v)
    torch.testing.assert_close(results, [torch.cat(expected, 1)] * 2)


def test_prompts_and_single_rows_are_attention() -> None:
    """Without a batch too; ``actual_seq_lengths`` of the incremental operator are those of the cache; NZ pages hold the same."""
    query, key, value = (torch.randn(1, n, S, D).double() for n in (N, KV, KV))
    how = {"num_heads": N, "num_key_value_heads": KV, "scale_value": 0.3}
    causal = attention(query, key, value, is_causal=True, scale=0.3, enable_gqa=True)
    for layout in ("BNSD", "NSD"):
        given = [x if layout == "BNSD" else x[0] for x in (query, key, value)]
        output = formula("prompt_flash_attention", *given, **how, input_layout=layout, sparse_mode=2)
        torch.testing.assert_close(output, causal if layout == "BNSD" else causal[0])
    single = attention(query[:, :, :1], key[:, :, :4], value[:, :, :4], scale=0.3, enable_gqa=True)
    rest = {"input_layout": "BNSD", "actual_seq_lengths": [4]}
    torch.testing.assert_close(formula("incre_flash_attention", query[:, :, :1], key, value, **how, **rest), single)
    pages = [x[0].unflatten(1, (3, 2)).transpose(0, 1).unflatten(-1, (2, 4)).transpose(2, 3) for x in (key, value)]
    output = formula(
        "incre_flash_attention", query[:, :, :1], *pages, **how, **rest, block_table=torch.tensor([[0, 1, 2]])
    )
    torch.testing.assert_close(output, single)
    with pytest.raises(ValueError, match="quant_scale1 should be a tensor beside the others"):
        formula("incre_flash_attention", query, key, value, dequant_scale1=key)


def test_parts_are_merged_to_the_whole() -> None:
    """Attention to all keys, from that to the first and that to the others; in two forms and both layouts."""
    q, k, v = torch.randn(5, D).double(), torch.randn(9, D).double(), torch.randn(9, D).double()
    whole = torch.softmax(q @ k.T, -1) @ v
    scores = [q @ k[part].T for part in (slice(0, 4), slice(4, 9))]
    outputs = [
        torch.softmax(score, -1) @ v[part] for score, part in zip(scores, (slice(0, 4), slice(4, 9)), strict=True)
    ]
    output, lse = formula("attention_update", [score.logsumexp(-1) for score in scores], outputs, 1)
    torch.testing.assert_close((output, lse), (whole, (q @ k.T).logsumexp(-1)))
    # A part without keys, as fused attention hands it out, counts nothing; a row without any is zeros.
    parts = [scores[0].logsumexp(-1), torch.full((5,), torch.inf).double()]
    parts[0][4] = torch.inf
    merged_parts = formula("attention_update", parts, [outputs[0], torch.zeros_like(outputs[0])], 1)
    seen = torch.cat([outputs[0][:4], torch.zeros_like(outputs[0][4:])])
    torch.testing.assert_close(merged_parts, (seen, parts[0]))
    maxima = [score.amax(-1) for score in scores]
    sums = [torch.exp(score - top.unsqueeze(-1)).sum(-1) for score, top in zip(scores, maxima, strict=True)]
    for layout, rows, statistics in (("SBH", (5, 1, D), (1, 1, 5, 1)), ("TND", (5, 1, D), (5, 1, 1))):
        blocks = [
            (
                out.view(rows),
                top.view(statistics).expand(*statistics[:-1], 8),
                total.view(statistics).expand(*statistics[:-1], 8),
            )
            for out, top, total in zip(outputs, maxima, sums, strict=True)
        ]
        merged = formula(
            "ring_attention_update", *blocks[0], *blocks[1], input_layout=layout, actual_seq_qlen=torch.tensor([5])
        )
        torch.testing.assert_close(merged[0], whole.view(rows))
        torch.testing.assert_close(merged[1][..., 0].flatten() + merged[2][..., 3].flatten().log(), lse)


def test_the_indexer_names_the_best_keys_and_sparse_attention_attends_to_them() -> None:
    """With a count as large as the keys, causal attention; with a smaller one, attention to the best by the weighted score."""
    query, key, weights = (
        torch.randn(1, 4, 3, D).double(),
        torch.randn(1, 6, 1, D).double(),
        torch.rand(1, 4, 3).double(),
    )
    scores = (torch.relu(torch.einsum("bsnd,btod->bsnt", query, key)) * weights.unsqueeze(-1)).sum(2)
    seen = torch.ones(4, 6, dtype=torch.bool).tril(2)
    indices, values = formula("lightning_indexer", query, key, weights, sparse_count=2, return_value=True)
    best, places = scores.masked_fill(~seen, -torch.inf).sort(dim=-1, descending=True, stable=True)
    torch.testing.assert_close(values[:, :, 0], best[..., :2])
    assert torch.equal(indices[:, :, 0], places[..., :2].to(torch.int32))
    chosen = torch.zeros(4, 6, dtype=torch.bool).scatter_(1, places[0, :, :2], True)
    everything, _ = formula("lightning_indexer", query, key, weights, sparse_count=8)
    assert everything[0, 0, 0].tolist().count(-1) == 5
    heads = query.transpose(1, 2), key.transpose(1, 2).expand(-1, 3, -1, -1)
    for named, mask in ((indices, chosen), (everything, seen)):
        output, *_ = formula("sparse_flash_attention", query, key, key, named, 0.3)
        torch.testing.assert_close(output, attention(*heads, heads[1], mask, scale=0.3).transpose(1, 2))
    whole = torch.arange(6, dtype=torch.int32).expand(1, 4, 1, 6)  # names keys behind the query too
    for mode, mask in ((3, seen), (0, None)):
        output, *_ = formula("sparse_flash_attention", query, key, key, whole, 0.3, sparse_mode=mode)
        torch.testing.assert_close(output, attention(*heads, heads[1], mask, scale=0.3).transpose(1, 2))
    paged = key.view(3, 2, 1, D)[[1, 2, 0]]
    table, lengths = torch.tensor([[2, 0, 1]]), {"query": torch.tensor([4]), "key": torch.tensor([6])}
    how = {"block_table": table, "layout_query": "TND", "layout_key": "PA_BSND", "sparse_count": 2}
    sizes = {f"actual_seq_lengths_{name}": value for name, value in lengths.items()}
    assert torch.equal(formula("lightning_indexer", query[0], paged, weights[0], **how, **sizes)[0], indices[0])
    scales = torch.rand(1, 4, 3).double() + 0.1, torch.rand(1, 6, 1).double() + 0.1
    codes = [torch.randint(-9, 9, x.shape, dtype=torch.int8) for x in (query, key)]
    exact = formula(
        "lightning_indexer",
        codes[0] * scales[0].unsqueeze(-1),
        codes[1] * scales[1].unsqueeze(-1),
        weights,
        sparse_count=3,
    )
    eighths, hifloats = [x.to(torch.float8_e4m3fn) for x in codes], [encode(x, saturate=True) for x in codes]
    for found, named in ((codes, None), (codes, 1), (eighths, None), (eighths, 292), (hifloats, 290)):
        how = {"sparse_count": 3, "query_dtype": named, "key_dtype": named}
        assert torch.equal(formula("quant_lightning_indexer", *found, weights, *scales, 0, 0, **how), exact[0])
    with pytest.raises(UnsupportedArgumentError, match=r"query and query_dtype=\(torch.uint8, None\)"):
        formula("quant_lightning_indexer", *hifloats, weights, *scales, 0, 0)


def test_sparse_blocks_and_statistics() -> None:
    """Blocks of two keys; a row's maximum and sum are those of its scaled scores, the sink's included."""
    query, key, sinks = torch.randn(1, 1, 2, D).double(), torch.randn(1, 6, 1, D).double(), torch.randn(2).double()
    indices = torch.tensor([2, 0, -1], dtype=torch.int32).view(1, 1, 1, 3)
    how = {"sparse_block_size": 2, "return_softmax_lse": True, "sinks": sinks}
    output, largest, total = formula("sparse_flash_attention", query, key, None, indices, 0.3, **how)
    named = key[0, [4, 5, 0, 1], 0]
    scores = torch.cat((query[0, 0] @ named.T * 0.3, sinks.unsqueeze(-1)), -1)
    torch.testing.assert_close(output[0, 0], torch.softmax(scores, -1)[:, :4] @ named)
    torch.testing.assert_close((largest + total.log()).flatten(), scores.logsumexp(-1))


@pytest.mark.parametrize("kind", ["int8", "float8", "hifloat8"])
def test_sparse_attention_to_quantised_latent_keys(kind: str) -> None:
    """The keys that an index names, times their tiles' scales; in pages, causal; the values are the keys' latent part."""
    query = torch.randn(2, 3, 4, 320).half()
    latent, rope, scale = torch.randn(2, 6, 1, 256) * 9, torch.randn(2, 6, 1, 64).half(), torch.rand(2, 6, 1, 2)
    code = {"hifloat8": 290}.get(kind)
    if code:
        stored = encode(latent, saturate=True)
        numbers = decode(stored)
    else:
        stored = latent.to(torch.int8 if kind == "int8" else torch.float8_e4m3fn)
        numbers = stored.float()
    key = torch.cat([part.view(torch.uint8) for part in (stored, rope, scale)], -1).view(stored.dtype)
    indices = torch.tensor([5, 0, 2, 3, -1, 4], dtype=torch.int32).expand(2, 3, 1, 6).contiguous()
    given = (0.1, 2, 2)
    how = {"attention_mode": 2, "key_dtype": code, "value_dtype": code}
    output = formula("kv_quant_sparse_flash_attention", query, key, key, indices, *given, **how)
    values = (numbers * scale.repeat_interleave(128, -1)).half()
    keys = torch.cat([values, rope], -1).double()[:, :, 0]
    for row in range(3):
        named = [index for index in (5, 0, 2, 3) if index <= 3 + row]
        weights = (torch.einsum("bnd,bsd->bns", query[:, row].double(), keys[:, named]) * 0.1).softmax(-1)
        expected = torch.einsum("bns,bsd->bnd", weights, values[:, named, 0].double())
        torch.testing.assert_close(output[:, row].double(), expected, rtol=2e-3, atol=2e-2)
    pages = key.reshape(6, 2, 1, -1)[[4, 1, 2, 0, 3, 5]]
    table = torch.tensor([[3, 1, 2], [4, 0, 5]])
    lengths = torch.tensor([6, 6])
    paged = {"block_table": table, "actual_seq_lengths_kv": lengths, "layout_kv": "PA_BSND", **how}
    assert torch.equal(
        formula("kv_quant_sparse_flash_attention", query, pages, pages, indices, *given, **paged), output
    )
    for message, fields in (
        ("tile_size should be 128", {"tile_size": 64}),
        ("value_dtype should be", {"value_dtype": 5}),
        ("key_dequant_scale should be None", {"key_dequant_scale": scale}),
    ):
        with pytest.raises(RuntimeError, match=message):
            formula("kv_quant_sparse_flash_attention", query, key, key, indices, *given, **{**how, **fields})
    with pytest.raises(RuntimeError, match="of 260 bytes a row"):
        formula("kv_quant_sparse_flash_attention", query[..., :192], key, key, indices, *given, **how)


def test_blocks_selected_for_each_query() -> None:
    """Two sequences: torch's attention over the keys that are named, one of them twice, and autograd's gradients of it."""
    heads, shared, block = 4, 2, 16
    q, k, v = (
        torch.randn(size).double().requires_grad_() for size in ((3, heads, 8), (80, shared, 8), (80, shared, 6))
    )
    named = torch.tensor([[[2, 0], [1, 1]], [[0, 1], [2, 1]], [[1, 0], [0, 0]]], dtype=torch.int32)
    rows = []
    for row, first in ((0, 0), (1, 0), (2, 48)):
        keys = [first + torch.cat([torch.arange(block) + block * int(i) for i in named[row, n]]) for n in range(shared)]
        mine = [torch.stack([operand[keys[n], n] for n in range(shared)]).unsqueeze(0) for operand in (k, v)]
        rows.append(attention(q[row].unsqueeze(0).unsqueeze(2), *mine, scale=0.3, enable_gqa=True)[0, :, 0])
    expected = torch.stack(rows)
    slope = torch.randn_like(expected)
    how = (named, 0.3, heads, block, 2)
    ends = {"actual_seq_qlen": [2, 3], "actual_seq_kvlen": [48, 80]}
    plain = [operand.detach() for operand in (q, k, v)]
    found = formula("nsa_select_attention", *plain, *how, **ends)
    torch.testing.assert_close(found[0], expected.detach())
    assert found[1].shape == found[2].shape == (3, heads, 8)
    gradients = formula("nsa_select_attention_grad", slope, *plain, *found, *how, **ends)
    for one, other in zip(gradients, torch.autograd.grad(expected, (q, k, v), slope), strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(RuntimeError, match="topk_indices"):
        formula("nsa_select_attention", *plain, named + 1, *how[1:], **ends)
    with pytest.raises(UnsupportedArgumentError, match="atten_mask"):
        formula("nsa_select_attention", *plain, *how, atten_mask=torch.ones(1), **ends)
