"""What vLLM-Ascend does with this library, call by call and in its order, without vLLM.

Every name of the library that the client uses is used here in the way in which the client uses it: imports inside
functions, attributes of modules and classes looked up late, methods replaced on classes. Nothing else of the library is.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._inductor.compile_fx import graph_returns_tuple, make_graph_return_tuple
from torch._inductor.pattern_matcher import Match


def patch_value_packs() -> type:
    """At worker start: a class of the client's own in the place of `ValuePack`, and a reload so that it is seen."""
    import npugraph_ex as nge
    from npugraph_ex.core._concrete_graph import _is_symlist
    from npugraph_ex.npu_fx_compiler import _unpack_meta_list

    class ValuePack:
        def __init__(self, meta: Any, npu_meta: Any = None) -> None:
            self.meta = meta
            self.npu = meta if npu_meta is None else npu_meta

    def unpack_meta(args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        def part(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: item.meta if isinstance(item, ValuePack) else item for key, item in value.items()}
            if isinstance(value, (list, tuple)):
                return _unpack_meta_list(value)
            return value.meta if isinstance(value, ValuePack) else value

        return [part(value) for value in args], {key: part(value) for key, value in kwargs.items()}

    def unpack_npu(self: Any, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
        def part(value: Any) -> Any:
            if isinstance(value, (list, tuple)) and _is_symlist(value):
                return self._graph.parse_symlist(value)
            return value.npu if isinstance(value, ValuePack) else value

        return [part(value) for value in args], {key: part(value) for key, value in kwargs.items()}

    nge.core._concrete_graph.ValuePack = ValuePack
    importlib.reload(sys.modules["npugraph_ex.npu_fx_compiler"])
    nge.npu_fx_compiler._unpack_meta = unpack_meta
    assert callable(nge.npu_fx_compiler._NpuGraphConverter._unpack_npu)
    nge.npu_fx_compiler._NpuGraphConverter._unpack_npu = unpack_npu
    return ValuePack


@contextmanager
def patched() -> Iterator[type]:
    """The patch, and afterwards what no client does: leave the process as it was, for the next test."""
    from npugraph_ex import npu_fx_compiler
    from npugraph_ex.core import _concrete_graph
    from npugraph_ex.integrations import value_packs

    unpack_npu = value_packs.Converter._unpack_npu
    before = [(module, dict(vars(module))) for module in (npu_fx_compiler, _concrete_graph)]
    try:
        yield patch_value_packs()
    finally:
        value_packs.Converter._unpack_npu = unpack_npu
        for module, names in before:
            vars(module).clear()
            vars(module).update(names)


def check_value_packs() -> None:
    """The client's own test of its patch: dicts are taken apart, positional and by keyword."""
    from npugraph_ex.core._concrete_graph import ValuePack
    from npugraph_ex.npu_fx_compiler import _NpuGraphConverter, _unpack_meta

    pack = ValuePack(meta={"value": "meta"}, npu_meta={"value": "npu"})
    assert pack["value"] == "meta"
    assert _unpack_meta(({"input": pack},), {"keyword": pack}) == ([{"input": pack.meta}], {"keyword": pack.meta})
    unpacked = _NpuGraphConverter._unpack_npu(object(), ({"input": pack},), {"keyword": pack})
    assert unpacked == ([{"input": pack.npu}], {"keyword": pack.npu})


def register_fusion() -> Any:
    """The client registers its fusions in this way: by keyword, with a list of real tensors, and a check of streams."""
    import npugraph_ex as nge

    def search(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.neg(x))

    def replace(x: torch.Tensor) -> torch.Tensor:
        return torch.clamp(torch.neg(x), min=0)

    def check(match: Match) -> bool:
        return len({node.meta.get("stream_label") for node in match.nodes if node.op == "call_function"}) == 1

    example = [torch.randn(2, 4, device="npu")]
    return nge.register_replacement(search_fn=search, replace_fn=replace, example_inputs=example, extra_check=check)


def compile_graph(
    graph: fx.GraphModule, example_inputs: list[Any], path: Path | None, *, look: Callable[..., None] | None = None
) -> Callable[..., Any]:
    """Compile one Dynamo graph and save its code, by replacing the method that makes it meanwhile."""
    graph = copy.deepcopy(graph)
    mode = detect_fake_mode()
    if mode is not None:
        example_inputs = [
            mode.from_tensor(value)
            if isinstance(value, torch.Tensor) and hasattr(value, "fake_mode") and value.fake_mode is not mode
            else value
            for value in example_inputs
        ]
    import npugraph_ex as nge

    torch.npu.set_compile_mode(jit_compile=False)
    config = nge.CompilerConfig()
    from npugraph_ex.configs.compiler_config import _process_kwargs_options

    options = {"force_eager": True, "inplace_pass": False, "clone_input": False, "clone_output": False}
    _process_kwargs_options(config, {"options": options})
    import npugraph_ex.npu_fx_compiler as nfx

    original = nfx._NpuFxCompiler._get_compiled_gm
    original_passes = nge.npu_fx_compiler._optimize_fx

    def saving(self: Any, gm: fx.GraphModule, inputs: Any) -> Any:
        compiled = original(self, gm, inputs)
        if path is not None:
            code = compiled.get_code()
            if code and "triton_kernel_wrapper" not in code:
                path.write_text(code)
        return compiled

    def looking(gm: fx.GraphModule, example_inputs: Any = None, config: Any = None) -> Any:
        result = original_passes(gm, example_inputs, config)
        if look is not None:
            look(copy.deepcopy(gm))
        return result

    nfx._NpuFxCompiler._get_compiled_gm = saving
    nge.npu_fx_compiler._optimize_fx = looking
    try:
        backend = nge.get_npu_backend(compiler_config=config)
        if graph_returns_tuple(graph):
            return backend(graph, example_inputs)
        return make_graph_return_tuple(graph, example_inputs, backend)
    finally:
        nfx._NpuFxCompiler._get_compiled_gm = original
        nge.npu_fx_compiler._optimize_fx = original_passes


def load_graph(path: Path) -> Callable[..., Any]:
    """Make a saved graph callable, as a fresh process does."""
    from npugraph_ex.npu_fx_compiler import _CompiledFxArtifacts, _CompiledFxGraph

    artifacts = _CompiledFxArtifacts()
    artifacts.py_code = path.read_text()
    return _CompiledFxGraph.load_artifacts(artifacts)
