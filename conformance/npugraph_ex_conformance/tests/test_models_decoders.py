"""Small decoders of three families, quantised and not: eager, fused, replayed, by several schedules and with any batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import npugraph_ex
from npugraph_ex.report.graphs import graph_records, graphs_so_far
from npugraph_ex.report.passes import PassReport
from npugraph_ex_conformance.models.decoders import Decoded, Decoder, decode, random_decoder
from npugraph_ex_conformance.models.layer_ulps import HEADERS, UNIT, layer_table, reference
from npugraph_ex_conformance.session import FAMILIES, Run

LAYERS, BATCH, MOST, LENGTH, PROMPT = 2, 2, 3, 96, 3
SCHEDULES = ("lazy", "random:7", "pct:5:3")
EPSILON = 2.125
QUANTISED = {"llama": 2 * LAYERS - 1, "qwen3": 2 * LAYERS - 1, "deepseek": 2 * LAYERS - 2}
"""How many norms are fused with what quantises them, too: all but the first, which adds nothing, and those that experts read."""


def _search(x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, ...]:
    total = torch.add(x, residual)
    return torch.ops.npu.npu_rms_norm(total, gamma, epsilon)[0], total


def _replace(x: torch.Tensor, residual: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> tuple[torch.Tensor, ...]:
    y, _, total = torch.ops.npu.npu_add_rms_norm(x, residual, gamma, epsilon)
    return y, total


@pytest.fixture
def residual_norms() -> Iterator[str]:
    """A rule of a user: the sum and the norm of `transformers`' layers as one operator. Its name."""
    with FakeTensorMode():
        rows, gamma = (torch.empty(shape, dtype=torch.float16, device="npu") for shape in ((2, 1, 64), (64,)))
    with npugraph_ex.register_replacement(
        _search, _replace, [rows, rows, gamma], scalar_workaround={"epsilon": EPSILON}
    ) as rule:
        yield rule.name


@contextmanager
def _schedule(run: Run, text: str) -> Iterator[None]:
    """By another schedule, where the device has one to choose."""
    with ExitStack() as stack:
        if run.target.kind == "emulated":
            import npu_emulator

            stack.enter_context(npu_emulator.schedule(text))
        yield


def _prompt(batch: int) -> torch.Tensor:
    return torch.randint(0, 256, (batch, PROMPT), generator=torch.Generator().manual_seed(1)).to("npu")


def _skip_others(family: str, *, within: bool) -> None:
    if not within:
        pytest.skip("in the profiles full and nightly")
    if family in {"deepseek", "qwen3_moe"} and find_spec("transformers.integrations.moe") is None:
        pytest.skip("transformers 4 loops over the experts that tokens chose, which no single graph holds")


def _compiled(decoder: Decoder, **given: Any) -> Any:
    torch.compiler.reset()
    decoder.reset()
    return torch.compile(decoder, backend="npugraph_ex", fullgraph=True, **given)


@pytest.mark.parametrize("quantised", [False, True], ids=["float16", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_decodes_the_same_tokens(run: Run, family: str, quantised: bool, residual_norms: str) -> None:
    """Eager, fused and replayed give the same tokens; replay is bit-equal to fused, by every schedule."""
    _skip_others(family, within=(family, quantised) in run.profile.decoders)
    prompt, new = _prompt(BATCH), max(4, run.profile.tokens // 3)
    decoder = Decoder(random_decoder(family, layers=LAYERS), batch=MOST, length=LENGTH, quantised=quantised).to("npu")
    eager = decode(decoder, prompt, new=new)
    fused = decode(_compiled(decoder, dynamic=False, options={"force_eager": True}), prompt, new=new)
    report = npugraph_ex.last_report()
    assert report is not None
    assert report.fusions(residual_norms) == 2 * LAYERS, report.table()
    assert report.fusions("add_rms_norm_dynamic_quant") == (QUANTISED[family] if quantised else 0), report.table()

    compiled = _compiled(decoder, dynamic=False)
    replayed = decode(compiled, prompt, new=new)
    for schedule in SCHEDULES:
        decoder.reset()
        with _schedule(run, schedule):
            again = decode(compiled, prompt, new=new)
        assert torch.equal(again.logits, fused.logits), schedule
        assert torch.equal(again.hidden, fused.hidden), schedule

    rows, is_as_close = layer_table(reference(family, prompt, eager.tokens, layers=LAYERS), eager, fused, replayed)
    _enter(run, f"{family}, {'int8' if quantised else 'float16'}", rows, eager, replayed, report)
    assert torch.equal(eager.tokens, fused.tokens)
    assert torch.equal(replayed.tokens, fused.tokens)
    assert torch.equal(replayed.logits, fused.logits)
    assert torch.equal(replayed.hidden, fused.hidden)
    assert is_as_close, rows


def _enter(
    run: Run, name: str, rows: list[tuple[object, ...]], eager: Decoded, replayed: Decoded, report: PassReport
) -> None:
    """The table of one model."""
    best = eager.logits.float().topk(2, dim=-1).values
    equal = torch.equal(eager.tokens, replayed.tokens)
    run.models.append(
        {
            "name": f"{name}, {LAYERS} layers, random weights",
            "headers": HEADERS,
            "rows": rows,
            "note": f"{eager.tokens.numel()} tokens decoded, eager and replayed {'equal' if equal else 'DIFFERENT'}, also by "
            f"schedules {', '.join(SCHEDULES)}; smallest lead of a chosen token "
            f"{float((best[..., 0] - best[..., 1]).min()):.2g}; {2 * LAYERS} sums and norms fused, "
            f"{report.fusions('add_rms_norm_dynamic_quant')} of them with their quantisation. {UNIT}",
        }
    )


@pytest.mark.parametrize("quantised", [False, True], ids=["float16", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_batch(run: Run, family: str, quantised: bool, residual_norms: str) -> None:
    """Compiled once for a symbolic batch, every batch decodes the tokens of eager mode."""
    _skip_others(family, within=(family, quantised) in run.profile.dynamic)
    decoder = Decoder(random_decoder(family, layers=LAYERS), batch=MOST, length=LENGTH, quantised=quantised).to("npu")
    compiled, mark = _compiled(decoder, dynamic=True), graphs_so_far()
    for batch in (2, 3, 2):
        decoder.reset()
        eager = decode(decoder, _prompt(batch), new=4)
        decoder.reset()
        replayed = decode(compiled, _prompt(batch), new=4)
        assert torch.equal(eager.tokens, replayed.tokens), batch
        assert replayed.tokens.shape == (batch, 4)
    (graph,) = graph_records(after=mark)
    report = npugraph_ex.last_report()
    assert report is not None
    assert report.fusions(residual_norms) == 2 * LAYERS, graph
