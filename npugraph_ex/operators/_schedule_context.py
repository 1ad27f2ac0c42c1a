"""The structure in device memory by which attention and feed-forward workers hand tokens to each other. Holds no operator.

It says where buffers lie, by address (CANN operator documentation, aclnnFfnWorkerScheduler; op-plugin's tests)::

    common     0: sessions A, micro batches M, tokens of one BS, choices of a token K + 1
    attention  256: address and size of the tokens that came back, [M, BS, K + 1, H]; 288: the micro batch
    ffn        384: address and size of what was sent, [A, M] of (flag, layer, expert of each of BS * (K + 1) rows)
               400: address and size of the rows, [A, M, BS, K + 1] with H elements, and a float32 scale behind int8 ones
               416: the micro batch that is next
"""

from __future__ import annotations

import ctypes
import struct

import torch

from npugraph_ex.operators._precision import refused, unsupported

SIZE = 1024
_COMMON, _ATTENTION, _FFN = 0, 256, 384


class ScheduleContext:
    """What the structure says, read from its bytes."""

    def __init__(self, operator: str, context: torch.Tensor, need_schedule: int) -> None:
        """Read the int8 tensor ``context``, of 1024 bytes."""
        if context.dtype != torch.int8 or context.numel() != SIZE:
            raise refused(
                operator, "schedule_context", (context.dtype, tuple(context.shape)), f"{SIZE} numbers of int8"
            )
        self._operator, self._bytes = operator, context.contiguous().numpy().tobytes()
        self.sessions, self.micro_batches, self.tokens, self.choices = struct.unpack_from("<4I", self._bytes, _COMMON)
        (self.row_bytes,) = struct.unpack_from("<I", self._bytes, _COMMON + 20)
        (self.returned_micro_batch,) = struct.unpack_from("<I", self._bytes, _ATTENTION + 32)
        (self.next_micro_batch,) = struct.unpack_from("<Q", self._bytes, _FFN + 32)
        self.waits = bool(need_schedule)

    def returned(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        """The tokens that came back, [M, BS, K + 1, width]."""
        return self._at(_ATTENTION + 16, (self.micro_batches, self.tokens, self.choices, width), dtype)

    def sent(self) -> torch.Tensor:
        """Flag, layer and the experts of the rows, int32 [A, M, 2 + BS * (K + 1)]."""
        shape = (self.sessions, self.micro_batches, 2 + self.tokens * self.choices)
        return self._at(_FFN, shape, torch.int32)

    def rows(self) -> torch.Tensor:
        """The bytes of the rows that were sent, [A, M, BS, K + 1, bytes of a row]."""
        shape = (self.sessions, self.micro_batches, self.tokens, self.choices, self.row_bytes)
        return self._at(_FFN + 16, shape, torch.int8)

    def _at(self, place: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The memory whose address and size stand at ``place``."""
        address, size = struct.unpack_from("<2Q", self._bytes, place)
        wanted = torch.Size(shape).numel() * dtype.itemsize
        if not address or size < wanted:
            raise refused(
                self._operator, "schedule_context", f"a buffer of {size} bytes at {address:#x}", f"{wanted} bytes"
            )
        memory = (ctypes.c_char * wanted).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def refuse_waiting(self) -> None:
        """Raise where the device would wait for a flag that another worker sets."""
        if self.waits and not bool((self.sent()[:, self.next_micro_batch, 0] == 1).all()):
            raise unsupported(self._operator, "need_schedule", 1, "1 where all tokens of the micro batch have come")
