"""AOT's facts about a graph that it passes to the backend: inputs, results, forward and backward."""

# ruff: noqa: SLF001 - reaching behind underscores is this module's whole purpose

from __future__ import annotations

import operator
import random
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch import fx
from torch._ops import OpOverload

from npugraph_ex._torch_private.tensors import autograd_base, has_symbolic_sizes
from npugraph_ex.versions.aot_results import settings_that_keep_results
from npugraph_ex.versions.import_sources import torch_source
from npugraph_ex.versions.saved_values import saved_value_classes


def aot_backend(**arguments: Any) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """Dynamo's backend that makes an AOT graph and passes it to compilers; ``arguments`` are those of `aot_autograd`."""
    from torch._dynamo.backends.common import aot_autograd

    backend: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]] = aot_autograd(**arguments)
    return backend


def is_of_backward(node: fx.Node) -> bool:
    """Whether AOT traced ``node`` of a joint graph in the backward; its partitioner uses the same mark."""
    return bool(node.meta.get("partitioner_tag") == "is_backward")


def is_recomputed(node: fx.Node) -> bool:
    """Whether checkpointing asks that the backward computes ``node`` of a joint graph again."""
    from torch._functorch.partitioners import must_recompute

    return must_recompute(node)


def keep_where_traced(graph: fx.Graph, nodes: Iterable[fx.Node]) -> None:
    """Make AOT's partitioner put nodes of a joint graph into the half in which they were traced, and compute them once."""
    from torch.utils.checkpoint import CheckpointPolicy

    # Nodes of an `autograd.Function` have no mark; like the partitioner, go by the last node that has one.
    last = next((node for node in reversed(graph.nodes) if node.meta.get("partitioner_tag") == "is_forward"), None)
    for node in nodes:
        half = "forward" if last is not None and node <= last else "backward"
        node.meta.update({"partitioner_tag": f"must_be_in_{half}", "recompute": CheckpointPolicy.MUST_SAVE})


def static_input_positions(graph: fx.Graph) -> tuple[int, ...]:
    """The positions of the inputs of the graph being compiled whose address AOT knows to be stable: parameters, buffers."""
    metadata = _metadata()
    if metadata is None:
        return ()
    # AOT counts the tokens too, but not in a graph that it splits for training.
    skipped = 0 if metadata.num_symints_saved_for_bw is None else _tokens_of(graph)
    return tuple(skipped + position for position in metadata.static_input_indices)


def is_effect_token(node: fx.Node) -> bool:
    """Whether a node of an AOT graph stands for the order of effects: it is no data, and nothing of the program's."""
    from torch._functorch._aot_autograd import descriptors

    if node.op == "placeholder":
        return isinstance(node.meta.get("desc"), (descriptors.ForwardTokenAOTInput, descriptors.BackwardTokenAOTInput))
    if node.target is operator.getitem:
        source, position = node.args
        return isinstance(source, fx.Node) and ordered_effect(source) is not None and bool(position == 0)
    return node.target in {torch.ops.prims._make_token.default, torch.ops.prims._sink_tokens.default}


def ordered_effect(node: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """The operator that AOT keeps in order by a token because of its effects, and its arguments; None for other nodes."""
    if node.target is not torch.ops.higher_order.with_effects:
        return None
    return node.args[1], tuple(node.args[2:])


def _tokens_of(graph: fx.Graph) -> int:
    """How many tokens come before the inputs of the function, which alone AOT's facts about outputs count."""
    return sum(map(is_effect_token, graph.find_nodes(op="placeholder")))


def allow_retained_graphs() -> None:
    """Let the backward of the current function run again: nothing here overwrites what the forward saved for it.

    AOT takes some saved tensors for the backward compiler's own, and then refuses `backward(retain_graph=True)`.
    """
    metadata = _metadata()
    if metadata is not None:
        metadata.bw_donated_idxs = []


def is_gradient(node: fx.Node) -> bool:
    """Whether an input of a backward graph is the gradient of a result; the name that AOT gave it says so."""
    return "tangents" in str(node.target)


def facts_of_function() -> object:
    """AOT's facts about the current function, for `keep_gradients_undefined`."""
    return _metadata()


def keep_gradients_undefined(tensors: Iterable[object], facts: object) -> None:
    """Let the backward of one call of a compiled function get None for gradients that are undefined, where autograd makes zeros.

    Args:
        tensors: results and inputs of the call, one of which leads to its backward.
        facts: AOT's facts about the function.
    """
    from torch._dynamo import compiled_autograd

    if compiled_autograd.compiled_autograd_enabled:  # it traces AOT's backward, without this library
        return
    for backward in _backwards_near(tensors):
        function = getattr(type(backward), "_forward_cls", None)
        if function is not None and getattr(function, "metadata", None) is facts:
            if (
                getattr(function, "maybe_subclass_metadata", True) is None
            ):  # AOT takes subclasses of tensors apart, and no None
                backward.set_materialize_grads(False)
            return


def _backwards_near(tensors: Iterable[object]) -> Iterator[Any]:
    """What made tensors, or made what they are views or copies of."""
    for tensor in tensors:
        known = [tensor, autograd_base(tensor)] if isinstance(tensor, torch.Tensor) else []
        for made_by in (one.grad_fn for one in known if isinstance(one, torch.Tensor)):
            if made_by is not None:
                yield made_by
                yield from (before for before, _ in made_by.next_functions)


def hooked_inputs() -> list[int]:
    """The inputs, by position, of the function whose backward runs, which are leaves with hooks that take their gradients."""
    backward: Any = torch._C._current_autograd_node()
    differentiable = [place for place, needs in enumerate(backward.needs_input_grad) if needs]
    edges = [node for node, _ in backward.next_functions if node is not None]
    leaves = [getattr(node, "variable", None) for node in edges]
    return [
        place for place, leaf in zip(differentiable, leaves, strict=True) if leaf is not None and leaf._backward_hooks
    ]


_Function = TypeVar("_Function", bound=Callable[..., Any])


def boxed(function: _Function) -> _Function:
    """Mark a function that takes its arguments in one list, so that AOT passes its own list."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def keeps_results() -> bool:
    """Whether AOT keeps its results to save them, under `aot_compile`. Then it takes no plain functions."""
    import torch._functorch.config as settings

    return any(getattr(settings, name) for name in settings_that_keep_results())


def fails_on_shared_memory(error: RuntimeError) -> bool:
    """Whether AOT failed to make a base for inputs of symbolic sizes that share memory and have none, as inference tensors."""
    return "size_bytes_is_heap_allocated_" in str(error)


def draws_of_eager_mode() -> AbstractContextManager[None]:
    """Within the block AOT keeps the calls that draw random numbers which nobody uses, as Inductor's option asks."""
    from torch._inductor import config

    patched: AbstractContextManager[None] = config.patch(fallback_random=True)
    return patched


@contextmanager
def never_from_torchs_cache() -> Iterator[None]:
    """Always compile: the keys of AOT's own cache on disk do not include this library's version, options, rules and passes.

    The key of a graph that torch cannot hash is a number from Python's generator. A program that seeds the generator would
    get the graph of another program. So the system seeds it during the block, and its state is restored.
    """
    before = random.getstate()
    random.seed()
    try:
        with torch.compiler.config.patch(cache_key_tag=uuid4().hex):  # type: ignore[attr-defined] # torch gives it to the module
            yield
    finally:
        random.setstate(before)


def saves_intermediates(graph: fx.Graph) -> bool:
    """Whether ``graph`` is a forward graph that saves computed values, not only inputs, for its backward."""
    saved = saved_value_classes()
    results: Any = graph.output_node().args[0]
    kinds = graph.output_node().meta.get("desc") or [None] * len(results)
    return any(
        isinstance(kind, saved) and isinstance(node, fx.Node) and node.op != "placeholder"
        for node, kind in zip(results, kinds, strict=True)
    )


def belongs_to_training(graph: fx.Graph) -> bool:
    """Whether ``graph`` is a forward graph that saves anything for its backward, or a backward or joint graph."""
    from torch._functorch._aot_autograd import descriptors

    saved = saved_value_classes()
    kinds = graph.output_node().meta.get("desc") or ()
    inputs = (node.meta.get("desc") for node in graph.find_nodes(op="placeholder"))
    return any(isinstance(kind, saved) for kind in kinds) or any(
        isinstance(kind, descriptors.TangentAOTInput) for kind in inputs
    )


def outputs_in_inputs(graph: fx.Graph) -> dict[int, int]:
    """The outputs of the current graph that are inputs or views of inputs, as AOT knows.

    AOT returns none of these results: it makes a new view of the caller's input with the result's offset and strides.

    Returns:
        The placeholder's position by the output's position.
    """
    from torch._functorch._aot_autograd.schemas import OutputType

    metadata = _metadata()
    if metadata is None:
        return {}
    kinds, tokens = (OutputType.alias_of_input, OutputType.is_input), _tokens_of(graph)
    found = {position: metadata.output_info[number] for position, number in _plain_outputs(graph)}
    return {position: tokens + info.base_idx for position, info in found.items() if info.output_type in kinds}


def replay_no_views_of_bases(graph: fx.Graph) -> None:
    """Make AOT use only offset and strides for outputs in a base of several inputs.

    If inputs of the current graph share memory and one is written, AOT passes their base instead. Torch 2.13 then applies the
    program's views of one input to the base, which gives wrong elements or a failed assertion.
    """
    inputs = graph.find_nodes(op="placeholder")
    for position, home in outputs_in_inputs(graph).items():
        if _is_base(inputs[home]):
            _revise(graph, position, view_meta_sequence=None)


def hand_out_as_they_are(graph: fx.Graph, positions: Sequence[int]) -> None:
    """Make AOT return the current graph's results at some positions unchanged, because it cannot rebuild their views.

    Not in a graph that AOT split for training, which wraps such results.
    """
    from torch._functorch._aot_autograd.schemas import OutputType

    metadata = _metadata()
    numbers = dict(_plain_outputs(graph))
    for position in positions if metadata is not None and metadata.num_symints_saved_for_bw is None else ():
        views = metadata.output_info[numbers[position]].view_meta_sequence
        if views is None or any(view.has_symbolic_inputs for view in views.sequence):
            _revise(graph, position, output_type=OutputType.non_alias, base_idx=None, view_meta_sequence=None)


def _revise(graph: fx.Graph, position: int, **what: Any) -> None:
    """Change AOT's facts about one output of the current graph; AOT reads them when it makes the graph's wrapper."""
    known, number = _metadata().output_info, dict(_plain_outputs(graph))[position]
    known[number] = replace(known[number], **what)


def _is_base(node: fx.Node) -> bool:
    """Whether a placeholder is a base that AOT passes instead of inputs that share memory."""
    return hasattr(node.meta.get("desc"), "base_of")


def _metadata() -> Any:
    """AOT's facts about the current function; None outside a compilation."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    return context.fw_metadata if context is not None else None


def _plain_outputs(graph: fx.Graph) -> list[tuple[int, int]]:
    """The function's own outputs in a graph: their positions in the graph and in the function."""
    from torch._functorch._aot_autograd.descriptors import PlainAOTOutput

    results = graph.output_node().meta.get("desc") or ()
    return [(position, found.idx) for position, found in enumerate(results) if isinstance(found, PlainAOTOutput)]


def positions_of_outputs(graph: fx.Graph, outputs: Container[int]) -> frozenset[int]:
    """Where some outputs of AOT's function are among those of its graph."""
    return frozenset(position for position, number in _plain_outputs(graph) if number in outputs)


_kept: Counter[OpOverload] = Counter()
_kept_lock = Lock()


@contextmanager
def never_dead(operators: Iterable[OpOverload]) -> Iterator[None]:
    """Within the block AOT keeps calls of these operators whose results nobody uses.

    Torch has one set of such operators for all threads. An operator leaves the set with the last block that added it. They are not
    added for good, because other backends' graphs for training would then run such a call in both forward and backward.
    """
    from torch.fx.node import _side_effectful_functions

    with _kept_lock:
        added = [one for one in {*operators} if one in _kept or one not in _side_effectful_functions]
        _kept.update(added)
        _side_effectful_functions.update(added)
    try:
        yield
    finally:
        with _kept_lock:
            _kept.subtract(added)
            for one in [one for one in added if not _kept[one]]:
                del _kept[one]
                _side_effectful_functions.discard(one)


@contextmanager
def keywords_of_number_operands() -> Iterator[None]:
    """Within the block AOT keeps the keywords of an operator whose number it replaces by a tensor."""
    from torch._functorch._aot_autograd import graph_compile
    from torch.fx.passes import _tensorify_python_scalars as tensorify

    stage: Any = graph_compile
    operators: dict[Any, Any] = tensorify.SUPPORTED_OPS
    replace_numbers = stage.tensorify_python_scalars

    def with_keywords(gm: fx.GraphModule, *known: Any) -> None:
        before: dict[fx.Node, Any] = {}
        bound: dict[Any, Callable[..., Any]] = {}
        for node in gm.graph.nodes:
            if node.op == "call_function" and node.target in operators and node.kwargs:
                # An operator of its own: torch calls it with the positional arguments alone. One that another number is a
                # keyword of gets no tensor, so both numbers stay fixed.
                before[node], call = node.target, partial(operators[node.target], **node.kwargs)
                node.target = call
                if not any(isinstance(value, fx.Node) for value in node.kwargs.values()):
                    bound[call] = call
        operators.update(bound)
        try:
            replace_numbers(gm, *known)
        finally:
            for call in bound:
                del operators[call]
            for node in gm.graph.nodes:
                node.target = before.get(node, node.target)

    stage.tensorify_python_scalars = with_keywords
    try:
        yield
    finally:
        stage.tensorify_python_scalars = replace_numbers


@contextmanager
def overlaps_of_specialised_sizes() -> Iterator[None]:
    """Within the block AOT looks for overlaps by symbols where a tensor was made with them, even if its sizes are numbers now."""
    from torch._functorch._aot_autograd import input_output_analysis

    analysis: Any = input_output_analysis
    search = analysis.compute_overlapping_tensors

    def found(tensors: list[torch.Tensor], *, symbolic: bool) -> set[int]:
        overlapping: set[int] = search(tensors, symbolic=symbolic or any(map(has_symbolic_sizes, tensors)))
        return overlapping

    analysis.compute_overlapping_tensors = found
    try:
        yield
    finally:
        analysis.compute_overlapping_tensors = search


def guard_on_result(*path: str) -> None:
    """Add a Dynamo guard: compile the current function again if a function of torch returns another value.

    Outside of a compilation nothing happens.

    Args:
        path: the names from ``torch`` to a function without arguments, whose result can be compared.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource, CallFunctionNoArgsSource
    from torch._guards import Source, TracingContext

    if TracingContext.try_get() is None:
        return
    source: Source = torch_source()
    for name in path:
        source = AttrSource(source, name)
    install_guard(CallFunctionNoArgsSource(source).make_guard(GuardBuilder.EQUALS_MATCH))


def guard_on_dual_level() -> None:
    """Add a Dynamo guard: compile the current function again in another level of forward-mode derivatives.

    Dynamo adds it only where the function itself enters a level. Outside of a compilation nothing happens.
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import GlobalStateSource
    from torch._guards import TracingContext

    if TracingContext.try_get() is not None:
        install_guard(GlobalStateSource().make_guard(GuardBuilder.DUAL_LEVEL))


def aot_input_position(node: fx.Node) -> int | None:
    """The position of an AOT placeholder among the Dynamo graph's inputs; None if AOT added the placeholder."""
    from torch._functorch._aot_autograd.descriptors import PlainAOTInput

    found = node.meta.get("desc")
    return found.idx if isinstance(found, PlainAOTInput) else None


def aot_input_value(node: fx.Node, values: Sequence[Any]) -> Any:
    """The value of an AOT placeholder among the Dynamo graph's inputs; None if AOT added the placeholder."""
    position = aot_input_position(node)
    if position is not None:
        return values[position] if position < len(values) else None
    of_view = getattr(getattr(node.meta.get("desc"), "base_of", None), "idx", None)
    view = values[of_view] if of_view is not None and of_view < len(values) else None
    return view._base if isinstance(view, torch.Tensor) else None


def is_synthetic_base(node: fx.Node) -> bool:
    """Whether a placeholder is a whole storage, which AOT passes instead of the inputs that share it."""
    return type(node.meta.get("desc")).__name__ == "SyntheticBaseAOTInput"


def written_inputs(graph: fx.Graph) -> tuple[frozenset[int], bool] | None:
    """The inputs of the Dynamo graph that the current graph writes, as AOT knows.

    Returns:
        Their positions, without inputs that a base replaces, and whether such a base is written; None if AOT splits inputs,
        so that they differ from the Dynamo graph's.
    """
    from torch._functorch._aot_autograd import descriptors

    metadata = _metadata()
    if metadata is None:
        return None
    own = [node.meta.get("desc") for node in graph.find_nodes(op="placeholder") if not is_effect_token(node)]
    kinds = [(found, info.mutates_data) for found, info in zip(own, metadata.input_info, strict=False)]
    if any(not hasattr(found, "base_of") and not isinstance(found, descriptors.PlainAOTInput) for found, _ in kinds):
        return None
    written = [found for found, is_written in kinds if is_written]
    return (
        frozenset(found.idx for found in written if isinstance(found, descriptors.PlainAOTInput)),
        any(hasattr(found, "base_of") for found in written),
    )


def inputs_written_afterwards(graph: fx.Graph) -> list[fx.Node]:
    """The inputs that AOT writes after the graph has run, with values that the graph returns."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput

    results = next(iter(graph.find_nodes(op="output"))).meta.get("desc") or ()
    written = [result.mutated_input for result in results if isinstance(result, InputMutationAOTOutput)]
    return [node for node in graph.find_nodes(op="placeholder") if node.meta.get("desc") in written]


def is_plain_aot_graph(graph: fx.Graph) -> bool:
    """Whether the inputs and outputs of an AOT graph are exactly those of AOT's function.

    Otherwise AOT's wrapper changes inputs or outputs, and the graph is only a part of the function. A
    graph that does not come from AOT has no such wrapper.
    """
    from torch._functorch._aot_autograd import descriptors

    inputs = [node.meta.get("desc") for node in graph.find_nodes(op="placeholder")]
    outputs = next(iter(graph.find_nodes(op="output"))).meta.get("desc")
    if outputs is None and not any(inputs):
        return True
    return all(
        isinstance(found, descriptors.PlainAOTInput) and found.idx == position for position, found in enumerate(inputs)
    ) and all(
        isinstance(found, descriptors.PlainAOTOutput) and found.idx == position
        for position, found in enumerate(outputs or ())
    )
