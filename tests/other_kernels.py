"""Kernels that a test gives operators for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import npu_emulator
from npu_emulator.activation import registry


@contextmanager
def kernels_in_their_place(kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Within the block operators have other kernels; afterwards their records' again, which later tests of this process meet."""
    for name, kernel in kernels.items():
        npu_emulator.register_kernel(name, kernel)
    yield
    for name in kernels:
        npu_emulator.register_kernel(name, registry.offered[name])
