"""One example about streams: a program whose streams write parts of one buffer, or any other, compiled from the front.

AOT and all passes run, and none may be undone. The graph as drawn is the program: what its author would have to add so that
it has no race is added. Compiled, it must then give the integers that it means on every schedule, under whatever options, and
nobody may be warned of a race.

Of racy examples nothing is mended before. The compiler must refuse a program exactly where results of the compiled graph depend on
the order in which its streams run, and only if the program as drawn has a race. As the compiler repairs it, every program must give
what it means on every schedule.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

import npu_emulator
from npugraph_ex.config import CompilerConfig
from npugraph_ex.config.compiler_config import apply_flat
from npugraph_ex.errors import StreamOrderError, StreamOrderWarning
from npugraph_ex.frontend.entry.backend import get_npu_backend
from npugraph_ex.graph.streams.events import MAIN, awaited, computes, is_record, is_record_stream, is_wait, stream_of
from npugraph_ex.graph.streams.labels import STREAM
from npugraph_ex.graph.streams.ops import ENTERS, EXITS, TAGGED_RECORDS, TAGGED_WAITS
from npugraph_ex.passes import event_closure
from npugraph_ex.passes.base import PassContext
from npugraph_ex.passes.stream_order import repair
from npugraph_ex.report.passes import last_report
from npugraph_ex.stream_check.analysis import analyse
from npugraph_ex.testing.oracle.tracing import copy_of
from npugraph_ex.testing.streams.programs import counting_inputs
from npugraph_ex.testing.streams.strategies import sample_parts_graph, sample_stream_graph
from npugraph_ex_conformance.stream_runs import SCHEDULES as MORE_SCHEDULES
from npugraph_ex_conformance.stream_runs import judge, run_in_order

OPTIONS: Sequence[Mapping[str, Any]] = (
    {},
    {"inplace_pass": False, "stream_check": "off"},
    {"input_inplace_pass": False, "stream_check": "raise"},
    {"inplace_pass": False, "input_inplace_pass": False, "force_eager": True},
)
"""Those under which programs are compiled."""

SCHEDULES = ("lazy", "random:1", "random:2")


def part_example(seed: int) -> str:
    """What is wrong with the example that ``seed`` stands for; empty when nothing is. Of every third one values die soon."""
    try:
        gm = sample_stream_graph(seed, keep=False) if seed % 3 == 2 else sample_parts_graph(seed)
        return check_parts(gm, OPTIONS[seed % len(OPTIONS)])
    except Exception as error:  # noqa: BLE001 - whatever a fault makes the library raise is what was found
        return f"raised {type(error).__name__}: {error}"


def racy_part_example(seed: int) -> str:
    """As ``part_example``, of a program as it is drawn; in every third one any stream computes anything."""
    try:
        return check_races(sample_stream_graph(seed, keep=True) if seed % 3 == 2 else sample_parts_graph(seed))
    except Exception as error:  # noqa: BLE001 - whatever a fault makes the library raise is what was found
        return f"raised {type(error).__name__}: {error}"


def check_parts(gm: fx.GraphModule, options: Mapping[str, Any]) -> str:
    """Compile a program and compare; empty when all is right.

    Args:
        gm: labelled, with ``record`` and ``wait`` nodes. The edges that it lacks are inserted.
        options: what it is compiled with.
    """
    repair(gm.graph, analyse(gm.graph))
    return _compiled(gm, options)


def check_races(gm: fx.GraphModule) -> str:
    """Compile a program, racy or not, that "raise" must refuse if and only if the compiled graph is racy, and "repair" must mend.

    Args:
        gm: labelled, with ``record`` and ``wait`` nodes. Every value is an output, so that no memory is used again.
    """
    closed = copy_of(gm)
    event_closure.run(closed, PassContext(CompilerConfig().to_options(), []))
    try:
        _compile(gm, {"stream_check": "raise"})
        refused = ""
    except StreamOrderError as error:
        refused = str(error)
    if refused and not judge(closed, counting_inputs(gm), schedules=SCHEDULES).is_racy:
        return f"the device finds no race in the program, and the compiler says: {refused}\n{gm.graph}"
    with npu_emulator.detect_races() as races:
        compiled = _compile(gm, {"stream_check": "off"})
        wrong = _differs(gm, compiled)
    if refused and not races and not wrong:
        return f"the device finds no race in the compiled graph, and the compiler says: {refused}\n{gm.graph}"
    # A functional write first copies its base's memory, bytes that nothing uses later included. A race there changes no result.
    wrong = wrong or (_differs(gm, compiled, MORE_SCHEDULES) if races else "")
    if wrong and not refused:
        return f"the compiler finds no race, and the device {[*map(str, races)]}, {wrong}"
    return _compiled(gm, {"stream_check": "repair"})


def _given(gm: fx.GraphModule) -> list[torch.Tensor]:
    return [tensor.to("npu") for tensor in counting_inputs(gm)]


def _config(options: Mapping[str, Any]) -> CompilerConfig:
    config = CompilerConfig()
    apply_flat(config, options)
    return config


def _compile(gm: fx.GraphModule, options: Mapping[str, Any]) -> Callable[..., Sequence[torch.Tensor]]:
    return get_npu_backend(compiler_config=_config(options))(as_a_user_writes(gm), _given(gm))


def _differs(
    gm: fx.GraphModule, compiled: Callable[..., Sequence[torch.Tensor]], schedules: Sequence[str] = SCHEDULES
) -> str:
    """The first schedule under which a compiled program gives other results than it means; empty if there is none."""
    expected = [tensor.tolist() for tensor in run_in_order(gm, counting_inputs(gm))]
    for text in schedules:
        given = _given(gm)
        torch.accelerator.synchronize()
        with npu_emulator.schedule(text), torch.no_grad():
            results = [tensor.cpu().tolist() for tensor in (*compiled(*given), *given)]
        if results != expected:
            return f"under schedule {text}: {results} instead of {expected}\n{gm.graph}"
    return ""


def _compiled(gm: fx.GraphModule, options: Mapping[str, Any]) -> str:
    """What is wrong with a program as compiled: its results, a pass that was undone, a warning of a race."""
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        wrong = _differs(gm, _compile(gm, options))
    if wrong:
        return f"with {dict(options)} {wrong}"
    report = last_report()
    undone = [one for one in report.passes if one.outcome == "rolled back"] if report is not None else []
    if undone:
        return f"pass {undone[0].name} was rolled back: {undone[0].message}\n{gm.graph}"
    blamed = [str(warning.message) for warning in caught if warning.category is StreamOrderWarning]
    return f"a program without a race was blamed: {blamed[0]}\n{gm.graph}" if blamed else ""


def as_a_user_writes(gm: fx.GraphModule) -> fx.GraphModule:
    """A labelled graph as Dynamo would give it: scopes and tagged events, in-place operators on views, no metadata."""
    graph, known = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        stream = MAIN if node.op == "output" else stream_of(node)
        enclosed = stream != MAIN and (computes(node) or is_record(node) or is_wait(node))
        if enclosed:
            graph.call_function(ENTERS[0], ([STREAM], [stream]))
        if is_record(node):
            graph.call_function(TAGGED_RECORDS[0], (node.name,))
        elif is_wait(node):
            for record in awaited(node):
                graph.call_function(TAGGED_WAITS[0], (record.name,))
        elif not is_record_stream(node):
            known[node] = graph.node_copy(node, lambda argument: known[argument])
            known[node].meta = {}
        if enclosed:
            graph.call_function(EXITS[0])
    return fx.GraphModule(torch.nn.Module(), graph)
