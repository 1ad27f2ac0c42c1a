"""The numeric check of a pass: the graph before and after it, run on the same inputs on the CPU, and compared.

Off by default (option `check_numerics`), because it runs the whole graph for each pass that changes something. It finds what
the contract cannot see: a rewrite that keeps every shape and computes other values. The inputs are those of the current call,
if they are known, and random ones. If AOT's graph does not run on the CPU, nothing is compared, and the report says why.

A fused operator rounds less often than the operators that it replaces, and one rounding can change all later values: an int8
sum wraps around, a float16 value overflows. So a difference counts only if it remains when both graphs compute in float64.

That proves nothing of a result that only rounding decides, such as `x.half() > x`: in float64 it is what any other comparison
is. So a result of which many elements are far from what they were is not judged, and the log warns of it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex._plurals import counted
from npugraph_ex.errors import GraphVerificationError
from npugraph_ex.graph.collectives import is_collective
from npugraph_ex.graph.memory.aliases import output_values, tensor_leaves
from npugraph_ex.lifting.joined_weights import PARTS
from npugraph_ex.observe.logger import logger
from npugraph_ex.operators import CpuInterpreter, UnsupportedArgumentError
from npugraph_ex.passes.trial_inputs import copies, drawn_inputs, in_float64, own_inputs
from npugraph_ex.report.builder import ReportBuilder

_TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-4, torch.float64: 1e-9}
"""Relative to the largest element: a few roundings of a dtype, since a fused operator may round less often.

The coarsest dtype anywhere in the graph decides: a float32 scale of float16 values carries their error.
"""

_WIDE_TOLERANCE = 1e-4
"""The tolerance in float64, where a formula may still keep a scale in float32."""

_APART, _SHARE = 1 / 32, 1 / 4
"""If so many elements differ by more than this part of the largest, float64 proves nothing. Roundings are finer, and few of them
make a large difference by chance. `npugraph-ex validate` has the same limits."""

_NO_KERNEL = (UnsupportedArgumentError, NotImplementedError)
"""The exceptions of an operator without a CPU kernel."""


class _NotRunError(Exception):
    """A graph does not run on the CPU with some inputs. The message names the node and the cause."""


@dataclass(frozen=True)
class _TrialRun:
    """Inputs, and the graph's results for them when the graph was last known to be right.

    Attributes:
        what: the inputs, in words for a message.
        inputs: the graph's inputs, on the CPU.
        expected: the outputs, then the inputs after the call.
        tolerance: relative to the largest element.
        wide: whether floating-point numbers are float64.
    """

    what: str
    inputs: list[Any]
    expected: list[Any]
    tolerance: float
    wide: bool = False

    def problem(self, gm: fx.GraphModule, names: Sequence[str]) -> GraphVerificationError | None:
        """The difference between ``gm`` and the correct graph, if there is one, and the exception of an operator that raised."""
        try:
            results = _run(gm.graph, gm, self.inputs, wide=self.wide)
        except _NotRunError as error:
            problem = GraphVerificationError(f"with {self.what}, {error}; the graph before the pass did not raise")
            problem.__cause__ = error.__cause__
            return problem
        for name, want, have in zip(names, self.expected, results, strict=True):
            difference = _difference(want, have, self.tolerance)
            if difference:
                return GraphVerificationError(f"{name} has other values on {self.what}: {difference}")
        return None

    def decided_by_rounding(self, gm: fx.GraphModule, names: Sequence[str]) -> str:
        """The first result of which many elements are far from those of the correct graph, in words; empty if there is none."""
        for name, want, have in zip(names, self.expected, _run(gm.graph, gm, self.inputs, wide=self.wide), strict=True):
            if isinstance(want, torch.Tensor) and (apart := _apart(want, have)) > _SHARE * want.numel():
                return f"{apart:,} of {counted(want.numel(), 'element')} of {name}"
        return ""


class NumericCheck:
    """The results of one graph for some inputs when it was last known to be right.

    Args:
        gm: AOT's graph.
        report: records what cannot be compared.
        values: the placeholders' values in the current call, as far as they are known.
    """

    def __init__(self, gm: fx.GraphModule, report: ReportBuilder, values: Sequence[Any] = ()) -> None:
        self._report = report
        report.add_compared(0)
        self._tolerance = _tolerance(gm)
        self._original = _copy_of(gm.graph)
        self._names = [
            *map(str, output_values(gm.graph)),
            *(str(n.target) for n in gm.graph.find_nodes(op="placeholder")),
        ]
        self._trials: list[_TrialRun] = []
        self._unjudged: set[str] = set()
        if any(map(is_collective, gm.graph.nodes)):
            self._leave_out("the graph communicates with other processes")
            return
        with _on_the_cpu():
            own = own_inputs(gm, values)
            if own is not None:
                self._try(gm, "the inputs of the call", [own])
            self._try(gm, "random inputs", drawn_inputs(gm))

    def check(self, gm: fx.GraphModule, pass_name: str) -> None:
        """Raise ``GraphVerificationError`` if ``gm`` now computes other outputs or other contents of inputs."""
        gm.recompile()
        with _on_the_cpu():
            agree = [self._agrees(gm, trial, pass_name) for trial in self._trials]
        self._report.add_compared(bool(agree) and all(agree))

    def _try(self, gm: fx.GraphModule, what: str, several: Iterable[list[Any]]) -> None:
        """Keep the first inputs with which the graph runs, because its operators may refuse random ones."""
        reason = ""
        for inputs in several:
            try:
                self._trials.append(_TrialRun(what, inputs, _run(gm.graph, gm, inputs), self._tolerance))
            except _NotRunError as error:
                reason = str(error)
            else:
                return
        self._leave_out(f"with {what}, {reason}")

    def _agrees(self, gm: fx.GraphModule, trial: _TrialRun, pass_name: str) -> bool:
        """Whether the graph computes what it did, but for rounding; False where that cannot be compared."""
        problem, wide = trial.problem(gm, self._names), False
        if problem is None:
            if self._tolerance <= _WIDE_TOLERANCE:
                return True
            # A few roundings of a narrow dtype are wide enough for a wrong formula. Without the rounding it shows.
            problem, wide = self._problem_without_rounding(gm, trial), True
            if problem is None:
                return True
        if isinstance(problem.__cause__, _NO_KERNEL):
            self._leave_out(f"after pass {pass_name} and {problem}")
        elif not wide and self._is_rounding(gm, trial):
            return self._is_judged(gm, trial, pass_name, str(problem))
        else:
            raise GraphVerificationError(
                f"After pass {pass_name}: {str(problem).rstrip('.')}. A pass must not change what the graph computes."
            ) from problem.__cause__
        return False

    def _is_judged(self, gm: fx.GraphModule, trial: _TrialRun, pass_name: str, problem: str) -> bool:
        """Whether agreement in float64 proves that rounding makes the difference. The report has it, or why nothing is proven."""
        many = trial.decided_by_rounding(gm, self._names)
        if not many:
            self._report.add_rounding(f"after pass {pass_name}, {problem}")
            return True
        reason = (
            f"after pass {pass_name}, {problem}; {many} are apart by more than 1/{round(1 / _APART)} of the largest. The graphs "
            "agree in float64, which proves nothing of values that only rounding decides"
        )
        if problem not in self._unjudged and self._report.add_uncompared(reason):
            logger.warning("check_numerics does not judge: %s", reason)
        self._unjudged.add(problem)  # later passes keep it
        return False

    def _is_rounding(self, gm: fx.GraphModule, trial: _TrialRun) -> bool:
        """Whether the two graphs agree in float64; False if nothing was rounded, or if the first graph does not run in float64."""
        try:
            return bool(self._tolerance) and self._wide_problem(gm, trial) is None
        except _NotRunError:
            return False

    def _problem_without_rounding(self, gm: fx.GraphModule, trial: _TrialRun) -> GraphVerificationError | None:
        """The difference in float64, where both graphs run there."""
        try:
            problem = self._wide_problem(gm, trial)
        except _NotRunError:
            return None
        return problem if problem is None or problem.__cause__ is None else None

    def _wide_problem(self, gm: fx.GraphModule, trial: _TrialRun) -> GraphVerificationError | None:
        """The difference of the two graphs in float64.

        Raises:
            _NotRunError: the first graph does not run in float64.
        """
        inputs = in_float64(trial.inputs)
        expected = _run(self._original, gm, inputs, wide=True)
        what = f"{trial.what}, in float64"
        return _TrialRun(what, inputs, expected, _WIDE_TOLERANCE, wide=True).problem(gm, self._names)

    def _leave_out(self, reason: str) -> None:
        if self._report.add_uncompared(reason):
            logger.info("check_numerics compares no values here: %s", reason)


class _OfAPass(CpuInterpreter):
    """Runs a graph between passes.

    Joins the parameters of this run where the graph has a constant of the call's own, which others do not fit. Calls an operator
    that writes its arguments on copies of them where AOT has wrapped it.
    """

    def __init__(self, gm: fx.GraphModule, *, graph: fx.Graph, wide: bool, inputs: Sequence[Any]) -> None:
        super().__init__(gm, graph=graph, wide=wide)
        self._inputs = inputs

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        parts = n.meta.get(PARTS)
        return super().run_node(n) if parts is None else parts.joined(self._inputs)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call one operator on the CPU."""
        if target in _torch_private.auto_functionalized_operators():

            def unwrapped(*own: Any, **named: Any) -> Any:
                return _torch_private.call_unwrapped(target, own, named)

            return self.call_python(unwrapped, args, kwargs)
        return super().call_function(target, args, kwargs)


def _run(graph: fx.Graph, gm: fx.GraphModule, inputs: Sequence[Any], *, wide: bool = False) -> list[Any]:
    """The results of ``graph`` with the constants of ``gm``: the outputs, then the inputs after the call.

    Raises:
        _NotRunError: an operator raised; its exception is the cause.
    """
    torch.default_generator.manual_seed(0)
    given = copies(inputs)
    interpreter = _OfAPass(gm, graph=graph, wide=wide, inputs=inputs)
    try:
        return [*interpreter.run(*given), *given]
    except Exception as error:
        node, message = interpreter.running, str(error).strip().split("\n")[0]
        raise _NotRunError(
            f"node {node} ({node.target if node else ''}) raises {type(error).__name__}: {message}"
        ) from error


def _copy_of(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    copied.output(copied.graph_copy(graph, val_map={}))
    return copied


@contextmanager
def _on_the_cpu() -> Iterator[None]:
    """Compute real values on the CPU outside all active modes, and restore every random generator of the process."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - what user code draws from
    npu = torch.get_device_module("npu")
    devices = range(npu.device_count()) if npu.is_initialized() else ()
    try:
        with (
            _torch_private.real_execution(),
            torch.random.fork_rng(devices, device_type="npu"),
            torch.device("cpu"),
            torch.no_grad(),
        ):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


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
    if want.dtype == torch.int8:  # quantised: a tie may round either way
        worst = (want.int() - have.int()).abs().max().item()
        return None if worst <= 1 else f"quantised values differ by {worst}"
    return None if torch.equal(want, have) else f"{'truth values' if want.dtype == torch.bool else 'integers'} differ"


def _apart(want: torch.Tensor, have: torch.Tensor) -> int:
    """How many elements are far from what they should be: by a part of the largest, or in what is no number."""
    old, new = want.to(torch.complex128), have.to(torch.complex128)
    same = (old == new) | (old.isnan() & new.isnan())
    largest = old.abs().nan_to_num(0, 0, 0).amax() if old.numel() else 0
    return int((~same & ~((old - new).abs() <= _APART * largest)).sum())
