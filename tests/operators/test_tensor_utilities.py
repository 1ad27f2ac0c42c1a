"""Utilities of tensors: against torch's and numpy's own functions, and numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch_npu

from npugraph_ex.operators import OPERATORS, UnsupportedArgumentError


def formula(name: str) -> object:
    """The formula of ``npu::name``."""
    return OPERATORS[f"npu::{name}"].formula


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("npu_pad", ([1, 0, 0, 2],), lambda x: np.pad(x, ((1, 0), (0, 2)))),
        ("npu_slice", ([1, 2], [2, 3]), lambda x: x[1:3, 2:5]),
        ("npu_reshape", ([5, 3],), lambda x: x.reshape(5, 3)),
        ("npu_transpose", ([1, 0],), lambda x: x.T),
        ("npu_broadcast", ([2, 3, 5],), lambda x: np.broadcast_to(x, (2, 3, 5))),
        ("npu_sort_v2", (0, True), lambda x: -np.sort(-x, 0)),
        ("npu_max.dim", (1,), lambda x: (x.max(1), x.argmax(1))),
        ("npu_min.dim", (0, True), lambda x: (x.min(0, keepdims=True), x.argmin(0, keepdims=True))),
        ("npu_confusion_transpose", ([1, 0], [3, 5], True), lambda x: x.T.reshape(3, 5)),
        ("npu_confusion_transpose", ([1, 0], [5, 3], False), lambda x: x.reshape(5, 3).T),
        ("npu_gather_sparse_index", (torch.tensor([[2, 0]]),), lambda x: x[[[2, 0]]]),
    ],
)
def test_as_numpy_has_it(name: str, arguments: tuple, expected: object) -> None:
    """On a matrix of 3 by 5, contiguous and not."""
    for x in (torch.randn(3, 5), torch.randn(5, 3).t()):
        found, wanted = formula(name)(x, *arguments), expected(x.numpy())
        found, wanted = ((found,), (wanted,)) if isinstance(found, torch.Tensor) else (found, wanted)
        for one, other in zip(found, wanted, strict=True):
            assert np.array_equal(one.numpy(), other)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (([0, 0, 0], [2, 3, 4], [1, 2, 3]), np.s_[0:2, 0:3:2, 0:4:3]),
        (([1, -1, 3], [9, -4, 0], [1, -1, -2]), np.s_[1:9, -1:-4:-1, 3:0:-2]),
        (([1, 1, 1], [2, 2, 2], [1, 1, 1], 1, 4), np.s_[:2, 1:2, 1:]),
        (([1, 0], [2, 0], [1, 1], 0, 0, 2), np.s_[1:2, ...]),
        (([0, 1], [0, 2], [1, 1], 0, 0, 1), np.s_[..., 1:2]),
        (([0, 0, 1], [1, 1, 2], [1, 1, 1], 0, 0, 0, 2), np.s_[0:1, None, 1:2]),
        (([1, 0], [0, 3], [1, 1]), np.s_[1:0, 0:3]),
        (([0, -1, 0], [1, 0, 2], [1, 1, 1], 0, 0, 0, 0, 3), np.s_[0, -1, 0:2]),
        (([0, 0, 0, 1], [0, 0, 0, 2], [1, 1, 1, 1], 0, 0, 2, 4, 1), np.s_[0, ..., None, 1:2]),
    ],
)
def test_strided_slices_with_masks(arguments: tuple, expected: object) -> None:
    """Each mask as numpy writes what it stands for."""
    x = torch.arange(24).view(2, 3, 4)
    found = formula("npu_indexing")(x, *arguments)
    assert np.array_equal(found.numpy(), x.numpy()[expected])
    assert found.is_contiguous()


def test_out_variants_on_the_device() -> None:
    """Of each operator that has one: the result lies in what was given, resized where it had another shape."""
    x, out = torch.randn(3, 5), torch.zeros(1).npu()
    torch_npu.npu_slice(x.npu(), [1, 2], [2, 3], out=out)
    assert torch.equal(out.cpu(), x[1:, 2:])
    assert torch_npu.npu_transpose(x.npu(), [1, 0], out=torch.zeros(5, 3).npu()).tolist() == x.t().tolist()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([0], [1], [0]), r"strides\[0\] should be not 0"),
        (([0], [1], [-1], 0, 0, 0, 0, 1), r"strides\[0\] should be not 0"),
        (([0] * 4, [1] * 4, [1] * 4), "the size of begin"),
        (([0] * 2, [1], [1]), "the sizes of begin, end and strides should be equal"),
        (([0] * 2, [1] * 2, [1] * 2, 0, 0, 3), "ellipsis_mask should be a mask with one bit"),
        (([0] * 8, [1] * 8, [1] * 8, 0, 0, 0, 0b111111), "the result's rank should be at most 8; it is 9"),
    ],
)
def test_slices_without_meaning_are_refused(arguments: tuple, message: str) -> None:
    """As the device refuses them."""
    with pytest.raises(RuntimeError, match=message):
        formula("npu_indexing")(torch.zeros(2, 3, 4), *arguments)


def test_strides_count_elements_of_memory() -> None:
    """Three overlapping pairs, from the second element of what a view shows."""
    x = torch.arange(6.0)[1:]
    assert formula("npu_stride_copy")(x, [3, 2], [1, 1], 1).tolist() == [[2, 3], [3, 4], [4, 5]]


def test_one_hot() -> None:
    """Values of the user's, in float32; a class outside has none."""
    found = formula("npu_one_hot")(torch.tensor([2, 5, -1]), depth=3, on_value=7, off_value=-1)
    assert found.tolist() == [[-1, -1, 7], [-1, -1, -1], [-1, -1, -1]]
    assert found.dtype == torch.float32
    with pytest.raises(UnsupportedArgumentError, match="num_classes=0"):
        formula("npu_one_hot")(torch.tensor([1]), 0, 3)


def test_ranges_are_filled() -> None:
    """Row j of the last dimension has ranges of its own; of a middle dimension all rows together; the last value wins."""
    start, end = torch.tensor([[0, 1], [1, 3]]), torch.tensor([[2, 2], [2, 4]])
    value = torch.tensor([1.0, 2.0])
    fill = formula("npu_masked_fill_range")
    assert fill(torch.zeros(2, 4), start, end, value).tolist() == [[1, 2, 0, 0], [0, 1, 0, 2]]
    assert fill(torch.zeros(2, 1, 4), start, end, value)[:, 0].tolist() == [[1, 2, 0, 0], [0, 1, 0, 2]]
    middle = fill(torch.zeros(2, 4, 1), start, end, value, 1)
    assert middle[0, :, 0].tolist() == middle[1, :, 0].tolist() == [1, 2, 0, 2]
    assert fill(torch.zeros(4, 1), start, end, value, 0)[:, 0].tolist() == [1, 2, 0, 2]
    assert fill(torch.zeros(4), start, end, value, 0).tolist() == [1, 2, 0, 2]


def test_parts_are_added_in_blocks_of_channels() -> None:
    """Channels 1, 2 and 0, 1 are added; 30 of the 32 of the result stay 0."""
    x, y = torch.tensor([1.0, 2, 3]).view(1, 3, 1), torch.tensor([10.0, 20, 30]).view(1, 3, 1)
    found = formula("npu_stride_add")(x, y, 1, 0, 2)
    assert found.flatten().tolist() == [12, 23, *[0] * 30]


def test_signs_are_packed_and_unpacked() -> None:
    """The document's example; 0 counts as positive; what was packed comes back as signs."""
    signs = torch.tensor([5, 4, 3, 2, 0, -1, -2, 4, 3, 2, 1, 0, -1, -2.0])
    packed = formula("npu_sign_bits_pack")(signs, 2)
    assert packed.tolist() == [[159], [15]]
    found = formula("npu_sign_bits_unpack")(packed.flatten(), 1, torch.float16)[0, :14]
    assert torch.equal(found, torch.where(signs >= 0, 1.0, -1.0).half())
    with pytest.raises(ValueError, match="size is 3"):
        formula("npu_sign_bits_pack")(signs, 3)


@pytest.mark.parametrize("kind", [0, 1])
def test_sequences_are_normalised_over_what_is_valid(kind: int) -> None:
    """Against torch's mean and deviation of the valid part."""
    x, lengths = torch.randn(2, 3, 6, dtype=torch.float64), torch.tensor([4, 6])
    found = formula("npu_normalize_batch")(x, lengths, kind)
    for rows, length, normal in zip(x, lengths.tolist(), found, strict=True):
        deviation, mean = torch.std_mean(rows[:, :length], (-2, -1) if kind else -1, keepdim=True)
        torch.testing.assert_close(normal, (rows - mean) / (deviation + 1e-5))


@pytest.mark.parametrize("keepdim", [True, False])
def test_gradients_on_the_device(keepdim: bool) -> None:
    """``backward`` through the operators whose gradients are operators is torch's own."""
    x = torch.randn(3, 4, 5)
    calls = {
        lambda t: torch_npu.npu_max(t, 1, keepdim)[0]: lambda t: torch.max(t, 1, keepdim)[0],
        lambda t: torch_npu.npu_min(t, -1, keepdim)[0]: lambda t: torch.min(t, -1, keepdim)[0],
        lambda t: torch_npu.npu_confusion_transpose(t, [2, 0, 1], [5, 12], True): lambda t: t.permute(2, 0, 1).reshape(
            5, 12
        ),
        lambda t: torch_npu.npu_confusion_transpose(t, [1, 0], [4, 15], False): lambda t: t.reshape(4, 15).t(),
        lambda t: torch_npu.npu_gather_sparse_index(t, torch.tensor([2, 0, 2]).npu()): lambda t: t[[2, 0, 2]],
        lambda t: torch_npu.npu_dtype_cast(t, torch.float16).float(): lambda t: t.half().float(),
    }
    for on_device, on_host in calls.items():
        given, own = x.npu().requires_grad_(), x.clone().requires_grad_()
        results = on_device(given), on_host(own)
        torch.testing.assert_close(results[0].detach().cpu(), results[1].detach())
        weight = torch.randn_like(results[1])
        results[0].backward(weight.npu())
        results[1].backward(weight)
        torch.testing.assert_close(given.grad.cpu(), own.grad)


def test_in_place_on_the_device() -> None:
    """Ones, and copies into a transposed tensor and into another dtype."""
    x = torch.zeros(2, 3).npu()
    assert torch_npu.one_(x) is x
    assert x.cpu().eq(1).all()
    turned, source = x.t(), torch.randn(3, 2).npu()
    torch.ops.npu.npu_view_copy(turned, source, False)
    assert torch.equal(x.cpu(), source.cpu().t())
    half = torch.zeros(3, 2).half().npu()
    torch.ops.npu.npu_dtype_cast_(half, source)
    assert torch.equal(half.cpu(), source.cpu().half())


def test_overflow_leaves_no_status() -> None:
    """It is in the result, as inf; the status that is read stays 0."""
    status = torch_npu.npu_alloc_float_status(torch.ones(1).npu())
    assert torch.full((1,), 60000.0).half().npu().mul(2).isinf().item()
    found = torch_npu.npu_get_float_status(status)
    assert (found.tolist(), found.dtype) == ([0] * 8, torch.int32)
    assert torch_npu.npu_clear_float_status(status).tolist() == [0.0] * 8
    with pytest.raises(ValueError, match=r"mode .*; it is 2"):
        formula("npu_get_float_status")(torch.zeros(8), 2)


def test_prefetch_checks_its_range() -> None:
    """It computes nothing, and bytes outside the tensor are refused."""
    x = torch.ones(4)
    assert formula("npu_prefetch")(x, None, 16) is None
    with pytest.raises(ValueError, match="offset 0 to the 16 bytes"):
        formula("npu_prefetch")(x, None, 16, 16)
