"""Advice names what could be fused, and whoever follows it wins what it promised."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import npu_emulator
from npu_emulator.clock.roofline import LAUNCH_US
from npugraph_ex.commands.advise import Advised, _page, advising
from npugraph_ex.frontend.entry.advice import Advice
from npugraph_ex.graph.launches import Launched
from npugraph_ex.observe.modelled import modelled_us

SIZE, HEADS = 64, 4
SHARED = "shared projection"


class Plain(nn.Module):
    """A block as model code spells it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(SIZE))
        self.q, self.k, self.v, self.o = (nn.Linear(SIZE, SIZE, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(SIZE, 2 * SIZE, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * SIZE, SIZE, bias=False)

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        """RMS norm."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)

    def projections(self, x: torch.Tensor) -> Any:
        """Queries, keys and values."""
        return self.q(x), self.k(x), self.v(x)

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Over all positions."""
        return torch.softmax((q @ k.transpose(-1, -2) * 0.25).float(), -1).to(q.dtype) @ v

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """The product of gate and up."""
        return functional.silu(self.gate(x)) * self.up(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, SIZE] -> the same."""
        batch, length, _ = x.shape
        q, k, v = (one.view(batch, length, HEADS, -1).transpose(1, 2) for one in self.projections(self.norm(x)))
        x = x + self.o(self.attention(q, k, v).transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(self.gated(self.norm(x)))


class Joined(Plain):
    """The same with the projections of one input joined."""

    def joined(self) -> Joined:
        """Join the weights, once."""
        self.qkv = torch.cat((self.q.weight, self.k.weight, self.v.weight))
        self.gate_up = torch.cat((self.gate.weight, self.up.weight))
        return self

    def projections(self, x: torch.Tensor) -> Any:
        """Queries, keys and values."""
        return functional.linear(x, self.qkv).split((SIZE, SIZE, SIZE), dim=-1)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """The product of gate and up."""
        gate, up = functional.linear(x, self.gate_up).chunk(2, dim=-1)
        return functional.silu(gate) * up


class Attending(Plain):
    """The same with torch's own attention."""

    def attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Over all positions."""
        return functional.scaled_dot_product_attention(q, k, v, scale=0.25)


@cache
def compiled(make: Callable[[], nn.Module], lift: str) -> tuple[list[Advice], int, float, torch.Tensor]:
    """Advice on it, the kernels and modelled microseconds of a call, and its result."""
    torch.compiler.reset()
    model, options = make().half().npu().eval(), {"lift": lift}
    x = torch.randn(2, 5, SIZE, generator=torch.Generator().manual_seed(1)).half().npu()
    function = torch.compile(
        model.joined() if isinstance(model, Joined) else model, backend="npugraph_ex", options=options
    )
    with torch.no_grad(), advising() as found, npu_emulator.timeline() as clock:
        for _ in range(3):
            function(x)
        clock.refresh()
        seen = len(clock.spans)
        result = function(x)
        clock.refresh()
        spans = clock.spans[seen:]
    return found.advice, len(spans), sum(span.duration for span in spans), result


FOLLOWED: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], int]] = {
    "the option": (Plain, (), 0),
    "joined projections": (Joined, (SHARED,), 1),  # npu_swiglu, which the option lifts out of joined lines alone
    "attention": (Attending, ("lift_attention",), 1),  # the operator also writes where a copy would have to bring it
}
"""The changed model, the rules whose advice it follows beside the options', and kernels that go besides."""


@pytest.mark.slow
@pytest.mark.parametrize("change", FOLLOWED)
def test_followed_advice_wins_what_it_promised(change: str) -> None:
    """To the kernel, and to a twentieth of the modelled time; the result stays as near as float16 tells."""
    make, rules, besides = FOLLOWED[change]
    found, kernels, time, before = compiled(Plain, "off")
    promised = [one for one in found if one.kind == "option" or (one.kind == "spelling" and one.rule in rules)]
    _, fewer, shorter, after = compiled(make, "judged")
    assert kernels - fewer == sum(one.saves.kernels for one in promised) + besides
    won = sum(modelled_us(one.saves) for one in promised) + LAUNCH_US * besides
    assert time - shorter == pytest.approx(won, rel=0.01)
    torch.testing.assert_close(after, before, rtol=2e-2, atol=2e-2)


class Masked(Plain):
    """Each layer makes its mask, a view of a value that the layer before had."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, SIZE] -> the same."""
        hidden = x[..., 0] > 0
        for layer in (self.q, self.k, self.v):
            x = layer(x) + torch.zeros_like(hidden, dtype=x.dtype).masked_fill(hidden, 1)[:, :, None]
        return x


class Filled(Plain):
    """Fills copies of its input: each takes two kernels, of which the row of the repeated one has that of the form in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, SIZE] -> the same."""
        high = x > 0
        return (x.masked_fill(high, 1) + 1) * (x.masked_fill(high, 1) + 2) + x


@pytest.mark.slow
@pytest.mark.parametrize("make", [Masked, Attending])
def test_the_option_wins_the_sum_of_its_rows(make: Callable[[], nn.Module]) -> None:
    """To the kernel, in the logs of two settled calls."""
    found, kernels, *_ = compiled(make, "off")
    _, fewer, *_ = compiled(make, "judged")
    assert kernels - fewer == sum(one.saves.kernels for one in found if one.kind == "option") > 0


@pytest.mark.slow
@pytest.mark.parametrize("make", [Filled, Masked, Plain])
def test_the_total_is_what_the_options_win(make: Callable[[], nn.Module]) -> None:
    """As measured by a compilation with them, whatever the rows count."""
    _, kernels, *_ = compiled(make, "off")
    _, fewer, *_ = compiled(make, "judged")
    torch.compiler.reset()
    with torch.no_grad(), advising() as found:
        torch.compile(make().half().npu().eval(), backend="npugraph_ex")(torch.randn(2, 5, SIZE).half().npu())
    spelt = sum(one.saves.kernels for one in found.advice if one.kind == "spelling")
    total, _ = found.kernels_and_us()
    assert total - spelt == kernels - fewer > 0
    assert str(_page("s.py", found)).count("Each row counts its fusion by itself") == (make is Filled)


def spelled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention over all positions."""
    return torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v


def by_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same in one call, which starts one kernel up to a width, and many beyond."""
    return functional.scaled_dot_product_attention(q, k, v, scale=0.25)


def of_widths(function: Callable[..., torch.Tensor], widths: tuple[int, ...]) -> tuple[Advised, int]:
    """Advice on a function that is compiled for each of these widths of a head, and the kernels of a call of each graph."""
    torch.compiler.reset()
    compiled, kernels = torch.compile(function, backend="npugraph_ex", dynamic=False, options={"lift": "judged"}), 0
    with torch.no_grad(), advising() as found, npu_emulator.timeline() as clock:
        for width in widths:
            operands = [torch.randn(2, 4, 8, width).half().npu() for _ in range(3)]
            for _ in range(3):
                clock.refresh()
                seen = len(clock.spans)
                compiled(*operands)
                clock.refresh()
            kernels += len(clock.spans) - seen
    return found, kernels


@pytest.mark.slow
@pytest.mark.parametrize("widths", [(16, 32, 64, 96, 768), (64, 768), (768,), (64,)], ids=str)
def test_lines_count_in_each_graph_of_their_function(widths: tuple[int, ...]) -> None:
    """They are advised where all graphs together win, with what they cost in some; the sum is what a change of the line wins."""
    found, before = of_widths(spelled, widths)
    _, after = of_widths(by_torch, widths)
    total, _ = found.kernels_and_us()
    lines = [one for one in found.over_all_graphs() if one.kind == "spelling"]
    assert total == max(before - after, 0)
    assert bool(lines) == (before > after)
    assert sum(one.saves.kernels < 0 for one in lines) == (768 in widths and before > after)
    told = str(_page("s.py", found))
    refused = re.search(r"would save 3 kernels in graph \d+, and start 9 more in graph \d+", told)
    assert (refused is not None) == (widths == (64, 768))


def test_lines_say_of_which_graphs_their_cost_is_not_known() -> None:
    """Another reason against the form, which names no lines, does not say what those of another graph would start there."""
    one = Advice(1, "spelling", "lift_rms_norm", "s.py:3", 1, Launched(3, 0), "y = norm(x)")
    other = Advice(2, "refused", "lift_rms_norm", "s.py:3", 1, Launched(), "the size is a symbol")
    (told,) = (row.change for row in Advised(graphs=2, advice=[one, other]).over_all_graphs() if row.kind == "spelling")
    assert told == "y = norm(x)\n# in graph 2 they are no such form, and what they start there is not counted"


@pytest.mark.slow
def test_nothing_is_advised_twice() -> None:
    """Who has the option is not told of it; what has no remedy is told with its reason and wins nothing."""
    found, *_ = compiled(Attending, "judged")
    assert not [one for one in found if one.kind == "option"]
    assert {one.rule for one in found if one.kind == "spelling"} == {SHARED}
    assert all(one.change and one.source for one in found)


class Biased(nn.Module):
    """Projections of one input with biases; up comes first in the graph, and layers have numbers in their names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(SIZE, 2 * SIZE) for _ in range(2))
        self.heads = nn.ModuleList(nn.Linear(SIZE, size) for size in (8, 24, 16))

    def forward(self, x: torch.Tensor, which: str) -> tuple[torch.Tensor, ...]:
        """Up and gate, or the heads."""
        if which == "gated":
            up, gate = self.layers[0](x), self.layers[1](x)
            return (functional.silu(gate) * up,)
        return self.heads[0](x), self.heads[1](x), self.heads[2](x)

    def added(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The heads with biases that the lines add by hand."""
        one, two = self.heads[0], self.heads[1]
        return x @ one.weight.t() + one.bias, x @ two.weight.t() + two.bias


def shared(call: Callable[..., Any], *inputs: Any, lift: str = "off") -> tuple[list[Advice], int]:
    """What is advised on projections of one input, and the number of graphs that are trained."""
    torch.compiler.reset()
    with advising() as found:
        torch.compile(call, backend="npugraph_ex", options={"lift": lift})(*inputs)
    return [one for one in found.advice if one.rule == SHARED], found.trained


@pytest.mark.parametrize("shape", [(5, SIZE), (2, 5, SIZE)], ids=["matrix", "batch"])
@pytest.mark.parametrize("which", ["gated", "heads", "added"])
def test_advised_lines_compute_the_same(which: str, shape: tuple[int, ...]) -> None:
    """They run as they are printed, name the model's own parameters, and give the values of the lines that they replace."""
    model = Biased().half().npu().eval()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).half().npu()
    call, inputs = (model.added, (x,)) if which == "added" else (model, (x, which))
    with torch.no_grad():
        (one,), _ = shared(call, *inputs)
        names: dict[str, Any] = {"torch": torch, "self": model, "x": x}
        unknown = "<the tensor that self.heads[0].weight multiplies>"  # the source says `one.weight.t()` there
        assert (unknown in one.change) == (which == "added")
        exec(one.change.replace(unknown, "x"), names)  # noqa: S102 - the advice under test
        made = tuple(names[name] for name in sorted(names) if re.fullmatch(r"y\d", name))
        expected = call(*inputs)
    if which == "gated":
        assert len(shape) > 2 or "y0 in place of self.layers[1](x), y1 in place of self.layers[0](x)" in one.change
        up, gate = made[::-1] if ".chunk(" in one.change else made
        made = (functional.silu(gate) * up,)
    torch.testing.assert_close(made, expected, rtol=2e-3, atol=2e-3)


FOLLOWED_LINE = """\
import torch
from torch.nn import functional

class Inner(torch.nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.q, self.k = (torch.nn.Linear(64, 64, bias=bias) for _ in range(2))
        self.norm, self.added = torch.nn.LayerNorm(64), torch.nn.Parameter(torch.randn(64))

    def forward(s, x, r):
        {before}
        return {returned}

class Model(torch.nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.inner = Inner(bias)

    def forward(self, x, r):
        return {calls}
"""
"""A module of a module; the input of its projections is not `x`."""
H = "h = s.norm(x + r)"
KNOWN: dict[str, tuple[str, str, bool]] = {
    "of a module": (H, "functional.gelu(s.q(h)) + s.k(h)", False),
    "with biases": (H, "functional.gelu(s.q(h)) + s.k(h)", True),
    "of a function": (H, "functional.linear(h, s.q.weight, bias=s.q.bias) * functional.linear(h, s.k.weight, s.k.bias)", True),
    "weights whose inputs come first": (H, "torch.matmul(h, s.q.weight) * torch.matmul(h, s.k.weight)", False),
    "names that are taken": (f"{H}; y0 = x * 3; joined_weight = 2", "s.q(h) * joined_weight + s.k(h) + y0", True),
    "two names of one tensor": (f"{H}; g = h", "functional.gelu(s.q(h)) + s.k(g)", True),
    "one argument twice, in one of two calls": ("h = x", "functional.gelu(s.q(h)) + s.k(r)", True),
    "an expression": ("h = [r, s.norm(x + r)]", "functional.silu(s.q(h[1])) * s.k(h[1])", False),
}  # fmt: skip
UNKNOWN: dict[str, tuple[str, str, bool]] = {
    "a comprehension": (H, "sum(m(y) for m in (s.q, s.k) for y in (h,))", False),
    "one call twice": (f"{H}; call = lambda m: m(h)", "functional.gelu(call(s.q)) + call(s.k)", False),
    "two expressions": (f"{H}; h = [h]", "functional.gelu(s.q(h[0])) + s.k(h[-1])", False),
    "weights whose inputs come first, by an operator": (H, "(h @ s.q.weight) * (h @ s.k.weight)", False),
    "a bias beside the call": (H, "functional.gelu(s.q(h) + s.added) + (s.k(h) + s.added)", False),
}
"""What the function has before its last line, what that returns, and whether its projections have a bias."""


@pytest.mark.parametrize("form", [*KNOWN, *UNKNOWN])
def test_the_lines_are_written_into_the_source(form: str, tmp_path: Path) -> None:
    """The edits that the advice names, and no other, keep the values; what it does not know is no Python."""
    before, returned, bias = (KNOWN | UNKNOWN)[form]
    calls = "self.inner(x, x) + self.inner(x * 2, r)" if "two calls" in form else "self.inner(x, r)"
    text = FOLLOWED_LINE.format(before=before, returned=returned, calls=calls)
    (tmp_path / "model.py").write_text(text)

    def made(source: str) -> Any:
        names: dict[str, Any] = {}
        exec(compile(source, str(tmp_path / "model.py"), "exec"), names)  # noqa: S102 - the model under test
        torch.manual_seed(0)
        return names["Model"](bias).npu()

    x, r = (torch.randn(4, SIZE, generator=torch.Generator().manual_seed(seed)).npu() for seed in (1, 2))
    with torch.no_grad():
        (one,), _ = shared(made(text), x, r)
        *lines, last = one.change.splitlines()
        if form in UNKNOWN:
            known, y0 = ("s", "s.q(h[0])") if "two" in form else ("self.inner", "<the product with self.inner.q.weight")
            between = " @" if "operator" in form else ","
            assert f"(<the tensor that {known}.q.weight multiplies>{between} joined_weight" in lines[-1]
            assert f"y0 in place of {y0}" in last
            return
        edited = returned
        for name, expression in re.findall(r"(\w+) in place of (.+?)(?=, \w+ in place of |$)", last):
            assert expression in edited
            edited = edited.replace(expression, name)
        edited = text.replace(f"return {returned}", "\n        ".join((*lines, f"return {edited}")))
        torch.testing.assert_close(made(edited)(x, r), made(text)(x, r), rtol=1e-4, atol=1e-4)
        assert not shared(made(edited), x, r)[0]


@pytest.mark.slow
def test_weights_that_are_trained_are_not_joined() -> None:
    """A joined weight would not follow a step; the same call without gradients is advised on."""
    model, x = Biased().half().npu(), torch.ones(5, SIZE).half().npu()
    with torch.enable_grad():
        assert shared(model, x, "heads") == ([], 1)
    with torch.no_grad():
        advice, trained = shared(model, x, "heads")
    assert (len(advice), trained) == (1, 0)


def test_a_row_counts_what_the_option_wins_only_where_it_is_set() -> None:
    """The lines alone save a product; activation and product go where the program lifts by judgement."""
    model, x = Biased().half().npu(), torch.ones(5, SIZE).half().npu()
    with torch.no_grad():
        saved = [shared(model, x, "gated", lift=lift)[0][0].saves.kernels for lift in ("off", "judged")]
    assert saved == [1, 2]


GATES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], str]] = {
    "silu": (lambda gate, up: functional.silu(gate) * up, "npu_swiglu"),
    "silu in float32": (lambda gate, up: (functional.silu(gate.float()) * up.float()).to(gate.dtype), "npu_swiglu"),
    "silu of the product": (lambda gate, up: (gate * up) * torch.sigmoid(gate), "npu_swiglu"),
    "gelu": (lambda gate, up: up * functional.gelu(gate), "npu_geglu"),
    "gelu by tanh": (lambda gate, up: functional.gelu(gate, approximate="tanh") * up, "npu_geglu"),
    "gelu that is spelled": (lambda gate, up: 0.5 * gate * (1 + torch.erf(gate / 2**0.5)) * up, "npu_geglu"),
    "relu": (lambda gate, up: functional.relu(gate) * up, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("up_first", [False, True], ids=["gate first", "up first"])
@pytest.mark.parametrize("name", GATES)
def test_gated_projections_win_what_is_promised(name: str, up_first: bool) -> None:
    """Whatever the activation: the row names the operator that is lifted then, and counts it."""
    active, operator = GATES[name]
    model, x = Biased().half().npu().eval(), torch.randn(2, 5, SIZE).half().npu()
    both = nn.Linear(SIZE, 4 * SIZE).half().npu()
    both.weight.data, both.bias.data = (
        torch.cat([getattr(one, part) for one in model.layers]) for part in ("weight", "bias")
    )

    def spelled(x: torch.Tensor) -> torch.Tensor:
        up = model.layers[1](x) if up_first else None
        gate = model.layers[0](x)
        return active(gate, model.layers[1](x) if up is None else up)

    def followed(x: torch.Tensor) -> torch.Tensor:
        return active(*both(x).chunk(2, dim=-1))

    with torch.no_grad():
        (row,), _ = shared(spelled, x, lift="judged")
        assert (f"# {operator} is then lifted" if operator else ".split(") in row.change
        assert row.change.startswith("joined_weight = torch.cat((model.layers[0].weight, ") or not operator
        kernels = [_launched(function, x) for function in (spelled, followed)]
    assert kernels[0] - kernels[1] == row.saves.kernels


def _launched(function: Callable[..., Any], x: torch.Tensor) -> int:
    """The kernels of a call, once inputs that stay are read where they are."""
    torch.compiler.reset()
    settled = torch.compile(function, backend="npugraph_ex", options={"lift": "judged"})
    for _ in range(4):
        settled(x)
    torch.npu.synchronize()
    with npu_emulator.kernel_log() as log:
        settled(x)
        torch.npu.synchronize()
    return len(log)
