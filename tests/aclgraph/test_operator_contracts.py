"""Fake functions and schemas that lie (a trap of mutation): errors with a name, never wrong values; the honest are let be."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from device_helpers import check, compiled, random

from npugraph_ex import npu_fx_compiler
from npugraph_ex.errors import BrokenPromiseError
from npugraph_ex.graph import operators, undeclared
from npugraph_ex.inference import cache_compile
from npugraph_ex.report.captures import capture_records, captures_so_far
from npugraph_ex.versions import ahead_of_time

like, dense = torch.empty_like, lambda x: x.new_empty(x.shape)

# What the operator does, what its fake function says, a program that the passes would get wrong, what the error says.
# Torch itself notices only the first, and only where the variable CI is set.
LIES: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any], str]] = {
    "twice": (lambda x: [x + 1] * 2, lambda x: [like(x)] * 2, lambda op, x: op(x)[0].relu() + op(x)[1], "two results"),
    "shape": (lambda x: torch.cat([x + 1, x]), like, lambda op, x: op(x)[:4] * 2, r"shape \[8, 4\].* says \[4, 4\]"),
    "strides": (
        lambda x: (x + 1).t().contiguous().t(),
        dense,
        lambda op, x: op(x).contiguous().as_strided((16,), (1,)) * 2,
        r"strides \[1, 4\].* says \[4, 1\]",
    ),
    "dtype": (
        lambda x: x.half(),
        like,
        lambda op, x: torch.cat([op(x) + 1, op(x) * 2]),
        "float16.* says torch.float32",
    ),
    "device": (lambda x: x.cpu(), like, lambda op, x: op(x) + 1, "on cpu.* says npu:0"),
}


@pytest.fixture(scope="module")
def library() -> Iterator[torch.library.Library]:
    """Operators registered as C++ extensions do it, without the checks of torch.library.custom_op."""
    with torch.library._scoped_library("npugraph_ex_lies", "DEF") as made:
        for name, (kernel, fake, _, _) in LIES.items():
            _define(made, f"{name}(Tensor x) -> Tensor" + ("[]" if name == "twice" else ""), kernel, fake)
        yield made


def _define(library: torch.library.Library, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = library.define(schema)
    library.impl(name, kernel, "PrivateUse1")
    torch.library.register_fake(f"npugraph_ex_lies::{name}", fake, lib=library)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("force_eager", [False, True], ids=["captured", "uncaptured"])
@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_an_error_at_every_call(name: str, force_eager: bool) -> None:
    """Three calls, three errors that name the operator, its line, what came and what to do; no input has changed."""
    _, _, program, said = LIES[name]
    operator = getattr(torch.ops.npugraph_ex_lies, name)
    graph, mark = compiled(lambda x: program(operator, x + 1), force_eager=force_eager), captures_so_far()
    for _ in range(3):
        x = random(4, 4)
        before = x.cpu()
        with pytest.raises(BrokenPromiseError, match=said) as caught:
            graph(x)
        assert f"(npugraph_ex_lies.{name}.default) at " in str(caught.value)
        assert "test_operator_contracts.py:" in str(caught.value)
        assert torch.equal(x.cpu(), before)
    assert not capture_records(after=mark)


def _read_beside(op: Any, x: torch.Tensor) -> Any:
    y = x - 1
    return op(y).relu() + y


def _read_before(op: Any, x: torch.Tensor) -> Any:
    y = x - 1
    return y.clone() + op(y)


def _read_before_and_after(op: Any, x: torch.Tensor) -> Any:
    y = x - 1
    return y * 3, op(y), y * 3


def _called_twice(op: Any, x: torch.Tensor) -> Any:
    y = x - 1
    return y * 3, op(y) + op(y), y


def _written_after(op: Any, x: torch.Tensor) -> Any:
    y = x - 1
    op(y).add_(2)
    return y * 3


def _write_and_return(op: Any, x: torch.Tensor) -> Any:
    x.mul_(2)
    return op(x)


# What the operator does beside what it declares, and a program that is wrong where nobody knows.
EFFECTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "returned": (lambda x: x, lambda op, x: op(x + 1).relu() + 1),
    "returned_and_read": (lambda x: x, _read_beside),
    "returned_input": (lambda x: x, lambda op, x: (op(x), op(x).relu() + x)),
    "returned_view": (lambda x: x[1:2], _read_beside),
    "written": (lambda x: x.add_(1) * 2, _read_before),
    "written_later_read": (lambda x: x.add_(1) * 2, _read_before_and_after),
    "written_input": (lambda x: x.add_(1) * 2, lambda op, x: (x * 3, op(x), x * 3)),
    "written_and_returned": (lambda x: x.mul_(2), _called_twice),
    "written_and_unused": (lambda x: x.add_(1) * 2, lambda op, x: (op(x), x * 3)[1]),
    "returned_then_written": (lambda x: x, _written_after),
    "returned_view_then_written": (lambda x: x[1:2], _written_after),
    "returned_after_a_write": (lambda x: x, _write_and_return),
}

LOST = {"returned_then_written", "returned_view_then_written", "returned_after_a_write"}


@pytest.mark.parametrize("force_eager", [False, True], ids=["captured", "uncaptured"])
@pytest.mark.parametrize("name", EFFECTS)
def test_an_undeclared_effect_is_believed_when_it_is_seen(
    name: str, force_eager: bool, library: torch.library.Library, caplog: pytest.LogCaptureFixture
) -> None:
    """Values, and what is in the inputs afterwards, are eager mode's from the first call on; one warning names the operator.

    A second one says so where AOT has lost a write, and the graph runs as it was traced.
    """
    kernel, program = EFFECTS[name]
    own = f"{name}_{force_eager}".lower()
    one_row = name == "returned_view"
    _define(
        library, f"{own}(Tensor x) -> Tensor", kernel, lambda x: x.new_empty(1, *x.shape[1:]) if one_row else like(x)
    )
    operator = getattr(torch.ops.npugraph_ex_lies, own)
    check(lambda x: program(operator, x), [(random(4, 4),) for _ in range(4)], force_eager=force_eager)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [f"npugraph_ex_lies.{own}.default" in message for message in said] == [True] * (2 if name in LOST else 1)


def _program(x: torch.Tensor) -> torch.Tensor:
    y = x - 1
    return torch.ops.npugraph_ex_lies.kept(y).relu() + y


@pytest.mark.slow
def test_a_saved_compilation_learns_too(
    library: torch.library.Library, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was saved before the effect was seen is saved anew; a process that reads it knows the operator from it."""
    _define(library, "kept(Tensor x) -> Tensor", lambda x: x, like)
    for said in (1, 1):  # once in the first process, never in the second
        torch.compiler.reset()
        function = cache_compile(_program, cache_dir=tmp_path, dynamic=False)
        for _ in range(3):
            x = random(4, 4)
            assert torch.equal(function(x).cpu(), _program(x).cpu())
        assert sum("kept.default" in record.getMessage() for record in caplog.records) == said
        assert len(list(tmp_path.iterdir())) == 1
        monkeypatch.setattr(undeclared, "_FOUND", {})  # as in a new process
        operators._traits.cache_clear()


def test_a_client_may_copy_the_graph(library: torch.library.Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM-Ascend's tests wrap the function that optimises a graph, and copy it before and after."""
    _define(library, "copied(Tensor x) -> Tensor", lambda x: x + 1, like)
    original, copies = npu_fx_compiler._optimize_fx, []

    def copying(gm: torch.fx.GraphModule, *args: Any) -> Any:
        copies.append(copy.deepcopy(gm))
        report = original(gm, *args)
        copies.append(copy.deepcopy(gm))
        return report

    monkeypatch.setattr(npu_fx_compiler, "_optimize_fx", copying)
    check(lambda x: torch.ops.npugraph_ex_lies.copied(x - 1).relu(), [(random(4, 4),) for _ in range(2)])
    assert len(copies) == 2


@pytest.mark.slow
@pytest.mark.skipif(ahead_of_time.DIFFERENCE.older, reason=ahead_of_time.DIFFERENCE.what)
@pytest.mark.parametrize("case", ["new memory", "another result is written", "in place", "lost"])
def test_a_graph_that_was_saved_before_its_first_run(case: str, library: torch.library.Library, tmp_path: Path) -> None:
    """It cannot be compiled again where it is loaded. It runs if it writes nothing of what is shared; otherwise it is an error.

    It is one, too, if AOT may have lost such a write. Writes into what another operator of a library gave are no such ones.
    """
    own, in_place = f"saved_{case.replace(' ', '_')}", case == "in place"
    _define(library, f"{own}(Tensor x) -> Tensor", lambda x: x, like)
    _define(library, f"{own}_honest(Tensor x) -> Tensor", lambda x: x + 1, like)

    def program(x: torch.Tensor) -> torch.Tensor:
        ours = (_written_after if case == "lost" else _read_beside)(getattr(torch.ops.npugraph_ex_lies, own), x)
        if case == "another result is written":
            ours += getattr(torch.ops.npugraph_ex_lies, f"{own}_honest")(x).mul_(2)
        return ours

    x = random(4, 4)
    torch.compiler.reset()
    options = {"force_eager": True, "inplace_pass": in_place}
    saved = torch.compile(program, backend="npugraph_ex", fullgraph=True, options=options).aot_compile(((x,), {}))
    saved.save_compiled_function(str(tmp_path / "saved"))
    with (tmp_path / "saved").open("rb") as file:
        loaded = torch.compiler.load_compiled_function(file)
    if case in {"in place", "lost"}:
        with pytest.raises(BrokenPromiseError, match="returned memory of an argument"):
            loaded(x)
        return
    for _ in range(3):
        assert torch.equal(loaded(x).cpu(), program(x).cpu())
    assert undeclared.was_found(getattr(torch.ops.npugraph_ex_lies, own).default)


def test_a_custom_op_that_returns_its_input() -> None:
    """The same through `torch.library.custom_op`, which has a check of its own: an error at each call, never values."""

    @torch.library.custom_op("npugraph_ex_tests::identity_that_lies", mutates_args=())
    def lies(x: torch.Tensor) -> torch.Tensor:
        return x

    lies.register_fake(torch.empty_like)
    graph = compiled(lambda x: torch.ops.npugraph_ex_tests.identity_that_lies(x).add(1).relu())
    for _ in range(3):
        x = random(4)
        before = x.cpu()
        with pytest.raises(RuntimeError, match="must not also be an input"):
            graph(x)
        assert torch.equal(x.cpu(), before)


def _positive(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


HONEST: dict[str, tuple[str, Callable[..., Any], Callable[..., Any], Callable[..., Any]]] = {
    "grow": (
        "grow(Tensor x) -> Tensor",
        lambda x: torch.cat([x, x]),
        lambda x: torch.cat([x, x]),
        lambda op, x: op(x)[:3],
    ),
    "fill": (
        "fill(Tensor(a!) x, Tensor y) -> Tensor",
        lambda x, y: x.add_(y) * 2,
        lambda x, _: like(x),
        lambda op, x: (op(x, x * 3), x),
    ),
    "one_row": (
        "one_row(Tensor x) -> Tensor",
        lambda x: torch.empty_strided((1, 4), (9, 1), device=x.device).copy_(x[:1]),  # the 9 leads nowhere
        lambda x: x.new_empty(1, 4),
        lambda op, x: op(x).sum(0),
    ),
    "positive": (
        "positive(Tensor x) -> Tensor",
        _positive,
        lambda x: x.new_empty(torch.library.get_ctx().new_dynamic_size()),
        lambda op, x: op(x).sum(),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", HONEST)
def test_who_keeps_his_word_is_not_refused(library: torch.library.Library, name: str, dynamic: bool) -> None:
    """Other sizes, declared writes, and sizes that only the elements tell: values are eager's over four calls."""
    schema, kernel, fake, program = HONEST[name]
    if not hasattr(torch.ops.npugraph_ex_lies, name):
        _define(library, schema, kernel, fake)
    operator = getattr(torch.ops.npugraph_ex_lies, name)
    sizes = (4, 5, 4, 6) if dynamic else (4,) * 4
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check(lambda x: program(operator, x), [(random(size, 4),) for size in sizes], dynamic=dynamic)
