"""Copies of an input's bytes into a buffer of a captured graph, through CANN's public API and without torch's dispatcher.

The copy of a small tensor costs 9 us of host time in `copy_`, and 1 us here. What `copy_` does besides is not needed where both
sides have one device, dtype, shape, strides and no private format.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

import torch

from npugraph_ex.aclgraph import _npu_private

_DEVICE_TO_DEVICE = ctypes.c_int(3)
"""ACL_MEMCPY_DEVICE_TO_DEVICE."""

_ARGUMENTS = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)

_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)


def bytes_to_copy(source: torch.Tensor, target: torch.Tensor, extent: int) -> int:
    """The number of bytes that a copy of ``extent`` elements moves; 0 if only `copy_` can do it.

    A complex tensor may be lazily conjugated, a negated one means other values than its bytes, and a tensor of another device
    needs another kind of copy.
    """
    if source.device.type != "npu" or source.device != target.device or source.dtype in _COMPLEX or source.is_neg():
        return 0
    return extent * target.element_size() if format_question()(target) in PLAIN_FORMATS else 0


class DeviceCopy:
    """Starts copies of a fixed number of bytes to one address.

    The arguments that stay are converted for C once; that halves the time of a call.

    Args:
        target: the address.
        count: the number of bytes.
    """

    def __init__(self, target: int, count: int) -> None:
        self._copy = ctypes.CDLL("libascendcl.so")["aclrtMemcpyAsync"]  # torch_npu has loaded it
        self._copy.argtypes = _ARGUMENTS
        self._target = ctypes.c_void_p(target)
        self._count = ctypes.c_size_t(count)

    def start(self, source: int, stream: ctypes.c_void_p) -> bool:
        """Copy from ``source`` on a stream, see `current_stream_handle`; return whether CANN took it."""
        count = self._count
        status: int = self._copy(self._target, count, source, count, _DEVICE_TO_DEVICE, stream)
        return status == 0


@cache
def format_question() -> Callable[[torch.Tensor], int]:
    """A function that returns a tensor's storage format as a number."""
    return _npu_private.format_question()


PLAIN_FORMATS = frozenset({0, 1, 2, 30, 47})
"""NCHW, NHWC, ND, NCDHW and NCL: the strides say where an element lies. In a private format they do not."""


@cache
def _stream(key: tuple[int, int, int]) -> torch.npu.Stream:
    stream_id, device_index, device_type = key
    return torch.npu.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)


@cache
def _current_stream() -> Callable[[int], tuple[int, int, int]]:
    return _npu_private.stream_question()


def current_stream_handle(device: int) -> ctypes.c_void_p:
    """CANN's handle of the current stream.

    torch_npu launches operators from a queue. Its property `npu_stream` waits until the queue is empty, as a replay does, so
    that what is started with the handle comes after them.
    """
    return ctypes.c_void_p(_stream(_current_stream()(device)).npu_stream)
