"""The numeric check of a pass: the graph before and after it, run on the same random inputs on the CPU, and compared.

Off by default (option `check_numerics`), because it runs the whole graph once for each pass that changes something. It
finds what the contract cannot see: a rewrite that keeps every shape and computes something else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.errors import GraphVerificationError
from npugraph_ex.graph.memory.aliases import output_values, tensor_leaves
from npugraph_ex.operators import CpuInterpreter

_TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4, torch.float64: 1e-9}
"""Relative to the largest element: a few roundings of a dtype, since a fused operator may round less often.

The coarsest dtype anywhere in the graph decides: a float32 scale of float16 values carries their error.
"""

_GENERATED_SIZE = 8  # for a symbolic size without a hint


class NumericCheck:
    """Random inputs for one graph, and what it computed on them when it was last known to be right.

    Args:
        gm: the graph as AOT made it.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        with _torch_private.real_execution():
            self._inputs = _random_inputs(gm)
            self._expected = self._run(gm)
        self._tolerance = _tolerance(gm)
        self._names = [
            *map(str, output_values(gm.graph)),
            *(str(n.target) for n in gm.graph.find_nodes(op="placeholder")),
        ]

    def check(self, gm: fx.GraphModule, pass_name: str) -> None:
        """Raise ``GraphVerificationError`` if ``gm`` now computes something else, outputs or contents of inputs."""
        gm.recompile()
        with _torch_private.real_execution():
            pairs = list(zip(self._names, self._expected, self._run(gm), strict=True))
            problems = [(name, _difference(want, have, self._tolerance)) for name, want, have in pairs]
        for name, problem in problems:
            if problem:
                raise GraphVerificationError(
                    f"After pass {pass_name}: {name} has other values on random inputs: {problem}. "
                    "A pass must not change what the graph computes."
                )

    def _run(self, gm: fx.GraphModule) -> list[Any]:
        """The outputs, then the inputs after the call."""
        inputs = [value.clone() if isinstance(value, torch.Tensor) else value for value in self._inputs]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            outputs = CpuInterpreter(gm).run(*inputs)
        return [*outputs, *inputs]


def _random_inputs(gm: fx.GraphModule) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [_random(node.meta.get("val"), generator) for node in gm.graph.find_nodes(op="placeholder")]


def _random(value: Any, generator: torch.Generator) -> Any:
    """A CPU value like a fake one: normal floats, small integers."""
    if isinstance(value, torch.SymInt):
        return _hint(value)
    if not isinstance(value, torch.Tensor):
        return value
    size = [_hint(number) for number in value.size()]
    stride = [_hint(number) for number in value.stride()]
    result = torch.empty_strided(size, stride, dtype=value.dtype)
    if value.dtype.is_floating_point or value.dtype.is_complex:
        values = torch.randn(size, generator=generator, dtype=torch.float32)
    else:
        values = torch.randint(0, 3, size, generator=generator)
    return result.copy_(values) if 0 not in stride else values.to(value.dtype)


def _hint(number: int | torch.SymInt) -> int:
    """The size that a symbol stands for in the example inputs."""
    if isinstance(number, int):
        return number
    hint = number.node.hint
    return int(hint) if hint is not None else _GENERATED_SIZE


def _tolerance(gm: fx.GraphModule) -> float:
    dtypes = {leaf.dtype for node in gm.graph.nodes for leaf in tensor_leaves(node)}
    return max((_TOLERANCE[dtype] for dtype in dtypes & _TOLERANCE.keys()), default=0.0)


def _difference(want: Any, have: Any, tolerance: float) -> str | None:
    """The worst disagreement in words, or None."""
    if not isinstance(want, torch.Tensor) or not isinstance(have, torch.Tensor):
        return None if want is have or want == have else f"{have} instead of {want}"
    if want.numel() == 0:
        return None
    if want.dtype in _TOLERANCE:
        scale = want.double().abs().nan_to_num(0, 0, 0).max().item() or 1.0
        error = (want.double() - have.double()).abs() / scale
        same = want.isnan() & have.isnan() | (want == have)
        worst = error.masked_fill(same, 0).nan_to_num(float("inf")).max().item()
        return None if worst <= tolerance else f"relative error {worst:.2g}"
    if want.dtype == torch.int8:  # quantised: a tie may fall either way
        worst = (want.int() - have.int()).abs().max().item()
        return None if worst <= 1 else f"quantised values differ by {worst}"
    return None if torch.equal(want, have) else "integers differ"
