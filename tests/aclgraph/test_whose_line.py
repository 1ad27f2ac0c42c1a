"""Every kernel names the line and the module of the model that asked for it: eager, compiled, captured, replayed, fused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_npu

import npu_emulator

MODES = ["eager", "uncaptured", "captured"]


class Norm(torch.nn.Module):
    """A residual norm with a cast, which one fused operator computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm as float32, and the sum."""
        y, _, total = torch_npu.npu_add_rms_norm(x, residual, self.weight, 1e-6)  # the norm
        return y.float(), total  # the cast


class Block(torch.nn.Module):
    """A linear layer and the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(64, 64)
        self.norm = Norm()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the layer, the norm and a product."""
        hidden = self.fc(x)  # the linear layer
        y, total = self.norm(hidden, x)
        return torch.tanh(y).half() * total  # the product


class Model(torch.nn.Module):
    """Two blocks in a list, and a product that stands in a function of no module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks."""
        for layer in self.layers:
            x = layer(x)
        return _scaled(x)


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return torch.erfinv(x)  # the end


def _line(comment: str) -> str:
    """Where a comment stands in this file, as file:line."""
    rows = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = [number for number, row in enumerate(rows, 1) if row.endswith(f"  # {comment}")]
    return f"{__file__}:{number}"


def _expected(mode: str) -> set[tuple[str, str, str]]:
    """(what, line, module) of each kernel; a fused operator stands for its last part, which is the cast."""
    norm = _line("the norm" if mode == "eager" else "the cast")
    layers = {
        (what, line, f"layers.{number}{path}")
        for number in range(2)
        for what, line, path in (
            ("linear", _line("the linear layer"), ".fc"),
            ("norm", norm, ".norm"),
            ("tanh", _line("the product"), ""),
            ("mul", _line("the product"), ""),
        )
    }
    return {*layers, ("erfinv", _line("the end"), "")}


_SPELLINGS = {"addmm": "linear", "linear": "linear", "add_rms_norm": "norm", "add_rms_norm_cast": "norm"}


def _kind(name: str) -> str:
    """`mul` of `aten.mul_.Tensor`; what a fused operator takes the place of."""
    short = name.split(".")[name.startswith(("aten.", "npu."))].removeprefix("npu_").rstrip("_")
    return _SPELLINGS.get(short, short)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing that an earlier test compiled."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _ready(mode: str, model: torch.nn.Module) -> Any:
    """The model in one of the ways to run it; a second call runs what the first one compiled."""
    if mode == "eager":
        return model
    return torch.compile(model, backend="npugraph_ex", options={"force_eager": mode == "uncaptured"})


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_the_kernel_log_names_line_and_module(mode: str) -> None:
    """Each way to run the model tells the same, at the first call and at the next; the fused operator, too."""
    model, x = Model().npu().half(), torch.full((4, 64), 0.01, device="npu", dtype=torch.float16)
    run = _ready(mode, model)
    for _ in range(3):
        with npu_emulator.schedule("lazy"), npu_emulator.kernel_log() as log:
            run(x)
            torch.npu.synchronize()
        wanted = {kind for kind, _, _ in _expected(mode)}
        found = {(_kind(ran.name), ran.line, ran.module) for ran in log if _kind(ran.name) in wanted}
        assert found == _expected(mode)
        assert not [ran for ran in log if "/npugraph_ex/" in ran.line]
    names = {ran.name for ran in log}
    assert ("npu.npu_add_rms_norm_cast.default" in names) == (mode != "eager")


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_timeline_and_races_name_line_and_module(mode: str) -> None:
    """The boxes of the picture, and both sides of a race with work outside of the model."""
    model, x = Model().npu().half(), torch.full((4, 64), 0.01, device="npu", dtype=torch.float16)
    run = _ready(mode, model)
    with npu_emulator.timeline() as clock:
        run(x)
        torch.npu.synchronize()
    lines = {span.line for span in clock.spans if "tanh" in span.name}
    assert lines == {f"{_line('the product')} in forward of layers.{number}" for number in range(2)}
    if mode == "captured":
        torch.compiler.reset()  # graphs are looked at that are captured while the detector is on
    with npu_emulator.detect_races() as races:
        result = run(x)
        with torch.npu.stream(torch.npu.Stream()):
            result.neg_()  # the race
    text = "\n".join(map(str, races))
    assert f"{_line('the end')} in _scaled" in text
    assert f"{_line('the race')} in test_timeline_and_races" in text
    assert "/npugraph_ex/" not in text


@torch.library.custom_op("whose_line::fails", mutates_args=())
def fails(x: torch.Tensor) -> torch.Tensor:
    """An operator whose kernel raises on negative elements."""
    return x.clone()


@fails.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Failing(torch.nn.Module):
    """Calls the operator inside a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Identity(), Caller())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the parts."""
        return self.inner(x) + 1  # type: ignore[no-any-return]


class Caller(torch.nn.Module):
    """Calls the operator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call it."""
        return torch.ops.whose_line.fails(x) * 2  # type: ignore[no-any-return]  # the failure


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_errors_of_a_kernel_name_line_and_module(mode: str) -> None:
    """A kernel that fails on the device is reported where the model called it."""

    @npu_emulator.register_kernel("whose_line::fails")
    def kernel(x: torch.Tensor) -> torch.Tensor:
        if bool((x < 0).any()):
            raise ValueError("negative")
        return x.clone()

    run, x = _ready(mode, Failing().npu()), torch.ones(4, device="npu")
    for _ in range(2):
        run(x)
    torch.npu.synchronize()
    wanted = re.escape(f"launched at {_line('the failure')} in forward of inner.1")
    with npu_emulator.schedule("lazy"):
        run(x.neg_())
        with pytest.raises(RuntimeError, match=wanted):
            torch.npu.synchronize()


@pytest.mark.parametrize("mode", MODES)
@torch.no_grad()
def test_a_compiled_part_is_named_from_the_whole(mode: str) -> None:
    """A layer that is compiled by itself has the path that it has in the model."""
    model, x = Model().npu().half(), torch.full((4, 64), 0.01, device="npu", dtype=torch.float16)
    model.layers[1] = _ready(mode, model.layers[1])
    for _ in range(2):
        with npu_emulator.schedule("lazy"), npu_emulator.kernel_log("*tanh*") as log:
            model(x)
            torch.npu.synchronize()
        assert {(ran.line, ran.module) for ran in log} == {(_line("the product"), f"layers.{n}") for n in range(2)}
