"""The backend: from a Dynamo graph, or an AOT graph, to a callable."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.backends.common import aot_autograd

from npugraph_ex import _torch_private
from npugraph_ex.aclgraph import compile_graph
from npugraph_ex.aclgraph.data_dump import DumpedGraph
from npugraph_ex.config import CompilerConfig
from npugraph_ex.config.compiler_config import apply_flat
from npugraph_ex.errors import OptionValueError
from npugraph_ex.frontend.record import description, record
from npugraph_ex.observe import captures, graphs
from npugraph_ex.observe.dump import GraphDumper, new_dumper
from npugraph_ex.passes import pipeline

Backend = Callable[..., Callable[..., Any]]


def get_npu_backend(
    *,
    compiler_config: CompilerConfig | None = None,
    custom_decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> Backend:
    """Make a backend for ``torch.compile(model, backend=...)``.

    Args:
        compiler_config: the options; the defaults when None. Read at each compilation, so later changes count.
        custom_decompositions: decompositions, by operator overload, that AOT applies before the passes.

    Returns:
        ``backend(gm, example_inputs)``, which compiles one Dynamo graph.
    """
    config = CompilerConfig() if compiler_config is None else compiler_config
    decompositions = dict(custom_decompositions or {})

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        names = _torch_private.dynamo_input_names(gm)
        dumper = new_dumper()
        if dumper is not None:
            dumper.graph(gm, "dynamo")

        def compiler(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            compiled = _compile(graph, inputs, config, names, dumper)
            boxed: Callable[..., Any] = make_boxed_func(compiled)
            return boxed

        with _torch_private.sound_aot(example_inputs):
            compiled: Callable[..., Any] = aot_autograd(
                fw_compiler=compiler,
                bw_compiler=_uncompiled,
                decompositions=decompositions,
                keep_inference_input_mutations=True,
            )(gm, example_inputs)
        return compiled

    return backend


def npugraph_ex(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile one Dynamo graph: what the string in ``torch.compile(backend="npugraph_ex", options=...)`` stands for.

    Raises:
        OptionError: a wrong option name or value, or a ``mode``, which this backend has no use for.
    """
    if mode not in {None, "default"}:
        raise OptionValueError(
            f"torch.compile(mode={mode!r}) is for Inductor; give this backend options={{...}} instead"
        )
    config = CompilerConfig()
    apply_flat(config, dict(options or {}))
    return get_npu_backend(compiler_config=config)(gm, example_inputs)


def get_compiler(
    compiler_config: CompilerConfig | None = None,
) -> Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]:
    """Make an AOT compiler (``fw_compiler``): it takes an ATen graph and its inputs and returns a callable."""
    config = CompilerConfig() if compiler_config is None else compiler_config

    def compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return _compile(gm, example_inputs, config)

    return compiler


def compile_fx(
    gm: fx.GraphModule, example_inputs: Sequence[Any] | None = None, options: Mapping[str, object] | None = None
) -> Callable[..., Any]:
    """Compile an ATen graph, as AOT or ``make_fx`` give it.

    Args:
        gm: the graph; its nodes carry fake tensors in ``meta["val"]``. Edited in place.
        example_inputs: its inputs, fake or real; taken from the placeholders' metadata when None.
        options: as in ``torch.compile(options=...)``.

    Returns:
        A function of the graph's inputs that returns its outputs as a list.
    """
    config = CompilerConfig()
    apply_flat(config, dict(options or {}))
    inputs = example_inputs
    if inputs is None:
        inputs = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    return _compile(gm, inputs, config)


def _compile(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: CompilerConfig,
    dynamo_names: Sequence[str] = (),
    dumper: GraphDumper | None = None,
) -> Callable[..., Sequence[Any]]:
    options = config.to_options()
    dumper = dumper or new_dumper()
    number, kernels_before = graphs.next_number(), graphs.count_kernels(gm.graph)
    static = _torch_private.static_input_positions()
    names = [_input_name(node, dynamo_names) for node in gm.graph.find_nodes(op="placeholder")]
    original = fx.GraphModule(gm, copy.deepcopy(gm.graph)) if options.dump_tensor_data else gm
    report = pipeline.run(gm, example_inputs, options, config=config, dumper=dumper)
    if options.dump_tensor_data:
        dumped = original if options.data_dump_stage == "original" else gm
        compiled: Callable[..., Sequence[Any]] = DumpedGraph(dumped, names, options.data_dump_dir, number)
    else:
        compiled = compile_graph(gm, example_inputs, options, static=static, names=names, number=number)
    made = record(
        gm, example_inputs, names, options, compiled, number=number, report=report, kernels_before=kernels_before
    )
    if dumper is not None:
        dumper.text(description(made), "captured_graph")
        captures.also_write(number, dumper.directory / "captures.txt")
    return compiled


def _input_name(node: fx.Node, dynamo_names: Sequence[str]) -> str:
    """What messages call an input: the user's own words where Dynamo knows them."""
    position = _torch_private.aot_input_position(node)
    known = position is not None and position < len(dynamo_names)
    return dynamo_names[position] if known and position is not None else str(node.target)


def _uncompiled(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Leave a backward graph as it is: it runs operator by operator."""
    del example_inputs
    boxed: Callable[..., Any] = make_boxed_func(gm.forward)
    return boxed
