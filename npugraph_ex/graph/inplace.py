"""The in-place form of an operator, from the dispatcher's schemas and not from a list."""

from __future__ import annotations

import functools

import torch
from torch._ops import OpOverload

from npugraph_ex import _torch_private
from npugraph_ex.graph.collectives import communicates

_CHANGE_METADATA = frozenset({"set", "resize", "resize_as"})
"""Operators whose in-place forms change a tensor's metadata and not its elements."""


@functools.cache
def inplace_overload(functional: OpOverload) -> OpOverload | None:
    """The overload that computes the same into its first argument and has a kernel on the device; None if there is none.

    An in-place overload without a device kernel would fall back to the CPU, which costs more than it saves.
    """
    schema = _torch_private.schema(functional)
    if (
        schema.is_mutable
        or len(schema.returns) != 1
        or not schema.arguments
        or schema.returns[0].alias_info is not None
    ):
        return None
    namespace, _, operator = schema.name.partition("::")
    if operator in _CHANGE_METADATA or communicates(functional):  # another process may still be reading the sent data
        return None
    packet = getattr(getattr(torch.ops, namespace), f"{operator}_", None)
    candidate = getattr(packet, functional._overloadname, None) if packet is not None else None
    if (
        not isinstance(candidate, OpOverload)
        or torch.Tag.inplace_view in candidate.tags
        or not _same_arguments(functional, candidate)
    ):
        return None
    return candidate if _torch_private.has_device_kernel(candidate) else None


def _same_arguments(functional: OpOverload, candidate: OpOverload) -> bool:
    """Whether the candidate takes the same arguments and writes only the first."""
    plain, writing = _torch_private.schema(functional).arguments, _torch_private.schema(candidate).arguments
    if [(a.name, str(a.type)) for a in plain] != [(a.name, str(a.type)) for a in writing]:
        return False
    writes = [a.alias_info is not None and a.alias_info.is_write for a in writing]
    return writes[:1] == [True] and not any(writes[1:]) and str(plain[0].type) == "Tensor"
