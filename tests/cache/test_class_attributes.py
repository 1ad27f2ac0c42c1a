"""What a class holds, and hooks, decide what objects compute: a saved compilation compares them, too."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch._dynamo.mutation_guard import install_generation_tagging_init

from npugraph_ex.inference import cache_compile
from npugraph_ex.inference.replaced_code import replaced_code
from npugraph_ex.report.graphs import graphs_so_far


class Settings:
    """What a model holds."""

    gain = 3.0


class Base(torch.nn.Module):
    """A class that others derive from."""

    scale = 2.0


class Model(Base):
    """Computes with numbers of three classes."""

    shift = 1.0
    table: ClassVar = [4.0]

    def __init__(self) -> None:
        super().__init__()
        self.settings = Settings()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` of any shape."""
        return x * self.scale + self.shift + self.settings.gain * self.table[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [(Model, "shift", 5.0), (Base, "scale", 7.0), (Settings, "gain", 9.0), (Model, "table", [6.0]), (Model, "table", [4.0, 1.0])],
)  # fmt: skip
def test_a_changed_class_is_compiled_anew(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: type,
    name: str,
    value: Any,
) -> None:
    """An attribute of the own class, of a base or of a held object's; a list by its elements and its length. The log names it."""
    x = torch.tensor([1.0, -2.0], device="npu")
    for changed, new in ((False, 1), (False, 0), (True, 1)):
        if changed:
            monkeypatch.setattr(owner, name, value)
        model, before = Model(), graphs_so_far()
        with torch.no_grad():
            assert torch.equal(cache_compile(model.forward, cache_dir=tmp_path)(x).cpu(), model.forward(x).cpu())
        assert graphs_so_far() - before == new
    assert f"{owner.__qualname__}.{name}" in caplog.text


class Layered(torch.nn.Module):
    """A method and a layer, whose code somebody replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.ReLU()

    def after(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` of any shape."""
        return x - 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` of any shape."""
        return self.after(self.layer(x))


def _tenfold(_self: object, x: torch.Tensor) -> torch.Tensor:
    return x * 10


def _threefold(_module: object, _given: object, result: torch.Tensor) -> torch.Tensor:
    return result * 3


def _wrapped(original: Any, times: int) -> Any:
    @functools.wraps(original)
    def wrapper(self: object, x: torch.Tensor) -> torch.Tensor:
        return times * original(self, x)

    return wrapper


SET_UP: dict[str, Any] = {
    "a hook": lambda model, _: model.layer.register_forward_hook(_threefold),
    "a hook before": lambda model, _: model.layer.register_forward_pre_hook(lambda _, given: (given[0] + 5,)),
    "a function of the class": lambda _, patch: patch.setattr(Layered, "after", _tenfold),
    "a function under its name": lambda _, patch: patch.setattr(Layered, "after", _wrapped(Layered.after, 3)),
    "the same with another number": lambda _, patch: patch.setattr(Layered, "after", _wrapped(Layered.after, 4)),
    "a layer's function": lambda _, patch: patch.setattr(torch.nn.ReLU, "forward", _tenfold),
}


def test_what_torch_replaces_of_its_own_does_not_count() -> None:
    """Dynamo puts functions of its own into `nn.Module` in some processes, and not in others."""
    with pytest.MonkeyPatch.context() as patch:
        before = replaced_code({"self": Layered()})
        patch.setattr(torch.nn.Module, "__init__", torch.nn.Module.__init__)
        patch.setattr(torch.nn.Module, "__setstate__", torch.nn.Module.__setstate__)
        patch.setattr(torch.nn.Module, "___needs_generation_tag_patch", True, raising=False)
        install_generation_tagging_init()
        assert torch.nn.Module.__init__.__qualname__ != "Module.__init__"
        assert replaced_code({"self": Layered()}) == before


@pytest.mark.slow
def test_code_that_a_process_replaces_is_compiled_anew(tmp_path: Path) -> None:
    """Hooks and functions put into a class before the file is read: each way has a compilation of its own, which is found again."""
    x = torch.tensor([1.0, -2.0], device="npu")
    for new in (1, 0):
        for name, set_up in {"nothing": lambda *_: None, **SET_UP}.items():
            with pytest.MonkeyPatch.context() as patch, torch.no_grad():
                torch.compiler.reset()
                model, before = Layered(), graphs_so_far()
                set_up(model, patch)
                expected = model.forward(x)
                assert torch.equal(cache_compile(model.forward, cache_dir=tmp_path)(x), expected), name
                assert graphs_so_far() - before == new, name
