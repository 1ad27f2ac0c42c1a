"""The import path by which vLLM-Ascend reaches the compiler; re-exports only, so that `importlib.reload` changes nothing.

Two names are hooks, looked up at each compilation: `_NpuFxCompiler._get_compiled_gm` on the class, `_optimize_fx` here.
"""

from npugraph_ex.frontend.entry.backend import compile_fx, get_compiler, get_npu_backend
from npugraph_ex.frontend.entry.compiler import CompiledFxArtifacts as _CompiledFxArtifacts
from npugraph_ex.frontend.entry.compiler import CompiledFxGraph as _CompiledFxGraph
from npugraph_ex.frontend.entry.compiler import NpuFxCompiler as _NpuFxCompiler
from npugraph_ex.frontend.entry.compiler import optimise as _optimize_fx
from npugraph_ex.integrations.value_packs import Converter as _NpuGraphConverter
from npugraph_ex.integrations.value_packs import unpack_meta as _unpack_meta
from npugraph_ex.integrations.value_packs import unpack_meta_list as _unpack_meta_list

__all__ = [
    "_CompiledFxArtifacts",
    "_CompiledFxGraph",
    "_NpuFxCompiler",
    "_NpuGraphConverter",
    "_optimize_fx",
    "_unpack_meta",
    "_unpack_meta_list",
    "compile_fx",
    "get_compiler",
    "get_npu_backend",
]
