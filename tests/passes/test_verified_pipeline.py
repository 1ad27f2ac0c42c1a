"""The pipeline verifies after every pass, undoes a built-in pass that breaks a graph, and raises for a user's."""

# The small undocumented functions are graphs to be traced; their names say what is in them.
# ruff: noqa: ARG005, D103, FBT002, PLW0108

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fx_helpers import PASSES, aot_graph, evaluate, optimise, targets
from torch import fx

from npugraph_ex.config.options import Options
from npugraph_ex.errors import GraphVerificationError
from npugraph_ex.passes import pipeline
from npugraph_ex.passes.base import Pass, PassContext

aten = torch.ops.aten


def half(*shape: int) -> torch.Tensor:
    """A float16 tensor on the device."""
    return torch.zeros(shape, dtype=torch.float16, device="npu")


def model(x: torch.Tensor, y: torch.Tensor) -> Any:
    total = x + y
    x.copy_(total)
    y.mul_(2)
    return torch.relu(total), total.t()


def graph(dynamic: bool = False) -> fx.GraphModule:
    return aot_graph(model, half(4, 16), half(4, 16), dynamic=dynamic)


def call(gm: fx.GraphModule, target: Any) -> fx.Node:
    (node,) = gm.graph.find_nodes(op="call_function", target=target)
    return node


def returned(gm: fx.GraphModule) -> fx.Node:
    (node,) = gm.graph.find_nodes(op="output")
    return node


def drops_a_write(gm: fx.GraphModule) -> None:
    copy = gm.graph.find_nodes(op="call_function", target=aten.copy_.default)[0]
    copy.replace_all_uses_with(copy.args[1])
    gm.graph.erase_node(copy)


def writes_another_input(gm: fx.GraphModule) -> None:
    with gm.graph.inserting_before(returned(gm)):
        source = gm.graph.find_nodes(op="placeholder")[-1]
        gm.graph.call_function(aten.add_.Tensor, (source, 1))


def changes_a_dtype(gm: fx.GraphModule) -> None:
    relu = call(gm, aten.relu.default)
    with gm.graph.inserting_after(relu):
        wide = gm.graph.call_function(aten._to_copy.default, (relu,), {"dtype": torch.float32})
    relu.replace_all_uses_with(wide, delete_user_cb=lambda user: user is not wide)


def changes_a_shape(gm: fx.GraphModule) -> None:
    relu = call(gm, aten.relu.default)
    with gm.graph.inserting_after(relu):
        part = gm.graph.call_function(aten.slice.Tensor, (relu, 0, 0, 1))
    relu.replace_all_uses_with(part, delete_user_cb=lambda user: user is not part)


def changes_strides(gm: fx.GraphModule) -> None:
    relu = call(gm, aten.relu.default)
    with gm.graph.inserting_after(relu):
        clone = gm.graph.call_function(
            aten.empty_strided.default, ([4, 16], [1, 4]), {"device": "npu", "dtype": torch.half}
        )
    relu.replace_all_uses_with(clone)


def returns_an_input(gm: fx.GraphModule) -> None:
    source = gm.graph.find_nodes(op="placeholder")[0]
    call(gm, aten.relu.default).replace_all_uses_with(source)


def uses_before_definition(gm: fx.GraphModule) -> None:
    relu = call(gm, aten.relu.default)
    gm.graph.find_nodes(op="placeholder")[-1].append(relu)


def passes_nonsense(gm: fx.GraphModule) -> None:
    relu = call(gm, aten.relu.default)
    relu.target = aten.bmm.default
    relu.args = (relu.args[0], relu.args[0])


BROKEN: dict[Callable[[fx.GraphModule], None], str] = {
    drops_a_write: "input 0, node arg0_1, is no longer written",
    changes_a_dtype: "dtype torch.float32 instead of torch.float16",
    changes_a_shape: "shape [1, 16] instead of [4, 16]",
    changes_strides: "strides [1, 4] instead of [16, 1]",
    returns_an_input: "shares memory with input 0 instead of nothing",
    uses_before_definition: "before it is defined",
    passes_nonsense: "relu",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda f: f.__name__)
def test_a_users_broken_pass_raises(broken: Callable[[fx.GraphModule], None]) -> None:
    """The error names the fault, the node and the pass."""
    with pytest.raises(GraphVerificationError) as raised:
        optimise(graph(), post_grad_custom_post_pass=lambda gm, inputs, config: broken(gm))
    shown = str(raised.value)
    assert BROKEN[broken] in shown
    assert "post_grad_custom_post_pass" in shown


@pytest.mark.parametrize("broken", BROKEN, ids=lambda f: f.__name__)
def test_a_built_in_broken_pass_is_rolled_back(broken: Callable[[fx.GraphModule], None]) -> None:
    """The graph is what it was, the report says so, and later passes still run."""
    gm = graph()
    values = [torch.randn(4, 16), torch.randn(4, 16)]
    expected = evaluate(gm, *(value.clone() for value in values))
    before = targets(gm)
    passes = (Pass("broken", lambda gm, _: broken(gm)), *PASSES)
    report = pipeline.run(gm, [], Options(), passes=passes)
    record = report.passes[0]
    assert record.outcome == "rolled back"
    assert BROKEN[broken] in record.message
    assert targets(gm) == before
    inputs = [value.clone() for value in values]
    for old, new in zip(expected, evaluate(gm, *inputs), strict=True):
        torch.testing.assert_close(new, old)
    torch.testing.assert_close(inputs[0], values[0] + values[1])
    assert [p.outcome for p in report.passes[1:]] == [
        "skipped",
        "unchanged",
        "skipped",
        "unchanged",
        "skipped",
        "unchanged",
    ]


def test_a_new_write_to_an_input_is_a_violation() -> None:
    """An input that the program leaves alone must stay alone."""
    gm = aot_graph(lambda x: torch.relu(x), half(4))
    with pytest.raises(GraphVerificationError, match="is now written"):
        optimise(gm, post_grad_custom_pre_pass=lambda gm, inputs, config: writes_another_input(gm))


def test_a_pass_that_raises_is_rolled_back() -> None:
    """Half an edit is undone too."""

    def half_done(gm: fx.GraphModule, context: PassContext) -> None:
        drops_a_write(gm)
        raise KeyError("lost")

    gm = graph()
    before = targets(gm)
    report = pipeline.run(gm, [], Options(), passes=(Pass("half_done", half_done),))
    assert report.passes[0].message == "KeyError: 'lost'"
    assert targets(gm) == before


NEEDED = [pass_ for pass_ in pipeline.PIPELINE if not (pass_.recoverable or pass_.by_user)]


@pytest.mark.parametrize("needed", NEEDED, ids=lambda pass_: pass_.name)
def test_a_pass_that_the_graph_needs_is_not_undone(needed: Pass) -> None:
    """Whether it raises or breaks the graph, the compilation fails and names it; so does the documentation."""

    def raises(gm: fx.GraphModule, context: PassContext) -> None:
        raise KeyError("lost")

    for run, error in ((raises, KeyError), (lambda gm, _: drops_a_write(gm), GraphVerificationError)):
        with pytest.raises(error) as raised:
            pipeline.run(graph(), [], Options(), passes=(replace(needed, run=run),))
        said = [str(raised.value), *getattr(raised.value, "__notes__", ())]
        assert any(f"pass {needed.name}" in line for line in said)


def test_the_passes_that_are_never_undone_are_documented() -> None:
    """The table on the backend's page names exactly these."""
    page = (Path(__file__).parents[2] / "docs" / "explanation" / "backend.md").read_text(encoding="utf-8")
    section = page.partition("## Passes that are never undone")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert set(re.findall(r"`(\w+)`", "".join(rows))) == {pass_.name for pass_ in NEEDED}
    assert len(NEEDED) == 9  # as the text says


@dataclass  # which gives it no hash
class Named:
    """Users' passes of several kinds, each of which ends in ``drops_a_write``."""

    def __call__(self, gm: Any, inputs: Any, config: Any) -> None:
        """An object that is called."""
        drops_a_write(gm)

    def method(self, gm: Any, inputs: Any, config: Any, *, some: int = 0) -> None:
        """A method."""
        drops_a_write(gm)


def decorator(function: Any) -> Any:
    return functools.wraps(function)(lambda *arguments: function(*arguments))


@decorator
def decorated(gm: Any, inputs: Any, config: Any) -> None:
    """A decorated function."""
    drops_a_write(gm)


unnamed: Any = lambda gm, inputs, config: drops_a_write(gm)  # noqa: E731 - as users write it
USERS: dict[str, tuple[Any, str, Any]] = {
    "object": (Named(), "Named.__call__", Named.__call__),
    "method": (Named().method, "Named.method", Named.method),
    "partial": (functools.partial(Named().method, some=1), "Named.method", Named.method),
    "partial of an object": (functools.partial(Named()), "Named.__call__", Named.__call__),
    "lambda": (unnamed, "<lambda>", unnamed),
    "decorated": (decorated, "decorated", decorated.__wrapped__),
}


@pytest.mark.parametrize("kind", USERS)
def test_a_users_pass_that_breaks_the_graph_is_named_with_its_place(kind: str) -> None:
    """The message names the option, the function, its file and line, and the node."""
    user_pass, name, function = USERS[kind]
    line = function.__code__.co_firstlineno
    with pytest.raises(GraphVerificationError) as raised:
        optimise(graph(), post_grad_custom_pre_pass=user_pass)
    wanted = f"After pass post_grad_custom_pre_pass ({name}, {__file__}:{line}): input 0, node "
    assert str(raised.value).startswith(wanted)


def reads(gm: fx.GraphModule, constant: torch.Tensor) -> None:
    product = call(gm, aten.mul.Tensor)
    gm.register_buffer("constant", constant)
    with gm.graph.inserting_before(product):
        product.update_arg(1, gm.graph.get_attr("constant"))


BREAKING: dict[str, tuple[Any, str]] = {
    "inputs": (lambda gm: gm.graph.placeholder("extra"), "new nodes: extra; missing: none"),
    "outputs": (lambda gm: setattr(gm.graph.output_node(), "args", ([],)), "node output returns 0 values"),
    "no output": (lambda gm: gm.graph.erase_node(gm.graph.output_node()), "0 output nodes instead of one"),
    "order": (lambda gm: gm.graph.output_node().append(call(gm, aten.relu.default)), "node output uses "),
    "stranger": (
        lambda gm: setattr(call(gm, aten.relu.default), "args", (fx.Graph().placeholder("stranger"),)),
        "node relu uses stranger before it is defined",
    ),
    "arguments": (
        lambda gm: setattr(call(gm, aten.relu.default), "args", ()),
        "Node relu calls aten.relu.default with",
    ),
    "fake constant": (
        lambda gm: reads(gm, call(gm, aten.mul.Tensor).meta["val"]),
        "constant reads gm.constant, which is",
    ),
    "tensor": (lambda gm: call(gm, aten.mul.Tensor).update_arg(1, half(4, 16)), "an argument of node mul is a tensor"),
    "symbol": (
        lambda gm: call(gm, aten.mul.Tensor).update_arg(1, call(gm, aten.mul.Tensor).meta["val"].shape[0]),
        " is the symbol s",
    ),
}


@pytest.mark.parametrize("kind", BREAKING)
def test_whatever_a_users_pass_breaks_its_place_and_the_node_are_named(kind: str) -> None:
    """Also where the graph is so broken that its metadata cannot be derived."""
    break_, said = BREAKING[kind]

    def breaks(gm: Any, inputs: Any, config: Any) -> None:
        break_(gm)

    with pytest.raises(GraphVerificationError) as raised:
        optimise(graph(dynamic=kind == "symbol"), post_grad_custom_post_pass=breaks)
    place = f"post_grad_custom_post_pass ({breaks.__qualname__}, {__file__}:{breaks.__code__.co_firstlineno})"
    assert place in str(raised.value)
    assert said in str(raised.value)


def test_metadata_that_a_users_pass_removes_is_put_back() -> None:
    """Of inputs too; the graph is optimised as it is without the pass."""

    def clears(gm: fx.GraphModule, *_: Any) -> None:
        for node in gm.graph.nodes:
            node.meta.pop("val", None)

    cleared, kept = graph(), graph()
    optimise(cleared, post_grad_custom_pre_pass=clears, post_grad_custom_post_pass=clears)
    optimise(kept)
    shown = [[(node.name, str(node.meta.get("val"))) for node in gm.graph.nodes] for gm in (cleared, kept)]
    assert shown[0] == shown[1]


@pytest.mark.slow
def test_a_users_exception_keeps_its_type_and_names_the_pass() -> None:
    """The message goes on with the option and the function; it is one that Dynamo shows, which drops notes."""

    def failing(gm: Any, inputs: Any, config: Any) -> None:
        raise ZeroDivisionError("mine")

    def empty(gm: Any, inputs: Any, config: Any) -> None:
        raise StopIteration

    def lookup(gm: Any, inputs: Any, config: Any) -> None:
        raise KeyError("lost")

    for function, error in ((failing, ZeroDivisionError), (empty, StopIteration), (lookup, KeyError)):
        with pytest.raises(error) as raised:
            optimise(graph(), post_grad_custom_pre_pass=function)
        place = f"{function.__qualname__}, {__file__}:{function.__code__.co_firstlineno}"
        said = [str(raised.value), *getattr(raised.value, "__notes__", ())]
        assert said[-1].endswith(f"Raised in pass post_grad_custom_pre_pass ({place}).")
    assert raised.value.args == ("lost",)

    torch.compiler.reset()
    compiled = torch.compile(lambda x: x + 1, backend="npugraph_ex", options={"post_grad_custom_pre_pass": failing})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"mine\nRaised in pass .*failing, .*\.py:\d+"):
        compiled(torch.ones(3).npu())


@pytest.mark.parametrize("fullgraph", [False, True])  # which has a symbol for the value
def test_a_pass_that_asks_for_a_value_ends_the_compilation(fullgraph: bool) -> None:
    """Dynamo would take torch's own exception for a reason to run the graph in eager mode."""

    def reads(gm: Any, inputs: Any, config: Any) -> None:
        assert float(inputs[0].max()) > 1

    options = {"post_grad_custom_post_pass": reads, "require_capture": True}
    compiled = torch.compile(lambda x: x + 1, backend="npugraph_ex", fullgraph=fullgraph, options=options)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"Pass post.*reads.* asks for a value") as raised:
        compiled(half(3))
    assert isinstance(raised.value.inner_exception, GraphVerificationError)


def test_user_passes_get_their_arguments_and_their_result_is_ignored() -> None:
    """``fn(gm, example_inputs, config)``; config is what the caller of the pipeline gave."""
    seen: list[Any] = []
    gm, config = graph(), object()
    options = Options(post_grad_custom_pre_pass=lambda *arguments: seen.append(arguments) or "ignored")
    pipeline.run(gm, ["inputs"], options, config=config, passes=PASSES)
    assert seen == [(gm, ["inputs"], config)]


def test_a_user_pass_that_returns_another_graph_is_refused() -> None:
    """What it returned would be lost in silence; the graph that it got may be returned."""
    gm = graph()
    optimise(gm, post_grad_custom_pre_pass=lambda gm, inputs, config: gm)
    optimise(gm, post_grad_custom_pre_pass=lambda gm, inputs, config: gm.graph)
    for other in (fx.Transformer(gm).transform(), fx.Graph()):
        with pytest.raises(GraphVerificationError, match=rf"pre_pass returned another {type(other).__name__}.*edits"):
            optimise(gm, post_grad_custom_pre_pass=lambda gm, inputs, config, other=other: other)


@pytest.mark.parametrize("dynamic", [False, True])
def test_metadata_of_inserted_nodes_is_derived(dynamic: bool) -> None:
    """A user's nodes without metadata get it, symbols included, and users follow."""

    def insert(gm: fx.GraphModule, inputs: Any, config: Any) -> None:
        relu = call(gm, aten.relu.default)
        with gm.graph.inserting_before(relu):
            wide = gm.graph.call_function(aten._to_copy.default, (relu.args[0],), {"dtype": torch.float32})
            narrow = gm.graph.call_function(aten._to_copy.default, (wide,), {"dtype": torch.float16})
        relu.args = (narrow,)

    gm = graph(dynamic)
    expected = call(gm, aten.relu.default).meta["val"]
    optimise(gm, post_grad_custom_post_pass=insert)
    wide, narrow = gm.graph.find_nodes(op="call_function", target=aten._to_copy.default)
    assert wide.meta["val"].dtype == torch.float32
    assert narrow.meta["val"].shape == expected.shape
    assert narrow.meta["val"].fake_mode is expected.fake_mode
    assert all("val" in node.meta for node in gm.graph.nodes if node.op != "output")


def test_a_constant_of_a_pass_is_read_in_each_call() -> None:
    """Made before the pass, it needs no metadata; what is written to it later counts."""
    constant = torch.full((4,), 3.0, device="npu")

    def run(gm: fx.GraphModule, *_: Any) -> None:
        reads(gm, constant)

    options = {"post_grad_custom_pre_pass": run, "require_capture": True}
    compiled = torch.compile(lambda x: x * 2, backend="npugraph_ex", dynamic=True, options=options)
    for factor in (3, 5):
        constant.fill_(factor)
        assert compiled(torch.ones(2, 4, device="npu")).tolist() == [[factor] * 4] * 2


@pytest.mark.slow
def test_metadata_is_derived_only_where_something_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One new node in a graph of a thousand costs a handful of fake executions, not a thousand."""
    from npugraph_ex.graph import metadata

    def chain(x: torch.Tensor) -> torch.Tensor:
        for _ in range(1000):
            x = torch.relu(x)
        return x

    def insert(gm: fx.GraphModule, inputs: Any, config: Any) -> None:
        middle = gm.graph.find_nodes(op="call_function", target=aten.relu.default)[500]
        with gm.graph.inserting_after(middle):
            new = gm.graph.call_function(aten.neg.default, (middle,))
        middle.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)

    derived: list[str] = []
    original = metadata.derive
    monkeypatch.setattr(metadata, "derive", lambda node, mode: derived.append(node.name) or original(node, mode))
    optimise(aot_graph(chain, half(4)), post_grad_custom_post_pass=insert)
    assert len(derived) <= 3


def test_dead_code_keeps_writes_and_effects() -> None:
    """Unused results go; input writes, random operators and their order stay."""

    def random(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return torch.relu(x)

    def leave_rubbish(gm: fx.GraphModule, inputs: Any, config: Any) -> None:
        with gm.graph.inserting_before(returned(gm)):
            source = gm.graph.find_nodes(op="placeholder")[0]
            gm.graph.call_function(aten.neg.default, (source,))
            gm.graph.call_function(aten.rand_like.default, (source,))

    gm = aot_graph(random, half(4))
    optimise(gm, post_grad_custom_post_pass=leave_rubbish)
    names = targets(gm)
    assert "neg" not in names
    assert {"rand_like", "copy_"} <= set(names)


def test_the_report_counts_nodes_and_is_published() -> None:
    """One record a pass, in order, with what it left."""
    from npugraph_ex.report.passes import last_report

    gm = graph()
    report = optimise(gm, remove_noop_ops=False)
    assert [p.name for p in report.passes] == [p.name for p in PASSES]
    assert (report.passes[1].outcome, report.passes[1].message) == ("skipped", "the option 'remove_noop_ops' is off")
    assert report.passes[-1].nodes_after == len(gm.graph.nodes)
    assert last_report() is report


def test_dumps_show_every_stage_and_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbered Python files with shapes and dtypes; each defines a module that computes the graph."""
    from npugraph_ex import _torch_private

    monkeypatch.setenv("TORCH_COMPILE_DEBUG", "1")
    monkeypatch.setattr(_torch_private, "debug_directory", lambda: tmp_path)
    gm = graph()
    optimise(gm)
    optimise(graph())
    files = sorted(path.name for path in (tmp_path / "npugraph_ex" / "model__0").iterdir())
    assert files[:2] == ["000_aot.py", "001_noop_removal.py"]
    assert files[-2:] == ["004_pass_report.txt", "005_pass_report.json"]
    assert (tmp_path / "npugraph_ex" / "model__1").is_dir()
    source = (tmp_path / "npugraph_ex" / "model__0" / "003_dead_code.py").read_text()
    assert '"f16[4, 16]' in source
    namespace: dict[str, Any] = {}
    exec(source, namespace)  # noqa: S102 - that it runs is the point
    values = [torch.randn(4, 16), torch.randn(4, 16)]
    for old, new in zip(evaluate(gm, *values), namespace["GraphModule"]()(*values), strict=True):
        assert operator.eq(old.shape, new.shape)
