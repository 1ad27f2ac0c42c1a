"""The references of vLLM-Ascend's operators: against cases computed by hand, and against what compilation is told of them."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from npugraph_ex.operators import OPERATORS
from npugraph_ex.testing.generator.client_operators import client_operators

embedding = OPERATORS["vllm::npu_rotary_embedding"].formula
split_norm_rope = OPERATORS["vllm::qkv_rmsnorm_rope"].formula
QUARTER_TURN = torch.tensor([[0.0, 0.0, 1.0, 1.0]])
"""One row of cosines 0 and sines 1."""


def test_rotary_embedding_by_hand() -> None:
    """A quarter turn makes (a, b) into (-b, a): halves are pairs in the first style, neighbours in the second."""
    query, key = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[5.0, 6.0, 7.0, 8.0]])
    position = torch.tensor([0])
    halves = embedding(position, query, key, QUARTER_TURN, 4, 4, True)
    assert [out.tolist() for out in halves] == [[[-3, -4, 1, 2]], [[-7, -8, 5, 6]]]
    neighbours = embedding(position, query, key, QUARTER_TURN, 4, 4, False)
    assert [out.tolist() for out in neighbours] == [[[-2, 1, -4, 3]], [[-6, 5, -8, 7]]]


def test_split_norm_and_rope_by_hand() -> None:
    """The mean square of (3, 4) is 12.5, so with that much for epsilon the root is 5; then a quarter turn; v as it is."""
    x = torch.tensor([[3.0, 4.0, 0.0, 0.0, 3.0, 4.0, 9.0, 8.0]])
    weight = torch.tensor([1.0, 10.0])
    q, k, v = split_norm_rope(x, torch.tensor([[0.0, 1.0]]), torch.tensor([0]), weight, weight, 4, 2, 2, 12.5)
    torch.testing.assert_close(q, torch.tensor([[-8.0, 0.6, 0.0, 0.0]]))
    torch.testing.assert_close(k, torch.tensor([[-8.0, 0.6]]))
    assert v.tolist() == [[9, 8]]
    assert v.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_compilation_is_told_the_metadata_of_the_results() -> None:
    """Shapes, strides and dtypes of the fake implementations are those of the references, permuted inputs included."""
    permuted = torch.randn(4, 3, 2).permute(1, 2, 0)
    cases = {
        "npu_rotary_embedding": (torch.arange(3), permuted, permuted, torch.randn(8, 4), 4, 4, True),
        "qkv_rmsnorm_rope": (
            torch.randn(1, 8),
            torch.randn(8, 2),
            torch.tensor([1]),
            *[torch.ones(2)] * 2,
            4,
            2,
            2,
            1e-6,
        ),
    }
    with client_operators():
        for name, arguments in cases.items():
            real = OPERATORS[f"vllm::{name}"].formula(*arguments)
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fakes = [mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for value in arguments]
                told = getattr(torch.ops.vllm, name)(*fakes)
            for one, other in zip(real, told, strict=True):
                assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype), name
