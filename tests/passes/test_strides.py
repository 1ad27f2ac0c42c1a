"""Whether two views of one storage share a byte: proofs are right, and the usual ways to divide a tensor are proven."""

from __future__ import annotations

import random

import pytest
import torch

from npugraph_ex.graph.memory.strides import share_no_byte

BASE = torch.zeros(6, 8, 10, dtype=torch.int16)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (BASE.view(-1)[::2], BASE.view(-1)[1::2]),
        (BASE.view(-1)[::4], BASE.view(-1)[1::6]),
        (BASE.view(48, 10)[:, :3], BASE.view(48, 10)[:, 3:]),
        (BASE[:, :4], BASE[:, 4:]),
        (BASE[:, ::2, 1:], BASE[:, 1::2, :]),
        (BASE[:, :, 0], BASE[:, :, 9]),
        (BASE[:, 2:4].view(torch.int8), BASE[:, 4:5, 3]),
        (BASE.view(48, 10)[:, ::3], BASE.view(48, 10)[:, 1::3]),
        (BASE[:, ::3, ::4], BASE[:, ::3, 1::4]),
        (BASE[:, 0].t(), BASE[:, 1].expand(3, 6, 10)),
    ],
)
def test_the_usual_divisions_are_proven(left: torch.Tensor, right: torch.Tensor) -> None:
    """Even and odd elements, blocks of columns, of a middle dimension, transposed and expanded: no byte in common."""
    assert _are_apart(left, right)
    assert _are_apart(right, left)


def _are_apart(left: torch.Tensor, right: torch.Tensor) -> bool:
    """What is proven of two views of one storage."""
    here, there = (int(tensor.storage_offset()) * tensor.element_size() for tensor in (left, right))
    return share_no_byte(left, right, starts=(here, there))


def _bytes(tensor: torch.Tensor) -> set[int]:
    addresses = torch.arange(BASE.numel()).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
    return set(addresses.flatten().tolist())


def test_what_is_proven_is_true() -> None:
    """Of random pairs of views, those that are said to be apart have no element in common; many are said to be."""
    rng, proven, apart = random.Random(0), 0, 0
    for _ in range(600):
        left, right = (_view(rng) for _ in range(2))
        truth = not (_bytes(left) & _bytes(right))
        apart += truth
        if _are_apart(left, right):
            assert truth, (left.size(), left.stride(), left.storage_offset(), right.size(), right.stride())
            proven += 1
    assert proven > apart / 3


def _view(rng: random.Random) -> torch.Tensor:
    view = BASE
    for dim in range(3):
        start = rng.randrange(view.size(dim))
        stop = rng.randrange(start, view.size(dim)) + 1
        view = view[(slice(None),) * dim + (slice(start, stop, rng.choice((1, 1, 2, 3))),)]
    return view.permute(*rng.sample(range(3), 3))
