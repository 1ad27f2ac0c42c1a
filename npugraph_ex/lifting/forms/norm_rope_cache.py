"""Norm and rotary embedding of compressed keys and values, written to their caches (multi-head latent attention) => one operator.

::

    c, k = split(kv, [512, 64])
    ckv_cache.index_copy_(…, index, rms_norm(c, gamma))
    k_cache.index_copy_(…, index, rotary(even elements of k, then the odd ones))

``index`` counts the positions of a cache [B, 1, S, D], or the slots of a paged one. The operator is
`npu_kv_rmsnorm_rope_cache_v2`; 512 and 64 are the only sizes that it takes (operator documentation of
``torch_npu.npu_kv_rmsnorm_rope_cache``), all operands dense. The norm and the rotary embedding are operators by the time this
form is tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx

from npugraph_ex.lifting import terms
from npugraph_ex.lifting.forms.cache_writes import INDEX_COPY, CacheWrite, flat, is_dense, write_before
from npugraph_ex.lifting.parts import part_of
from npugraph_ex.lifting.proposal import Emit, Proposal, Unlike

_aten = torch.ops.aten
_NORMED, _ROTATED = 512, 64
_WHOLE = _NORMED + _ROTATED
_TAKEN = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _CachedPart:
    """What one of the two caches gets: a function of a part of ``kv``.

    Attributes:
        write: to the cache.
        node: the result of the function.
        kv: what the part is of.
        start: where the part begins in the last dimension.
        operands: the function's others.
        epsilon: the norm's; None for the rotary embedding.
    """

    write: CacheWrite
    node: fx.Node
    kv: fx.Node
    start: int
    operands: tuple[fx.Node, ...]
    epsilon: float | None = None


def _part(write: CacheWrite) -> _CachedPart | None:
    """What a write writes, if it is one of the two."""
    for node in terms.reshaped_from(write.rows):
        if (
            node.target is getitem
            and node.args[1] == 0
            and terms.calls(node.args[0], torch.ops.npu.npu_rms_norm.default)
        ):
            given = terms.arguments(node.args[0])
            return _of_part(write, node, given["input"], (given["gamma"],), given.get("epsilon", 1e-6))
        if terms.calls(node, torch.ops.npu.npu_rotary_mul.default):
            x, *factors = node.args
            source = _parted(x) if len(factors) == 2 else None  # no mode: halves
            return None if source is None else _of_part(write, node, source, tuple(factors))  # type: ignore[arg-type]
    return None


def _of_part(
    write: CacheWrite, node: fx.Node, x: fx.Node, operands: tuple[fx.Node, ...], epsilon: float | None = None
) -> _CachedPart | None:
    for source in terms.reshaped_from(x):
        found = part_of(source)
        if found is not None and found[3] == 1:
            return _CachedPart(write, node, found[0], found[1], operands, epsilon)
    return None


def _parted(x: object) -> fx.Node | None:
    """The tensor whose even elements come first in ``x``, then the odd ones: ``[..., D/2, 2]`` transposed, and flat again."""
    if not isinstance(x, fx.Node):
        return None
    turned = next((node for node in terms.reshaped_from(x) if terms.calls(node, _aten.transpose.int)), None)
    if turned is None:
        return None
    given = terms.arguments(turned)
    pairs, whole = given["self"].meta["val"], x.meta["val"]
    last_two = {given["dim0"] % pairs.dim(), given["dim1"] % pairs.dim()} == {pairs.dim() - 2, pairs.dim() - 1}
    halved = terms.same_size(pairs.shape[-1], 2) and terms.same_size(pairs.shape[-2] * 2, whole.shape[-1])
    return given["self"] if last_two and halved else None


class _NormRopeCache:
    """The form."""

    name = "lift_norm_rope_cache"
    ends_with = frozenset({INDEX_COPY})

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The two writes of which ``node`` is the second."""
        second = CacheWrite.of(node)
        first = None if second is None else write_before(second)
        parts = [] if first is None or second is None else [_part(first), _part(second)]
        normed = next((one for one in parts if one is not None and one.epsilon is not None), None)
        rotated = next((one for one in parts if one is not None and one.epsilon is None), None)
        if normed is None or rotated is None:
            return None
        reason = _unfit(normed, rotated)
        return Unlike(node, reason) if reason is not None else _proposal(normed, rotated)


def _unfit(normed: _CachedPart, rotated: _CachedPart) -> str | None:
    """Why the operator does not take these operands."""
    if normed.kv is not rotated.kv:
        return f"the norm is of {normed.kv.name}, and the rotary embedding of {rotated.kv.name}"
    kv, k = normed.kv.meta["val"], rotated.node.meta["val"]
    sizes = normed.operands[0].meta["val"].shape[0], k.shape[-1], kv.shape[-1]
    if sizes != (_NORMED, _ROTATED, _WHOLE) or (normed.start, rotated.start) != (0, _NORMED):
        return f"norm, rotary embedding and both have {sizes} elements; the operator takes {_NORMED}, {_ROTATED} and {_WHOLE}"
    operands = (normed.kv, *normed.operands, *rotated.operands, normed.write.cache, rotated.write.cache)
    dtypes = {one.meta["val"].dtype for one in operands}
    if len(dtypes) > 1 or not dtypes <= set(_TAKEN):
        return f"the operands are {', '.join(sorted(map(str, dtypes)))}"
    strided = [one.name for one in (*operands, normed.write.index) if not is_dense(one)]
    if strided:
        return f"{' and '.join(strided)} has gaps in memory; the operator takes dense tensors"
    for factor in rotated.operands:
        found = factor.meta["val"].shape
        if len(found) != 4 or not all(map(terms.same_size, found, (k.shape[0], 1, *k.shape[2:]))):
            return (
                f"cosines or sines are {list(found)}, and keys {list(k.shape)}; the operator takes [B, 1, S, D] of each"
            )
    return None


def _proposal(normed: _CachedPart, rotated: _CachedPart) -> Proposal | Unlike:
    writes = (rotated.write, normed.write)
    paged = all(map(_is_paged, writes))
    if not paged and not all(map(_counts_positions, writes)):
        return Unlike(
            max(write.node for write in writes),
            "the index counts neither the positions of caches [B, 1, S, D] nor the slots of paged ones, [blocks, size, 1, D]",
        )
    batch, _, length, _ = rotated.node.meta["val"].shape
    if not paged and not isinstance(batch, int):
        return Unlike(max(write.node for write in writes), f"the number of sequences is the symbol {batch}")
    kept = [part for part in (rotated, normed) if _is_used_otherwise(part)]

    def build(emit: Emit, kv: fx.Node, gamma: fx.Node, *others: fx.Node) -> tuple[fx.Node, ...]:
        *factors, index, k_cache, ckv_cache = others
        index = index if paged else _for_each_sequence(emit, index, batch)
        x = emit(_aten.view.default, kv, [-1, 1, 1, _WHOLE]) if length == 1 else _of_four(emit, kv, 1)
        caches = (_of_four(emit, one, 2 if paged else 1) for one in (k_cache, ckv_cache))
        how: dict[str, Any] = {"epsilon": normed.epsilon, "cache_mode": "PA" if paged else "Norm"}
        operator = torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2_functional.default
        made = emit(operator, x, gamma, *factors, index, *caches, is_output_kv=bool(kept), **how)
        k_rope, c_kv, *written = (emit(getitem, made, at) for at in range(4))
        shaped = flat if paged else _like
        results = [shaped(emit, one, write.node) for one, write in zip(written, writes, strict=True)]
        return (*results, *(_like(emit, k_rope if part is rotated else c_kv, part.node) for part in kept))

    return Proposal(
        (normed.kv, *normed.operands, *rotated.operands, normed.write.index, *(write.cache for write in writes)),
        (*(write.node for write in writes), *(part.node for part in kept)),
        (build,),
        places=(normed.write.index,),
    )


def _is_paged(write: CacheWrite) -> bool:
    """Whether it writes slots of a cache of one head."""
    shape = write.cache.meta["val"].shape
    return write.is_paged() and (len(shape) == 3 or (len(shape) == 4 and terms.same_size(shape[2], 1)))


def _counts_positions(write: CacheWrite) -> bool:
    """Whether it writes positions of a cache [B, 1, S, D] or [B, S, D]."""
    shape, whole = write.node.meta["val"].shape, write.cache.meta["val"].shape
    alone = len(shape) == 3 or (len(shape) == 4 and terms.same_size(shape[1], 1))
    return alone and write.dim == len(shape) - 2 and len(shape) == len(whole)


def _is_used_otherwise(part: _CachedPart) -> bool:
    """Whether a node other than the write uses the written value."""
    chain = {part.write.node}
    for node in terms.reshaped_from(part.write.rows):
        chain.add(node)
        if node is part.node:
            break
    return any(user not in chain for node in chain - {part.write.node} for user in node.users)


def _for_each_sequence(emit: Emit, index: fx.Node, batch: int) -> fx.Node:
    """The positions, once for each sequence: [B, S]."""
    rows = emit(_aten.unsqueeze.default, index, 0)
    if batch == 1:
        return rows
    return emit(
        _aten.clone.default, emit(_aten.expand.default, rows, [batch, -1]), memory_format=torch.contiguous_format
    )


def _of_four(emit: Emit, tensor: fx.Node, dim: int) -> fx.Node:
    """The tensor with its one head as dimension ``dim``."""
    return emit(_aten.unsqueeze.default, tensor, dim) if tensor.meta["val"].dim() == 3 else tensor


def _like(emit: Emit, tensor: fx.Node, node: fx.Node) -> fx.Node:
    """[B, 1, S, D] without its one head where ``node`` has none."""
    return emit(_aten.squeeze.dim, tensor, 1) if node.meta["val"].dim() == 3 else tensor


FORM = _NormRopeCache()
