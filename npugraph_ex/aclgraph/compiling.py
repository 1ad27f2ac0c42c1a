"""`compile_graph`: an optimised graph becomes callable, by capture, or operator by operator where capture is impossible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from npugraph_ex import _torch_private
from npugraph_ex.aclgraph import scopes
from npugraph_ex.aclgraph.compiled_graph import CompiledGraph
from npugraph_ex.aclgraph.first_run import Original, first_run_checked
from npugraph_ex.aclgraph.frame_memory import memory_of
from npugraph_ex.aclgraph.host_updates import UpdatePlan
from npugraph_ex.aclgraph.inputs import InputPlan
from npugraph_ex.aclgraph.obstacles import find_obstacles, in_lines
from npugraph_ex.aclgraph.static_kernels import StaticKernels
from npugraph_ex.config.options import Options
from npugraph_ex.errors import CaptureError, address_of
from npugraph_ex.observe.logger import logger


def compile_graph(  # noqa: PLR0913 - the parts of one graph
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    *,
    static: Sequence[int] = (),
    names: Sequence[str] | None = None,
    number: int = 0,
    original: Original | None = None,
    frame: _torch_private.Frame | None = None,
) -> Callable[..., Sequence[Any]]:
    """Make an optimised graph callable.

    Args:
        gm: the graph after all passes, with fake tensors in ``meta["val"]``.
        example_inputs: its inputs, fake or real.
        options: the validated options.
        static: positions of inputs whose address does not change from call to call.
        names: the input names for messages; None for the placeholders' names.
        number: the graph's number in `report.graphs`.
        original: the graph before the passes, in case an operator turns out to have an effect that its schema does not
            declare.
        frame: what Dynamo compiles the graph from; the captures of its graphs share memory. None for memory of its own.

    Returns:
        A function of the graph's inputs that returns its outputs: captured and replayed, or, with ``force_eager`` and
        where capture is impossible, run operator by operator.

    Raises:
        CaptureError: an input is a tensor subclass; or capture is impossible and ``require_capture`` is on.
    """
    _refuse_subclasses(example_inputs, names)
    kernels = StaticKernels(gm, example_inputs, options) if options.static_kernel_compile else None
    if options.force_eager:
        return _preparing(scopes.around(gm)(first_run_checked(gm, original)), kernels)
    updates = UpdatePlan.from_graph(gm)
    obstacles = find_obstacles(gm, updates, names)
    if obstacles:
        lines = in_lines(obstacles)
        if options.require_capture:
            raise CaptureError(f"the option require_capture is on, and this graph cannot be captured:\n  {lines}")
        logger.warning(
            "This graph cannot be captured and runs operator by operator:\n  %s\n%s", lines, address_of("CaptureError")
        )
        return _preparing(scopes.around(gm)(first_run_checked(gm, original)), kernels)
    if not any(node.op == "call_function" for node in gm.graph.nodes):
        return gm.forward  # the device has nothing to run
    plan = InputPlan.from_graph(gm, example_inputs, static, names, updates)
    options = _sparing_the_backward(gm, options)
    memory = memory_of(frame, plan.device, options)
    return CompiledGraph(gm, plan, options, number, kernels, original, memory=memory)


def _sparing_the_backward(gm: fx.GraphModule, options: Options) -> Options:
    """The options for this graph: what a backward needs is neither overwritten nor written into."""
    if options.clone_output is False and _torch_private.saves_intermediates(gm.graph):
        options = replace(options, clone_output=None, poison_results=False)
    if not options.clone_input and _torch_private.belongs_to_training(gm.graph):
        options = replace(
            options, clone_input=True
        )  # autograd keeps the inputs for the backward, and counts the writes
    return options


def _preparing(function: scopes.GraphFunction, kernels: StaticKernels | None) -> scopes.GraphFunction:
    """The function, which now prepares static kernels for the sizes of each call first."""
    if kernels is None:
        return function

    def run(*inputs: Any) -> Sequence[Any]:
        kernels.prepare(inputs)
        return function(*inputs)

    return run


def _refuse_subclasses(example_inputs: Sequence[Any], names: Sequence[str] | None) -> None:
    """Refuse tensor subclasses: a replay runs kernels only, so a subclass's Python code would run at capture alone."""
    for position, value in enumerate(example_inputs):
        if isinstance(value, torch.Tensor) and _has_dispatch_of_its_own(value):
            name = names[position] if names else f"input {position}"
            raise CaptureError(
                f"{name} is a {type(value).__name__}, a tensor subclass; this compiler takes plain tensors. "
                "Use torch.compile, which splits the subclass into plain tensors first"
            )


def _has_dispatch_of_its_own(value: torch.Tensor) -> bool:
    """Whether operators on ``value`` run code of its class; a parameter, or a subclass with methods only, is plain memory."""
    return type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and not isinstance(value, FakeTensor)
