"""Who follows the advice on three models of the suite by hand wins what it promised."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

import npu_emulator
from npu_emulator.clock.roofline import LAUNCH_US
from npugraph_ex.commands.advise import advising
from npugraph_ex.frontend.entry.advice import Advice
from npugraph_ex.observe.modelled import modelled_us

SETTLED = 4
"""Calls until inputs that stay are read where they are."""


class Part(nn.Module):
    """One of several projections of one input, joined: the first computes all, the others take their own."""

    def __init__(self, parts: Sequence[nn.Linear], at: int, found: list[torch.Tensor]) -> None:
        super().__init__()
        self.at, self.found, self.sizes = at, found, [part.out_features for part in parts]
        if not at:
            self.weight = torch.cat([part.weight for part in parts])
            self.bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        if not self.at:
            self.found[:] = functional.linear(x, self.weight, self.bias).split(self.sizes, dim=-1)
        return self.found.pop(0)


def join(model: nn.Module, *names: str) -> None:
    """Follow the advice on shared projections by hand, wherever a module has all of these."""
    for module in list(model.modules()):
        owners, parts = [], []
        for name in names:
            owner, _, last = name.rpartition(".")
            owners.append((getattr(module, owner, None) if owner else module, last))
            parts.append(getattr(owners[-1][0], last, None))
        if all(isinstance(part, nn.Linear) for part in parts):
            found: list[torch.Tensor] = []
            for at, (owner, last) in enumerate(owners):  # type: ignore[assignment]
                setattr(owner, last, Part(parts, at, found))  # type: ignore[arg-type]


class Settled(NamedTuple):
    """A model after its first calls: the advice on it, the kernels and microseconds of one call, and its result."""

    found: list[Advice]
    kernels: list[str]
    time: float
    result: torch.Tensor


MODELS: dict[str, dict[tuple[str, ...], int]] = {
    "Llama, decode step": {("q_proj", "k_proj", "v_proj"): 0, ("gate_proj", "up_proj"): 2},
    "BERT": {("query", "key", "value"): 0},
    "UNet": {("before.time", "middle.time", "after.time"): 0},
}
"""Of the suite's architectures, with the projections that are joined by hand, and the `npu_swiglu` that come besides."""


def _settled(name: str, lift: str, joined: Sequence[str]) -> Settled:
    """The advice, and a call of which nothing changes any more."""
    from npugraph_ex_conformance.models.architectures import make

    torch.compiler.reset()
    gc.collect()  # a compiled graph that dies during the measured call could add work of its own
    model, inputs = make(name, torch.float16, "npu")
    with torch.no_grad():
        join(model, *joined)
        function = torch.compile(model, backend="npugraph_ex", options={"lift": lift}, dynamic=False)
        model.prepare()
        with advising() as found, npu_emulator.timeline() as clock:
            for _ in range(SETTLED):
                result = function(*inputs)
            clock.refresh()
            seen = len(clock.spans)
            function(*inputs)
            clock.refresh()
            spans = clock.spans[seen:]
    return Settled(found.advice, [span.name for span in spans], sum(span.duration for span in spans), result)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_win_what_is_advised(name: str) -> None:
    """To the kernel and to a hundredth of the modelled time: the option, and each row on projections of one input, by hand."""
    plain, lifted = _settled(name, "off", ()), _settled(name, "judged", ())
    torch.testing.assert_close(lifted.result, plain.result, rtol=2e-2, atol=2e-2)
    option = [one for one in plain.found if one.kind == "option"]
    _assert_won(plain, lifted, option, 0)
    rows = [one for one in plain.found if one.kind == "spelling"]
    assert len(rows) == len(MODELS[name]), rows
    for names, besides in MODELS[name].items():
        joined = _settled(name, "judged", names)
        row = [one for one in rows if all(f"{part}.weight" in one.change for part in names)]
        assert len(row) == 1
        torch.testing.assert_close(joined.result, plain.result, rtol=2e-2, atol=2e-2)
        _assert_won(lifted, joined, row, besides)


def _assert_won(before: Settled, after: Settled, promised: Sequence[Advice], besides: int) -> None:
    """What the advice says, and kernels that it does not count."""
    kernels = sum(one.saves.kernels for one in promised)
    assert len(before.kernels) - len(after.kernels) == kernels + besides > 0, (before.kernels, after.kernels)
    us = sum(modelled_us(one.saves) for one in promised) + LAUNCH_US * besides
    assert before.time - after.time == pytest.approx(us, rel=0.01)
