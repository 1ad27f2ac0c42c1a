"""Rotary embeddings against complex rotation in float64, gradients against autograd; caches and decoding inputs by hand."""

from __future__ import annotations

import pytest
import torch

from npugraph_ex.operators import OPERATORS, UnsupportedArgumentError


def formula(name: str, *args: object, **kwargs: object) -> object:
    """The formula of ``npu::name`` called with these arguments."""
    return OPERATORS[f"npu::{name}"].formula(*args, **kwargs)


def turned(x: torch.Tensor, angle: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """``x`` whose elements ``first`` and ``second``, pair by pair, are a point of the plane, turned by ``angle``."""
    point = torch.complex(x[..., first], x[..., second]) * torch.polar(torch.ones_like(angle), angle)
    out = x.clone()
    out[..., first], out[..., second] = point.real, point.imag
    return out


PAIRS = {
    "half": ([0, 1, 2, 3], [4, 5, 6, 7]),
    "interleave": ([0, 2, 4, 6], [1, 3, 5, 7]),
    "quarter": ([0, 1, 4, 5], [2, 3, 6, 7]),
}


@pytest.mark.parametrize("mode", PAIRS)
def test_rotary_embedding_turns_pairs_and_has_the_gradients_of_its_formula(mode: str) -> None:
    """Each mode turns its pairs by the angle; the backward operator gives what autograd gives, broadcast factors included."""
    first, second = (torch.tensor(places) for places in PAIRS[mode])
    x, angle = torch.randn(2, 3, 4, 8).double(), torch.rand(1, 3, 1, 4).double()
    whole = torch.zeros(1, 3, 1, 8).double()
    whole[..., first], whole[..., second] = angle, angle
    given = [leaf.requires_grad_() for leaf in (x, whole.cos(), whole.sin())]
    result = formula("npu_rotary_mul", *given, mode)
    torch.testing.assert_close(result, turned(x, angle, first, second))
    slope = torch.randn_like(x)
    expected = torch.autograd.grad(result, given, slope)
    torch.testing.assert_close(formula("npu_rotary_mul_backward", slope, *given, mode), expected)


def test_pairs_are_turned_by_tables_along_one_dimension() -> None:
    """Halves by a table for each entry of the batch, too; the device does not tile pairs so."""
    x, right, wrong = (torch.randn(size).half().npu() for size in ((2, 3, 4, 8), (1, 3, 1, 8), (2, 3, 1, 8)))
    turn = torch.ops.npu.npu_rotary_mul
    for mode, tables in (("half", right), ("half", wrong), ("interleave", right)):
        wanted = formula("npu_rotary_mul", x.cpu(), tables.cpu(), tables.cpu(), mode)
        assert torch.equal(turn(x, tables, tables, mode).cpu(), wanted)
    with pytest.raises(
        RuntimeError, match=r"r1's shape should be 1 in all dimensions .*; it is \(2, 3, 1, 8\)"
    ) as caught:
        turn(x, wrong, wrong, "interleave")
    assert getattr(caught.value, "code", None) == 561002


def test_queries_and_keys_are_embedded_in_place() -> None:
    """As ``npu_rotary_mul``; a head wider than the table keeps its last elements; the tables of packed rows have no heads."""
    query, key, angle = torch.randn(3, 4, 10).double(), torch.randn(3, 2, 10).double(), torch.rand(3, 8).double()
    right = [
        formula("npu_rotary_mul", x[..., :8], *(t.unsqueeze(1) for t in (angle.cos(), angle.sin())))
        for x in (query, key)
    ]
    rest = query[..., 8:].clone()
    results = formula("npu_apply_rotary_pos_emb", query, key, angle.cos(), angle.sin(), "TND")
    assert results[0] is query
    assert results[1] is key
    torch.testing.assert_close([query[..., :8], key[..., :8]], right)
    assert torch.equal(query[..., 8:], rest)


def test_interleaved_pairs_come_out_in_halves() -> None:
    """The pairs are neighbours; turned, their first members stand first."""
    x, angle = torch.randn(2, 3, 4, 8).double(), torch.rand(2, 1, 4, 4).double()
    first, second = (torch.tensor(places) for places in PAIRS["interleave"])
    right = turned(x, angle, first, second)
    both = torch.cat((angle, angle), -1)
    result = formula("npu_interleave_rope", x, both.cos(), both.sin())
    torch.testing.assert_close(result, torch.cat((right[..., first], right[..., second]), -1))


@pytest.mark.parametrize(("cache_mode", "axes"), [("default", [0, 1, 1, 2]), ("interleave", [0, 1, 2, 0])])
def test_pairs_take_their_own_position(cache_mode: str, axes: list[int]) -> None:
    """In sections, or in turns as far as they reach."""
    positions, angles = torch.tensor([[0, 3], [1, 2], [2, 0]]), torch.rand(4, 4).double()
    x = torch.randn(2, 16).double()
    table = torch.cat((angles.cos(), angles.sin()), -1)
    sections = [1, 2, 1] if cache_mode == "default" else [2, 1, 1]
    query, _ = formula("npu_mrope", positions, x, x, table, 8, mrope_section=sections, cache_mode=cache_mode)
    angle = torch.stack([angles[positions[axis], pair] for pair, axis in enumerate(axes)], -1).unsqueeze(1)
    first, second = (torch.tensor(places) for places in PAIRS["half"])
    torch.testing.assert_close(query.view(2, 2, 8), turned(x.view(2, 2, 8), angle, first, second))


def latent(cache_mode: str, index: torch.Tensor, *shape: int, **kwargs: object) -> tuple[torch.Tensor, ...]:
    """The caches after a call with two sequences of three tokens, 16 normed and 16 embedded elements, and both parts."""
    torch.manual_seed(0)
    kv, gamma, angle = torch.randn(2, 1, 3, 32).double(), torch.rand(16).double(), torch.rand(2, 1, 3, 8).double()
    both = torch.cat((angle, angle), -1)
    caches = [torch.zeros(*shape, 16).double() for _ in range(2)]
    return formula(
        "npu_kv_rmsnorm_rope_cache",
        kv,
        gamma,
        both.cos(),
        both.sin(),
        index,
        *caches,
        cache_mode=cache_mode,
        is_output_kv=True,
        **kwargs,
    )


def test_latent_keys_are_normed_embedded_and_stored() -> None:
    """The parts are those of their own operators; every cache mode puts each token where its index says."""
    torch.manual_seed(0)
    kv, gamma, angle = torch.randn(2, 1, 3, 32).double(), torch.rand(16).double(), torch.rand(2, 1, 3, 8).double()
    both = torch.cat((angle, angle), -1)
    normed = torch.nn.functional.rms_norm(kv[..., :16], (16,), gamma, 1e-5)
    rope = formula("npu_interleave_rope", kv[..., 16:], both.cos(), both.sin())
    k_cache, ckv_cache, *parts = latent("Norm", torch.tensor([[0, 2, 4], [1, -1, 3]]), 2, 1, 5)
    torch.testing.assert_close(parts, [rope, normed])
    assert torch.equal(k_cache[0, 0, [0, 2, 4]], parts[0][0, 0])
    assert torch.equal(ckv_cache[1, 0, [1, 3]], parts[1][1, 0, [0, 2]])
    assert not ckv_cache[1, 0, [0, 2, 4]].any()
    slots = torch.tensor([2, 5, 7, 0, -1, 6])
    paged = latent("PA", slots, 4, 2, 1)[1].view(8, 16)
    assert torch.equal(paged[slots[slots >= 0]], normed.view(6, 16)[slots >= 0])
    assert torch.equal(latent("PA_NZ", slots, 4, 2, 1)[1].view(8, 16), paged)  # 16 elements are one part
    blocks = latent("PA_BLK_BNSD", torch.tensor([4, 0, -1, 6]), 4, 2, 1)[1].view(8, 16)
    assert torch.equal(blocks[[4, 5, 0, 6]], normed.view(6, 16)[[0, 1, 2, 5]])
    assert not blocks[[1, 2, 3, 7]].any()


def test_projected_tokens_are_split_embedded_and_quantised() -> None:
    """round(x / scale + offset) in the cache of each sequence from its index on; the query is only embedded."""
    x, angle = torch.randn(2, 1, 12).double(), torch.rand(2, 1, 1, 2).double()
    both = torch.cat((angle, angle), -1)
    caches = [torch.zeros(2, 3, 1, 4, dtype=torch.int8) for _ in range(2)]
    scales, offset = [torch.full((4,), 0.01).double() for _ in range(2)], torch.full((4,), 3.0).double()
    q, k, v, *written = formula(
        "npu_rope_quant_kvcache",
        x,
        both.cos(),
        both.sin(),
        *caches,
        torch.tensor([1, 2]),
        *scales,
        [4, 4, 4],
        offset_k=offset,
        kv_output=True,
    )
    assert written[0] is caches[0]
    first, second = torch.tensor([0, 1]), torch.tensor([2, 3])
    torch.testing.assert_close(q, turned(x[..., :4].unsqueeze(2), angle, first, second))
    assert torch.equal(caches[0][0, 1, 0], (k[0, 0, 0] / 0.01 + 3).round().clamp(-128, 127).to(torch.int8))
    assert torch.equal(caches[1][1, 2, 0], (v[1, 0, 0] / 0.01).round().clamp(-128, 127).to(torch.int8))
    assert caches[1].count_nonzero() <= 8


def test_pages_are_scattered_and_gathered_back() -> None:
    """What was written by slots is read by the table; a block that the table does not name gives zeros."""
    key, value = torch.randn(5, 2, 4), torch.randn(5, 2, 8)
    key_cache, value_cache = torch.zeros(4, 2, 2, 4), torch.zeros(4, 2, 2, 8)
    slots = torch.tensor([6, 7, 0, 4, 5])
    formula("npu_scatter_pa_kv_cache", key, value, key_cache, value_cache, slots, cache_mode="Norm")
    tables, outs = torch.tensor([[3, 0], [2, -1]]), [torch.full((6, 2, size), 9.0) for size in (4, 8)]
    formula("npu_gather_pa_kv_cache", key_cache, value_cache, tables, torch.tensor([3, 3]), *outs)
    assert torch.equal(outs[0][:5], key)
    assert torch.equal(outs[1][:5], value)
    assert not outs[0][5].any()
    with pytest.raises(UnsupportedArgumentError, match="compress_lens"):
        formula("npu_scatter_pa_kv_cache", key, value, key_cache, value_cache, slots, compress_lens=slots)


def test_parts_are_updated_at_their_places() -> None:
    """Row by row, by row and place, and tensor by tensor where the mask lets."""
    data, updates = torch.zeros(2, 3, 2), torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    assert formula("scatter_update", data, torch.tensor([2, 0]), updates, -2)[:, :, 0].tolist() == [
        [0, 0, 1],
        [3, 0, 0],
    ]
    assert not data.any()
    formula("scatter_update_", data, torch.tensor([[1, 2], [0, 1]]), updates, 1)
    assert data[:, :, 1].tolist() == [[0, 4, 0], [0, 0, 2]]
    tensors, given = [torch.zeros(1, 3, 2) for _ in range(2)], updates.unsqueeze(1)
    formula("npu_scatter_list_", tensors, torch.tensor([1, 2]), given, torch.tensor([0, 1]))
    assert [tensor[0, :, 0].tolist() for tensor in tensors] == [[0, 0, 0], [0, 0, 3]]


def test_the_next_step_is_prepared() -> None:
    """By hand: two queries and one padded sequence; then one accepted token of a speculation."""
    tokens, positions, lengths, slots = (
        torch.zeros(3).long(),
        torch.zeros(3).long(),
        torch.tensor([3, 4, 9]),
        torch.zeros(3).long(),
    )
    tables = torch.tensor([[3, 0], [1, 5], [7, 7]])
    formula(
        "npu_advance_step_flashattn", tokens, torch.tensor([[70], [80]]), positions, lengths, slots, tables, 3, 2, 4
    )
    assert [x.tolist() for x in (tokens, positions, lengths, slots)] == [
        [70, 80, 0],
        [3, 4, 0],
        [4, 5, 9],
        [15, 20, -1],
    ]
    tokens, positions, lengths, slots = (
        torch.zeros(2).long(),
        torch.tensor([2, 3]),
        torch.zeros(2).long(),
        torch.zeros(2).long(),
    )
    step = {"spec_token": torch.tensor([[6]]), "accepted_num": torch.tensor([1])}
    formula(
        "npu_advance_step_flashattn",
        tokens,
        torch.tensor([[7, 8]]),
        positions,
        lengths,
        slots,
        tables[:1],
        1,
        1,
        4,
        **step,
    )
    assert [x.tolist() for x in (tokens, positions, lengths, slots)] == [[8, 6], [4, 5], [5, 6], [0, 1]]
