"""Every part of torch_npu that the library calls, and what proves that a device's wheel has it: for a page and for its test.

The emulator runs torch_npu's own wheel. But a name that works there may come from the emulator alone, so each name stands in a file
of the wheel that defines it or uses it itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import torch

from npugraph_ex.versions.difference import differences

LIBRARY = Path(__file__).parent.parent / "npugraph_ex"
_GRAPHS, _STREAMS, _UTILS, _CONFIG = "npu/graphs.py", "npu/streams.py", "npu/utils.py", "npu/npu_config.py"

PROOFS = {
    **dict.fromkeys(
        ("torch.npu.NPUGraph", "torch.npu.graph_pool_handle", "torch.npu.is_current_stream_capturing"), _GRAPHS
    ),
    **dict.fromkeys(
        (f"torch.npu.graph_task_{part}" for part in ("group_begin", "group_end", "update_begin", "update_end")), _GRAPHS
    ),
    **dict.fromkeys((f"torch.npu.NPUGraph.{name}" for name in ("capture_begin", "capture_end", "replay")), _GRAPHS),
    **dict.fromkeys(("torch.npu.Event", "torch.npu.Stream"), _STREAMS),
    **dict.fromkeys((f"torch.npu.Stream.{name}" for name in ("record_event", "wait_event", "wait_stream")), _STREAMS),
    **dict.fromkeys(
        (f"torch.npu.{name}" for name in ("current_device", "current_stream", "device", "set_stream", "stream")), _UTILS
    ),
    **dict.fromkeys(("torch_npu._C._npu_getCurrentStream", "torch_npu.npu.synchronize"), _UTILS),
    **dict.fromkeys((f"torch_npu.npu.utils.{name}" for name in ("_is_gte_cann_version", "get_cann_version")), _UTILS),
    **dict.fromkeys((f"torch.npu.{verb}_stream_limit" for verb in ("get", "set", "reset")), _CONFIG),
    **dict.fromkeys(("torch.npu.get_device_limit", "torch.npu.set_compile_mode"), _CONFIG),
    **dict.fromkeys(
        (f"torch.npu.{name}" for name in ("device_count", "get_device_name", "is_available", "is_initialized")),
        "npu/__init__.py",
    ),
    **dict.fromkeys(("torch.npu.get_rng_state", "torch.npu.set_rng_state"), "npu/random.py"),
    **dict.fromkeys(
        ("torch.npu.empty_cache", "torch.npu.max_memory_allocated", "torch.npu.memory_snapshot"), "npu/memory.py"
    ),
    "torch_npu.__version__": "__init__.py",
    **dict.fromkeys(
        (f"torch_npu._C._aclop_{verb}_dump" for verb in ("start", "stop")), "_inductor/npu_static_kernel.py"
    ),
    # The end of such allocations has two names, of which a torch_npu has one.
    **dict.fromkeys(
        (f"torch_npu._C{name}" for name in ("", "._npu_beginAllocateCurrentThreadToPool", "._npu_releasePool")),
        "npu/memory.py",
    ),
    "torch_npu._C._npu_set_deterministic_level": "npu/__init__.py",
    "torch_npu._C._tensors_data_ptrs_at_indices_equal": "npu/_graph_tree.py",
    "torch_npu._C._weak_ref_tensor": _GRAPHS,
    **dict.fromkeys(
        (f"torch_npu.npu._aclnn_reselect_static_kernel{path}" for path in ("", "_with_path")), "npu/__init__.py"
    ),
    "torch_npu.npu._get_deterministic_level": "npu/__init__.py",
}
"""By name, the file of torch_npu's wheel that defines it, or that uses what C++ defines."""
_METHODS = ("capture_begin", "capture_end", "replay", "record_event", "wait_event", "wait_stream")
"""Methods of torch_npu's objects by whose name alone the object is known."""


def used() -> set[str]:
    """The parts of torch_npu that the library's source names, except those for earlier releases and of its public toolkit."""
    earlier = {name for difference in differences().values() for name in difference.old}
    found = {
        name
        for path in LIBRARY.rglob("*.py")
        if path.relative_to(LIBRARY).parts[0] not in {"testing", "_benches"}
        for name in _names(ast.parse(path.read_text(encoding="utf-8")))
    }
    return found - earlier


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        name = _dotted(node)
        if name.startswith(("torch.npu.", "torch_npu.")):
            yield from () if name == "torch_npu.npu" else (name,)
            return
        if node.attr in _METHODS:
            yield f"torch.npu.{'Stream' if node.attr.endswith(('event', 'stream')) else 'NPUGraph'}.{node.attr}"
    for child in ast.iter_child_nodes(node):
        yield from _names(child)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def rows() -> Iterator[str]:
    """The table of a page."""
    yield "| call | stands in torch_npu's | documented by PyTorch as |"
    yield "|---|---|---|"
    for name, file in sorted(PROOFS.items()):
        yield f"| `{name}` | `{file}` | {_of_cuda(name)} |"


def _of_cuda(name: str) -> str:
    """The name of the same thing for CUDA, which PyTorch documents and torch_npu follows."""
    owner: object = torch.cuda
    path = name.removeprefix("torch.npu.").replace("NPUGraph", "CUDAGraph").split(".")
    for part in path:
        owner = getattr(owner, part, None)
    return f"`torch.cuda.{'.'.join(path)}`" if name.startswith("torch.npu.") and owner is not None else ""
