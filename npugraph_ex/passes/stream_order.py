"""The pass that checks the order of streams in the final graph, and warns, refuses or repairs as the option says."""

from __future__ import annotations

from torch import fx

from npugraph_ex.errors import StreamOrderError, StreamOrderWarning
from npugraph_ex.graph.streams.events import MAIN, begin, insert_record, insert_wait, stream_of
from npugraph_ex.graph.streams.ops import RECORD_STREAMS
from npugraph_ex.passes.base import PassContext
from npugraph_ex.report.findings import Code, Finding, Findings, warn_at
from npugraph_ex.report.graphs import note_refused
from npugraph_ex.stream_check.analysis import analyse

_HINTS = {
    "warn": 'the option stream_check takes "raise" and "repair" too',
    "repair": 'stream_check="repair" can insert no event for this: change the program',
}
"""What a warning says of the option, by its value."""


def run(gm: fx.GraphModule, context: PassContext) -> None:
    """Check ``gm.graph``; findings go into the report.

    Raises:
        StreamOrderError: ``stream_check="raise"`` and results may be wrong.
    """
    what = context.options.stream_check
    earlier = context.report.findings
    ours = context.report.has_branches
    if all(stream_of(node) == MAIN for node in gm.graph.nodes):
        found = Findings()
    else:
        found = analyse(gm.graph, idle_waits_go=True, streams_are_ours=ours)  # by the later pass `redundant`
        if what == "repair" and found.errors:
            repair(gm.graph, found)
            found = found.after_repair(analyse(gm.graph, idle_waits_go=True, streams_are_ours=ours))
        else:  # races that the program cannot know are always repaired, whatever the option says
            repair(gm.graph, Findings(found.of(Code.MADE_DEPENDENT)))
            found = found.as_repaired(Code.MADE_DEPENDENT)
    if what == "off":
        return
    for finding in found:
        context.report.add_finding(finding)
    wrong = (earlier + found).errors
    if wrong and what == "raise":
        note_refused(wrong)
        raise StreamOrderError(_text(wrong, 'the option stream_check="raise" refuses such a graph'))
    if wrong:
        try:
            warn_at(wrong[0], _text(wrong, _HINTS[what]), StreamOrderWarning)
        except StreamOrderWarning:  # the program's filter makes an error of it
            note_refused(wrong)
            raise


def _text(wrong: tuple[Finding, ...], hint: str) -> str:
    findings = "\n".join(str(finding) for finding in wrong)
    return f"Results may depend on the order in which streams happen to run:\n{findings}\n({hint})"


def repair(graph: fx.Graph, findings: Findings) -> None:
    """Insert every missing edge of ``findings``, and return the findings without a missing edge.

    Args:
        graph: the analysed graph, without later changes.
        findings: the result of `analyse`.
    """
    nodes, start = {node.name: node for node in graph.nodes}, begin(graph)
    for finding in findings:
        if finding.keep_alive:
            value, use = nodes[finding.keep_alive], nodes[finding.first.node]
            with graph.inserting_after(use):
                graph.call_function(RECORD_STREAMS[0], (value, stream_of(use)))
        elif finding.wait_before:
            second = nodes[finding.wait_before]
            if finding.record:
                record = nodes[finding.record]
            elif finding.record_after:
                first = nodes[finding.record_after]
                record = insert_record(graph, first, stream_of(first))
            else:
                record = insert_record(graph, start, MAIN)
            stream = MAIN if second.op == "output" else stream_of(second)
            insert_wait(graph, second, stream, [record])
