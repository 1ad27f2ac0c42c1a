"""Decoders whose layers (tensor parallelism) or experts (expert parallelism) are spread over the ranks, against one device.

Tensor parallelism: every rank has some heads and some columns of the feed-forward layers, and the ranks add what their rows give.
Expert parallelism: every rank has its own sequences, all of the attention, and some experts; tokens are dispatched to
their experts and combined again by the device's operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import nn

import npu_emulator
from npugraph_ex.report.graphs import graph_records, graphs_so_far
from npugraph_ex_conformance.models.decoders import Decoded, Decoder, decode, random_decoder
from npugraph_ex_conformance.models.layer_ulps import layer_table, reference
from npugraph_ex_conformance.ranks.checks import here
from npugraph_ex_conformance.ranks.programs import RankPlace

_LAYERS, _BATCH, _LENGTH, _PROMPT = 2, 2, 24, 3
_SCHEDULES = ("lazy", "random:7", "pct:5:3")
_LEAD = 0.05
"""Smallest lead of a chosen token's logit with which rounding of float16 sums cannot choose another."""


class _SummedLinear(nn.Module):
    """Some columns of a linear's weight, and the sum over the ranks."""

    def __init__(self, linear: nn.Linear, at: RankPlace) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.chunk(at.ranks, 1)[at.rank].clone())
        self.group: Any = at.group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """..., in / ranks -> ..., out."""
        total: torch.Tensor = collectives.all_reduce(x @ self.weight.t(), "sum", self.group)
        return total


class _SpreadExperts(nn.Module):
    """Some of a layer's experts; each token goes to the ranks of its experts and comes back."""

    def __init__(self, experts: Any, at: RankPlace) -> None:
        super().__init__()
        self.experts, self.where = len(experts.gate_up_proj), (at.experts, at.ranks, at.rank)
        # Experts of this rank, in, out.
        self.into, self.back = (
            nn.Parameter(weights.chunk(at.ranks)[at.rank].transpose(1, 2).contiguous())
            for weights in (experts.gate_up_proj, experts.down_proj)
        )

    def forward(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Tokens (tokens, hidden), their experts and those experts' weights (tokens, chosen) -> (tokens, hidden)."""
        ids, npu = chosen.int(), torch.ops.npu
        sent = npu.npu_moe_distribute_dispatch_v2(tokens, ids, *self.where, self.experts)
        received, assist, counts, origins = sent[0], sent[2], sent[3], sent[4]
        hidden = npu.npu_swiglu(_each_expert(received, self.into, counts))
        worked = _each_expert(hidden, self.back, counts)
        back: torch.Tensor = npu.npu_moe_distribute_combine_v2(
            worked, ids, assist, origins, weights.float(), *self.where, self.experts
        )
        return back


def _each_expert(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Rows (rows, in), in the order of the experts, by each expert's weight (experts, in, out) -> (rows, out)."""
    out: torch.Tensor = torch.ops.npu.npu_grouped_matmul(
        [rows], [weights], group_list=counts, split_item=3, group_type=0, group_list_type=1
    )[0]
    return out


def _spread_layers(model: Any, at: RankPlace) -> None:
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            linear.weight = nn.Parameter(linear.weight.chunk(at.ranks)[at.rank].clone())
        attention.o_proj, mlp.down_proj = _SummedLinear(attention.o_proj, at), _SummedLinear(mlp.down_proj, at)
    model.config.num_key_value_heads //= at.ranks


def _spread_experts(model: Any, at: RankPlace) -> None:
    for layer in model.model.layers:
        layer.mlp.experts = _SpreadExperts(layer.mlp.experts, at)


SPREAD: dict[str, tuple[str, Callable[[Any, RankPlace], None]]] = {
    "tensor": ("qwen3", _spread_layers),
    "experts": ("qwen3_moe", _spread_experts),
}
"""Of each kind of parallelism the family of `random_decoder`, and what spreads it."""


def decoder_faults(kind: str, new: int) -> str:
    """What is wrong on this rank with a decoder that is spread over the ranks; empty if nothing is.

    Args:
        kind: a name of `SPREAD`.
        new: how many tokens it decodes.
    """
    at, (family, spread) = here(), SPREAD[kind]
    seed = at.rank if kind == "experts" else 0  # there each rank has sequences of its own
    prompt = torch.randint(0, 256, (_BATCH, _PROMPT), generator=torch.Generator().manual_seed(seed)).to("npu")
    one = decode(_decoder(family, None, at), prompt, new=new)
    best = one.logits[_PROMPT - 1 :].float().topk(2, dim=-1).values
    if float((best[..., 0] - best[..., 1]).min()) < _LEAD:
        return "the model chooses tokens that rounding may change: take another seed"
    exact = reference(family, prompt, one.tokens, layers=_LAYERS)

    decoder = _decoder(family, spread, at)
    eager = decode(decoder, prompt, new=new)
    fused = decode(_compiled(decoder, force_eager=True), prompt, new=new)
    compiled, mark = _compiled(decoder), graphs_so_far()
    runs = {"fifo": _decode_again(decoder, compiled, prompt, new=new)}
    for schedule in _SCHEDULES:
        with npu_emulator.schedule(schedule):
            runs[schedule] = _decode_again(decoder, compiled, prompt, new=new)
    fates = [record.fate for record in graph_records(after=mark)]
    if fates != ["captured"]:
        return f"the step must be one captured graph, not {fates}"
    return _first_fault(one, {"eager mode": eager, "the compiled graph": fused}, runs, exact)


def _first_fault(one: Decoded, spread: dict[str, Decoded], replayed: dict[str, Decoded], exact: torch.Tensor) -> str:
    *_, fused = spread.values()
    for what, decoded in {
        **spread,
        **{f"replay by the schedule {name}": run for name, run in replayed.items()},
    }.items():
        if not torch.equal(decoded.tokens, one.tokens):
            return f"{what} decodes other tokens than one device: {decoded.tokens.tolist()}, not {one.tokens.tolist()}"
        rows, is_as_close = layer_table(exact, one, decoded, decoded)
        if not is_as_close:
            return f"{what} is farther from float64 than one device: {rows}"
    for name, run in replayed.items():
        if not (torch.equal(run.logits, fused.logits) and torch.equal(run.hidden, fused.hidden)):
            return f"replay by the schedule {name} differs from the compiled graph without capture"
    return ""


def _decoder(family: str, spread: Callable[[Any, RankPlace], None] | None, at: RankPlace) -> Decoder:
    model = random_decoder(family, layers=_LAYERS)
    with torch.no_grad():
        (spread or (lambda *_: None))(model, at)
    return Decoder(model, batch=_BATCH, length=_LENGTH, quantised=False).to("npu")


def _compiled(decoder: Decoder, **options: Any) -> Any:
    torch.compiler.reset()
    decoder.reset()
    return torch.compile(decoder, backend="npugraph_ex", fullgraph=True, dynamic=False, options=options or None)


def _decode_again(decoder: Decoder, compiled: Any, prompt: torch.Tensor, *, new: int) -> Decoded:
    decoder.reset()
    return decode(compiled, prompt, new=new)
