"""What attention of training and its gradient have in common: the formula, layouts, masks and dropout.

Formula (operator documentation of ``torch_npu.npu_fusion_attention``)::

    scores = mask(scale * (Q K^T + pse), atten_mask)
    P      = softmax(scores)
    output = D(P) V

and, with dO the gradient of the output::

    dV = D(P)^T dO    dP = D(dO V^T)    dS = P * (dP - rowsum(dO * output))    dQ = scale dS K    dK = scale dS^T Q

D is dropout: it keeps an element with probability ``keep_prob`` and divides it by that, and makes the others 0. Which elements,
the result ``seed`` tells, a draw from torch's generator; the gradient takes it and drops the same ones.

``atten_mask`` is true where a score is *excluded*. Torch's ``scaled_dot_product_attention`` arrives here on an NPU.
Not covered: variable-length layouts, prefix masks, learnable sinks.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._precision import compute_dtype, unsupported

NO_LIMIT = 2147483647
_LAYOUTS = ("BSH", "SBH", "BSND", "BNSD")


def dropped(weights: torch.Tensor, keep_prob: float, seed: torch.Tensor | None) -> torch.Tensor:
    """``weights`` [B, N, Sq, Skv] with some of them 0 and the others divided by ``keep_prob``."""
    if keep_prob == 1.0:
        return weights
    if seed is None:
        raise ValueError(
            "npu_fusion_attention_grad_v3: with keep_prob below 1 it needs the seed that the forward gave."
        )
    generator = torch.Generator().manual_seed(int(seed.reshape(-1)[0]))
    kept = torch.rand(weights.shape, generator=generator) < keep_prob
    return torch.where(kept, weights / keep_prob, 0.0)


def refuse(operator: str, layout: str, keep_prob: float, *others: object) -> None:
    """Raise for argument values that the formula does not cover."""
    if layout not in _LAYOUTS:
        raise unsupported(operator, "input_layout", layout, "BSH, SBH, BSND and BNSD")
    if not 0.0 < keep_prob <= 1.0:
        raise ValueError(f"{operator}: keep_prob must be above 0 and at most 1; it is {keep_prob}.")
    names = ("prefix", "actual_seq_qlen", "actual_seq_kvlen", "padding_mask", "sink")
    for name, given in zip(names, others, strict=True):
        if given is not None:
            raise unsupported(operator, name, "a value", "None")


def operands(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, layout: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value by heads; where their dimension is joined with D, the key has as many as make them as wide."""
    shared = max(key.shape[-1] * head_num // max(query.shape[-1], 1), 1)
    return heads(query, head_num, layout), heads(key, shared, layout), heads(value, shared, layout)


def heads(operand: torch.Tensor, count: int, layout: str) -> torch.Tensor:
    """``operand`` as [B, N, S, D] in the precision of the computation; ``count`` heads, where a layout does not tell."""
    operand = operand.to(compute_dtype(operand))
    if layout == "BNSD":
        return operand
    if layout == "BSND":
        return operand.transpose(1, 2)
    if layout == "SBH":
        operand = operand.transpose(0, 1)
    parts: torch.Tensor = operand.unflatten(-1, (count, -1))
    return parts.transpose(1, 2)


def stored(heads: torch.Tensor, like: torch.Tensor, layout: str) -> torch.Tensor:
    """[B, N, S, D] in the layout and dtype of ``like``."""
    if layout != "BNSD":
        heads = heads.transpose(1, 2)
        if layout != "BSND":
            heads = heads.flatten(2)
        if layout == "SBH":
            heads = heads.transpose(0, 1)
    return heads.to(like.dtype).contiguous()


def expanded(kv: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Each key or value head repeated for the query heads that share it (grouped-query attention)."""
    return kv.repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def folded(wide: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """The gradients of a shared head, added up."""
    shared: torch.Tensor = wide.unflatten(1, (kv.shape[1], -1))
    return shared.sum(2)


def exponentials(scores: torch.Tensor, maximum: torch.Tensor) -> torch.Tensor:
    """``exp(scores - maximum)``, and 0 in a row that is excluded altogether."""
    return torch.where(maximum.isinf() & (maximum < 0), 0.0, torch.exp(scores - maximum))


def scores(
    q: torch.Tensor, k: torch.Tensor, pse: torch.Tensor | None, scale: float, left_out: torch.Tensor | None
) -> torch.Tensor:
    """The scores [B, N, Sq, Skv], minus infinity where they are left out."""
    logits = q @ expanded(k, q).mT
    if pse is not None:
        logits = logits + pse.to(logits.dtype)
    logits = logits * scale
    return logits if left_out is None else logits.masked_fill(left_out, -torch.inf)


def excluded(
    operator: str,
    mask: torch.Tensor | None,
    sparse_mode: int,
    before: int,
    after: int,
    q: torch.Tensor,
    k: torch.Tensor,
) -> torch.Tensor | None:
    """Where a score is left out: the whole mask given (modes 0, 1), causal from the left (2) or the right (3), a band (4)."""
    rows, columns = q.shape[-2], k.shape[-2]
    distance = torch.arange(columns) - torch.arange(rows).unsqueeze(-1)
    if sparse_mode == 2:
        return distance > 0
    if sparse_mode == 3:
        return distance > columns - rows
    if sparse_mode == 4:
        shifted = distance - (columns - rows)
        return (shifted > after) | (shifted < -before)
    if sparse_mode not in {0, 1}:
        raise unsupported(operator, "sparse_mode", sparse_mode, "0 to 4")
    if mask is None:
        return None
    left_out = mask.bool()
    if sparse_mode == 0 and (before < rows or after < columns):
        left_out = left_out | (distance > after) | (distance < -before)
    return left_out
