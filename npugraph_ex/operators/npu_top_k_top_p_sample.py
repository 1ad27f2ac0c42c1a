"""Chooses one token of each row, after keeping the likeliest ones by number, by probability and by a share of the highest one.

Formula (operator documentation of ``torch_npu.npu_top_k_top_p_sample``), with each row in descending order::

    k:       the top_k first ones; all where top_k is not in 1 to min(vocabulary, ks_max)
    probs:   softmax of those with input_is_logits, else they are probabilities
    p:       those before whom the others add up to less than top_p; the first one for top_p <= 0, all for top_p >= 1
    min_ps:  those with at least min_ps times the highest probability; the first one for min_ps >= 1, all for min_ps <= 0
    chosen:  argmax(probs), argmax(probs / (abs(q) + eps)) with "qSample" and a q, a draw by probs with "multiNomial"

Without q, "qSample" is argmax(probs). With ``is_need_logits`` the second result has the logits of those kept, and -inf elsewhere (0
for probabilities); else the device leaves it unwritten, and it is zeros here. A row that is not cut keeps its own order.
``top_k_guess`` is a hint for speed.

Not covered: seeds in ``q`` with "multiNomial"; there the numbers come from torch's generator.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import compute_dtype, unsupported
from npugraph_ex.operators._record import Operator, call

_NAME = "npu_top_k_top_p_sample"
_DRAWN, _BY_Q, _HIGHEST = "multiNomial", "qSample", "None"


def _draws(*args: object, post_sample: str | None = _BY_Q, **kwargs: object) -> bool:
    given = args[10] if len(args) > 10 else post_sample
    return given == _DRAWN


def _kept(
    row: torch.Tensor, k: int, p: float, min_p: float, limit: int, is_logits: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(probabilities, tokens)`` of those that one row keeps, the likeliest first."""
    values, tokens = row.sort(descending=True, stable=True)
    by_k, by_p = 1 <= k <= min(limit, row.numel()), p < 1.0
    if not by_k and not by_p and min_p < 1:
        values, tokens = row, torch.arange(row.numel())
    if by_k:
        values, tokens = values[:k], tokens[:k]
    probs = values.softmax(-1) if is_logits else values
    keep = torch.ones_like(probs, dtype=torch.bool)
    if by_p:
        keep = (probs.cumsum(-1) - probs < p) if p > 0 else torch.arange(probs.numel()) == 0
    if by_p and p <= 0 and is_logits:
        probs = torch.ones_like(probs)
    if min_p >= 1:
        keep = torch.arange(probs.numel()) == 0
    elif min_p > 0:
        keep = keep & (probs >= probs.max() * min_p)
    return probs[keep], tokens[keep]


def _chooser(
    post_sample: str | None, q: torch.Tensor | None, eps: float
) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """What takes a row's number and its probabilities, and gives the place of the chosen one."""
    if post_sample not in {_DRAWN, _BY_Q, _HIGHEST}:
        raise unsupported(_NAME, "post_sample", post_sample, f"{_BY_Q!r}, {_DRAWN!r} and {_HIGHEST!r}")
    if post_sample == _DRAWN:
        if q is not None:
            raise unsupported(_NAME, "q", "a tensor", "None with 'multiNomial'")
        return lambda _, probs: torch.multinomial(probs, 1, replacement=True).squeeze(0)
    if q is None or post_sample == _HIGHEST:
        return lambda _, probs: probs.argmax()
    return lambda row, probs: (probs / (q[row, : probs.numel()].to(probs.dtype).abs() + eps)).argmax()


@Operator(
    name="npu::npu_top_k_top_p_sample",
    source="operator documentation of torch_npu.npu_top_k_top_p_sample",
    dtypes=(torch.float16, torch.bfloat16, torch.float32),
    draws_random_numbers=_draws,
    alike=Alike(dtype=("logits", "top_p")),
    examples=(
        lambda: call(
            torch.randn(2, 8), torch.tensor([3, 0], dtype=torch.int32), torch.tensor([0.9, 0.5]), is_need_logits=True
        ),
        lambda: call(torch.randn(2, 8), torch.tensor([3, 0]).int(), torch.tensor([0.9, 0.5]), torch.rand(2, 8) + 0.1),
        lambda: call(
            torch.randn(2, 8).half(), torch.tensor([3, 8], dtype=torch.int32), torch.tensor([1.0, 0.5]).half(),
            post_sample="multiNomial",
        ),
    ),
)  # fmt: skip
def npu_top_k_top_p_sample(
    logits: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    q: torch.Tensor | None = None,
    eps: float | None = 1e-8,
    is_need_logits: bool | None = False,
    top_k_guess: int | None = 32,
    min_ps: torch.Tensor | None = None,
    ks_max: int | None = 1024,
    input_is_logits: bool | None = True,
    post_sample: str | None = "qSample",
    generator: torch.Generator | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(tokens [rows] int64, logits of those kept [rows, vocabulary] float32)``.

    logits: [rows, vocabulary] floating; top_k: [rows] int32; top_p, min_ps: [rows] like logits; q: [rows, vocabulary] float32.
    """
    wide = compute_dtype(logits)
    is_logits = input_is_logits is not False
    limit = min(-(-(1024 if ks_max is None else ks_max) // 8) * 8, 1024)
    choose = _chooser(post_sample, q, 1e-8 if eps is None else eps)
    kept_logits = torch.zeros(logits.shape, dtype=wide)
    if is_need_logits and is_logits:
        kept_logits.fill_(-torch.inf)
    chosen = torch.zeros(logits.shape[0], dtype=torch.int64)
    for row in range(logits.shape[0]):
        values = logits[row].to(wide)
        min_p = -1.0 if min_ps is None else float(min_ps[row])
        probs, tokens = _kept(values, int(top_k[row]), float(top_p[row]), min_p, limit, is_logits)
        chosen[row] = tokens[choose(row, probs)]
        if is_need_logits:
            kept_logits[row, tokens] = values[tokens]
    return chosen, kept_logits
