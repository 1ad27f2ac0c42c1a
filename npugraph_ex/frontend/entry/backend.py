"""The backend: from a Dynamo graph, or an AOT graph, to a callable."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.config import OPTION_TABLE, CompilerConfig
from npugraph_ex.config.compiler_config import apply_flat, given_or_default
from npugraph_ex.errors import (
    CaptureError,
    GraphVerificationError,
    OptionValueError,
    SavedGraphError,
    address_of,
    with_address,
)
from npugraph_ex.frontend.entry import current_device, ge
from npugraph_ex.frontend.entry.compiler import CompiledFxGraph, NpuFxCompiler
from npugraph_ex.frontend.entry.record import record_as_traced
from npugraph_ex.frontend.entry.undeclared_effects import UndeclaredEffects
from npugraph_ex.frontend.native_streams import core_limits
from npugraph_ex.frontend.native_streams import streams as native_streams
from npugraph_ex.frontend.upstream_repairs import (
    foreach_writes,
    layouts,
    number_keywords,
    rank_writes,
    region_writes,
    replaced_memory,
    returned_inputs,
    shared_arguments,
    shared_inputs,
    specialised_sizes,
    turned_arguments,
    undefined_gradients,
    written_views,
)
from npugraph_ex.graph.collectives import overloads_in
from npugraph_ex.graph.memory.aliases import output_values
from npugraph_ex.observe.dump import new_dumper
from npugraph_ex.observe.logger import logger
from npugraph_ex.passes.result_views import NO_VIEWS
from npugraph_ex.saving.size_one import AtSizeOne
from npugraph_ex.tracing_repairs.as_aot import as_aot_traces
from npugraph_ex.versions.frame_room import roomy

Backend = Callable[..., Callable[..., Any]]


def get_npu_backend(
    *,
    compiler_config: CompilerConfig | None = None,
    custom_decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    on_compiled: Callable[[CompiledFxGraph], object] | None = None,
) -> Backend:
    """Make a backend for ``torch.compile(model, backend=...)``.

    Args:
        compiler_config: the options; None for the defaults. Each compilation reads them, so later changes have an effect.
        custom_decompositions: decompositions, by operator overload, that AOT applies before the passes.
        on_compiled: called with each compiled graph, so that the caller can save it; not with one that uses native streams,
            because such objects belong to this process.

    Returns:
        ``backend(gm, example_inputs)``, which compiles one Dynamo graph.
    """
    config = given_or_default(compiler_config, "get_npu_backend: compiler_config")
    if custom_decompositions is not None and not isinstance(custom_decompositions, Mapping):
        raise OptionValueError(
            "get_npu_backend: custom_decompositions takes a dict of operator overloads to functions, got "
            f"{custom_decompositions!r} ({type(custom_decompositions).__name__})"
        )
    decompositions = dict(custom_decompositions or {})
    if config.mode == ge.MODE and ge.why_not() is None:
        return ge.backend(config, decompositions)

    @with_address()
    @roomy
    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if config.mode == ge.MODE:
            return ge.backend(config, decompositions)(gm, example_inputs)
        return _compiled(gm, example_inputs, config, decompositions, on_compiled)

    return backend


@with_address()
def npugraph_ex(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph: the backend of ``torch.compile(backend="npugraph_ex", options=...)``.

    Raises:
        OptionError: a wrong option name or value, or a ``mode``, which this backend takes as an option.
    """
    if mode not in {None, "default"}:
        kind = OPTION_TABLE["mode"].kind
        raise OptionValueError(
            f"torch.compile(mode={mode!r}) is Inductor's; this backend takes the mode as an option: "
            + (
                f"options={{'mode': {mode!r}}}"
                if kind.accepts(mode)
                else f"options={{'mode': ...}}, one of {kind.allowed}"
            )
        )
    config = CompilerConfig()
    apply_flat(config, {} if options is None else options)
    return get_npu_backend(compiler_config=config)(gm, example_inputs)


def get_compiler(compiler_config: CompilerConfig | None = None) -> NpuFxCompiler:
    """Make an AOT compiler (``fw_compiler``): it takes an ATen graph and its inputs and returns a callable."""
    return NpuFxCompiler(given_or_default(compiler_config, "get_compiler: compiler_config"))


def compile_fx(
    gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None, options: Mapping[str, object] | None = None
) -> Callable[..., Any]:
    """Compile an ATen graph from AOT or ``make_fx``.

    Args:
        gm: the graph; its nodes carry fake tensors in ``meta["val"]``. Edited in place.
        example_inputs: its inputs, fake or real; None for the placeholders' metadata.
        options: as in ``torch.compile(options=...)``.

    Returns:
        A function of the graph's inputs that returns its outputs as a list.
    """
    config = CompilerConfig()
    apply_flat(config, {} if options is None else options)
    if not isinstance(gm, fx.GraphModule):
        raise GraphVerificationError(
            f"compile_fx takes a graph of ATen operators (fx.GraphModule) as AOT or make_fx give it, got {gm!r}; "
            "torch.compile(function, backend='npugraph_ex') takes functions and modules"
        )
    inputs = example_inputs
    if inputs is None:
        inputs = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    return NpuFxCompiler(config)(gm, inputs)


def _compiled(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: CompilerConfig,
    decompositions: Mapping[Any, Callable[..., Any]],
    on_compiled: Callable[[CompiledFxGraph], object] | None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph, or return it as it was traced where AOT fails on inputs that share memory."""
    as_traced = native_streams.kept(gm)
    try:
        return _through_aot(gm, example_inputs, config, decompositions, on_compiled)
    except RuntimeError as error:
        if not _torch_private.fails_on_shared_memory(error):
            raise
        _tell_uncaptured(gm, shared_inputs.NOT_TRACED, require_capture=config.to_options().require_capture)
        return _unsaveable(as_traced, [shared_inputs.NOT_TRACED])


def _through_aot(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: CompilerConfig,
    decompositions: Mapping[Any, Callable[..., Any]],
    on_compiled: Callable[[CompiledFxGraph], object] | None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph: repair it, let AOT trace it and compile what AOT makes of it, and guard what comes of it."""
    frame = _torch_private.frame_of(gm)
    native_streams.keep_threads_apart(gm)
    example_inputs = _torch_private.in_one_fake_mode(example_inputs)
    names = _torch_private.dynamo_input_names(gm)
    dumper = new_dumper()
    if dumper is not None:
        dumper.graph(gm, "dynamo")
    require_capture = config.to_options().require_capture
    effects = UndeclaredEffects(gm, example_inputs, require_capture=require_capture)
    uncompiled, reason = _in_eager_mode(gm, effects, require_capture=require_capture)
    if uncompiled is not None:
        return _unsaveable(uncompiled, [reason])
    _mend(gm)
    current_device.guard(gm)
    follows = current_device.decides(gm.graph)
    no_views = _no_views(gm.graph)
    known_inputs = shared_inputs.examples(gm, example_inputs)
    as_traced = native_streams.kept(gm)
    core_limits.refuse_impossible(gm.graph)
    on_streams = native_streams.lower(gm)
    written_views.remake(gm)
    layouts.keep(gm)
    compile_one = NpuFxCompiler(config, names, dumper, effects)
    compile_one.values, compile_one.at_one = example_inputs, AtSizeOne(gm, known_inputs)
    compile_one.follows_current_device, compile_one.frame = follows, frame
    watched: list[shared_inputs.SharedInputs] = []

    def compiler(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        _torch_private.allow_retained_graphs()
        graph.graph.output_node().meta[NO_VIEWS] = _torch_private.positions_of_outputs(graph.graph, no_views)
        watched.extend(shared_inputs.of(graph.graph, known_inputs))
        known.append(_torch_private.facts_of_function())
        made = compile_one(graph, inputs)
        shared_inputs.refuse_saving(made, watched)
        if on_compiled is not None and on_streams is None:
            on_compiled(made)
        return _for_aot(made, unsaveable)

    unsaveable: list[str] = []
    known: list[object] = []
    keeps = _torch_private.keeps_results()
    with _torch_private.never_from_torchs_cache(), compile_one.tracing as tracing:
        # Other ranks take part in a collective whether its result is used here or not.
        # What an operator that is not torch's does beside its result, its schema may not say.
        tracing.enter_context(_torch_private.never_dead(overloads_in(gm) | effects.operators))
        tracing.enter_context(as_aot_traces())
        tracing.enter_context(number_keywords.kept())
        tracing.enter_context(specialised_sizes.compared())
        compiled: Callable[..., Any] = _torch_private.aot_backend(
            fw_compiler=compiler, bw_compiler=_uncompiled, partition_fn=compile_one.partition,
            decompositions=decompositions,
            keep_inference_input_mutations=not returned_inputs.may_lose_results(gm),
        )(gm, example_inputs)  # fmt: skip
    compile_one.values, compile_one.at_one = (), None  # the compiled graph may live longer than the examples
    if compile_one.keeps_gradients_undefined and not keeps:
        compiled = undefined_gradients.kept(compiled, known[-1])
    compiled = _unsaveable(compiled, unsaveable)
    compiled = compiled if on_streams is None else _unsaveable(on_streams(compiled), [_OBJECTS])
    for shared in watched:
        compiled = shared_inputs.guard(compiled, as_traced, shared, names=names, require_capture=require_capture)
    return effects.or_as_traced(compiled, as_traced)


def _for_aot(made: CompiledFxGraph, unsaveable: list[str]) -> Callable[..., Any]:
    """A compiled graph in AOT's form. If AOT keeps it and it cannot be saved, the reason is added to ``unsaveable``."""
    if not _torch_private.keeps_results():
        return made.boxed()
    kept, reason = made.kept()
    if reason:
        unsaveable.append(reason)
    return kept


_OBJECTS = (
    "it uses torch.npu streams or events, objects of this process; npugraph_ex.scope.npu_stream_switch names streams"
)


def _mend(gm: fx.GraphModule) -> None:
    """Rewrite what AOT would get wrong in a Dynamo graph."""
    region_writes.restore(gm)
    foreach_writes.split(gm)
    rank_writes.copy(gm)


def _no_views(graph: fx.Graph) -> set[int]:
    """The results of a Dynamo graph that are no views to autograd, by position."""
    examples = [
        value.meta.get("example_value") if isinstance(value, fx.Node) else None for value in output_values(graph)
    ]
    return {
        position
        for position, example in enumerate(examples)
        if isinstance(example, torch.Tensor) and _torch_private.autograd_base(example) is None
    }


_DUAL = "forward-mode derivatives (torch.autograd.forward_ad) are no outputs of its operators"


def _in_eager_mode(
    gm: fx.GraphModule, effects: UndeclaredEffects, *, require_capture: bool
) -> tuple[Callable[..., Any] | None, str]:
    """What runs a graph that nothing can compile, and why it cannot be saved; None if there is something to compile."""
    on_the_host = native_streams.on_the_host(gm)
    _torch_private.guard_on_dual_level()
    if on_the_host is not None:
        return on_the_host, _OBJECTS
    lost = effects.lost_write()
    if lost:
        effects.warn(lost)
        record_as_traced(gm, lost)
        return native_streams.kept(gm), lost
    dual = _DUAL if _torch_private.dual_levels() else ""
    misplaced = replaced_memory.lost_write(gm) or turned_arguments.lost_write(gm)
    reason = dual or misplaced or shared_arguments.stale_read(gm)
    if not reason:
        return None, ""
    _tell_uncaptured(gm, reason, require_capture=require_capture)
    return native_streams.kept(gm), reason


def _tell_uncaptured(gm: fx.GraphModule, reason: str, *, require_capture: bool) -> None:
    """Say that a graph runs operator by operator, and why.

    Raises:
        CaptureError: ``require_capture`` is set.
    """
    if require_capture:
        raise CaptureError(f"require_capture is set, and this graph cannot be captured: {reason}")
    logger.warning(
        "This graph cannot be captured and runs as in eager mode: %s\n%s", reason, address_of("CaptureError")
    )
    record_as_traced(gm, reason)


def _unsaveable(function: Callable[..., Any], reasons: Sequence[str]) -> Callable[..., Any]:
    """A graph that runs only in this process if there are ``reasons``; `aot_compile` raises them when it saves."""

    def refuse() -> None:
        raise SavedGraphError(f"this compiled graph cannot be saved: {'; '.join(reasons)}. Compile it in every process")

    if reasons:
        function.serialize = refuse  # type: ignore[attr-defined]
    return function


def _uncompiled(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return a backward graph without compilation: it runs operator by operator."""
    if _torch_private.keeps_results():
        from npugraph_ex._torch_private.kept_output import uncompiled

        kept: Callable[..., Any] = uncompiled(gm, example_inputs)
        return kept
    boxed: Callable[..., Any] = make_boxed_func(undefined_gradients.Backward(gm))
    return boxed
