"""One example about streams: a program of the corpus, checked, closed, stripped of what orders nothing, and run.

The check must say what the corpus says. The mended program, without the forks and the join that its author wrote, goes
through the passes that put them back; then the device must find no race, and every schedule must give the same integers.
"""

from __future__ import annotations

import torch
from torch import fx

from npugraph_ex.config import CompilerConfig
from npugraph_ex.graph.streams.events import MAIN, awaited, computes, is_record, is_record_stream, is_wait, stream_of
from npugraph_ex.graph.streams.ops import KEEP_ALIVES
from npugraph_ex.passes import event_closure, lifetimes, redundant_events
from npugraph_ex.passes.base import PassContext
from npugraph_ex.stream_check.analysis import analyse
from npugraph_ex.testing.streams.programs import StreamProgram
from npugraph_ex_conformance.stream_corpus.programs import stream_corpus
from npugraph_ex_conformance.stream_runs import judge

_SCHEDULES = ("lazy", "random:0", "random:1")


def stream_example(seed: int) -> str:
    """What is wrong with the example that ``seed`` stands for; empty when nothing is."""
    programs = stream_corpus()
    program = programs[seed % len(programs)]
    try:
        return _checked(program) or _run(program)
    except Exception as error:  # noqa: BLE001 - whatever a fault makes the library raise is what was found
        return f"raised {type(error).__name__}: {error}"


def _checked(program: StreamProgram) -> str:
    for mended in (False, True):
        found = sorted(finding.code for finding in analyse(program.graph(mended=mended).graph))
        wanted = sorted((*program.notes, *(() if mended else program.codes)))
        if found != wanted:
            form = "mended" if mended else "racy"
            return f"check of {program.name} ({form}): {', '.join(found) or 'nothing'} instead of {', '.join(wanted) or 'nothing'}"
    return ""


def _run(program: StreamProgram) -> str:
    gm = program.graph(mended=True)
    _open(gm.graph)
    context = PassContext(CompilerConfig().to_options(), [])
    for run in (event_closure.run, lifetimes.run, redundant_events.run):
        run(gm, context)
    gm.graph.lint()
    gm.recompile()
    verdict = judge(gm, program.inputs(), schedules=_SCHEDULES)
    return f"run of {program.name}: {verdict}" if verdict.is_racy else ""


def _open(graph: fx.Graph) -> None:
    """Take away what the passes put there: lifetimes, the wait with which each side stream begins, the join at the end."""
    for node in [node for node in graph.nodes if is_record_stream(node) or node.target in KEEP_ALIVES]:
        graph.erase_node(node)
    begun = {MAIN}
    for node in list(graph.nodes):
        label = stream_of(node)
        if label in begun or not (computes(node) or is_wait(node) or is_record(node)):
            continue
        begun.add(label)
        if is_wait(node) and all(stream_of(record) == MAIN for record in awaited(node)):
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if computes(node) and node.target is not torch.ops.aten.copy_.default:
            break
        if is_wait(node) and stream_of(node) == MAIN:
            graph.erase_node(node)
    for node in [node for node in graph.nodes if is_record(node) and not node.users]:
        graph.erase_node(node)
