"""Runs the passes in order, and verifies the graph after each.

``PIPELINE`` is the order, as data. For every pass the pipeline measures the time, finds the changed nodes, derives their
metadata, verifies the graph against its contract from the start, and dumps it. It undoes and reports a recoverable pass that
fails; a user's pass raises.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex._garbage_collection import no_collection
from npugraph_ex.config.options import Options
from npugraph_ex.errors import GraphVerificationError, ScopeError
from npugraph_ex.graph import metadata, positional_arguments
from npugraph_ex.graph.snapshot import Snapshot
from npugraph_ex.observe.dump import GraphDumper, new_dumper
from npugraph_ex.observe.logger import logger
from npugraph_ex.passes import (
    auto_streams,
    canonical_views,
    cat_removal,
    dead_code,
    deadlock_check,
    event_closure,
    events,
    functional_copies,
    functionalized,
    fusion,
    lifetimes,
    lifting,
    noop_removal,
    redundant_events,
    reinplace,
    result_views,
    scopes,
    stream_order,
)
from npugraph_ex.passes.base import Pass, PassContext, user_pass
from npugraph_ex.passes.numerics import NumericCheck
from npugraph_ex.passes.verify import Contract, check_definitions, check_values
from npugraph_ex.report.builder import ReportBuilder
from npugraph_ex.report.passes import PassOutcome, PassRecord, PassReport, publish

PIPELINE: tuple[Pass, ...] = (
    user_pass("post_grad_custom_pre_pass"),
    Pass("scope_labels", scopes.label, recoverable=False),
    Pass("events", events.run, recoverable=False),
    Pass("noop_removal", noop_removal.run, option="remove_noop_ops"),
    # Before fusion, because some rules match operators that lifting makes.
    Pass("lifting", lifting.run, option="lift"),
    Pass("fusion", fusion.run, option="pattern_fusion_pass", replaces_collectives=True),
    user_pass("post_grad_custom_post_pass"),
    Pass("new_scope_labels", scopes.label, recoverable=False),
    Pass("new_events", events.run, recoverable=False),
    # Before reinplacing, which then removes the copies from unwrapping.
    Pass("functionalized_operators", functionalized.run, recoverable=False),
    Pass("canonical_views", canonical_views.run, option="remove_noop_ops"),
    Pass("cat_removal", cat_removal.run, option="remove_cat_ops"),
    Pass("dead_code", dead_code.run),
    # After every pass that adds or drops work, and before the passes that take their order from events.
    Pass("auto_streams", auto_streams.run, option="auto_streams"),
    # After the closure, because reinplacing needs the order that all events prove.
    Pass("event_closure", event_closure.run, recoverable=False),
    Pass("made_copies", reinplace.run_made_copies),
    Pass("reinplace_intermediates", reinplace.run_intermediates, option="inplace_pass"),
    Pass("reinplace_inputs", reinplace.run_inputs, option="input_inplace_pass"),
    Pass("final_dead_code", dead_code.run),
    Pass("functional_copies", functional_copies.run),
    Pass("result_views", result_views.run),
    Pass("lifetimes", lifetimes.run, recoverable=False),
    Pass("stream_check", stream_order.run, recoverable=False),
    Pass("deadlock_check", deadlock_check.run, option="deadlock_check"),
    Pass("redundant_events", redundant_events.run),
    Pass("scope_lowering", scopes.lower, recoverable=False),
)

JOINT_PIPELINE: tuple[Pass, ...] = (
    Pass("joint_noop_removal", noop_removal.run, option="remove_noop_ops"),
    Pass("joint_fusion", fusion.run_on_joint_graph, option="pattern_fusion_pass", replaces_collectives=True),
)
"""Over the joint graph of forward and backward, before AOT splits it."""


@dataclass
class _PipelineRun:
    """One graph in the pipeline."""

    gm: fx.GraphModule
    context: PassContext
    contract: Contract
    snapshot: Snapshot
    dumper: GraphDumper | None

    def apply(self, pass_: Pass) -> None:
        """Run one pass: time, metadata, verification, dump."""
        before, start = len(self.snapshot), time.perf_counter()
        outcome: PassOutcome = "skipped"
        message = ""
        if pass_.enabled(self.context):
            outcome, message = self._attempt(pass_)
        else:
            message = f"the option {pass_.option!r} is off"
        seconds = time.perf_counter() - start
        after = len(self.gm.graph.nodes)
        self.context.report.add_pass(PassRecord(pass_.name, outcome, seconds, before, after, message))
        if self.dumper is not None and outcome != "skipped":
            self.dumper.graph(self.gm, pass_.name)

    def _call(self, pass_: Pass, name: str) -> None:
        """Call its function. A user's may remove metadata that it does not know; that is put back."""
        if not pass_.by_user:
            pass_.run(self.gm, self.context)
            return
        self.gm.recompile()
        values = {node: node.meta["val"] for node in self.gm.graph.nodes if "val" in node.meta}
        was_paired = scopes.unpaired(self.gm.graph) is None  # a graph break inside a scope is not the pass's
        try:
            pass_.run(self.gm, self.context)
        except (
            _torch_private.NEEDS_VALUES
        ) as error:  # which Dynamo would take for a reason to run the graph in eager mode
            what = f"{type(error).__name__}: {error}".split("\n")[0]
            raise GraphVerificationError(
                f"Pass {name} asks for a value: {what}. The tensors in a pass are fake: they have shapes and dtypes, no values."
            ) from error
        for node, value in values.items():
            node.meta.setdefault("val", value)
        check_definitions(self.gm.graph, name)
        check_values(self.gm.graph, name)
        metadata.derive_constants(self.gm.graph, metadata.fake_mode_of(self.gm.graph))
        if was_paired and (node := scopes.unpaired(self.gm.graph)) is not None:
            raise ScopeError(
                f"Pass {name} left {node.name} ({node.target}) alone: a pass must put a scope_exit after each scope_enter"
            )
        positional_arguments.make_positional(self.gm.graph.nodes)

    def _attempt(self, pass_: Pass) -> tuple[PassOutcome, str]:
        mark, name = self.context.report.mark(), pass_.named(self.context)
        try:
            self._call(pass_, name)
            if not self.snapshot.differs(self.gm):
                if not pass_.recoverable:
                    self.snapshot = Snapshot(self.gm)  # the pass may have changed only metadata, such as a stream label
                return "unchanged", ""
            metadata.refresh(self.gm.graph, self.snapshot.changed_nodes(self.gm), trusting=pass_.recoverable)
            contract = self.contract
            if pass_.replaces_collectives:
                contract = contract.with_collectives_of(self.gm.graph)
            contract.check(self.gm.graph, name)
            if self.context.numerics is not None:
                self.context.numerics.check(self.gm, name)
        except Exception as error:
            if not pass_.recoverable:
                if name not in str(error):
                    _add(error, f"Raised in pass {name}.")
                raise
            self.snapshot.restore(self.gm)
            self.context.report.reset(mark)
            logger.warning("Pass %s was rolled back: %s", pass_.name, error, exc_info=True)
            self.snapshot = Snapshot(self.gm)
            return "rolled back", f"{type(error).__name__}: {error}"
        self.contract = contract
        self.snapshot = Snapshot(self.gm)
        return "changed", ""


def _add(error: Exception, line: str) -> None:
    """Add a line to an exception's message. Dynamo shows no notes of an exception."""
    if not error.args:
        error.args = (line,)
    elif str(error) == error.args[0]:
        error.args = (f"{error.args[0]}\n{line}", *error.args[1:])
    else:  # such as a KeyError, whose argument is its key
        if sys.version_info >= (3, 11):
            error.add_note(line)
        logger.error("%s: %s. %s", type(error).__name__, error, line)


def run(  # noqa: PLR0913 - what is optional is named
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    *,
    config: object | None = None,
    passes: Sequence[Pass] = PIPELINE,
    dumper: GraphDumper | None = None,
    so_far: ReportBuilder | None = None,
    vector_cores: int | None = None,
    values: Sequence[Any] = (),
    price: Callable[[fx.Node], float] | None = None,
) -> PassReport:
    """Run ``passes`` over ``gm``, in place.

    Args:
        gm: an AOT inference graph with fake tensors in ``meta["val"]``; it may write its inputs.
        example_inputs: the inputs, in the order of the placeholders.
        options: which passes are on.
        config: the third argument of a user's pass; ``options`` when None.
        passes: the order, for tests and for callers with passes of their own.
        dumper: writes the graphs; None makes a new one if TORCH_COMPILE_DEBUG=1.
        so_far: the earlier part of the report, for example of the joint graph that AOT split.
        vector_cores: the device's number of vector cores, for the deadlock check; None switches the check off.
        values: the placeholders' values in the current call, for ``check_numerics`` and ``join_projections``; empty if
            unknown.
        price: the modelled microseconds of a node, for ``auto_streams``; None counts its start alone.

    Returns:
        The report. ``report.passes.last_report`` returns the same until the next graph.

    Raises:
        GraphVerificationError: a user's pass broke the graph, or the graph was broken from the start.
    """
    builder = so_far or ReportBuilder()
    dumper = dumper or new_dumper()
    untrue = [node for node in gm.graph.nodes if "val" not in node.meta or metadata.has_doubtful_strides(node)]
    metadata.refresh(gm.graph, untrue)
    positional_arguments.make_positional(gm.graph.nodes)
    check_definitions(gm.graph, "AOT")
    numerics = NumericCheck(gm, builder, values or example_inputs) if options.check_numerics else None
    seen_by_users = options if config is None else config
    context = PassContext(
        options,
        example_inputs,
        builder,
        seen_by_users,
        vector_cores,
        numerics,
        result_views.kinds(gm.graph),
        values,
        price,
    )
    if dumper is not None:
        dumper.graph(gm, "aot")
    # There are many nodes and all stay alive, so each full garbage collection would visit all of them for nothing.
    with no_collection():
        state = _PipelineRun(gm, context, Contract.from_graph(gm.graph), Snapshot(gm), dumper)
        for pass_ in passes:
            state.apply(pass_)
        gm.recompile()
        state.contract.check(gm.graph, "final_verification")
    report = context.report.build()
    publish(report)
    if dumper is not None:
        dumper.text(report.table() + "\n", "pass_report")
        dumper.text(report.to_json() + "\n", "pass_report", ".json")
        if report.streams:
            dumper.text(report.streams.to_sarif() + "\n", "stream_check", ".sarif")
    return report
