"""Sizes that may be symbols, as numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private

SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def known(number: Any) -> int:
    """A size; of a symbol the one that was compiled for."""
    return number if isinstance(number, int) else int(number.node.hint or 1)


def has_symbols(values: object) -> bool:
    """Whether a number among ``values``, or a size, a stride or an offset of a tensor, is a symbol."""
    return any(
        _torch_private.has_symbolic_sizes(leaf) if isinstance(leaf, torch.Tensor) else isinstance(leaf, SYMBOLS)
        for leaf in pytree.tree_leaves(values)
    )
