"""The calls that vLLM-Ascend makes, in its order (`client.py`), and what must come of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import block
import client
import pytest
import torch
from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation
from torch._subclasses.fake_tensor import FakeTensorMode

from npugraph_ex.errors import SavedGraphError

FOLDER = str(Path(__file__).parent)

LOADING = f"""
import sys
sys.path.insert(0, {FOLDER!r})
import npu_emulator
npu_emulator.activate(quiet=True)
from pathlib import Path
import block, client
from npugraph_ex.integrations.vllm.compiler import NpuGraphExCompiler
model = block.block()
names = {{names!r}}
block.check(model, client.load_graph(Path({{literal!r}})), names)
compiled = block.Compiled(model, lambda graph, inputs: NpuGraphExCompiler().load({{handle!r}}, graph, inputs))
from npugraph_ex.report.graphs import graphs_so_far
answer = graphs_so_far()
"""

SYMBOLS = (
    ("npugraph_ex", "CompilerConfig"),
    ("npugraph_ex", "get_npu_backend"),
    ("npugraph_ex", "register_replacement"),
    ("npugraph_ex.configs.compiler_config", "_process_kwargs_options"),
    ("npugraph_ex.core._concrete_graph", "ValuePack"),
    ("npugraph_ex.core._concrete_graph", "_is_symlist"),
    ("npugraph_ex.npu_fx_compiler", "_CompiledFxArtifacts"),
    ("npugraph_ex.npu_fx_compiler", "_CompiledFxGraph"),
    ("npugraph_ex.npu_fx_compiler", "_CompiledFxGraph.get_code"),
    ("npugraph_ex.npu_fx_compiler", "_CompiledFxGraph.load_artifacts"),
    ("npugraph_ex.npu_fx_compiler", "_NpuFxCompiler"),
    ("npugraph_ex.npu_fx_compiler", "_NpuFxCompiler._get_compiled_gm"),
    ("npugraph_ex.npu_fx_compiler", "_NpuGraphConverter"),
    ("npugraph_ex.npu_fx_compiler", "_NpuGraphConverter._unpack_npu"),
    ("npugraph_ex.npu_fx_compiler", "_optimize_fx"),
    ("npugraph_ex.npu_fx_compiler", "_unpack_meta"),
    ("npugraph_ex.npu_fx_compiler", "_unpack_meta_list"),
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[block.Block, block.Compiled, Path]:
    """The block, compiled and saved by the client after its patches and reloads."""
    path = tmp_path_factory.mktemp("client") / "graph"
    model = block.block()
    with client.patched():
        return model, block.Compiled(model, lambda graph, given: client.compile_graph(graph, given, path)), path


@pytest.mark.slow
def test_the_client_compiles_after_its_patches_and_reloads(saved: tuple[block.Block, block.Compiled, Path]) -> None:
    """Symbolic batch, a cache written in place, passes only: results and the cache are as in eager mode."""
    model, compiled, _ = saved
    block.check(model, compiled.function, compiled.names)


def test_the_saved_code_is_text_that_loads(saved: tuple[block.Block, block.Compiled, Path]) -> None:
    """`get_code()` is a str; loaded in the same process it computes the same for other batches, and saves alike."""
    model, compiled, path = saved
    loaded = client.load_graph(path)
    block.check(model, loaded, compiled.names)
    assert loaded.get_code() == path.read_text()


def test_saved_here_and_loaded_in_a_fresh_process(
    saved: tuple[block.Block, block.Compiled, Path], ask: Callable[..., Any], tmp_path: Path
) -> None:
    """Both roads, the client's own and the compiler object, give equal values in a process that compiles nothing."""
    from npugraph_ex.integrations.vllm.compiler import NpuGraphExCompiler

    model, compiled, path = saved
    compiler = NpuGraphExCompiler()
    compiler.initialize_cache(str(tmp_path))
    handles: list[Any] = []

    def compile_one(graph: fx.GraphModule, given: list[Any]) -> Callable[..., Any]:
        function, handle = compiler.compile(graph, given, {}, None, "range_0")
        handles.append(handle)
        return function

    block.check(model, block.Compiled(model, compile_one).function, compiled.names)
    program = LOADING.format(names=compiled.names, literal=str(path), handle=handles[0])
    assert ask(program) == 0, "the fresh process ran the passes"


def test_a_loaded_graph_refuses_other_inputs(saved: tuple[block.Block, block.Compiled, Path]) -> None:
    """Another dtype, another width, or sizes that contradict each other: refused with the input's name, never broadcast."""
    model, compiled, path = saved
    loaded = client.load_graph(path)
    cases = {
        "L_residual_": lambda given: given[compiled.names.index("L_residual_")].float(),
        "L_x_": lambda given: given[compiled.names.index("L_x_")][:, :1],
        "L_cache_": lambda given: given[compiled.names.index("L_cache_")].t().contiguous(),
    }
    for name, change in cases.items():
        given = block.bind(compiled.names, model, block.inputs(4))
        given[compiled.names.index(name)] = change(given)
        with pytest.raises(SavedGraphError, match=name.strip("L_")):
            loaded(*given)
    given = block.bind(compiled.names, model, block.inputs(4))
    given[compiled.names.index("L_residual_")] = given[compiled.names.index("L_residual_")][:1]
    with pytest.raises(SavedGraphError, match=r"size\(\)\[0\]"):
        loaded(*given)


@pytest.mark.parametrize(
    "damage", [lambda text: text[:-9], lambda text: text.replace("32", "33", 1), lambda _: "import os"]
)
def test_damaged_code_is_refused(
    saved: tuple[block.Block, block.Compiled, Path], damage: Callable[[str], str], tmp_path: Path
) -> None:
    """Cut off, changed, or somebody else's: an error of this library, and nothing of it runs."""
    path = tmp_path / "graph"
    path.write_text(damage(saved[2].read_text()))
    with pytest.raises(SavedGraphError):
        client.load_graph(path)


def test_the_hook_on_the_passes_sees_the_optimised_graph() -> None:
    """`_optimize_fx`, replaced on the module, is called once with the graph, which it finds rewritten in place."""
    seen: list[fx.GraphModule] = []

    def model(x: torch.Tensor, residual: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, ...]:
        quantised, scale = torch.ops.npu.npu_dynamic_quant(
            torch.ops.npu.npu_add_rms_norm(x, residual, cache[0], 1e-6)[0]
        )
        return quantised, scale

    block.Compiled(model, lambda graph, given: client.compile_graph(graph, given, None, look=seen.append))  # type: ignore[arg-type]
    (gm,) = seen
    targets = [node.target for node in gm.graph.nodes]
    assert torch.ops.npu.npu_add_rms_norm_dynamic_quant.default in targets
    assert torch.ops.npu.npu_dynamic_quant.default not in targets


def test_inputs_of_another_fake_mode_than_the_one_in_force() -> None:
    """Under an outer fake mode the backend takes inputs of its own mode and of another, and the result runs on real ones."""
    import npugraph_ex as nge

    def double(x: torch.Tensor) -> tuple[torch.Tensor]:
        return (x * 2,)

    graph = fx.symbolic_trace(double)
    config = nge.CompilerConfig()
    config.force_eager = True
    backend = nge.get_npu_backend(compiler_config=config)
    x = torch.randn(3, device="npu")
    inner, outer = FakeTensorMode(), FakeTensorMode()
    with torch.no_grad():
        with outer:
            functions = [backend(graph, [inner.from_tensor(x)]), backend(graph, [torch.empty(3, device="npu")])]
        for function in functions:
            assert torch.equal(function(x)[0].cpu(), (x * 2).cpu())


class _Kernel:
    """Stands for a Triton kernel: torch launches it by ``kernel[grid](*arguments)``."""

    arg_names = ("x", "out", "factor")

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(x: torch.Tensor, out: torch.Tensor, factor: int) -> None:
            out.copy_(x * factor)

        return launch


@pytest.mark.filterwarnings("ignore")  # torch warns that it cannot look into a kernel without Triton
@pytest.mark.parametrize("force_eager", [True, False])
def test_dict_valued_arguments(force_eager: bool, tmp_path: Path) -> None:
    """A Triton wrapper, whose tensors lie in a dict, compiles and captures; its code, which only this process has, is not saved."""
    import npugraph_ex as nge

    kernel = kernel_side_table.add_kernel(_Kernel())  # type: ignore[arg-type]
    constants = kernel_side_table.add_constant_args({"factor": 3})
    graph = fx.Graph()
    x = graph.placeholder("x")
    out = graph.call_function(torch.empty_like, (x,))
    where = {"kernel_idx": kernel, "constant_args_idx": constants, "grid": [(1, 1, 1)], "tma_descriptor_metadata": {}}
    graph.call_function(triton_kernel_wrapper_mutation, (), {**where, "kwargs": {"x": x, "out": out}})
    graph.output((graph.call_function(torch.add, (out, 1)),))
    made: list[Any] = []
    config = nge.CompilerConfig()
    config.force_eager = force_eager
    with torch.no_grad():
        backend = nge.get_npu_backend(compiler_config=config, on_compiled=made.append)
        function = backend(fx.GraphModule({}, graph), [FakeTensorMode().from_tensor(torch.randn(4, device="npu"))])
        for _ in range(3):
            value = torch.randn(4, device="npu")
            assert torch.equal(function(value)[0].cpu(), (value * 3 + 1).cpu())
    assert made[0].get_code() is None


def test_value_packs_take_dicts_without_the_patch() -> None:
    """The client's own test of its patch holds without the patch."""
    client.check_value_packs()


def _turned(x: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.neg(x))


def _play(path: Path, look: Callable[..., None] | None = None) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Every call of the client, on a graph of two operators that its fusion joins: what it compiled, and what it loaded."""
    client.check_value_packs()
    with client.patched(), client.register_fusion():
        graph = fx.symbolic_trace(_turned)
        return client.compile_graph(graph, [torch.ones(2, device="npu")], path, look=look), client.load_graph(path)


def test_the_client_plays_through(tmp_path: Path) -> None:
    """The short play that the next test breaks works when nothing is broken: fused once, and equal values both times."""
    seen: list[fx.GraphModule] = []
    x = torch.tensor([1.0, -2.0], device="npu")
    with torch.no_grad():
        compiled, loaded = _play(tmp_path / "graph", seen.append)
        assert [compiled(x).tolist(), loaded(x)[0].tolist()] == [[0, 2], [0, 2]]
    assert [node.target for node in seen[0].graph.nodes if node.op == "call_function"] == [
        torch.ops.aten.neg.default,
        torch.ops.aten.clamp.default,
    ]


@pytest.mark.parametrize(("module", "name"), SYMBOLS, ids=[name for _, name in SYMBOLS])
def test_a_renamed_symbol_fails_the_client(
    module: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each name of the contract is really used: without it the client fails."""
    owner: Any = importlib.import_module(module)
    *parts, last = name.split(".")
    for part in parts:
        owner = getattr(owner, part)
    monkeypatch.delattr(owner, last)
    if module == "npugraph_ex":
        monkeypatch.setitem(owner._names.home_of, last, "npugraph_ex.errors")
    elif not parts:
        # A reload would bring a re-exported name back; a renamed one it would not find.
        monkeypatch.setattr(importlib, "reload", lambda module: module)
    with pytest.raises((AttributeError, ImportError)), torch.no_grad():
        _play(tmp_path / "graph")
