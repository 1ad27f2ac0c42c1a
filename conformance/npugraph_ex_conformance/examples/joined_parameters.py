"""Examples for the forms of lifting that join parameters: models whose projections become one product, and whose weights change.

One model in three is a near-miss, of which no projections may be joined. What is compared with eager mode are a few calls, between
which a weight is written, or replaced by another one.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn

import npugraph_ex
from npugraph_ex.lifting import judging
from npugraph_ex_conformance.examples.spellings import judged

_CALLS = 3
_NEAR = 2.0**-6
"""Of the largest result: what roundings to float16 make of a sum of products, and no other weight does."""
_USES = ("torch.sin({})", "torch.exp({} * 0.5)", "torch.tanh({})", "{} * 0.5")
_GATES = (
    ("lift_joined_swiglu", "torch.nn.functional.silu({})"),
    ("lift_joined_geglu", "torch.nn.functional.gelu({})"),
    ("lift_joined_geglu", "torch.nn.functional.gelu({}, approximate='tanh')"),
)


class _Projections(nn.Module):
    """``function`` of x and the projections, in the order in which they are made."""

    def __init__(self, sizes: tuple[int, ...], width: int, *, bias: bool, function: str) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(width, size, bias=bias) for size in sizes)
        scope: dict[str, Any] = {"torch": torch}
        exec(function, scope)  # noqa: S102 - the text of an example
        self.function = scope["function"]

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, *self.parts)


def _gated(draw: random.Random) -> tuple[str, str, tuple[int, ...], bool]:
    """Gate and up: form, text, sizes, and whether it is a near-miss."""
    miss = draw.choice(("", "", "value", "activation"))
    gate = f"one({'x + 1' if miss == 'value' else 'x'})"
    form, active = draw.choice(_GATES)
    active = ("torch.sigmoid({})" if miss == "activation" else active).format(gate)
    factors = [active, "two(x)"]
    draw.shuffle(factors)
    return form, f"def function(x, one, two):\n    return {' * '.join(factors)}\n", (24, 24), bool(miss)


def _several(draw: random.Random) -> tuple[str, str, tuple[int, ...], bool]:
    """Projections of one input: as above."""
    count, miss = draw.choice((2, 3)), draw.random() < 1 / 3
    names = "abc"[:count]
    uses = draw.sample(_USES, count)
    lines = [f"{name}_ = {name}({'x' if not miss else f'x + {at}'})" for at, name in enumerate(names)]
    draw.shuffle(lines)
    total = " + ".join(f"({use.format(f'{name}_')}).sum(-1)" for name, use in zip(names, uses, strict=True))
    text = "\n    ".join((f"def function(x, {', '.join(names)}):", *lines, f"return {total}\n"))
    sizes = tuple(draw.choice((8, 8, 16)) for _ in names)
    return "lift_joined_projections", text, sizes, miss


def joined_example(seed: int) -> str:
    """What is wrong with one example; empty when nothing is."""
    judging.forget()
    draw, _ = random.Random(seed), torch.manual_seed(seed)
    form, text, sizes, near_miss = draw.choice((_gated, _several))(draw)
    model = _Projections(sizes, 32, bias=form == "lift_joined_projections" and draw.random() < 0.5, function=text)
    model.to("npu", torch.float16)
    options: dict[str, Any] = {"lift": "judged", "join_projections": True, "force_eager": draw.random() < 0.5}
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="npugraph_ex", options=options, dynamic=False, fullgraph=True)
    with torch.no_grad():
        for call in range(_CALLS):
            x = torch.randn(4, 32).half().npu()
            try:
                found = compiled(x)
            except Exception as error:  # noqa: BLE001 - whatever a fault makes the library raise is what was found
                return f"raised {type(error).__name__}: {error}\n{text}"
            wrong = _difference(found, model(x)) or (call == 0 and _misread(form, near_miss=near_miss))
            if wrong:
                return f"call {call}: {wrong}\n{text}"
            _change(draw, draw.choice([*model.parameters()]), model)
    return ""


def _difference(found: torch.Tensor, right: torch.Tensor) -> str:
    far, most = (found.double() - right.double()).abs().max().item(), right.abs().max().item()
    return "" if far <= _NEAR * most else f"a result is wrong by {far}, of {most} at most"


def _misread(form: str, *, near_miss: bool) -> str:
    """What is wrong with what was joined."""
    report = npugraph_ex.last_report()
    assert report is not None
    reasons = [miss.reason for miss in report.near_misses(form)]
    if near_miss:
        read = "joined" if report.fusions(form) else next(filter(judged, reasons), "")
        return f"{read}, although the projections do not go together" if read else ""
    return "" if report.fusions(form) else f"missed: {'; '.join(reasons) or 'nothing resembled the form'}"


def _change(draw: random.Random, weight: nn.Parameter, model: nn.Module) -> None:
    """Write a weight, or put another one in its place."""
    if draw.random() < 1 / 2:
        weight.mul_(-2)
        return
    owner, name = next(
        (module, name)
        for module in model.modules()
        for name, one in module.named_parameters(recurse=False)
        if one is weight
    )
    setattr(owner, name, nn.Parameter(torch.randn_like(weight)))
