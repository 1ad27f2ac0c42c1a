"""What the library's doors say to arguments of the wrong kind, and the graphs that they take besides AOT's."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_helpers import random
from torch.fx.experimental.proxy_tensor import make_fx

import npugraph_ex
from npugraph_ex.config import Options, variables
from npugraph_ex.errors import NpuGraphExError, OptionError


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: npugraph_ex.get_npu_backend(compiler_config=3), "compiler_config takes a CompilerConfig, got 3"),
        (lambda: npugraph_ex.get_npu_backend(compiler_config={"force_eager": True}), "by flat name"),
        (lambda: npugraph_ex.get_npu_backend(custom_decompositions=3), "takes a dict of operator overloads"),
        (lambda: npugraph_ex.get_compiler(3), "compiler_config takes a CompilerConfig, got 3"),
        (lambda: npugraph_ex.compile_fx(torch.relu, [random(3)]), "torch.compile"),
        (lambda: npugraph_ex.explain(3, random(3)), "a module or function"),
        (lambda: npugraph_ex.explain(torch.relu, random(3), calls="2"), "an int >= 1, got '2'"),
        (lambda: npugraph_ex.inference.cache_compile(torch.nn.ReLU().forward, config=3), "got 3"),
    ],
)
def test_arguments_of_the_wrong_kind(call: Callable[[], object], said: str) -> None:
    """Each is an error of the library's own that says what is taken and what came."""
    with pytest.raises(NpuGraphExError, match=said):
        call()


@pytest.mark.parametrize("pool", [(99, 99), (0, 0), (-1, 0), (0, 1, 2)])
def test_what_is_no_pool(pool: tuple[int, ...]) -> None:
    """A pair that the device would refuse at capture is refused as an option."""
    with pytest.raises(OptionError, match="graph_pool_handle"):
        Options.from_mapping({"use_graph_pool": pool})
    assert Options.from_mapping({"use_graph_pool": torch.npu.graph_pool_handle()}).use_graph_pool


def test_a_rule_that_does_not_exist() -> None:
    """A near name is suggested; without one, all names are listed."""
    for name, suggested in (("nope", False), ("qk_norm_rop", True)):
        with pytest.raises(Exception, match=r"no rule has that name.*qk_norm_rope") as error:
            torch.compile(torch.relu, backend="npugraph_ex", options={"fusion_rules": {name: True}})(random(3))
        assert ("did you mean" in str(error.value)) is suggested


def test_a_mode_of_torch_compile() -> None:
    """A mode that the option has is repeated as the option; of another one the legal values are named."""
    for mode, said in (("max-autotune", "{'mode': 'max-autotune'}"), ("max-autotun", "one of 'npugraph_ex' or")):
        with pytest.raises(Exception, match=re.escape(said)):
            torch.compile(torch.relu, backend="npugraph_ex", mode=mode)(random(3))


def test_a_mistyped_variable(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """It is named once, with the name that was meant; ours are not."""
    monkeypatch.setenv("NPUGRAPH_EX_CAHCE", "/nowhere")
    monkeypatch.setenv("NPUGRAPH_EX_CACHE", "/nowhere")
    variables.warn_of_unknown.cache_clear()
    for _ in range(2):
        npugraph_ex.get_compiler()
    (record,) = [record for record in caplog.records if record.name.startswith("npugraph_ex")]
    assert record.levelname == "WARNING"
    assert record.args == ("NPUGRAPH_EX_CAHCE", "; did you mean NPUGRAPH_EX_CACHE?")


@pytest.mark.parametrize("options", [{}, {"force_eager": True}])
def test_a_graph_that_returns_one_tensor(options: dict[str, Any]) -> None:
    """`make_fx` gives a graph without a list around its one output; the compiled function returns a list of it."""
    gm = make_fx(lambda x: x + 1, tracing_mode="fake")(random(4))
    graph = npugraph_ex.compile_fx(gm, options=options)
    kept = [(x, graph(x)) for x in (random(4), random(4), random(4))]
    for x, results in kept:
        (result,) = results
        torch.testing.assert_close(result.cpu(), x.cpu() + 1)


def test_a_graph_that_returns_something_nested() -> None:
    """What would come out flat or not at all is refused."""
    gm = make_fx(lambda x: {"a": x + 1}, tracing_mode="fake")(random(4))
    with pytest.raises(NpuGraphExError, match="one flat list"):
        npugraph_ex.compile_fx(gm)
