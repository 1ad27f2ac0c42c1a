"""Writes what `discovery.py` found as a module of fusion rules."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import fx

from npugraph_ex._plurals import counted
from npugraph_ex.operators import OPERATORS
from npugraph_ex.testing.discovery import Discovery


def distinct(found: Sequence[Discovery]) -> list[Discovery]:
    """Each part once, whatever graphs and layers it stands in, with the operator that saves the most kernels."""
    parts: dict[str, Discovery] = {}
    for one in sorted(found, key=lambda one: -one.saves.kernels):
        parts.setdefault(_function("part", one.spelled), one)
    return list(parts.values())


def module_of(found: Sequence[Discovery]) -> str:
    """A module that registers a replacement for each part; `npugraph-ex validate` takes it."""
    return "\n\n\n".join([_HEAD, *(_registered(number, one) for number, one in enumerate(found, 1))]) + "\n"


_HEAD = '''"""Rules that `npugraph-ex advise --discover` found. Next: `npugraph-ex validate` with this file."""

import torch, torch_npu, npugraph_ex
from torch import device, inf, nan
from torch._subclasses.fake_tensor import FakeTensorMode'''


def _registered(number: int, one: Discovery) -> str:
    """The functions of a rule and its registration."""
    ours, eagers = one.ulps
    examples = ", ".join(
        f"torch.empty_strided({tuple(value.shape)}, {value.stride()}, dtype={value.dtype}, device='npu')"
        for value in one.inputs
    )
    likes = ", ".join(f"input_{at}=examples[{at}]" for at in range(len(one.inputs)))
    judged = ", ".join(f"{str(value.dtype).removeprefix('torch.')}{[*value.shape]}" for value in one.inputs)
    takes = ", ".join(str(dtype).removeprefix("torch.") for dtype in OPERATORS[one.operator].dtypes)
    said = f"{one.source}: {counted(one.saves.kernels, 'kernel')} less. Ulps from float64: {ours:.3g}, eager mode {eagers:.3g}."
    return (
        f"# {said}\n# Judged with {judged}. The document of {one.operator} lists {takes}.\n"
        f"{_function(f'search_{number}', one.spelled)}\n\n{_function(f'replace_{number}', one.fused)}\n\n"
        f"with FakeTensorMode():\n    examples = [{examples}]\n"
        f"    check = npugraph_ex.LikeExamples({likes})\n"
        f"    npugraph_ex.register_replacement(search_{number}, replace_{number}, examples, extra_check=check)"
    )


def _function(name: str, graph: fx.Graph) -> str:
    """The graph as a function: fx's own lines, without those that free what is not needed any more."""
    lines = str(graph.python_code("self").src).split("def forward(self, ", 1)[1]
    return re.sub(r";  [\w = ]+ = None", "", f"def {name}({lines}").strip()
