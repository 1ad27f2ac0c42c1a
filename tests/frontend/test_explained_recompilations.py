"""What `npugraph_ex.explain` says of graph breaks, functions left out and graphs compiled again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch_npu

import npugraph_ex
from npu_emulator.pages import Facts
from npugraph_ex.frontend.entry.explain import Watch
from npugraph_ex.report.recompilations import in_words


@pytest.mark.slow
def test_graph_breaks_are_told_with_their_lines() -> None:
    """Dynamo's reason and the line of the user's code: of a call, also in a function of another, and of a branch on values."""

    def says(y: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break(msg="a line of the test's own")
        return y * 2

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = says(x + 1)
        if y.sum() > 3:
            y = y - 1
        return y.relu()

    explanation, again = (npugraph_ex.explain(broken, torch.ones(3, device="npu")) for _ in range(2))
    assert again.breaks == explanation.breaks
    lines = (says.__code__.co_firstlineno + 1, broken.__code__.co_firstlineno + 2)
    assert [reason.splitlines()[0] for reason in explanation.breaks] == [
        f"{__file__}:{lines[0]}: Call to `torch._dynamo.graph_break()`",
        f"{__file__}:{lines[1]}: Data-dependent branching: a condition needs the value of a tensor",
    ]
    assert json.loads(explanation.to_json())["breaks"] == list(explanation.breaks)
    assert all(reason in str(explanation) for reason in explanation.breaks)


@pytest.mark.slow
def test_a_function_that_is_left_out_is_told() -> None:
    """A break in a block that no graph can end in: Dynamo leaves out the whole function, or the rest of one; also in a loop."""

    def step(x: torch.Tensor) -> torch.Tensor:
        try:
            x = x + 1
            torch._dynamo.graph_break()
        finally:
            x = x * 2
        return x

    def early(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        try:
            x = x - 2
            torch._dynamo.graph_break()
        finally:
            x = x * 3
        return x

    def loop(x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = x + x.sum().item()
        return x

    def whole(x: torch.Tensor) -> torch.Tensor:
        return step(x) + loop(x) + early(x)

    found = npugraph_ex.explain(whole, torch.ones(3, device="npu"))
    firsts = [reason.splitlines()[0] for reason in found.breaks]
    begin, turn, late = (function.__code__.co_firstlineno for function in (step, loop, early))
    own = "Call to `torch._dynamo.graph_break()`"
    assert f"{__file__}:{begin + 3}: the function step of line {begin} is not compiled: {own}" in firsts
    loops = [
        first for first in firsts if first.startswith(f"{__file__}:{turn + 2}: ")
    ]  # torch 2.10 compiles the loop in parts
    assert loops
    assert f"{__file__}:{late + 5}: the rest of early from line {late + 2} is not compiled: {own}" in firsts
    assert sum("is not compiled" in first for first in firsts) == 2 + any(
        first.endswith(f"the function loop of line {turn} is not compiled: {_ITEM}") for first in loops
    )
    assert not any(first.startswith(("Call", "Unsupported")) for first in firsts)


_ITEM = "Unsupported Tensor.item() call with capture_scalar_outputs=False"


def test_a_function_that_is_compiled_no_more_is_told() -> None:
    """Behind Dynamo's limit calls run in eager mode: no graph would show it."""

    def scale(x: torch.Tensor, number: int) -> torch.Tensor:
        return x * number

    fast = torch.compile(scale, backend="npugraph_ex", dynamic=False)
    watch = Watch()
    with torch._dynamo.config.patch(recompile_limit=1):
        for number in (2, 3):
            fast(torch.randn(3, device="npu"), number)
    explanation = watch.explanation()
    assert (len(explanation.graphs), len(explanation.breaks)) == (1, 1)
    assert re.search("recompile.limit", str(explanation))
    line = scale.__code__.co_firstlineno
    assert explanation.breaks[0].startswith(f"{__file__}:{line}: the function scale of line {line} is not compiled: ")


@pytest.mark.slow
def test_a_break_inside_torch_has_the_users_line() -> None:
    """An optimizer's functions are torch's, and it asks torch_npu's: the line is that of the program from which they are called."""
    weight = torch.ones(4, device="npu", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    @torch.compile(backend="npugraph_ex")
    def step() -> None:
        optimizer.step()

    weight.grad = torch.ones_like(weight)
    watch = Watch()
    step()
    firsts = [reason.splitlines()[0] for reason in watch.explanation().breaks]
    line = step.__wrapped__.__code__.co_firstlineno + 2
    places = {first.partition(": ")[0].partition(" (calls ")[::2] for first in firsts}
    assert {place for place, _ in places} <= {f"{__file__}:{line}", f"{__file__}:{line + 4}"}
    assert (f"{__file__}:{line}", "") in places
    assert any("/torch/optim/" in called for _, called in places)


@pytest.mark.slow
def test_a_recompiled_graph_says_what_changed() -> None:
    """Each change of one thing gives a graph that names it: a number, sizes, strides, dtype, gradient, grad mode, an attribute."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4, device="npu"))
            self.factor = 3.0

        def forward(self, x: torch.Tensor, n: object) -> torch.Tensor:
            return x * self.weight * n * self.factor

    model = Scaled()
    line = f"{Path(__file__).name}:{Scaled.forward.__code__.co_firstlineno + 1}"
    fast = torch.compile(model, backend="npugraph_ex", dynamic=False)
    square = torch.ones(4, 4, device="npu")
    watch, narrow = Watch(), square[:2].half()
    columns = narrow.t().contiguous().t()
    for call in ((square, 2), (square, 3), (square[:2], 3), (narrow, 3), (columns, 3)):
        fast(*call)
    model.factor = 4.0
    fast(columns, 3)
    with torch.enable_grad():
        fast(columns, 3)
    causes = [entry.graph.cause for entry in watch.explanation().graphs]
    assert causes[2:5] == [
        "again: the size 0 of x was 4 and is 2",
        "again: the dtype of x was torch.float32 and is torch.float16",
        "again: the stride 0 of x was 4 and is 1",
    ]
    assert (causes[0], causes[6]) == ("for the first call", "again: torch's own state changed: grad_mode")
    assert re.fullmatch(rf"again: n == 2 was true and is not now \(used at {line}\)", causes[1])
    assert causes[5].startswith("again: self.factor == 3.0 was true")
    assert f"compiled         {causes[1]}\n" in str(watch.explanation())
    numbers = [entry.graph.number for entry in watch.explanation().graphs]
    summary = watch.explanation().summary()
    assert isinstance(summary, Facts)
    first = next(place for place, (name, _) in enumerate(summary.pairs) if name == "compiled")
    assert [said for _, said in summary.pairs[first : first + 4]] == [
        *(f"graph {number} {cause}" for number, cause in zip(numbers[1:4], causes[1:4], strict=True)), "… and 3 more"
    ]  # fmt: skip
    few = f"graphs {numbers[0]}, {numbers[1]}, {numbers[2]}, …, {numbers[6]}"
    assert summary.pairs[0] == ("runs as", f"captured graphs, replayed: {few}")


@pytest.mark.slow
def test_the_line_that_needed_a_size_is_named() -> None:
    """torch_npu's attention asks for its sizes under `dynamic=True`: each length compiles, and its values are right.

    If this test fails with a new torch_npu because nothing compiles again, take the case out of `docs/faq.md`.
    """
    attend = torch.nn.functional.scaled_dot_product_attention

    def attention(given: dict[str, torch.Tensor]) -> torch.Tensor:
        return attend(given["q"], given["q"], given["q"])

    def asking_nothing(q: torch.Tensor) -> torch.Tensor:
        return torch_npu.npu_fusion_attention(q, q, q, 2, "BNSD", scale=0.25)[0]

    lengths = [torch.randn(1, 2, length, 16, device="npu", dtype=torch.float16) for length in (4, 7, 9)]
    watch = Watch()
    fast = torch.compile(attention, backend="npugraph_ex", dynamic=True)
    for q in lengths:
        torch.testing.assert_close(fast({"q": q}), attention({"q": q}), rtol=0, atol=0)
    once = torch.compile(asking_nothing, backend="npugraph_ex", dynamic=True)
    for q in lengths:
        torch.testing.assert_close(once(q), attention({"q": q}), rtol=0, atol=0)
    line = f"{Path(__file__).name}:{attention.__code__.co_firstlineno + 1}"
    changes = [f"again: the size 2 of given['q'] was {old} and is {new}" for old, new in ((4, 7), (7, 9))]
    asked = f' (`return attend(given["q"], given["q"], given["q"])` at {line} needs its value)'
    assert [entry.graph.cause for entry in watch.explanation().graphs] == [
        "for the first call", *[change + asked for change in changes], "for the first call"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("", ""),
        ("Unable to find recompilation reasons", "a guard failed, and torch does not say which"),
        (
            "0/2: 2 <= L['x'].size()[0]  # return x + 1  # model.py:7 in forward (to avoid 0/1 specialization, do)\nUser stack",
            "2 <= x.size()[0] was true and is not now (used at model.py:7, torch compiles for the sizes 0 and 1 anew)",
        ),
        ("0/0: tensor 'x' rank mismatch. expected 2, actual 1", "the number of dimensions of x was 2 and is 1"),
        ("0/0: tensor 'x' requires_grad mismatch. expected requires_grad=0", "x required no gradient and does now"),
        ("0/0: ___check_type_id(n, 12), type=<class 'int'>  # (HINT)", "n was of type int and is of another type"),
        ("0/0: ___check_obj_id(f, 12), type=<class 'x'>", "f is another object than it was"),
        (
            "0/0: expected type of 'm._modules['lin']._parameters['bias']' to be a tensor type, ' but found <class 'NoneType'>",
            "m.lin.bias was a tensor and is of type NoneType",
        ),
        ("0/0: TYPE_MISMATCH(L['parts']._modules)", "parts._modules is of another type than it was"),
        ("0/0: G['__import_my_dot_code'].N == 2", "my.code.N == 2 was true and is not now"),
        ("0/0: G['__import_my'].CFG['a'] == 2", "my.CFG['a'] == 2 was true and is not now"),
        (
            "0/0: BACKEND_MATCH failure: torch.compile detected different backend callables (id=0x7f5d)",
            "torch.compile was called again, with other options",
        ),
        ("0/0: words of a later torch", "words of a later torch was true and is not now"),
    ],
)
def test_reasons_of_dynamo_in_plain_words(reason: str, words: str) -> None:
    """Each form that Dynamo writes; what it writes in another form is passed on."""
    assert in_words(reason) == words


@pytest.mark.parametrize(("line", "shown"), [("y.tolist()", "`y.tolist()`"), ("", "the line")])
def test_a_line_without_text_has_its_place(line: str, shown: str) -> None:
    """A program that was made by `exec` has no file, so its lines have numbers alone."""
    pinned = {("L['i']", 1): f"{line}  # <string>:20 in forward"}
    reason = "0/0: tensor 'i' size mismatch at index 1. expected 5, actual 9"
    assert in_words(reason, pinned) == f"the size 1 of i was 5 and is 9 ({shown} at <string>:20 needs its value)"
