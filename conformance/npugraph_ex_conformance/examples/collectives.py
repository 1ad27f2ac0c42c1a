"""Random programs with collectives, through the passes, as one of two ranks that have equal values.

The compiled graph starts the collectives of the program, each once, in its order. Its values are those of the program, whether a
collective reads its argument when it starts or as late as it may, and whether its result is there at once or with the wait.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from npugraph_ex.fusion.registry import register_replacement
from npugraph_ex.testing.generator.inputs import Input, make_inputs
from npugraph_ex.testing.oracle import tracing
from npugraph_ex.testing.oracle.host import HostGraph, callable_of
from npugraph_ex.testing.oracle.without_device import optimise
from npugraph_ex_conformance.ranks.programs import COLLECTIVES, COLUMNS, FUSED, ROWS, RankPlace, doubling, draw

_PLACE = RankPlace(0, 2, "the ranks", "", "")
_SPEC = Input((ROWS, COLUMNS), "int32", whole=50)


def collective_example(seed: int) -> str:
    """What is wrong with the example that ``seed`` stands for; empty when nothing is. Every second one has a rule of a user's."""
    try:
        return _checked(seed)
    except Exception as error:  # noqa: BLE001 - whatever a fault makes the library raise is what was found
        return f"raised {type(error).__name__}: {error}"


def _checked(seed: int) -> str:
    drawn = draw(seed, _PLACE.ranks)
    steps = tuple(step._replace(kind="all_reduce") if step.kind in FUSED else step for step in drawn.steps)
    program = drawn._replace(steps=steps, side=-1)
    traced = tracing.trace(lambda x: program.run(x, _PLACE), [_SPEC], {}, dynamic=False, functional=seed % 3 > 0)
    wanted, optimised = _started(traced), tracing.copy_of(traced)
    if len(wanted) != sum(step.kind in COLLECTIVES for step in steps):
        return f"as traced, it starts {wanted}, and the program has {steps}\n{traced.graph}"
    ones = [torch.ones(2, dtype=torch.int32, device="npu")]
    with register_replacement(*doubling(_PLACE.group), ones) if seed % 2 else nullcontext():
        report = optimise(optimised, {})
    shown = f"\n{traced.graph}\n{optimised.graph}"
    if _started(optimised) != wanted:
        return f"it starts {_started(optimised)} instead of {wanted}{shown}"
    undone = [record.name for record in report.passes if record.outcome == "rolled back"]
    if undone:
        return f"passes were undone: {', '.join(undone)}{shown}"
    expected = _results(traced, seed, late=False)
    for late in (False, True):
        if _results(optimised, seed, late=late) != expected:
            return f"other values, if collectives read {'at the wait' if late else 'at once'}{shown}"
    return ""


def _started(gm: fx.GraphModule) -> list[str]:
    """The collectives of a graph, in order."""
    return [node.target.name() for node in gm.graph.nodes if _is_collective(node.target)]


def _name(target: Any) -> str:
    """The name of an operator of torch.distributed; empty for others."""
    return target._opname if getattr(target, "namespace", "") == "_c10d_functional" else ""


def _is_collective(target: Any) -> bool:
    return _name(target) not in ("", "wait_tensor")


def _results(gm: fx.GraphModule, seed: int, *, late: bool) -> list[Any]:
    inputs = make_inputs([_SPEC], call=seed, device="cpu")
    results = HostGraph(gm, call=_TwoRanks(late=late).called).run(inputs)
    return [tensor.tolist() for tensor in (*results, *inputs)]


class _TwoRanks:
    """The collectives of two ranks whose values are equal.

    Args:
        late: whether they read their argument and write their result only when somebody waits for it.
    """

    def __init__(self, *, late: bool) -> None:
        self._late = late
        self._running: dict[int, Callable[[], object]] = {}

    def called(self, target: Any) -> Callable[..., Any]:
        """What computes an operator."""
        if _name(target) == "wait_tensor":
            return self._wait
        if not _is_collective(target):
            return callable_of(target)
        return lambda *args: self._start(_name(target), *args)

    def _start(self, name: str, given: Any, *args: Any) -> Any:
        if name == "batch_p2p_ops":  # a send and a receive
            sent = args[2][0]
            return [self._start("message", sent) for _ in given]
        if isinstance(given, list):
            return [self._start(name.removesuffix("_coalesced"), one, *args) for one in given]
        result = torch.full_like(_value(name, given, *args), -7)
        self._running[result.data_ptr()] = lambda: result.copy_(_value(name, given, *args))
        if not self._late:
            self._wait(result)
        return result

    def _wait(self, result: torch.Tensor) -> torch.Tensor:
        self._running.pop(result.data_ptr(), lambda: None)()
        return result


def _value(name: str, given: torch.Tensor, *args: Any) -> torch.Tensor:
    """A collective's result, if the other rank gives the same."""
    if name == "all_gather_into_tensor":
        return torch.cat([given, given])
    if name == "all_to_all_single":  # the other rank's part for this one, as often as it fits
        taken, sent = sum(args[0]), given[: args[1][0]] if args[1][0] else given
        return sent[torch.arange(taken) % len(sent)] if len(sent) else given.new_zeros(taken, *given.shape[1:])
    how = 2 if "sum" in args else 1
    return (given[: len(given) // 2] if name == "reduce_scatter_tensor" else given) * how
