"""One example about streams: a program whose streams write parts of one buffer, or any other, compiled from the front.

AOT and all passes run, and none may be undone. The graph as drawn is the program: what its author would have to add so that
it has no race is added. Compiled, it must then give the integers that it means on every schedule, under whatever options, and
nobody may be warned of a race.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

import npu_emulator
from npugraph_ex.config import CompilerConfig
from npugraph_ex.config.compiler_config import apply_flat
from npugraph_ex.errors import StreamOrderWarning
from npugraph_ex.frontend.entry.backend import get_npu_backend
from npugraph_ex.graph.streams.events import MAIN, awaited, computes, is_record, is_record_stream, is_wait, stream_of
from npugraph_ex.graph.streams.labels import STREAM
from npugraph_ex.graph.streams.ops import ENTERS, EXITS, TAGGED_RECORDS, TAGGED_WAITS
from npugraph_ex.passes.stream_order import repair
from npugraph_ex.report.passes import last_report
from npugraph_ex.stream_check.analysis import analyse
from npugraph_ex.testing.streams.programs import counting_inputs
from npugraph_ex.testing.streams.strategies import sample_parts_graph, sample_stream_graph
from npugraph_ex_conformance.stream_runs import run_in_order

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


def check_parts(gm: fx.GraphModule, options: Mapping[str, Any]) -> str:
    """Compile a program and compare; empty when all is right.

    Args:
        gm: labelled, with ``record`` and ``wait`` nodes. The edges that it lacks are inserted.
        options: what it is compiled with.
    """
    repair(gm.graph, analyse(gm.graph))
    inputs = counting_inputs(gm)
    expected = [tensor.tolist() for tensor in run_in_order(gm, inputs)]
    config = CompilerConfig()
    apply_flat(config, options)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        compiled = get_npu_backend(compiler_config=config)(
            as_a_user_writes(gm), [tensor.to("npu") for tensor in inputs]
        )
        for text in SCHEDULES:
            given = [tensor.to("npu") for tensor in inputs]
            torch.accelerator.synchronize()
            with npu_emulator.schedule(text):
                results = [tensor.cpu().tolist() for tensor in (*compiled(*given), *given)]
            if results != expected:
                return f"under schedule {text} and {dict(options)}: {results} instead of {expected}\n{gm.graph}"
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
