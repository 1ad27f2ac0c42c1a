"""Examples for the forms of lifting that join parameters: models whose projections become one product, and whose weights change.

One model in three is a near-miss, of which no projections may be joined. What is compared with eager mode are a few calls, between
which a weight is written, or replaced by another one.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import npugraph_ex
from npugraph_ex.lifting import judging
from npugraph_ex.operators import ulp
from npugraph_ex_conformance.examples.spellings import judged, refused
from npugraph_ex_conformance.examples.spellings.spelling import product_of

_CALLS = 3
_NEAR = {torch.float16: 2.0**-6, torch.bfloat16: 2.0**-3, torch.float32: 2.0**-12}
"""Of the largest result: what roundings make of a sum of products, and no other weight does."""
_USES = ("torch.sin({})", "torch.exp({} * 0.5)", "torch.tanh({})", "{} * 0.5")
_GATES = (
    ("lift_joined_swiglu", "torch.nn.functional.silu({})"),
    ("lift_joined_swiglu", "{0} * torch.sigmoid({0})"),
    ("lift_joined_geglu", "torch.nn.functional.gelu({})"),
    ("lift_joined_geglu", "torch.nn.functional.gelu({}, approximate='tanh')"),
)
_HALVES = {"lift_joined_swiglu": "lift_swiglu", "lift_joined_geglu": "lift_geglu"}
"""Forms that read gate and up with biases, once the projections are joined."""
FORMS = ("lift_joined_swiglu", "lift_joined_geglu", "lift_joined_projections")


@dataclass(frozen=True)
class Joined:
    """What came of one example.

    Attributes:
        text: the function of the model's input and projections.
        near_miss: whether its projections do not go together.
        lifted: whether they were joined.
        fault: what is wrong; empty when nothing is.
        ulps: of the first call, how far its worst element and eager mode's are from float64.
    """

    text: str
    near_miss: bool
    lifted: bool
    fault: str
    ulps: tuple[float, float]


class _InputsFirst(nn.Linear):
    """With a weight [in, out], as GPT-2 has it."""

    def __init__(self, width: int, size: int, *, bias: bool) -> None:
        super().__init__(width, size, bias=bias)
        self.weight = nn.Parameter(self.weight.detach().t().contiguous())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight if self.bias is None else torch.addmm(self.bias, x, self.weight)


class _Projections(nn.Module):
    """``function`` of x and the projections, in the order in which they are made."""

    def __init__(self, sizes: tuple[int, ...], width: int, *, bias: bool, function: str, inputs_first: bool) -> None:
        super().__init__()
        kind = _InputsFirst if inputs_first else nn.Linear
        self.parts = nn.ModuleList(kind(width, size, bias=bias) for size in sizes)
        scope: dict[str, Any] = {"torch": torch}
        exec(function, scope)  # noqa: S102 - the text of an example
        self.function = scope["function"]

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, *self.parts)


def _step(weight: nn.Parameter) -> None:
    """A step of an optimiser, which writes lists of tensors."""
    weight.grad = torch.randn_like(weight)
    torch.optim.SGD([weight], lr=1.0, foreach=True).step()
    weight.grad = None


_WRITES: tuple[Callable[[nn.Parameter], object], ...] = (
    lambda weight: weight.mul_(-2),
    lambda weight: weight[:1].fill_(0.5),
    lambda weight: torch.neg(weight.detach(), out=weight),
    lambda weight: torch._foreach_mul_([weight], -2.0),
    lambda weight: torch._foreach_copy_([weight], [torch.randn_like(weight)]),
    _step,
)


Drawn = tuple[str, str, tuple[int, ...], bool]
"""Form, text, sizes of the projections, and whether they do not go together. A form of halves has biases."""


def _gated(draw: random.Random, gates: tuple[tuple[str, str], ...] = _GATES) -> Drawn:
    """Gate and up."""
    miss = draw.choice(("", "", "value", "activation"))
    wide = draw.random() < 1 / 3
    cast, back = (".float()", ".to(x.dtype)") if wide else ("", "")
    lines = [f"gate = one({'x + 1' if miss == 'value' else 'x'}){cast}", f"up = two(x){cast}"]
    draw.shuffle(lines)
    form, active = draw.choice(gates)
    active = ("torch.sigmoid({})" if miss == "activation" else active).format("gate")
    product = product_of(draw, (*active.split(" * "), "up"))
    text = "\n    ".join(("def function(x, one, two):", *lines, f"return {product}{back}\n"))
    return form, text, (24, 24), bool(miss)


def _gated_with_biases(draw: random.Random) -> Drawn:
    form, *others = _gated(draw)
    return _HALVES[form], *others  # type: ignore[return-value]


def _several(draw: random.Random) -> Drawn:
    """Projections of one input, which others may read, too; a part that leaves the graph would show what it is a part of."""
    count, miss = draw.choice((2, 3)), draw.choice(("", "", "", "", "input", "input", "leaves"))
    names = "abc"[:count]
    uses = draw.sample(_USES, count)
    lines = [f"{name}_ = {name}({f'x + {at}' if miss == 'input' else 'x'})" for at, name in enumerate(names)]
    draw.shuffle(lines)
    total = " + ".join(f"({use.format(f'{name}_')}).sum(-1)" for name, use in zip(names, uses, strict=True))
    total += draw.choice(("", " + x.sum(-1)"))
    result = f"({total}, {', '.join(f'{name}_' for name in names)})" if miss == "leaves" else total
    text = "\n    ".join((f"def function(x, {', '.join(names)}):", *lines, f"return {result}\n"))
    sizes = tuple(draw.choice((8, 8, 16)) for _ in names)
    return "lift_joined_projections", text, sizes, bool(miss)


def joined_example(seed: int) -> str:
    """What is wrong with one example; empty when nothing is."""
    draw = random.Random(seed)
    return _tried(seed, draw, draw.choice((_gated, _several, _gated_with_biases)), torch.float16).fault


def joined(form: str, seed: int, dtype: torch.dtype) -> Joined:
    """What comes of one example of this form, one of `FORMS`."""
    gates = tuple(gate for gate in _GATES if gate[0] == form)
    return _tried(
        seed, random.Random(f"{form}:{seed}"), lambda draw: _gated(draw, gates) if gates else _several(draw), dtype
    )


def _tried(seed: int, draw: random.Random, drawn: Callable[[random.Random], Drawn], dtype: torch.dtype) -> Joined:
    judging.forget()
    torch.manual_seed(seed)
    form, text, sizes, near_miss = drawn(draw)
    bias = form in _HALVES.values() or (form == "lift_joined_projections" and draw.random() < 0.5)
    inputs_first = draw.random() < 0.5
    model = _Projections(sizes, 32, bias=bias, function=text, inputs_first=inputs_first)
    model.to("npu", dtype)
    options: dict[str, Any] = {"lift": "judged", "join_projections": True, "force_eager": draw.random() < 0.5}
    rows = draw.choice((1, 4, 4))  # of one row the parts have the strides that they have alone
    torch.compiler.reset()
    compiled = torch.compile(model, backend="npugraph_ex", options=options, dynamic=False, fullgraph=True)
    lifted, fault, ulps = False, "", (0.0, 0.0)
    with torch.no_grad():
        for call in range(_CALLS):
            x = torch.randn(rows, 32).to(dtype).npu()
            try:
                found = compiled(x)
            except Exception as error:  # noqa: BLE001 - whatever a fault makes the library raise is what was found
                fault = f"raised {type(error).__name__}: {error}\n{text}"
                break
            right = model(x)
            (found, *_), (right, *_) = results = [one if isinstance(one, tuple) else (one,) for one in (found, right)]
            wrong = next(filter(None, (_difference(*pair) for pair in zip(*results, strict=True))), "")
            if call == 0:
                truth = copy.deepcopy(model).cpu().double()(x.cpu().double())
                truth = truth[0] if isinstance(truth, tuple) else truth
                ulps = _furthest(found, truth), _furthest(right, truth)
                lifted = _was_joined(form)
                wrong = wrong or _misread(form, dtype, near_miss=near_miss)
            if wrong:
                fault = f"call {call}: {wrong}\n{text}"
                break
            _change(draw, draw.choice([*model.parameters()]), model)
    return Joined(text, near_miss, lifted, fault, ulps)


def _furthest(value: torch.Tensor, truth: torch.Tensor) -> float:
    """Of the finite element that is farthest from float64, in ulps."""
    far = (value.cpu().double() - truth).abs() / ulp(truth, value.dtype)
    return far[far.isfinite()].max().item()


def _difference(found: torch.Tensor, right: torch.Tensor) -> str:
    same = (found == right) | (found.isnan() & right.isnan())
    far = (found.double() - right.double()).abs().masked_fill(same, 0.0).max().item()
    most = right.abs().nan_to_num(0.0, 0.0).max().item()
    return "" if far <= _NEAR[found.dtype] * most else f"a result is wrong by {far}, of {most} at most"


def _was_joined(form: str) -> bool:
    report = npugraph_ex.last_report()
    return report is not None and report.fusions(form) > 0


def _misread(form: str, dtype: torch.dtype, *, near_miss: bool) -> str:
    """What is wrong with what was joined. In float16 the judge refuses none."""
    report = npugraph_ex.last_report()
    assert report is not None
    reasons = [miss.reason for miss in report.near_misses(form)]
    if near_miss:
        read = "joined" if report.fusions(form) else next(filter(judged, reasons), "")
        return f"{read}, although the projections do not go together" if read else ""
    if report.fusions(form) or (dtype != torch.float16 and any(map(refused, reasons))):
        return ""
    return f"missed: {'; '.join(reasons) or 'nothing resembled the form'}"


def _change(draw: random.Random, weight: nn.Parameter, model: nn.Module) -> None:
    """Write a weight in one of many ways, or put another one in its place."""
    if draw.random() < 2 / 3:
        draw.choice(_WRITES)(weight)
        return
    owner, name = next(
        (module, name)
        for module in model.modules()
        for name, one in module.named_parameters(recurse=False)
        if one is weight
    )
    setattr(owner, name, nn.Parameter(torch.randn_like(weight)))
