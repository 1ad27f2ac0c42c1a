"""The checked matcher and torch's plain one, with the same rule on the same graph, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fx_helpers import evaluate, targets
from torch import fx
from torch._inductor.pattern_matcher import PatternExpr, PatternMatcherPass, fwd_only
from torch._inductor.pattern_matcher import register_replacement as torch_register
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from npugraph_ex.fusion.engine import apply_rules
from npugraph_ex.fusion.preparing import prepare
from npugraph_ex.fusion.rule import FusionRule
from npugraph_ex.report.builder import ReportBuilder
from npugraph_ex.report.passes import PassReport

Function = Callable[..., Any]


def half(*shape: int) -> torch.Tensor:
    """A float16 tensor on the device."""
    return torch.zeros(shape, dtype=torch.float16, device="npu")


def pair() -> list[torch.Tensor]:
    """Two of them, with one shape."""
    return [half(4, 16), half(4, 16)]


def like(value: torch.Tensor) -> torch.Tensor:
    """A tensor with the metadata of ``value``, in whatever mode is in force."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def ours(gm: fx.GraphModule, search: Any, replace: Any, examples: Function, **rule: Any) -> PassReport:
    """Apply one rule with the checked matcher."""
    report = ReportBuilder()
    apply_rules(gm.graph, (prepare(FusionRule("rule", search, replace, examples, **rule)),), report)
    gm.graph.lint()
    gm.recompile()
    return report.build()


def undecomposed(function: Function, arguments: Sequence[Any], **_: Any) -> fx.GraphModule:
    """A graph of the operators as they are written. Torch's matcher passes the choice on only since release 2.12."""
    return fwd_only(function, arguments, get_decomp_fn=dict)


def plain_torch(
    gm: fx.GraphModule, search: Any, replace: Any, examples: Function, pattern: PatternExpr | None = None
) -> int:
    """Apply the same rule, or a hand-written pattern of it, with torch's matcher; how often it matched."""
    matcher = PatternMatcherPass()
    with FakeTensorMode():
        fakes = [like(example) for example in examples()]
        torch_register(search, replace, fakes, undecomposed, matcher, search_fn_pattern=pattern)
    count = matcher.apply(gm)
    gm.recompile()
    return count


def traced(body: Function, *inputs: torch.Tensor) -> fx.GraphModule:
    """The graph of ``body``, writes in it included, with fake tensors like ``inputs``."""
    with FakeTensorMode():
        fakes = [like(value) for value in inputs]
    return make_fx(body)(*fakes)


@dataclass(frozen=True)
class Case:
    """A rule and a graph that it should, or should not, be applied to.

    Attributes:
        model: what is traced into the graph.
        search: what the rule looks for.
        replace: what it puts there.
        inputs: of the model; on the device, floating ones are drawn anew for the comparison of values.
        examples: of the rule; like ``inputs`` when None.
        edit: changes the traced graph.
    """

    model: Function
    search: Function
    replace: Function
    inputs: Sequence[torch.Tensor]
    examples: Sequence[torch.Tensor] | None = None
    edit: Callable[[fx.GraphModule], None] = lambda _: None

    def graph(self) -> fx.GraphModule:
        """The graph, made anew."""
        gm = traced(self.model, *self.inputs)
        self.edit(gm)
        return gm

    def values(self, gm: fx.GraphModule) -> list[torch.Tensor]:
        """Its results on random values, which are the same at every call."""
        generator = torch.Generator().manual_seed(3)
        drawn = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype) for t in self.inputs]
        return evaluate(gm, *drawn)

    def by_torch(self) -> tuple[int, fx.GraphModule]:
        """How often torch's matcher matched, and the graph that it made; what it raises is passed on."""
        gm = self.graph()
        return plain_torch(gm, self.search, self.replace, self._examples), gm

    def by_us(self) -> tuple[PassReport, fx.GraphModule]:
        """What the checked matcher did; the graph's values and the metadata of its results stay, whatever it did."""
        gm = self.graph()
        before, results = self.values(gm), metadata(gm)
        report = ours(gm, self.search, self.replace, self._examples)
        assert metadata(gm) == results
        for old, new in zip(before, self.values(gm), strict=True):
            torch.testing.assert_close(new, old)
        return report, gm

    def _examples(self) -> Sequence[torch.Tensor]:
        return list(self.examples or self.inputs)


def metadata(gm: fx.GraphModule) -> list[tuple[object, ...]]:
    """Shape, dtype, strides and device of each result, by executing the graph on fake tensors."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    mode = placeholders[0].meta["val"].fake_mode
    with mode:
        results = gm(*(node.meta["val"] for node in placeholders))
    results = results if isinstance(results, (tuple, list)) else [results]
    return [(tuple(t.shape), t.dtype, t.stride(), t.device) for t in results]


def add_mul(x: Any, y: Any) -> Any:
    """To look for: the simplest two operators in a row."""
    return torch.mul(torch.add(x, y), y)


def mul_add(x: Any, y: Any) -> Any:
    """To put in its place: the same values from a graph that reads otherwise."""
    return torch.mul(y, torch.add(x, y))


def values_differ(case: Case, gm: fx.GraphModule) -> bool:
    """Whether ``gm`` computes something else than the graph of ``case``, another dtype or shape included."""
    pairs = zip(case.values(case.graph()), case.values(gm), strict=True)
    return any(a.dtype != b.dtype or a.shape != b.shape or not torch.allclose(a, b) for a, b in pairs)


def refused(case: Case, reason: str) -> None:
    """Ours leaves the graph as it is and says why."""
    report, gm = case.by_us()
    assert report.fusions() == 0
    assert reason in " / ".join(miss.reason for miss in report.near_misses())
    assert targets(gm) == targets(case.graph())


def negated(x: Any) -> Any:
    """To look for: an operator with many optional arguments, none of them given."""
    return torch.ops.npu.npu_dynamic_quant(torch.neg(x))


def negated_otherwise(x: Any) -> Any:
    """To put in its place."""
    return torch.ops.npu.npu_dynamic_quant(torch.mul(x, -1))
