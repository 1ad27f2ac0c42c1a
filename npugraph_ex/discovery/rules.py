"""Writes what `search.py` found as a module of fusion rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from torch import fx

from npugraph_ex._plurals import counted
from npugraph_ex.discovery.search import Discovery
from npugraph_ex.operators import OPERATORS


def distinct(found: Sequence[Discovery]) -> list[Discovery]:
    """Each part once, whatever graphs and layers it stands in, with the operator that saves the most kernels."""
    parts: dict[str, Discovery] = {}
    for one in sorted(found, key=lambda one: -one.saves.kernels):
        parts.setdefault(_function("part", one.spelled), one)
    return list(parts.values())


class RuleVerdict(NamedTuple):
    """What a validation says of a rule."""

    ok: bool
    """Whether nothing is wrong with it."""
    text: str
    """For a person."""


def module_of(found: Sequence[Discovery], verdicts: Mapping[str, RuleVerdict] = MappingProxyType({})) -> str:
    """A module that registers a replacement for each part, as `npugraph-ex validate` takes it.

    Args:
        found: the parts.
        verdicts: of their validation, by the name of the search function; what is wrong is not registered.
    """
    rules = [_rule(f"{number}", one, verdicts.get(f"search_{number}")) for number, one in enumerate(found, 1)]
    return "\n\n\n".join([_HEAD, *rules]) + "\n"


_HEAD = '''"""Rules that `npugraph-ex advise --discover` found. `npugraph-ex validate` takes this file."""

import torch, torch_npu, npugraph_ex
from torch import device, inf, nan
from torch._subclasses.fake_tensor import FakeTensorMode'''


def _rule(number: str, one: Discovery, verdict: RuleVerdict | None) -> str:
    """The functions of a rule and its registration, below what was found out about it."""
    ours, eagers = one.ulps
    examples = ", ".join(
        f"torch.empty_strided({tuple(value.shape)}, {value.stride()}, dtype={value.dtype}, device='npu')"
        for value in one.inputs
    )
    likes = ", ".join(f"input_{at}=examples[{at}]" for at in range(len(one.inputs)))
    checks = [f"npugraph_ex.LikeExamples({likes})", *_fixed_sizes(one)]
    judged = ", ".join(f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}" for value in one.inputs)
    takes = ", ".join(str(dtype).removeprefix("torch.") for dtype in OPERATORS[one.operator].dtypes)
    said = f"{one.source}: {counted(one.saves.kernels, 'kernel')} less. Ulps from float64: {ours:.3g}, eager mode {eagers:.3g}."
    told = f"# {said}\n# Judged with {judged}. The document of {one.operator} lists {takes}.\n"
    told += f"# Validation: {verdict.text}\n" if verdict else ""
    functions = f"{_function(f'search_{number}', one.spelled)}\n\n{_function(f'replace_{number}', one.fused)}\n\n"
    if verdict and not verdict.ok:
        return f"{told}{functions}# It is not registered, because something is wrong with it."
    return (
        f"{told}{functions}with FakeTensorMode():\n    examples = [{examples}]\n"
        f"    check = {' & '.join(checks)}\n"
        f"    npugraph_ex.register_replacement(search_{number}, replace_{number}, examples, extra_check=check)"
    )


def _fixed_sizes(one: Discovery) -> Iterator[str]:
    """A check for each size of an input that must stay."""
    for at, value in enumerate(one.inputs):
        for place, size in enumerate(value.shape, -value.dim()):
            if (place, size) in one.fixed:
                yield f'npugraph_ex.ShapeRange("input_{at}", {place}, at_least={size}, at_most={size})'


def _function(name: str, graph: fx.Graph) -> str:
    """The graph as a function: fx's own lines, without those that free what is not needed any more."""
    lines = str(graph.python_code("self").src).split("def forward(self, ", 1)[1]
    return re.sub(r";  [\w = ]+ = None", "", f"def {name}({lines}").strip()
