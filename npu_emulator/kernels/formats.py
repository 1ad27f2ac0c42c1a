"""Memory formats: torch_npu keeps a tensor's format beside its storage, and the emulated memory keeps plain order in each.

On hardware `npu_format_cast(x, 29)` stores x in fractal order (FRACTAL_NZ) for the cube unit. Here the result has that format's
name and storage, with its padding, so that `get_npu_format`, the sizes of storages and the allocator's figures are those of the
device. Its elements lie in plain order: every kernel reads and writes them by the tensor's strides, so a program sees the same
values, shapes and strides as on hardware. Only a view that splits, joins or cuts what was cast would show an operator outside ATen
other elements than there: one in the sizes of the fractals is brought to their order, another one is refused. So is DLPack, which
passes on an address without its format. torch_npu's own rules decide which format a cast gives, and when it is refused.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.utils._pytree import tree_map_only

from npu_emulator.kernels.arguments import is_npu

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["NATIVE_CASTS", "as_it_lies", "format_kernels", "is_private", "keep_formats"]

NATIVE_CASTS = frozenset({"npu::npu_format_cast", "npu::npu_format_cast.Tensor"})
"""torch_npu's own: they choose a format and call `_npu_format_cast`."""
_ND, _FRACTAL_NZ = 2, 29
_BLOCK, _FRACTAL_BYTES = 16, 32
"""A fractal: rows, and bytes of a row."""
_used: list[int] = []
"""The private formats to which this process has cast."""
_libraries: list[torch.library.Library] = []
_NAMED = "npu_format_/"
"""How torch_npu notes a format's name in the metadata of a saved tensor."""
_PRIVATE = frozenset({3, 4, 29, 32, 33, 50, 51, 52, 53, 54})
"""Formats of which torch_npu keeps another size than that of the elements: NC1HWC0, FRACTAL_Z, FRACTAL_NZ, ..."""


def format_kernels() -> dict[str, Callable[..., Any]]:
    """Return the kernels of the format casts by operator name; call it before torch_npu's own are overridden."""
    names = (
        "_npu_format_cast",
        "_npu_format_cast.aclnn",
        "_npu_format_cast.input_dtype",
        "npu_format_cast_.acl_format",
    )
    casts: dict[str, Callable[..., Any]] = {
        f"npu::{name}": _Cast(f"npu::{name}", in_place="cast_" in name) for name in names
    }
    return {**casts, "npu::npu_format_cast_": _copied_in}


class _Cast:
    """One form of the cast. Between two base formats torch_npu changes a note beside the storage, and nothing else."""

    def __init__(self, name: str, *, in_place: bool) -> None:
        self._torch_npus_own = torch.library.get_kernel(name, "PrivateUse1")
        self._in_place = in_place

    def __call__(self, source: torch.Tensor, acl_format: int, *given: int | None, **also: int | None) -> torch.Tensor:
        """Return the tensor itself where its format stays or both formats are base ones, else one in new memory."""
        before = _format_of(source)
        if before == acl_format or (before not in _PRIVATE and acl_format not in _PRIVATE):
            keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)  # noqa: SLF001 - no public way to one kernel of an operator
            return self._torch_npus_own.call_boxed(keys, source, acl_format, *given, **also)  # type: ignore[no-any-return]
        cast = _in_new_memory(source, acl_format)
        if acl_format in _PRIVATE and acl_format not in _used:
            if not _used:
                _cast_before_resizes()
            _used.append(acl_format)
        if self._in_place:
            return source.set_(cast.untyped_storage(), cast.storage_offset(), cast.size(), cast.stride())
        return cast


def is_private(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in the device's memory in a format other than plain order."""
    return is_npu(tensor) and _format_of(tensor) in _PRIVATE


def as_it_lies(
    operator: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, writes: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with the elements that memory in FRACTAL_NZ would show on hardware.

    An operator outside ATen reads the memory as it lies, and [..., K, N] lies as [..., N / C, K / 16, 16, C] there, with 32 bytes
    in C elements. A view with these very sizes is brought to that order, in new memory. ATen's operators bring every view to plain
    order first (`format_contiguous` in torch_npu).

    Args:
        operator: its name, for the error.
        args: device tensors among other values.
        kwargs: likewise.
        writes: whether the operator writes an argument, for which new memory would not do.

    Raises:
        RuntimeError: another view shows other elements than on hardware.
    """
    if _FRACTAL_NZ not in _used:
        return args, kwargs

    def shown(tensor: torch.Tensor) -> torch.Tensor:
        if not (is_npu(tensor) and tensor.numel() and _format_of(tensor) == _FRACTAL_NZ):
            return tensor
        base = _sizes_before_the_cast(tensor)
        if _shows_whole_matrices(tensor, base):
            return tensor
        fractals = None if writes else _in_fractals(tensor, base)
        return _refuse_view(operator, tensor, base) if fractals is None else fractals

    return tree_map_only(torch.Tensor, shown, (args, kwargs))  # type: ignore[no-any-return]


def _sizes_before_the_cast(tensor: torch.Tensor) -> list[int]:
    noted = torch._utils.get_tensor_metadata(tensor)  # noqa: SLF001 - the one way to torch_npu's note of the sizes before the cast
    return [*map(int, next(key for key in noted if key.startswith("base_sizes_")).split("/")[1:-1])]


def _row_bytes(tensor: torch.Tensor, base: list[int]) -> int:
    """The bytes of a row of the matrices that were cast: the storage has them padded, in their own dtype."""
    *outer, k, n = base
    return n * (tensor.untyped_storage().nbytes() // (math.prod(outer) * _whole(k) * _whole(n)))


def _shows_whole_matrices(tensor: torch.Tensor, base: list[int]) -> bool:
    """Whether a view shows whole matrices, transposed ones, or those of some batches, which are the same in both orders."""
    *outer, k, n = base
    held, row, size = math.prod(outer) * _whole(k) * _whole(n), _row_bytes(tensor, base), tensor.element_size()
    matrix = k * row
    wanted = {step: count for step, count in ((size, row // size), (row, k)) if count > 1}
    whole = True
    for extent, stride in zip(tensor.size(), tensor.stride(), strict=True):
        if extent > 1 and stride:
            whole &= wanted.pop(stride * size, None) == extent or stride * size % matrix == 0
    start = tensor.storage_offset() * size
    padded = held != math.prod(base)
    return whole and not wanted and start % matrix == 0 and not (padded and start)


def _in_fractals(tensor: torch.Tensor, base: list[int]) -> torch.Tensor | None:
    """The elements in the order of the cube unit, in new memory in plain format; None if the view has other sizes than that."""
    *outer, k, _ = base
    row, size = _row_bytes(tensor, base), tensor.element_size()
    fractals = (*outer, row // _FRACTAL_BYTES, k // _BLOCK, _BLOCK, _FRACTAL_BYTES // size)
    if row % _FRACTAL_BYTES or k % _BLOCK or (tuple(tensor.size()), tensor.storage_offset()) != (fractals, 0):
        return None
    if not tensor.is_contiguous():
        return None
    plain = tensor.view(*outer, k // _BLOCK, _BLOCK, row // _FRACTAL_BYTES, _FRACTAL_BYTES // size)
    return plain.movedim(-2, -4).contiguous()


def _refuse_view(operator: str, tensor: torch.Tensor, base: list[int]) -> NoReturn:
    """Raise for a view that splits, joins or cuts the last two dimensions that were cast."""
    raise RuntimeError(
        f"{operator} would read {tuple(base)}, which lies in memory in format FRACTAL_NZ, through a view of shape "
        f"{tuple(tensor.size())} and strides {tensor.stride()}. The emulated device keeps that memory in plain order, so the view "
        "would show other elements than on hardware. Give the operator the whole matrices, or cast them back first: "
        "torch_npu.npu_format_cast(x, 2)"
    )


def _whole(size: int) -> int:
    """A size of a matrix in whole blocks."""
    return -(-size // _BLOCK) * _BLOCK


def _cast_before_resizes() -> None:
    """Let `resize_` bring a tensor to plain order by the emulator's cast; torch_npu's own calls CANN from C++."""
    torch_npus_own = torch.library.get_kernel("aten::resize_", "PrivateUse1")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)  # noqa: SLF001 - as above

    def resize_(tensor: torch.Tensor, size: Sequence[int], *, memory_format: Any = None) -> torch.Tensor:
        if is_private(tensor):
            torch.ops.npu.npu_format_cast_.acl_format(tensor, _ND)
        return torch_npus_own.call_boxed(keys, tensor, size, memory_format=memory_format)  # type: ignore[no-any-return]

    library = torch.library.Library("aten", "IMPL")
    library.impl("resize_", resize_, "PrivateUse1")
    _libraries.append(library)


def keep_formats() -> None:
    """Let `torch.load` give a tensor the format of its file, by the emulator's cast; let DLPack pass on no private format."""
    import torch_npu.utils.dlpack

    _restore()
    torch.Tensor.__dlpack__ = _of_plain_order(torch.Tensor.__dlpack__)  # type: ignore[method-assign]
    torch.Tensor.__dlpack_device__ = _of_plain_order(torch.Tensor.__dlpack_device__)  # type: ignore[method-assign]
    torch_npu.utils.dlpack._npu_to_dlpack = _of_plain_order(torch_npu.utils.dlpack._npu_to_dlpack)  # noqa: SLF001 - what its public functions call


def _of_plain_order(own: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a tensor that raises where the tensor's format is private."""

    @functools.wraps(own)
    def asked(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_private(tensor):
            raise RuntimeError(
                "DLPack has no word for the memory format of this tensor, which is private, so whoever takes it would read other "
                "elements; bring the tensor to the format ND first, with torch_npu.npu_format_cast(x, 2)"
            )
        return own(tensor, *args, **kwargs)

    return asked


def _restore() -> None:
    """Let `torch.load` bring a tensor to the format of its file by the emulator's cast; torch_npu's own calls CANN from C++."""
    import torch_npu

    set_metadata: Callable[..., None] = torch._utils.set_tensor_metadata  # noqa: SLF001 - what torch.load calls; no public name

    def set_tensor_metadata(tensor: torch.Tensor, metadata: dict[str, bool]) -> None:
        named = next((key for key in metadata if key.startswith(_NAMED)), f"{_NAMED}ND")
        number = int(torch_npu.Format[named.removeprefix(_NAMED)])
        if number in _PRIVATE and is_npu(tensor):
            metadata = {f"{_NAMED}ND" if key == named else key: value for key, value in metadata.items()}
        set_metadata(tensor, metadata)
        if number in _PRIVATE and is_npu(tensor):
            with torch.no_grad():
                torch.ops.npu.npu_format_cast_.acl_format(tensor, number)

    torch._utils.set_tensor_metadata = set_tensor_metadata  # noqa: SLF001 - as above


def _format_of(tensor: torch.Tensor) -> int:
    return int(torch.ops.npu.get_npu_format(tensor))


def _in_new_memory(source: torch.Tensor, acl_format: int) -> torch.Tensor:
    """Return a tensor in memory of a format, with the values of `source`."""
    only_new_operators = torch.npu.get_device_name().startswith("Ascend950")  # they ignore `allow_internal_format`
    cast = torch.ops.npu.unsafe_empty_with_format(
        source.size(), dtype=source.dtype, device=source.device, acl_format=acl_format, keep_format=only_new_operators
    )
    torch.ops.aten._foreach_copy_.default([cast], [source])
    return cast  # type: ignore[no-any-return]


def _copied_in(target: torch.Tensor, source: torch.Tensor, **also_ignored: int | None) -> torch.Tensor:
    """Take the values of a tensor of any format; the target's format stays."""
    del also_ignored
    torch.ops.aten._foreach_copy_.default([target], [source])
    return target
