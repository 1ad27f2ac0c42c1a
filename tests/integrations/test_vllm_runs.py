"""How runs of the real engine are compared: one version of the library, one value under every schedule. No vLLM is needed."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from npugraph_ex_conformance.vllm_ascend import stand_ins
from npugraph_ex_conformance.vllm_ascend.defects import DEFECTS
from npugraph_ex_conformance.vllm_ascend.engine import Answer, Seen
from npugraph_ex_conformance.vllm_ascend.fusions import compared
from npugraph_ex_conformance.vllm_ascend.models import MODELS
from npugraph_ex_conformance.vllm_ascend.runs import PLANS, Judged, Plan, Seconds, judge
from npugraph_ex_conformance.vllm_ascend.sources import digest, digest_of

if TYPE_CHECKING:
    from pathlib import Path


class _Uniform(nn.Module):
    """Every token has the same logit, or one of its own, after each token alike."""

    def __init__(self, logits: torch.Tensor | None = None) -> None:
        super().__init__()
        self._logits = torch.zeros(4) if logits is None else logits

    def forward(self, tokens: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self._logits.expand(*tokens.shape, 4))


_LOGPROB = -math.log(4)
_ANSWER = Answer(prompt=[0], tokens=[1, 2], logprobs=[_LOGPROB] * 2, cached=1)
_SEEN = Seen(
    [_ANSWER],
    replays=3,
    graphs=3,
    replayed=dict.fromkeys(MODELS["qwen3-w8a8"].fused, 1),
    compiled_graphs=1,
    fusions={},
    refused={},
    costs={},
    faults=[],
    sources=digest(),
)
_MOVED = replace(_SEEN, answers=[replace(_ANSWER, logprobs=[_LOGPROB, _LOGPROB + 0.06])])
_EAGER, _FIFO, _LAZY = PLANS[:3]


def _judge(plan: Plan, seen: Seen, *earlier: Judged) -> Judged:
    return judge(plan, seen, Seconds(0, 0), "qwen3-w8a8", _Uniform(), earlier)


def test_runs_of_two_versions_are_not_compared() -> None:
    """Runs with other sources than eager's have no verdict, so a control is not noticed by them."""
    eager = _judge(_EAGER, _SEEN)
    for plan in (_LAZY, PLANS[-1]):
        with pytest.raises(RuntimeError, match="other files of the library"):
            _judge(plan, replace(_MOVED, sources="other"), eager)


def test_a_schedule_may_not_move_a_value() -> None:
    """A fused kernel may be a little from eager; the same kernels, in another order or loaded, may not be from themselves."""
    eager = replace(_judge(_EAGER, _SEEN), from_float32=0.15)
    moved = _judge(_FIFO, _MOVED, eager)
    assert moved.held, moved.wrong
    assert moved.from_eager == pytest.approx(0.06)
    assert _judge(_LAZY, _MOVED, eager, moved).held
    saved, loaded = (
        next(plan for plan in PLANS if plan.name == name) for name in ("compiled, to be saved", "saved code")
    )
    for plan, seen in ((_LAZY, _SEEN), (saved, _SEEN), (loaded, replace(_SEEN, compiled_graphs=0))):
        assert _judge(plan, seen, eager, moved).wrong == ("other tokens or logprobs than under fifo",)
    pieces = next(plan for plan in PLANS if plan.mode == "PIECEWISE")
    assert _judge(pieces, _SEEN, eager, moved).held


def test_other_tokens_are_wrong_unless_float32_sees_a_tie() -> None:
    """A fused kernel's rounding may decide between two tokens that are as near as it; not between others, and not unfused."""
    eager = replace(_judge(_EAGER, _SEEN), from_float32=0.15)
    parted = replace(_SEEN, answers=[replace(_ANSWER, tokens=[1, 3])])
    unfused = replace(parted, replayed={"aten.add.Tensor": 1})
    for gap, seen, held in ((0.5, parted, True), (0.7, parted, False), (0.5, unfused, False)):
        reference = _Uniform(torch.tensor([0.0, 0.0, 0.0, gap]))
        found = judge(_FIFO, seen, Seconds(0, 0), "qwen3-w8a8", reference, (eager,))
        assert (f"other tokens than eager, {gap} apart in float32" not in found.wrong) == held, found.wrong


def test_two_ranks_are_compared_with_two_ranks() -> None:
    """Sums over ranks round otherwise than one device does, so the eager run over two ranks is the measure; replays hold sums."""
    one = _judge(_EAGER, _SEEN)
    spread = [plan for plan in PLANS if plan.ranks == 2]
    assert [plan.compiled for plan in spread] == [False, True]
    eager = _judge(spread[0], _MOVED, one)
    assert eager.held, eager.wrong
    assert _judge(spread[1], _MOVED, one, eager).wrong == ("hccl.all_reduce ran in no replay",)
    summed = _SEEN.replayed | {"hccl.all_reduce": 1}
    assert _judge(spread[1], replace(_MOVED, replayed=summed), one, eager).held
    assert not _judge(spread[1], replace(_MOVED, replayed=summed, faults=["rank 1: a race"]), one, eager).held


def test_each_size_and_each_fusion_is_demanded() -> None:
    """A size of the batch that was never replayed is wrong, and so is one of a model's two fusions that did not run."""
    eager = _judge(_EAGER, _SEEN)
    assert _judge(_FIFO, _SEEN, eager).held
    assert _judge(_FIFO, replace(_SEEN, graphs=2), eager).wrong == (
        "2 captured graphs were replayed, for 3 sizes of the batch",
    )
    rope, quant = MODELS["qwen3-w8a8-static"].fused
    alone = judge(_FIFO, _SEEN, Seconds(0, 0), "qwen3-w8a8-static", _Uniform(), (eager,))
    assert rope in _SEEN.replayed
    assert alone.wrong == (f"{quant} ran in no replay",)


def test_the_table_of_fusions_has_sites_reasons_and_costs() -> None:
    """For each compiled graph: what was fused, and what was refused, why, at what cost; the kernels of both backends."""
    kernels = {"vllm.qkv_rmsnorm_rope.default": 6, "aten.mm.default": 9}
    why = "NormQuant: bias is None"
    ours = replace(
        _SEEN, compiled_graphs=2, fusions={"QKNormRope -> qkv_rmsnorm_rope": 4}, refused={why: 6}, costs={why: 6},
        replayed=kernels,
    )  # fmt: skip
    bundled = next(plan for plan in PLANS if plan.bundled)
    found = [
        Judged(plan, seen, Seconds(0, 0), 0.0, 0.0, 0, ())
        for plan, seen in ((_FIFO, ours), (bundled, replace(ours, replayed=kernels | {"aten.clone.default": 3})))
    ]
    rows = {what: (one, other) for _, what, one, other in compared("qwen3", found)}
    assert rows["kernels in a replay"] == ("5", "6")
    assert rows["  aten.clone.default"] == ("0", "1")
    assert "  aten.mm.default" not in rows
    assert (rows["sites found"], rows["sites fused"]) == (("5", ""), ("2", "2"))
    assert rows[f"  by {why}"] == ("3, which costs 3 kernels", "")


def test_only_three_runs_of_a_model_for_fusions() -> None:
    """Eager, compiled, and by the bundled backend."""
    of_one = [plan for plan in PLANS if plan.is_of("deepseek-w8a8")]
    assert [(plan.compiled, plan.bundled) for plan in of_one] == [(False, False), (True, False), (True, True)]


def test_a_defect_is_noticed_by_its_own_error() -> None:
    """An engine that runs with a defect has not noticed it; nor has one that ends with another error."""
    eager = _judge(_EAGER, _SEEN)
    plans = [plan for plan in PLANS if plan.defect]
    assert len(plans) == len(DEFECTS) == 2
    for plan in plans:
        assert not _judge(plan, _SEEN, eager).held
        assert not _judge(plan, _MOVED, eager).held
        assert plan.has_its_error(f"an error: {DEFECTS[plan.defect].says}")
        assert not plan.has_its_error("another error")
        assert not any(other.has_its_error(DEFECTS[plan.defect].says) for other in PLANS if not other.defect)
        assert [name for name in MODELS if plan.is_of(name)] == ["qwen3"]


@pytest.mark.parametrize("installed", [False, True])
def test_the_clients_fused_kernel_is_interpreted_where_triton_is(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the record stands for it; and the words for the log say which."""
    record, interpreted = SimpleNamespace(formula=object()), object()
    module = SimpleNamespace(fused_kernel=lambda name: interpreted if name == stand_ins.FUSED else None)
    monkeypatch.setattr(stand_ins, "find_spec", lambda name: object() if installed and name == "triton" else None)
    monkeypatch.setattr(stand_ins, "import_module", lambda name: module if name.endswith(".interpreted") else None)
    kernel, words = stand_ins._fused(record)
    assert kernel is (interpreted if installed else record.formula)
    assert ("Triton's interpreter" in words, "record" in words) == (installed, not installed)


def test_the_digest_is_of_every_source(tmp_path: Path) -> None:
    """A changed or renamed Python or C++ file gives another digest; a changed page gives the same one."""
    package = tmp_path / "package"
    formula, runtime, page = package / "operators" / "norm.py", package / "runtime.cpp", package / "README.md"
    formula.parent.mkdir(parents=True)
    for path in (formula, runtime, page):
        path.write_text("one", encoding="utf-8")
    digests = [digest_of([package])]
    page.write_text("two", encoding="utf-8")
    assert digest_of([package]) == digests[0]
    for path in (formula, runtime):
        path.write_text("two", encoding="utf-8")
        digests.append(digest_of([package]))
    formula.rename(formula.with_name("root.py"))
    digests.append(digest_of([package]))
    assert len(set(digests)) == len(digests)
