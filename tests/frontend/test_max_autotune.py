"""Mode "max-autotune": handed to TorchAir where CANN could run it, and otherwise one clear error."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from npugraph_ex import CompilerConfig, get_compiler, get_npu_backend
from npugraph_ex.compat import torchair as ours
from npugraph_ex.errors import OptionNotAvailableError, OptionValueError


class _Section(SimpleNamespace):
    """A branch of TorchAir's configuration: any attribute may be asked for and set."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        setattr(self, name, _Section())
        return getattr(self, name)


@pytest.fixture
def torchair(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """A machine with CANN, an NPU and TorchAir, as far as this library can tell."""
    module = ModuleType("torchair")
    module.CompilerConfig = _Section  # type: ignore[attr-defined]

    def backend(*, compiler_config: Any, custom_decompositions: Any) -> Any:
        module.given = compiler_config, custom_decompositions  # type: ignore[attr-defined]
        return lambda gm, _: gm.forward

    module.get_npu_backend = backend  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torchair", module)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    monkeypatch.setattr(torch.npu, "get_device_name", lambda *_: "Ascend910B3")
    return module


def _config() -> CompilerConfig:
    config = CompilerConfig()
    config.mode = "max-autotune"
    return config


def test_it_is_handed_over_with_its_settings(torchair: Any) -> None:
    """TorchAir's backend compiles Dynamo's graph; shared options, GE's own and inverted ones arrive in TorchAir's sense."""
    config = _config()
    config.inplace_pass = False
    config.debug.graph_dump.type = "pbtxt"
    config.ge_config.optimization_switch = "AutomaticUbFusion:off"
    decompositions = {torch.ops.aten.add.Tensor: torch.add}
    backend = get_npu_backend(compiler_config=config, custom_decompositions=decompositions)
    x = torch.ones(3, device="npu")
    assert torch.equal(torch.compile(lambda x: x * 2, backend=backend)(x).cpu(), torch.full((3,), 2.0))
    theirs, given = torchair.given
    assert theirs.mode == "max-autotune"
    assert theirs.debug.aclgraph.disable_reinplace_inplaceable_ops_pass is True
    assert theirs.debug.graph_dump.type == "pbtxt"
    assert theirs.ge_config.optimization_switch == "AutomaticUbFusion:off"
    assert given == decompositions


def test_a_mode_set_later_counts(torchair: Any) -> None:
    """The configuration is read at each compilation, this option too."""
    config = CompilerConfig()
    backend = get_npu_backend(compiler_config=config)
    config.mode = "max-autotune"
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2, device="npu"))
    assert torchair.given[0].mode == "max-autotune"


def test_an_option_that_torchair_does_not_have(torchair: Any) -> None:
    """What only this backend does is refused, not dropped on the way."""
    config = _config()
    config.check_numerics = True
    with pytest.raises(OptionValueError, match="'check_numerics' is this backend's own"):
        get_npu_backend(compiler_config=config)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda patch: patch.setenv("ASCEND_HOME_PATH", "/nowhere"), "CANN is not installed"),
        (lambda patch: patch.setattr(torch.npu, "is_available", lambda: False), "there is no NPU"),
        (lambda patch: patch.setattr(torch.npu, "get_device_name", lambda: "X (emulated)"), "the device is emulated"),
        (lambda patch: patch.setitem(sys.modules, "torchair", ours), "means this library"),
        (lambda patch: patch.setitem(sys.modules, "torchair", None), "torchair cannot be imported"),
    ],
)
def test_where_it_cannot_run(spoil: Any, said: str, torchair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence that says why and what to do, when a graph is compiled: SGLang makes backends that nothing uses."""
    spoil(monkeypatch)
    with pytest.raises(OptionNotAvailableError, match=f"max-autotune.*{said}.*Leave the mode out"):
        get_npu_backend(compiler_config=_config())(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(1)])


def test_an_aot_graph_is_none_for_it() -> None:
    """`get_compiler` takes AOT graphs, and GE wants Dynamo's: refused by name."""
    with pytest.raises(OptionValueError, match="through get_npu_backend"):
        get_compiler(_config())(torch.fx.symbolic_trace(torch.nn.ReLU()), [torch.ones(1)])
