"""`check_numerics` and operators that take only some values: nothing right is refused, no generator moves."""

# The small undocumented functions are graphs to be traced; their names say what is in them.

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._functorch.aot_autograd import aot_function
from torch.nn import functional as F
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import npugraph_ex
from npugraph_ex.config import Options
from npugraph_ex.errors import GraphVerificationError
from npugraph_ex.operators import PreparedGraph
from npugraph_ex.passes import pipeline
from npugraph_ex.passes.base import Pass

aten = torch.ops.aten
ONE_ROW = torch.zeros(3, dtype=torch.int64)

# Each takes values of one kind only, and most are refused when drawn from normal numbers and small integers.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "embedding of one row": (lambda w, i: F.embedding(i, w) * 1, (torch.randn(1, 4), ONE_ROW)),
    "gather from one": (lambda a, i: a.gather(0, i) + 1, (torch.randn(1, 3), ONE_ROW.view(1, 3))),
    "one class": (F.cross_entropy, (torch.randn(3, 1), ONE_ROW)),
    "bernoulli": (lambda a: torch.bernoulli(a * 1), (torch.rand(4),)),
    "multinomial": (lambda a: torch.multinomial(a + 0, 2), (torch.rand(4),)),
    "binary_cross_entropy": (lambda a, b: F.binary_cross_entropy(a * 1, b), (torch.rand(4), torch.rand(4))),
    "cholesky": (lambda a: torch.linalg.cholesky(a) + 0, (torch.eye(3),)),
    "repeat_interleave": (lambda a, i: a.repeat_interleave(i, output_size=4), (torch.randn(2), torch.tensor([1, 3]))),
    "normal": (lambda a: torch.normal(0.0, a * 1), (torch.rand(4),)),
    "random": (lambda a: a + torch.rand_like(a), (torch.zeros(3),)),
    "dropout": (lambda a: F.dropout(a, 0.5) * 2, (torch.ones(50),)),
    "unwritten memory": (lambda a: (torch.empty_like(a), a.new_empty(5), a + 1), (torch.ones(3),)),
    "memory with gaps": (lambda a: a.add_(1) * 2, (torch.randn(8)[::2],)),
    "expanded": (lambda a: a.relu() * 2, (torch.randn(3).expand(4, 3),)),
}

# Of torch's own samples of its operators; indices, probabilities, matrices of a kind, whole numbers, bags, random numbers.
DEMANDING = (
    "bernoulli", "cholesky_inverse", "gather", "index_add", "index_copy", "index_put", "linalg.cholesky", "multinomial",
    "nn.functional.binary_cross_entropy", "nn.functional.embedding", "nn.functional.nll_loss", "normal", "put", "scatter",
    "take", "empty_like",
)  # fmt: skip


def generators() -> list[object]:
    """The state of every generator that a process has from the start: torch's two, Python's and numpy's."""
    numpy = np.random.get_state()  # noqa: NPY002 - the global one is what may move
    return [
        torch.get_rng_state().tolist(), torch.npu.get_rng_state().tolist(), random.getstate(),
        [part.tolist() if isinstance(part, np.ndarray) else part for part in numpy],
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)


def compiled(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> tuple[list[Tensor], list[object]]:
    """What a compiled function returns from inputs on the device, and the generators then."""
    torch.compiler.reset()
    torch.manual_seed(7)
    with torch.no_grad():
        results = torch.compile(function, backend="npugraph_ex", options=options)(*map(moved, inputs))
    return [result.cpu() for result in pytree.tree_leaves(results)], generators()


def moved(value: Tensor) -> Tensor:
    """A tensor of the same strides on the device."""
    storage = torch.empty(value.untyped_storage().nbytes() // value.element_size(), dtype=value.dtype, device="npu")
    return storage.as_strided(value.shape, value.stride()).copy_(value) if 0 not in value.stride() else value.npu()


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_right_programs_run_as_without_the_check(name: str) -> None:
    """Results and generators are what they are without the option, and the values of the call were compared."""
    function, inputs = PROGRAMS[name]
    (wanted, moved_as), (results, after) = compiled(function, *inputs), compiled(function, *inputs, check_numerics=True)
    report = npugraph_ex.last_report()
    assert report is not None
    assert not [reason for reason in report.uncompared if "the inputs of the call" in reason]
    assert after == moved_as
    if name != "unwritten memory":
        torch.testing.assert_close(results, wanted, rtol=0, atol=0)


@pytest.mark.slow
def test_the_check_draws_what_the_operators_take() -> None:
    """Where nothing is known but fake tensors, probabilities and matrices are drawn; only lengths that add up are not."""
    left = {name for name, (function, inputs) in PROGRAMS.items() if checked(function, inputs, known=False)}
    assert left == {"repeat_interleave"}


def checked(function: Callable[..., Any], inputs: Any, *, known: bool) -> tuple[str, ...]:
    """Why the pipeline compares no values of the AOT graph of a function; it may not raise, roll back or move anything."""
    made: list[tuple[fx.GraphModule, Any]] = []

    def keep(gm: fx.GraphModule, example_inputs: Any) -> Any:
        made.append((gm, example_inputs))
        return make_boxed_func(gm.forward)

    values = [value.npu() for value in inputs]
    with torch.no_grad():
        aot_function(function, fw_compiler=keep, keep_inference_input_mutations=True)(*values)
    before = generators()
    report = pipeline.run(*made[0], Options(check_numerics=True), values=values if known else ())
    assert not [record.message for record in report.passes if record.outcome == "rolled back"]
    assert generators() == before
    return report.uncompared


@pytest.mark.parametrize("name", DEMANDING)
def test_no_operator_of_torch_is_refused(name: str) -> None:
    """With the values of torch's own samples they are compared, with drawn ones at most left out."""
    operator = next(info for info in op_db if info.name == name)
    dtype = torch.float32 if torch.float32 in operator.dtypes else torch.int64
    sample = next(iter(operator.sample_inputs_func(operator, "cpu", dtype, False)))
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def called(*tensors: Tensor) -> Any:
        given = dict(zip(places, tensors, strict=True))
        first, args, kwargs = pytree.tree_unflatten([given.get(i, leaf) for i, leaf in enumerate(leaves)], spec)
        return operator.op(first, *args, **kwargs)

    inputs = [leaves[place] for place in places]
    assert not [reason for reason in checked(called, inputs, known=True) if "the inputs of the call" in reason]
    checked(called, inputs, known=False)


def broken(old: Any, new: Any) -> Pass:
    """A pass that puts one operator in the place of another."""

    def run(gm: fx.GraphModule, context: object) -> None:
        for node in gm.graph.find_nodes(op="call_function", target=old):
            node.target = new

    return Pass("broken", run, recoverable=False)


def run_broken(function: Callable[..., Any], inputs: list[Tensor], pass_: Pass) -> tuple[str, ...]:
    """The report's reasons after one broken pass over an AOT graph whose inputs are known."""
    made: list[Any] = []

    def keep(gm: fx.GraphModule, example_inputs: Any) -> Any:
        made.append((gm, example_inputs))
        return make_boxed_func(gm.forward)

    with torch.no_grad():
        aot_function(function, fw_compiler=keep)(*inputs)
    return pipeline.run(*made[0], Options(check_numerics=True), passes=(pass_,), values=inputs).uncompared


def test_a_difference_that_only_the_calls_own_values_show_is_found() -> None:
    """Random numbers cannot be drawn for this program; the call's own show that the pass is wrong."""

    def function(a: Tensor, lengths: Tensor) -> Tensor:
        return a.repeat_interleave(lengths, output_size=4).relu()

    inputs = [torch.tensor([-1.0, 2.0]).npu(), torch.tensor([1, 3]).npu()]
    with pytest.raises(GraphVerificationError, match=r"relu .*inputs of the call"):
        run_broken(function, inputs, broken(aten.relu.default, aten.neg.default))


def test_a_difference_that_the_calls_own_values_hide_is_found() -> None:
    """A cache full of zeros agrees with anything; random numbers do not."""
    zeros = [torch.zeros(3, device="npu")]
    with pytest.raises(GraphVerificationError, match=r"relu .*random inputs"):
        run_broken(lambda a: a.relu(), zeros, broken(aten.relu.default, aten.neg.default))


def test_a_pass_after_which_the_graph_raises_is_found() -> None:
    """The message names the node that raises, which it did not before."""
    above_one = [torch.tensor([1.5, 2.0]).npu()]
    with pytest.raises(GraphVerificationError, match=r"node sin \(aten.bernoulli.default\) raises .*did not raise"):
        run_broken(lambda a: a.sin(), above_one, broken(aten.sin.default, aten.bernoulli.default))


def test_what_the_cpu_cannot_run_is_left_out_with_a_line() -> None:
    """An operator for the device alone, before or after a pass: the report names it, and nothing is refused."""
    with torch.library._scoped_library("numerics_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "PrivateUse1")
        library.impl("twice", torch.empty_like, "Meta")
        twice = torch.ops.numerics_test.twice.default
        x = [torch.ones(3, device="npu")]
        reasons = checked(lambda a: twice(a) + 1, x, known=True)
        assert len(reasons) == 2
        assert all("node twice (numerics_test.twice.default) raises NotImplementedError" in line for line in reasons)
        reasons = run_broken(lambda a: a.neg(), x, broken(aten.neg.default, twice))
    assert all("after pass broken and with" in line and "numerics_test.twice.default" in line for line in reasons)
    assert len(reasons) == 2


def test_collectives_are_left_out() -> None:
    """Comparing values must not communicate: other processes would take part in what they do not run."""
    graph = fx.Graph()
    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(3, device="npu")
    x = graph.placeholder("x")
    x.meta["val"] = fake
    reduced = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))
    reduced.meta["val"] = fake
    waited = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (reduced,))
    waited.meta["val"] = fake
    graph.output([waited])
    gm = fx.GraphModule({}, graph)
    report = pipeline.run(gm, [fake], Options(check_numerics=True), passes=())
    assert report.uncompared == ("the graph communicates with other processes",)
    assert report.uncompared[0] in report.table()


def test_the_check_minds_no_default_device() -> None:
    """Random inputs are CPU tensors whatever the program's default device is."""
    torch.set_default_device("npu")
    try:
        assert checked(lambda a: a + torch.ones(3), [torch.ones(3)], known=False) == ()
    finally:
        torch.set_default_device(None)


def test_memory_that_nothing_wrote_reads_the_same_each_time() -> None:
    """Otherwise a right program that returns such memory would seem to compute something else after each pass."""
    graph = fx.Graph()
    graph.output([graph.call_function(aten.empty.memory_format, ([1000],), {"device": "npu"})])
    seen = []
    for number in (3.0, 4.0):
        left_behind = [torch.full((1000,), number) for _ in range(8)]
        del left_behind
        seen += PreparedGraph(graph).run()
    assert torch.equal(*seen)


def test_generators_that_an_operator_draws_from_stay() -> None:
    """An operator of the user's that draws in Python, by numpy and by torch is run by the check, and leaves no trace."""

    def drawing(x: Tensor) -> Tensor:
        numbers = random.random() + np.random.rand() + torch.rand(1).item()  # noqa: NPY002
        return x + numbers * 0

    with torch.library._scoped_library("numerics_test", "FRAGMENT") as library:
        library.define("drawing(Tensor x) -> Tensor")
        library.impl("drawing", drawing, "CompositeExplicitAutograd")
        library.impl("drawing", torch.empty_like, "Meta")
        assert checked(torch.ops.numerics_test.drawing, [torch.ones(3)], known=True) == ()
