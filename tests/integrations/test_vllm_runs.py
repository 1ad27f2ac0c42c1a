"""Runs of the real engine are compared only if one version of the library made both. These tests need no vLLM."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from npugraph_ex_conformance.vllm_ascend.engine import Answer, Seen
from npugraph_ex_conformance.vllm_ascend.runs import PLANS, judge
from npugraph_ex_conformance.vllm_ascend.sources import digest, digest_of

if TYPE_CHECKING:
    from pathlib import Path


class _Uniform(nn.Module):
    """Every token has the same logit."""

    def forward(self, tokens: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=torch.zeros(*tokens.shape, 4))


def test_runs_of_two_versions_are_not_compared() -> None:
    """Runs with other sources than eager's have no verdict, so a control is not noticed by them."""
    logprob = torch.tensor(1 / 4).log().item()
    answer = Answer(prompt=[0], tokens=[1, 2], logprobs=[logprob] * 2, cached=1)
    seen = Seen([answer], replays=1, replayed={}, compiled_graphs=1, faults=[], sources=digest())
    eager, lazy, control = PLANS[0], PLANS[2], PLANS[-1]
    first = judge(eager, seen, 0.0, "qwen3-w8a8", _Uniform(), None)
    assert first.held
    moved = replace(seen, answers=[replace(answer, logprobs=[logprob, logprob + 0.06])])
    assert judge(lazy, moved, 0.0, "qwen3-w8a8", _Uniform(), first).from_eager == pytest.approx(0.06)
    other = replace(moved, sources="other")
    for plan in (lazy, control):  # the control would count as noticed
        with pytest.raises(RuntimeError, match="other files of the library than eager"):
            judge(plan, other, 0.0, "qwen3-w8a8", _Uniform(), first)


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
