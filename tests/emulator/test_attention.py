"""Inference attention on the device: new sequence lengths in a captured graph, through torch_npu's task groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch_npu

import npu_emulator

FORMS = [
    (torch_npu.npu_fused_infer_attention_score, "actual_seq_lengths_kv", {"num_heads": 2, "scale": 0.5}),
    (torch_npu.npu_fused_infer_attention_score_v2, "actual_seq_kvlen", {"num_query_heads": 2, "softmax_scale": 0.5}),
]


@pytest.mark.parametrize(("operator", "lengths", "arguments"), FORMS, ids=["v1", "v2"])
@pytest.mark.parametrize("order", ["fifo", "lazy", "random:5"])
def test_a_graph_takes_new_sequence_lengths_each_step(
    operator: Any, lengths: str, arguments: dict[str, Any], order: str
) -> None:
    """`NPUGraph.update` with lengths 2 to 6 gives what eager attention gives, and without it the last lengths stay."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, rows, 8).npu() for rows in (1, 6, 6))
    with npu_emulator.schedule(order):
        graph = torch.npu.NPUGraph()
        with torch.npu.graph(graph, auto_dispatch_capture=True):
            out = operator(query * 2, key, value, input_layout="BSH", **{lengths: [1, 1]}, **arguments)[0] + 1
        seen = []
        for step in ([2, 3], [6, 1], [4, 6]):
            graph.update(cpu_update_input=[{lengths: step}])
            graph.replay()
            torch.npu.synchronize()
            expected = operator(query * 2, key, value, input_layout="BSH", **{lengths: step}, **arguments)[0] + 1
            assert torch.equal(out.cpu(), expected.cpu()), step
            seen.append(out.cpu())
        assert not torch.equal(seen[0], seen[1])


def test_the_out_form_writes_where_it_is_told() -> None:
    """`.out` with a workspace fills the given tensors, statistics included, and returns them."""
    query, key, value = (torch.randn(2, rows, 8).npu() for rows in (1, 6, 6))
    operator = torch_npu.npu_fused_infer_attention_score
    kwargs: dict[str, Any] = {"num_heads": 2, "softmax_lse_flag": True}
    expected = operator(query, key, value, **kwargs)
    out = [torch.zeros_like(tensor) for tensor in expected]
    workspace = torch_npu._npu_fused_infer_attention_score_get_max_workspace(query, key, value, **kwargs)
    operator.out(query, key, value, **kwargs, workspace=workspace, out=out)
    for found, wanted in zip(out, expected, strict=True):
        assert torch.equal(found.cpu(), wanted.cpu())


def test_experts_and_caches_on_the_device() -> None:
    """Gating, grouped products and in-place scatter run as kernels, in a graph too."""
    x, weight = torch.randn(4, 3).npu(), torch.randn(2, 3, 5).npu()
    cache = torch.zeros(6, 3).npu()
    places = torch.tensor([[1], [4], [0], [2]]).npu()
    ends = torch.tensor([1, 4]).npu()
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        shares, experts, _ = torch_npu.npu_moe_gating_top_k_softmax(x, k=2)
        (product,) = torch_npu.npu_grouped_matmul([x], [weight], group_list=ends, group_type=0, split_item=3)
        torch_npu.npu_scatter_nd_update_(cache, places, x)
    x.copy_(torch.randn(4, 3))
    graph.replay()
    host = x.cpu()
    best = torch.softmax(host, -1).topk(2)
    torch.testing.assert_close(shares.cpu(), best.values)
    assert torch.equal(experts.cpu().long(), best.indices)
    torch.testing.assert_close(product.cpu(), torch.cat([host[:1] @ weight[0].cpu(), host[1:] @ weight[1].cpu()]))
    assert torch.equal(cache.cpu()[places.cpu().flatten()], host)


def test_attention_with_dropout_draws_from_the_device() -> None:
    """The seed of the device decides what is dropped, replays draw anew as eager calls do, and no dropout draws nothing."""
    query, key, value = (torch.randn(2, 4, 16, 8).half().npu() for _ in range(3))
    attention = torch.nn.functional.scaled_dot_product_attention

    def drawn(count: int) -> list[torch.Tensor]:
        torch.manual_seed(7)
        return [attention(query, key, value, dropout_p=0.5).cpu() for _ in range(count)]

    host = torch.get_rng_state()
    first, second, third = drawn(3)
    assert not torch.equal(first, second)
    assert all(torch.equal(*pair) for pair in zip((first, second, third), drawn(3), strict=True))
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        out = attention(query, key, value, dropout_p=0.5)
    torch.manual_seed(7)
    host = torch.get_rng_state()
    for eager in (first, second, third):
        graph.replay()
        assert torch.equal(out.cpu(), eager)
    before = torch.npu.get_rng_state()
    attention(query, key, value)
    assert torch.equal(torch.npu.get_rng_state(), before)
    assert torch.equal(torch.get_rng_state(), host)


@pytest.mark.parametrize("backend", ["eager", "npugraph_ex"])
def test_the_gradient_of_dropout_is_that_of_what_was_dropped(backend: str) -> None:
    """With identity values the output is the weights that were kept; the gradient of the values is their transpose."""
    torch.compiler.reset()
    query, key = (torch.randn(1, 2, 32, 32).npu() for _ in range(2))
    value = torch.eye(32).expand(1, 2, 32, 32).clone().npu().requires_grad_()

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.25)

    for _ in range(2):
        value.grad = None
        kept = torch.compile(run, backend=backend)(query, key, value)
        upstream = torch.randn(1, 2, 32, 32).npu()
        kept.backward(upstream)
        assert value.grad is not None
        torch.testing.assert_close(value.grad, kept.detach().mT @ upstream, rtol=1e-5, atol=1e-5)
        assert 0.6 < (kept != 0).float().mean().item() < 0.9


def test_a_mask_made_apart_is_the_one_that_attention_draws() -> None:
    """After a seed is set, the mask of that seed and offset 0 drops what the forward drops; the next forward drops others."""
    query, key, value = (torch.randn(1, 2, 16, 16).half().npu() for _ in range(3))

    def attend(**given: Any) -> Any:
        return torch_npu.npu_fusion_attention(query, key, value, 2, "BNSD", scale=0.25, keep_prob=0.5, **given)

    for seed in (2, 2**40 + 7):
        torch.npu.manual_seed(seed)
        drawn = attend()
        mask = torch_npu._npu_dropout_gen_mask(query, [1, 2, 16, 16], 0.5, seed, 0, parallel=True, sync=False)
        assert drawn[4:6] == (seed, 0)
        assert torch.equal(drawn[0].cpu(), attend(dropout_mask=mask, seed=seed)[0].cpu())
        assert not torch.equal(drawn[0].cpu(), attend()[0].cpu())


@pytest.mark.parametrize(
    "operator", [torch_npu.npu_fusion_attention, torch_npu.npu_fusion_attention_v2], ids=["v1", "v2"]
)
def test_attention_of_training_without_dropout_is_captured(operator: Any) -> None:
    """Its seed and its count are numbers that the host knows. With dropout the generator gives the seed, and a capture refuses."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, rows, 8).half().npu() for rows in (3, 5, 5))
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        out, *_, seed, offset, weights = operator(query, key, value, 2, "BSH", scale=0.5)
    assert (seed, offset, weights) == (0, 0, 2 * 2 * 3 * 5)
    query.copy_(torch.randn(2, 3, 8).half())
    graph.replay()
    expected = operator(query, key, value, 2, "BSH", scale=0.5)
    assert torch.equal(out.cpu(), expected[0].cpu())
    assert expected[4:] == (0, 0, weights)
    refused = torch.npu.NPUGraph()
    with pytest.raises(RuntimeError, match="107030"), torch.npu.graph(refused):
        operator(query, key, value, 2, "BSH", scale=0.5, keep_prob=0.5)
