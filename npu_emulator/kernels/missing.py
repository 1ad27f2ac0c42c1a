"""The stand-in for a missing kernel: it raises and says how to add one, or it notes the call and returns zeros."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from npu_emulator.errors import KernelMissingError, add_note
from npu_emulator.kernels.arguments import is_npu
from npu_emulator.kernels.metadata import on_meta
from npu_emulator.kernels.registry import overload_of

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator

__all__ = ["Missing", "noting"]

_REASONS = {"npu::npu_matmul_compress_dequant": "no public document says how CANN's library compresses its weights; "}
"""Why the project itself has no kernel."""
_notes: list[Counter[str]] = []
"""The active collections of missing kernels, the innermost last."""


@contextmanager
def noting(found: Counter[str]) -> Iterator[None]:
    """Inside the block, count calls of operators without a kernel in `found`; the program continues with zeros."""
    _notes.append(found)
    try:
        yield
    finally:
        _notes.remove(found)


class Missing:
    """Stands in for a missing kernel, and raises at a launch."""

    def __init__(self, name: str) -> None:
        """Stand in for an operator."""
        self.name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise; if calls are noted, return written arguments unchanged, and zeros for the other results."""
        error = KernelMissingError(
            f"the emulated NPU has no kernel for {self.name}; {_REASONS.get(self.name, '')}"
            f"give it one with npu_emulator.register_kernel({self.name!r}, function_of_cpu_tensors)"
        )
        if not _notes:
            raise error
        _notes[-1][self.name] += 1
        op = overload_of(self.name)
        assert op is not None  # noqa: S101 - it was called
        schema = op._schema
        if all(result.alias_info is not None for result in schema.returns):
            names = [argument.name for argument in schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            written = [given[a.name] for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
            return None if not schema.returns else written[0] if len(schema.returns) == 1 else tuple(written)
        try:
            likes = op(*tree_map(on_meta, args), **tree_map(on_meta, kwargs))
        except Exception as reason:
            add_note(
                error,
                f"npu_emulator: nor does torch_npu say which shapes its results have ({reason}); the program ends here",
            )
            raise error from reason
        device = next((leaf.device for leaf in tree_leaves((args, kwargs)) if is_npu(leaf)), torch.device("npu"))
        return tree_map(lambda like: _zeros(like, device), likes)


def _zeros(like: Any, device: torch.device) -> Any:
    if not isinstance(like, torch.Tensor):
        return like
    return torch.empty_strided(like.size(), like.stride(), dtype=like.dtype, device=device).zero_()
