"""A real architecture, decoding on the device: the same tokens eager and compiled, few graphs, the fusions where they belong."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import npugraph_ex
from npugraph_ex.report.captures import capture_records, captures_so_far
from npugraph_ex.report.passes import PassReport
from npugraph_ex_conformance.models import quantised_qwen3
from npugraph_ex_conformance.models.decoders import Decoded, decode
from npugraph_ex_conformance.models.layer_ulps import HEADERS, UNIT, layer_table, reference
from npugraph_ex_conformance.models.quantised_qwen3 import QuantisedDecoder, random_qwen3
from npugraph_ex_conformance.session import Run

LAYERS, BATCH, LENGTH, PROMPT = 3, 2, 96, 4
RULE = "add_rms_norm_dynamic_quant"
MOST_GRAPHS = 2
"""One, and one more if a caller still holds logits when the next step runs."""


@pytest.fixture(scope="module")
def original() -> torch.nn.Module:
    """The decoder as `transformers` made it."""
    return random_qwen3(layers=LAYERS)


@pytest.fixture
def prompt() -> torch.Tensor:
    """Token numbers on the CPU."""
    return torch.randint(0, 512, (BATCH, PROMPT), generator=torch.Generator().manual_seed(1))


def _kernels(run: Run) -> Counter[str]:
    """What the device has run so far, by operator; nothing is known of a real one."""
    if run.target.kind != "emulated":
        return Counter()
    import npu_emulator

    return Counter(npu_emulator.kernel_counts())


def _launches(run: Run) -> int:
    if run.target.kind != "emulated":
        return 0
    import npu_emulator

    return npu_emulator.launch_count()


def _per_layer(report: object) -> list[int]:
    """How many fusions each layer got. Norms are numbered in the order of the layers, two a layer."""
    found = [0] * (LAYERS + 1)
    for rule in report.rules:
        for fusion in rule.fusions:
            numbers = [re.fullmatch(r"npu_add_rms_norm(?:_(\d+))?", name) for name in fusion.replaced]
            number = next(match for match in numbers if match)
            found[int(number[1] or 0) // 2] += 1
    return found[:LAYERS]


def _assert_every_norm_is_explained(report: PassReport, kernels: Counter[str], calls: int) -> None:
    """As many norms are explained as run in a step, each with its node, its line in the model, and what it goes to."""
    reasons = {
        "npu.npu_rms_norm.default": "no rule begins with npu.npu_rms_norm.default",
        "npu.npu_add_rms_norm.default": "the rules that begin so want",
    }
    model = Path(quantised_qwen3.__file__).read_text(encoding="utf-8").splitlines()
    for kernel, reason in reasons.items():
        explained = [norm for norm in report.unfused if reason in norm.reason]
        assert len(explained) == kernels[kernel] / calls, report.table()
        for norm in explained:
            file, line = norm.source.rsplit(":", 1)
            assert Path(file).name == "quantised_qwen3.py", norm
            assert kernel.split(".")[1] in model[int(line) - 1], norm
    assert len({norm.node for norm in report.unfused}) == len(report.unfused) > LAYERS


def test_quantised_qwen3_is_qwen3(original: torch.nn.Module, prompt: torch.Tensor) -> None:
    """The mapped model computes what `transformers` computes, up to what int8 costs."""
    with torch.no_grad():
        wanted = original(prompt).logits
    decoder = QuantisedDecoder(random_qwen3(layers=LAYERS), batch=BATCH, length=LENGTH).to("npu")
    logits = decode(decoder, prompt.to("npu"), new=1).logits.float()
    similarity = torch.nn.functional.cosine_similarity(logits.transpose(0, 1), wanted, dim=-1)
    assert similarity.min() > 0.98, similarity


def test_quantised_qwen3_decodes_the_same_tokens(run: Run, prompt: torch.Tensor) -> None:
    """Eager and compiled greedy decoding give the same tokens, and compiled steps replay one graph."""
    decoder = QuantisedDecoder(random_qwen3(layers=LAYERS), batch=BATCH, length=LENGTH).to("npu")
    prompt, new = prompt.to("npu"), run.profile.tokens
    calls = PROMPT + new - 1
    kernels, launches = _kernels(run), _launches(run)
    decoded = decode(decoder, prompt, new=new)
    tokens, logits = decoded.tokens, decoded.logits
    eager = _kernels(run) - kernels
    eager_launches = _launches(run) - launches

    decoder.reset()
    unfused = torch.compile(
        decoder, backend="npugraph_ex", fullgraph=True, dynamic=False, options={"pattern_fusion_pass": False}
    )
    unfused_logits = decode(unfused, prompt, new=2).logits
    assert torch.equal(unfused_logits, logits[: len(unfused_logits)]), (
        "without fusions, replay is bit-equal to eager mode"
    )

    torch.compiler.reset()
    decoder.reset()
    mark = captures_so_far()
    compiled = torch.compile(decoder, backend="npugraph_ex", fullgraph=True, dynamic=False)
    decode(compiled, prompt[:, :1], new=2)  # compiles and captures
    report = npugraph_ex.last_report()
    decoder.reset()
    kernels, launches = _kernels(run), _launches(run)
    decoded = decode(compiled, prompt, new=new)
    compiled_tokens, compiled_logits = decoded.tokens, decoded.logits
    replayed = _kernels(run) - kernels
    replayed_launches = _launches(run) - launches
    graphs = len(capture_records(after=mark))

    assert report is not None
    fusions = _per_layer(report)
    pairs = "npu.npu_add_rms_norm_dynamic_quant.default"
    best = logits.topk(2, dim=-1).values
    margin = float((best[..., 0] - best[..., 1]).min())
    rows: list[tuple[object, ...]] = [
        (f"layer {layer}", "fusions", count, "of 2") for layer, count in enumerate(fusions)
    ]
    rows += [
        (
            "a step",
            "kernels run",
            f"{sum(eager.values()) / calls:.0f} eager",
            f"{sum(replayed.values()) / calls:.0f} compiled",
        ),
        ("a step", "host launches", f"{eager_launches / calls:.0f} eager", f"{replayed_launches / calls:.0f} compiled"),
        ("a step", "fused kernels", f"{eager[pairs] / calls:.0f} eager", f"{replayed[pairs] / calls:.0f} compiled"),
        ("all", "graphs captured", graphs, f"{calls} steps"),
    ]
    run.models.append(
        {
            "name": f"Qwen3, {LAYERS} layers, random weights, int8",
            "headers": ("where", "what", "", ""),
            "rows": rows,
            "note": f"{BATCH}x{new} tokens decoded, eager and compiled "
            f"{'equal' if torch.equal(tokens, compiled_tokens) else 'DIFFERENT'}; "
            f"largest difference of logits {float((logits - compiled_logits).abs().max()):.2g}, "
            f"smallest lead of a chosen token {margin:.2g}",
        }
    )
    assert torch.equal(tokens, compiled_tokens)
    assert fusions == [2] * LAYERS, report.table()
    assert report.fusions(RULE) == 2 * LAYERS
    assert 1 <= graphs <= MOST_GRAPHS, capture_records(after=mark)
    if run.target.kind == "emulated":
        assert sum(replayed.values()) < sum(eager.values())
        assert eager[pairs] == 0
        assert replayed[pairs] == 2 * LAYERS * calls
        _assert_every_norm_is_explained(report, replayed, calls)


def test_quantised_qwen3_is_as_exact_fused_layer_by_layer(run: Run, prompt: torch.Tensor) -> None:
    """After each layer the fused model is as close to float64 as eager mode is, and replay equals fused to the bit."""
    decoder = QuantisedDecoder(random_qwen3(layers=LAYERS), batch=BATCH, length=LENGTH).to("npu")
    prompt, new = prompt.to("npu"), max(4, run.profile.tokens // 3)
    eager = decode(decoder, prompt, new=new)
    fused, replayed = (_decoded_by(decoder, prompt, new=new, options=each) for each in ({"force_eager": True}, {}))
    exact = reference("qwen3", prompt, eager.tokens, layers=LAYERS)
    rows, is_as_close = layer_table(exact, eager, fused, replayed)
    name = f"Qwen3, {LAYERS} layers, random weights, int8: by layer"
    run.models.append({"name": name, "headers": HEADERS, "rows": rows, "note": UNIT})
    assert torch.equal(eager.tokens, fused.tokens)
    assert torch.equal(replayed.hidden, fused.hidden)
    assert is_as_close, rows


def _decoded_by(decoder: QuantisedDecoder, prompt: torch.Tensor, *, new: int, options: dict[str, Any]) -> Decoded:
    """Decode from an empty cache by the decoder, compiled with these options."""
    torch.compiler.reset()
    decoder.reset()
    compiled = torch.compile(decoder, backend="npugraph_ex", fullgraph=True, dynamic=False, options=options)
    return decode(compiled, prompt, new=new)
