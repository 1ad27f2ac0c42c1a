"""Helpers for tests on FX graphs: make AOT graphs of small functions, and run graphs on the reference operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_module_simplified

from npugraph_ex.config.options import Options
from npugraph_ex.graph.memory.aliases import output_values
from npugraph_ex.operators import formula_of
from npugraph_ex.passes import pipeline
from npugraph_ex.report.passes import PassReport


def aot_graph(function: Callable[..., Any], *args: torch.Tensor, dynamic: bool | None = False) -> fx.GraphModule:
    """The inference graph that a backend gets for ``function(*args)``, input writes kept; it is not run."""
    graphs: list[fx.GraphModule] = []

    def compiler(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append(gm)
        return lambda *_: [blank(value) for value in output_values(gm.graph)]

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        return aot_module_simplified(gm, inputs, fw_compiler=compiler, keep_inference_input_mutations=True)

    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)(*args)
    return graphs[0]


def blank(value: Any) -> Any:
    """Uninitialised memory in place of an output, which the caller of the compiled function drops."""
    if not isinstance(value, fx.Node):
        return value
    fake = value.meta["val"]
    if not isinstance(fake, torch.Tensor):
        return fake
    # The hint, not int(): that would fix the symbol in the graph under test.
    sizes = [[n.node.hint if isinstance(n, torch.SymInt) else n for n in t] for t in (fake.shape, fake.stride())]
    return torch.empty_strided(*sizes, dtype=fake.dtype, device=fake.device)


# The passes that these tests are about; what comes after them may put operators in place and has tests of its own.
NAMES = ("post_grad_custom_pre_pass", "noop_removal", "lifting", "fusion", "post_grad_custom_post_pass", "dead_code")
PASSES = tuple(pass_ for pass_ in pipeline.PIPELINE if pass_.name in NAMES)


def optimise(gm: fx.GraphModule, **options: Any) -> PassReport:
    """Run ``PASSES`` over ``gm``, in place."""
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    report = pipeline.run(gm, inputs, Options(**options), passes=PASSES)
    # A roll-back leaves a right graph, so it would hide a wrong pass from a test of values.
    assert all(record.outcome != "rolled back" for record in report.passes), report.table()
    return report


def targets(gm: fx.GraphModule) -> list[str]:
    """The names of the operators that the graph calls, in order, without getitem."""
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    return [n.target._schema.name.split("::")[1] for n in calls if isinstance(n.target, torch._ops.OpOverload)]


class _OnReference(fx.Interpreter):
    """Runs a graph on CPU tensors; npu operators compute through the reference."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace npu operators by their reference, and the npu device by the CPU."""
        kernel = formula_of(target)
        if kernel is not None:
            return kernel(*args, **kwargs)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return super().call_function(target, args, kwargs)


def evaluate(gm: fx.GraphModule, *inputs: Any) -> list[torch.Tensor]:
    """The graph's results on CPU ``inputs``."""
    with torch.no_grad():
        result = _OnReference(gm).run(*inputs)
    return list(result) if isinstance(result, (list, tuple)) else [result]
