"""Small decoders of three families, quantised and not: eager, fused, replayed, by several schedules and with any batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from decoders import Decoded, Decoder, decode, random_decoder
from running import FAMILIES, Run
from torch._subclasses.fake_tensor import FakeTensorMode

import npugraph_ex
from npugraph_ex.observe.graphs import graph_records, graphs_so_far
from npugraph_ex.observe.report import PassReport
from npugraph_ex.testing import ulp

LAYERS, BATCH, MOST, LENGTH, PROMPT = 2, 2, 3, 96, 3
SCHEDULES = ("lazy", "random:7", "pct:5:3")
HEADERS = ("layer", "eager, ulp from float64", "fused", "replayed", "fused from eager, worst")
_LUCK = 1.5
"""How much further from the reference than eager mode, in root mean square, a fused layer may be."""
_MOST_TOKENS = 0.9
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


def _compiled(decoder: Decoder, **given: Any) -> Any:
    torch._dynamo.reset()
    decoder.reset()
    return torch.compile(decoder, backend="npugraph_ex", fullgraph=True, **given)


def _reference(family: str, prompt: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Hidden states after each layer in float64, of `transformers`' own model: (calls, layers, batch, hidden)."""
    model, seen = random_decoder(family, layers=LAYERS).double(), []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _module, _args, result: seen.append(result))
    with torch.no_grad():
        model(torch.cat([prompt.cpu(), tokens[:, :-1]], dim=1))
    return torch.stack(seen).permute(2, 0, 1, 3)


def _distance(hidden: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Root mean square of the difference of a token, for each layer, in float16 ulps of the layer's own root mean square.

    Of nine tokens in ten: a rounding may send one to other experts, after which nothing of it can be compared.
    """
    size = reference.double().square().mean((0, 2, 3)).sqrt()
    tokens = (hidden.double() - reference.double()).square().mean(3).sqrt().transpose(0, 1).flatten(1)
    return tokens.quantile(_MOST_TOKENS, dim=1) / ulp(size, torch.float16)


def _worst(hidden: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The largest difference of an element, for each layer, in the same unit."""
    size = other.double().square().mean((0, 2, 3)).sqrt()
    return (hidden.double() - other.double()).abs().amax((0, 2, 3)) / ulp(size, torch.float16)


@pytest.mark.parametrize("quantised", [False, True], ids=["float16", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_decodes_the_same_tokens(run: Run, family: str, quantised: bool, residual_norms: str) -> None:
    """Eager, fused and replayed give the same tokens; replay is bit-equal to fused, by every schedule."""
    if (family, quantised) not in run.profile.decoders:
        pytest.skip("in the profiles full and nightly")
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

    reference = _reference(family, prompt, eager.tokens)
    distances = [_distance(decoded.hidden, reference) for decoded in (eager, fused, replayed)]
    worst = _worst(fused.hidden, eager.hidden)
    _enter(run, f"{family}, {'int8' if quantised else 'float16'}", [*distances, worst], eager, replayed, report)
    assert torch.equal(eager.tokens, fused.tokens)
    assert torch.equal(replayed.tokens, fused.tokens)
    assert torch.equal(replayed.logits, fused.logits)
    assert torch.equal(replayed.hidden, fused.hidden)
    assert bool((distances[1] <= _LUCK * distances[0]).all()), distances


def _enter(
    run: Run, name: str, columns: list[torch.Tensor], eager: Decoded, replayed: Decoded, report: PassReport
) -> None:
    """The table of one model."""
    rows = [(layer, *(f"{float(column[layer]):.2f}" for column in columns)) for layer in range(LAYERS)]
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
            f"{report.fusions('add_rms_norm_dynamic_quant')} of them with their quantisation. Ulps: float16's, of a "
            "layer's root mean square, for nine tokens in ten.",
        }
    )


@pytest.mark.parametrize("quantised", [False, True], ids=["float16", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_batch(run: Run, family: str, quantised: bool, residual_norms: str) -> None:
    """Compiled once for a symbolic batch, every batch decodes the tokens of eager mode."""
    if (family, quantised) not in run.profile.dynamic:
        pytest.skip("in the profiles full and nightly")
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
    assert npugraph_ex.last_report().fusions(residual_norms) == 2 * LAYERS, graph
