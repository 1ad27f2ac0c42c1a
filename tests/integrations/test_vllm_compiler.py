"""The compiler object that vLLM calls, and the configuration that its users write."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import block
import pytest
import torch
from torch import fx

import npugraph_ex_autoload
from npugraph_ex import cache_key, register_replacement
from npugraph_ex.errors import OptionError, SavedGraphError
from npugraph_ex.integrations.vllm import VllmSettings
from npugraph_ex.integrations.vllm.compiler import NpuGraphExCompiler
from npugraph_ex.integrations.vllm.config import captured_batch_sizes
from npugraph_ex.report.graphs import graphs_so_far
from npugraph_ex_conformance.stand_in_cann import StandInCann, end_of_process


def _vllm_config(additional: Any = None, **speculative: int) -> Any:
    return SimpleNamespace(
        additional_config=additional,
        speculative_config=SimpleNamespace(**speculative) if speculative else None,
        scheduler_config=SimpleNamespace(max_num_seqs=4),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4, 8, 16]),
    )


@pytest.mark.parametrize(
    ("additional", "enable", "static"),
    [
        (None, True, False),
        ({}, True, False),
        ({"npugraph_ex_config": {}}, False, False),
        ({"npugraph_ex_config": {"enable": True, "enable_static_kernel": False}}, True, False),
        ({"npugraph_ex_config": {"enable": True, "enable_static_kernel": True, "fuse_norm_quant": True}}, True, True),
        ({"ascend_compilation_config": {}}, True, False),
        ({"ascend_compilation_config": {"enable_npugraph_ex": False}}, False, False),
        ({"ascend_compilation_config": {"enable_static_kernel": True, "fuse_muls_add": False}}, True, True),
        ({"ascend_compilation_config": {}, "npugraph_ex_config": {"enable": False}}, True, False),
    ],
)
def test_both_ages_of_the_configuration(additional: Any, enable: bool, static: bool) -> None:
    """Each age has its own default, the newer counts where both are given, and the client's other keys are left alone."""
    assert VllmSettings.of(additional) == VllmSettings(enable, static)


@pytest.mark.parametrize(
    ("additional", "said"),
    [
        ({"npugraph_ex_config": {"enabled": True}}, "did you mean 'enable'"),
        ({"npugraph_ex_config": {"enable": 1}}, "takes True or False, got 1"),
        ({"npugraph_ex_config": True}, "takes a dict, got True"),
        ({"ascend_compilation_config": {"enable_npugraph_ex": "yes"}}, "takes True or False, got 'yes'"),
    ],
)
def test_a_wrong_configuration_is_named(additional: Any, said: str) -> None:
    """The message names the key, what is allowed and what came."""
    with pytest.raises(OptionError, match=said):
        VllmSettings.of(additional)


def test_batch_sizes_of_decoding() -> None:
    """Static kernels are for the sizes of pure decoding: as many tokens a sequence as are speculated, and one."""
    assert captured_batch_sizes(_vllm_config()) == [1, 2, 4]
    assert captured_batch_sizes(_vllm_config(num_speculative_tokens=1)) == [2, 4, 8]


def test_the_hash_tells_configurations_apart() -> None:
    """`compute_hash` is stable, short text that differs when the options or the registered rules do."""

    def search(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.neg(x))

    def replace(x: torch.Tensor) -> torch.Tensor:
        return torch.clamp(torch.neg(x), min=0)

    enabled = _vllm_config({"ascend_compilation_config": {"enable_npugraph_ex": True}})
    disabled = _vllm_config({"ascend_compilation_config": {"enable_npugraph_ex": False}})
    plain = NpuGraphExCompiler().compute_hash(enabled)
    assert plain == NpuGraphExCompiler().compute_hash(enabled)
    assert plain == cache_key(VllmSettings().options())[:16]
    assert plain != NpuGraphExCompiler().compute_hash(disabled)
    with register_replacement(search, replace, [torch.ones(2, device="npu")]):
        assert plain != NpuGraphExCompiler().compute_hash(enabled)
    assert plain == NpuGraphExCompiler().compute_hash(enabled)


def _dictionary(x: torch.Tensor, residual: torch.Tensor, cache: torch.Tensor) -> dict[str, Any]:
    return {"sum": x + residual, "parts": [cache[: x.shape[0]] * 2, x.shape[0]]}


def _alone(x: torch.Tensor, residual: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    return (x + residual) * cache[0]


def _piece(model: Callable[..., Any]) -> tuple[fx.GraphModule, list[Any]]:
    """A graph such as vLLM cuts out: it returns what the model returns, not a tuple."""
    graph = fx.symbolic_trace(model)
    return graph, block.inputs(4)


@pytest.fixture
def compiler(tmp_path: Path) -> NpuGraphExCompiler:
    """A compiler that saves below the test's folder."""
    made = NpuGraphExCompiler()
    made.compute_hash(_vllm_config())
    made.initialize_cache(str(tmp_path), prefix="backbone")
    return made


@pytest.mark.parametrize("model", [_alone, _dictionary], ids=["tensor", "dictionary"])
def test_results_keep_their_form(model: Callable[..., Any], compiler: NpuGraphExCompiler, tmp_path: Path) -> None:
    """A graph that returns one tensor, or tensors and sizes in a dictionary, does so compiled and loaded; inputs stay."""
    graph, given = _piece(model)
    with torch.no_grad():
        function, handle = compiler.compile(graph, given, {}, None, "piece")
        assert handle == ("piece", str(tmp_path / "backbone" / "piece"))
        for call in (function, compiler.load(handle, graph, given, 0, None)):
            want, have = model(*given), call(*given)
            flat, form = torch.utils._pytree.tree_flatten(have)
            expected, expected_form = torch.utils._pytree.tree_flatten(want)
            assert form == expected_form
            for one, other in zip(flat, expected, strict=True):
                assert torch.equal(one.cpu(), other.cpu()) if isinstance(one, torch.Tensor) else one == other
            with pytest.raises(SavedGraphError, match="by itself"):  # what vLLM asks for to save a whole model
                call.serialize()


@pytest.mark.slow
def test_static_kernels_for_the_sizes_of_decoding(cann: StandInCann, tmp_path: Path) -> None:
    """`enable_static_kernel`: kernels for the batch sizes that the engine captures, compiled by one process for all."""
    made = NpuGraphExCompiler()
    made.compute_hash(_vllm_config({"ascend_compilation_config": {"enable_static_kernel": True}}))
    made.initialize_cache(str(tmp_path))
    found: list[tuple[fx.GraphModule, Any, Any]] = []

    def backend(graph: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        function, handle = made.compile(graph, given, {}, None, "piece")
        found.append((graph, given, handle))
        return function

    def check(function: Callable[..., Any]) -> None:
        for size in (3, 2, 4, 2):  # 3 is no size that is captured
            x = torch.randn(size, 5, device="npu")
            assert torch.equal(function(x).cpu(), torch.relu(x * 2 + x).cpu())
        assert [{shapes[0][0] for _, shapes in compiled} for compiled in cann.compiled()] == [{2}, {4}]

    torch.compiler.reset()
    with torch.no_grad():
        check(torch.compile(lambda x: torch.relu(x * 2 + x), backend=backend, dynamic=True))
        end_of_process()
        ((graph, given, handle),) = found
        loaded = made.load(handle, graph, given, 0, None)
        sizes = [name for name, value in enumerate(given) if not isinstance(value, torch.Tensor)]
        check(lambda x: loaded(*x.shape[: len(sizes)], x)[0])
    assert len(cann.installs()) == 4


def test_a_damaged_or_missing_file_is_compiled_anew(compiler: NpuGraphExCompiler, tmp_path: Path) -> None:
    """`load` never trusts what it cannot read: it compiles, and the file is right again."""
    graph, given = _piece(_alone)
    with torch.no_grad():
        _, handle = compiler.compile(graph, given, {}, None, "piece")
        assert handle is not None
        path = Path(handle[1])
        whole = path.read_text()
        for spoil in (lambda: path.write_text(whole[:200]), path.unlink, lambda: path.chmod(0o666)):
            spoil()
            function = compiler.load(handle, graph, given, 0, None)
            assert torch.equal(function(*given).cpu(), _alone(*given).cpu())
            assert path.read_text() == whole


def test_nothing_is_saved_when_nobody_asks(tmp_path: Path) -> None:
    """With the cache disabled, or without a key, there is no handle and no file."""
    graph, given = _piece(_alone)
    compiler = NpuGraphExCompiler()
    with torch.no_grad():
        compiler.initialize_cache(str(tmp_path), disable_cache=True)
        assert compiler.compile(graph, given, {}, None, "piece")[1] is None
        compiler.initialize_cache(str(tmp_path))
        assert compiler.compile(graph, given)[1] is None
    assert list(tmp_path.iterdir()) == []


def test_disabled_leaves_the_graph_as_it_is() -> None:
    """With `enable_npugraph_ex: False` vLLM gets its own graph back."""
    graph, given = _piece(_alone)
    compiler = NpuGraphExCompiler()
    compiler.compute_hash(_vllm_config({"ascend_compilation_config": {"enable_npugraph_ex": False}}))
    assert compiler.compile(graph, given, {}, None, "piece") == (graph, None)


def _one_layer(x: torch.Tensor, residual: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    return (x + residual) * cache[0:1] + 1


def _same_layer(hidden: torch.Tensor, before: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return (hidden + before) * keys[0:1] + 1


_OTHERS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "type of a number": (lambda x, r, c: (x + r) * c[0:1] + 1.0, lambda x, r, c: (x, r, c)),
    "slice": (lambda x, r, c: (x + r) * c[1:2] + 1, lambda x, r, c: (x, r, c)),
    "operand": (lambda x, r, c: (r + x) * c[0:1] + 1, lambda x, r, c: (x, r, c)),
    "operator": (lambda x, r, c: (x - r) * c[0:1] + 1, lambda x, r, c: (x, r, c)),
    "form of the results": (lambda x, r, c: [(x + r) * c[0:1] + 1], lambda x, r, c: (x, r, c)),
    "dtype": (_one_layer, lambda x, r, c: (x.double(), r.double(), c.double())),
    "strides": (_one_layer, lambda x, r, c: (x.t().contiguous().t(), r, c)),
    "shared memory": (_one_layer, lambda x, r, c: (r, r.view(x.shape), c)),
    "gradient": (_one_layer, lambda x, r, c: (x.detach().requires_grad_(), r, c)),
}


@pytest.mark.parametrize("other", [None, *_OTHERS])
def test_equal_pieces_are_compiled_once(other: str | None, compiler: NpuGraphExCompiler, tmp_path: Path) -> None:
    """The names of nodes do not count; whatever changes a result or what is compiled does. Equal pieces share a file."""
    graph, given = _piece(_one_layer)
    model, change = (_same_layer, lambda *inputs: inputs) if other is None else _OTHERS[other]
    second, inputs = fx.symbolic_trace(model), [*change(*given)]
    with torch.no_grad():
        _, first = compiler.compile(graph, given, {}, None, "first")
        before = graphs_so_far()
        function, handle = compiler.compile(second, inputs, {}, None, "second")
        assert graphs_so_far() - before == (other is not None)
        assert handle == (first if other is None else ("second", str(tmp_path / "backbone" / "second")))
        for call in (function, compiler.load(handle, second, inputs, 0, None)):
            have, want = call(*inputs), model(*inputs)
            assert type(have) is type(want)
            torch.testing.assert_close(have, want, rtol=0, atol=0)


def test_the_shared_file_is_written_again(compiler: NpuGraphExCompiler) -> None:
    """A piece that ran finds that an operator returns its argument undeclared: the file of all equal pieces says so."""
    library = torch.library.Library("quiet_piece", "DEF")
    library.define("same(Tensor x) -> Tensor")
    library.impl("same", lambda x: x, "PrivateUse1")
    torch.library.register_fake("quiet_piece::same", torch.empty_like, lib=library)

    def model(x: torch.Tensor, residual: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        return torch.ops.quiet_piece.same(x) + residual * cache[0:1]

    graph, given = _piece(model)
    with torch.no_grad():
        compiled = [compiler.compile(graph, given, {}, None, key) for key in ("first", "second")]
        function, handle = compiled[1]
        assert handle is not None
        assert handle == compiled[0][1]
        before = Path(handle[1]).read_text()
        for call in (function, function, compiler.load(handle, graph, given, 0, None)):
            torch.testing.assert_close(call(*given), given[0] + given[1] * given[2][0:1], rtol=0, atol=0)
        assert Path(handle[1]).read_text() != before


def test_the_file_of_a_graph_with_a_lost_write_goes(compiler: NpuGraphExCompiler) -> None:
    """A piece that ran finds that AOT lost a write: it runs as traced, and no process loads what was saved before."""
    library = torch.library.Library("losing_piece", "DEF")
    library.define("same(Tensor x) -> Tensor")
    library.impl("same", lambda x: x, "PrivateUse1")
    torch.library.register_fake("losing_piece::same", torch.empty_like, lib=library)

    def model(x: torch.Tensor, residual: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        y = x - residual
        torch.ops.losing_piece.same(y).add_(2)
        return y * cache[0:1]

    graph, given = _piece(model)
    with torch.no_grad():
        function, handle = compiler.compile(graph, given, {}, None, "lost")
        assert handle is not None
        assert Path(handle[1]).exists()
        for _ in range(2):
            meant = (given[0] - given[1] + 2) * given[2][0:1]
            torch.testing.assert_close(function(*given), meant, rtol=0, atol=0)
        assert not Path(handle[1]).exists()


@pytest.mark.parametrize(
    ("plugins", "chosen"),
    [(None, False), ("npugraph_ex,ascend_model", True), ("npugraph_ex,ascend", False), ("ascend_model", False)],
)
def test_the_platform_is_chosen_by_the_list_of_plugins(
    monkeypatch: pytest.MonkeyPatch, plugins: str | None, chosen: bool
) -> None:
    """The engine refuses two platforms, so this library's is none unless the list names it and not the client's."""
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("VLLM_PLUGINS", plugins)
    assert (npugraph_ex_autoload.vllm_platform() is not None) == chosen
    monkeypatch.setenv("NPUGRAPH_EX", "bundled")
    assert npugraph_ex_autoload.vllm_platform() is None


@pytest.mark.parametrize(
    ("pieces", "additional", "enabled"),
    [
        (True, {}, True),
        (True, {"npugraph_ex_config": {"enable": False}}, False),
        (True, {"ascend_compilation_config": {"enable_npugraph_ex": False}}, False),
        (False, {}, False),
    ],
)
def test_the_platform_keeps_the_library_on_for_pieces(
    monkeypatch: pytest.MonkeyPatch, pieces: bool, additional: dict[str, Any], enabled: bool
) -> None:
    """The client switches this library off; the platform puts back what the user asked for, in modes with pieces alone."""

    class Client:
        @classmethod
        def check_and_update_config(cls, vllm_config: Any) -> None:
            section = vllm_config.additional_config.setdefault("ascend_compilation_config", {})
            section["enable_npugraph_ex"] = False

    monkeypatch.setitem(sys.modules, "vllm_ascend", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm_ascend.platform", SimpleNamespace(NPUPlatform=Client))
    monkeypatch.setenv("VLLM_PLUGINS", "npugraph_ex")
    name, _, platform = str(npugraph_ex_autoload.vllm_platform()).rpartition(".")
    monkeypatch.delitem(sys.modules, name, raising=False)
    chosen = getattr(importlib.import_module(name), platform)
    monkeypatch.delitem(sys.modules, name)  # made from the stand-in
    mode = SimpleNamespace(requires_piecewise_compilation=lambda: pieces)
    config = SimpleNamespace(additional_config=additional, compilation_config=SimpleNamespace(cudagraph_mode=mode))
    chosen.check_and_update_config(config)
    assert VllmSettings.of(config.additional_config).enable == enabled
    assert chosen.get_compile_backend() == f"{NpuGraphExCompiler.__module__}.{NpuGraphExCompiler.__qualname__}"
