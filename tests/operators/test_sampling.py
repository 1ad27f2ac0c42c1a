"""Choosing tokens: which ones are kept, by hand; that what is drawn follows its distribution and the device's generator."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu

from npugraph_ex.operators import OPERATORS, UnsupportedArgumentError

INF = float("inf")
ROW = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
"""Logits of four tokens; their probabilities are these numbers."""


def formula(name: str) -> Callable[..., Any]:
    """The formula of ``npu::name``."""
    return OPERATORS[f"npu::{name}"].formula


def kept(row: torch.Tensor) -> list[int]:
    """The tokens that are left."""
    return row.isfinite().nonzero().flatten().tolist()


def test_the_likeliest_tokens_are_kept() -> None:
    """By number, by probability from the least likely one up, by both; the likeliest one always; equal ones together."""
    filtered = formula("npu_top_k_top_p")
    logits = ROW.expand(4, 4)
    k, p = torch.tensor([1, 2, 3, 4], dtype=torch.int32), torch.tensor([0.0, 0.45, 0.75, 1.0])
    assert [*map(kept, filtered(logits, None, k))] == [[1], [1, 3], [1, 2, 3], [0, 1, 2, 3]]
    assert [*map(kept, filtered(logits, p))] == [[1], [1, 3], [1, 2, 3], [0, 1, 2, 3]]
    # Of two tokens with 4/7 and 3/7, the lesser one stays where more than 4/7 is wanted.
    assert [*map(kept, filtered(logits[:2], torch.tensor([0.55, 0.6]), torch.tensor([2, 2])))] == [[1], [1, 3]]
    assert torch.equal(filtered(logits)[0], ROW)
    assert kept(filtered(torch.zeros(1, 3), None, torch.tensor([1]))[0]) == [0, 1, 2]


def sampled(*, k: int = 0, p: float = 1.0, **kwargs: Any) -> tuple[int, list[int]]:
    """The token that is chosen and those that are kept, of the row above or of ``logits``."""
    logits = kwargs.pop("logits", ROW).unsqueeze(0)
    tokens, left = formula("npu_top_k_top_p_sample")(
        logits, torch.tensor([k], dtype=torch.int32), torch.tensor([p]), is_need_logits=True, **kwargs
    )
    return int(tokens[0]), kept(left[0])


def test_a_token_is_chosen_of_those_kept() -> None:
    """By number, by probability, by a share of the highest one; by weights of q in the order of the tokens kept."""
    assert sampled() == (1, [0, 1, 2, 3])
    assert sampled(k=2) == (1, [1, 3])
    assert sampled(k=9) == (1, [0, 1, 2, 3])
    assert sampled(p=0.5) == (1, [1, 3])
    assert sampled(p=0.0) == (1, [1])
    assert sampled(k=3, p=0.3, min_ps=torch.tensor([-1.0])) == (1, [1])
    assert sampled(min_ps=torch.tensor([0.6])) == (1, [1, 3])
    assert sampled(k=3, min_ps=torch.tensor([1.0])) == (1, [1])
    q = torch.tensor([[10.0, 1.0, 0.1, 0.1]])
    assert sampled(k=2, q=q) == (3, [1, 3])  # 0.4 / 10 and 0.3 / 1 of the two, before they are scaled alike
    assert sampled(q=q) == (3, [0, 1, 2, 3])  # 0.01, 0.4, 2 and 3
    probs = ROW.exp()
    tokens, left = formula("npu_top_k_top_p_sample")(
        probs.unsqueeze(0), torch.tensor([2]), torch.tensor([1.0]), is_need_logits=True, input_is_logits=False
    )
    assert (tokens.tolist(), left.nonzero()[:, 1].tolist()) == ([1], [1, 3])
    for fields, message in (({"post_sample": "other"}, "post_sample"), ({"post_sample": "multiNomial", "q": q}, "q=")):
        with pytest.raises(UnsupportedArgumentError, match=message):
            sampled(**fields)


@pytest.mark.slow
def test_tokens_are_drawn_by_their_probabilities() -> None:
    """Of 4000 draws each token has its share within a tenth; a token that was cut is never drawn."""
    draw = functools.partial(formula("npu_top_k_top_p_sample"), post_sample="multiNomial")
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        rows = 4000
        tokens, _ = draw(ROW.expand(rows, 4), torch.full((rows,), 2), torch.ones(rows))
    assert set(tokens.tolist()) == {1, 3}
    assert abs((tokens == 1).double().mean().item() - 4 / 7) < 0.1


def test_exponential_numbers_on_the_device() -> None:
    """The generator's state makes the numbers and moves on; their mean is 1 / lambd; an infinite lambd gives zeros."""
    filled = torch.empty(4000).npu()
    torch.npu.manual_seed(5)
    first = torch_npu.npu_sim_exponential_(filled, 2.0).cpu()
    second = torch_npu.npu_sim_exponential_(filled, 2.0).cpu()
    torch.npu.manual_seed(5)
    assert torch.equal(torch_npu.npu_sim_exponential_(filled, 2.0).cpu(), first)
    assert not torch.equal(first, second)
    assert first.min() > 0
    assert abs(first.mean().item() - 0.5) < 0.05
    assert not torch_npu.npu_sim_exponential_(filled, INF).any()
    with pytest.raises(RuntimeError, match=r"expects lambd > 0\.0"):
        formula("npu_sim_exponential_")(torch.empty(1), 0.0)
