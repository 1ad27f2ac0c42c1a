"""Opaque objects as inputs of saved graphs: vLLM registers one for the names of its layers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from device_helpers import NPU
from torch._library.opaque_object import register_opaque_type

from npugraph_ex.errors import SavedGraphError

opaque_base: Any = pytest.importorskip("torch._opaque_base", reason="torch 2.10 makes them constants of the graph")


class LayerName(opaque_base.OpaqueBase):  # type: ignore[misc]
    """The name of a layer; each call of the graph may bring another one."""

    def __init__(self, value: str) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is LayerName and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __fx_repr__(self) -> tuple[str, dict[str, type]]:
        """How torch prints it in a graph."""
        return f"LayerName({self.value!r})", {"LayerName": LayerName}


register_opaque_type(LayerName, typ="value", hoist=True)


@torch.library.custom_op("nge_opaque_inputs::times", mutates_args=())
def times(x: torch.Tensor, name: LayerName) -> torch.Tensor:
    """The values depend on the name."""
    return x * len(name.value)


@times.register_fake
def _(x: torch.Tensor, _name: LayerName) -> torch.Tensor:
    return torch.empty_like(x)


def in_layer(x: torch.Tensor, name: LayerName) -> torch.Tensor:
    """The graph takes both."""
    return times(x + 1, name) * 2


@pytest.mark.parametrize("options", [{}, {"force_eager": True}], ids=["captured", "eager"])
def test_each_call_brings_its_own(options: dict[str, object], tmp_path: Path) -> None:
    """Compiled and loaded alike: the object of the call counts, not that of the compilation. Another class is refused."""
    x = torch.randn(4, 8, device=NPU)
    compiled = torch.compile(in_layer, backend="npugraph_ex", fullgraph=True, options=options).aot_compile(
        ((x, LayerName("abc")), {})
    )
    compiled.save_compiled_function(str(tmp_path / "saved"))
    with (tmp_path / "saved").open("rb") as file:
        loaded = torch.compiler.load_compiled_function(file)
    for run in (compiled, loaded):
        run.disable_guard_check()  # as vLLM does; the guard is equality with the name of the compilation
        for name in ("abc", "abcdefgh", "a", "abc"):
            for _ in range(2):
                assert torch.equal(run(x, LayerName(name)).cpu(), in_layer(x, LayerName(name)).cpu())
    with pytest.raises(SavedGraphError, match=r"takes an object of .*LayerName as .*, got 'abc'"):
        loaded(x, "abc")


def test_a_class_that_nobody_registered_here(tmp_path: Path) -> None:
    """The error names it."""
    x = torch.randn(4, 8, device=NPU)
    compiled = torch.compile(in_layer, backend="npugraph_ex", fullgraph=True).aot_compile(((x, LayerName("abc")), {}))
    compiled.save_compiled_function(str(tmp_path / "saved"))
    with (tmp_path / "saved").open("rb") as file, pytest.MonkeyPatch.context() as patch:
        patch.delattr(sys.modules[__name__], "LayerName")
        with pytest.raises(SavedGraphError, match=r"LayerName of opaque objects, which is not registered"):
            torch.compiler.load_compiled_function(file)
