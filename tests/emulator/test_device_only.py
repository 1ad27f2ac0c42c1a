"""ATen operators that the CPU lacks: against the operators that say the same in one step on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from torch.nn import functional

import npu_emulator
from npu_emulator import KernelMissingError


def test_products_with_a_wider_result() -> None:
    """In float16, 300 * 300 overflows; asked for in float32 it does not. A list of products, sums, out forms and captures."""
    x, graph = torch.full((2, 2), 300.0, dtype=torch.float16, device="npu"), torch.npu.NPUGraph()
    assert torch.mm(x, x, out_dtype=torch.float32).tolist() == [[180000.0] * 2] * 2
    out = torch.empty(2, 2, device="npu")
    assert torch.mm(x, x, out_dtype=torch.float32, out=out) is out
    assert out.tolist() == [[180000.0] * 2] * 2
    with torch.npu.graph(graph):
        batched = torch.bmm(x[None], x[None], out_dtype=torch.float32)
    x.fill_(1.0)
    graph.replay()
    assert batched.tolist() == [[[2.0, 2.0], [2.0, 2.0]]]
    added = torch.addmm(torch.ones(2, 2, device="npu"), x, x, out_dtype=torch.float32, beta=3, alpha=0.5)
    assert added.tolist() == [[4.0, 4.0], [4.0, 4.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_batch_norm_over_two_processes_is_that_of_the_whole_batch(dtype: torch.dtype) -> None:
    """Statistics, running statistics, results and gradients, from two unequal halves: those of torch's own batch norm."""
    torch.manual_seed(0)
    x, gradient = (torch.randn(5, 3, 4).to(dtype) for _ in range(2))
    weight, bias, running = torch.rand(3) + 0.5, torch.randn(3), (torch.zeros(3), torch.ones(3))
    whole, scale, shift = (t.double().requires_grad_() for t in (x, weight, bias))
    expected_running = [t.double() for t in running]
    expected = functional.batch_norm(whole, *expected_running, scale, shift, training=True, momentum=0.1, eps=1e-3)
    expected.backward(gradient.double())

    parts, gradients = ([t.npu() for t in tensor.split([2, 3])] for tensor in (x, gradient))
    weight, bias, mean, var = (t.npu() for t in (weight, bias, *running))
    stats = [torch.batch_norm_stats(part, 1e-3) for part in parts]
    counts = torch.tensor([8.0, 12.0], device="npu")
    means, deviations = (torch.stack([stat[side] for stat in stats]) for side in (0, 1))
    of_all = torch.batch_norm_gather_stats_with_counts(parts[0], means, deviations, mean, var, 0.1, 1e-3, counts)
    results = torch.cat([torch.batch_norm_elemt(part, weight, bias, *of_all, 1e-3) for part in parts])
    sums = [
        torch.batch_norm_backward_reduce(dy, part, *of_all, weight, True, True, True)
        for dy, part in zip(gradients, parts, strict=True)
    ]
    total, centred, of_weight, of_bias = (sum(each) for each in zip(*sums, strict=True))
    of_input = [
        torch.batch_norm_backward_elemt(dy, part, *of_all, weight, total, centred, counts.int())
        for dy, part in zip(gradients, parts, strict=True)
    ]
    assert results.dtype == of_input[0].dtype == dtype
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 2e-3}
    found = (results, mean, var, torch.cat(of_input), of_weight, of_bias)
    assert whole.grad is not None
    wanted = (expected.detach(), *expected_running, whole.grad, scale.grad, shift.grad)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, **near)


def test_running_statistics_of_several_processes_are_written() -> None:
    """Another stream's read of them is a race; there need be none."""
    ones, running, counts = torch.ones(2, 3, device="npu"), torch.ones(2, 3, device="npu"), torch.ones(2, device="npu")
    side, given = torch.npu.Stream(), (torch.ones(4, 3, 5, device="npu"), ones, ones)
    with npu_emulator.detect_races() as races:
        torch.batch_norm_gather_stats_with_counts(*given, *running, 0.1, 1e-3, counts)
        with torch.npu.stream(side):
            running + 0
        torch.npu.synchronize()
    assert races
    without = torch.batch_norm_gather_stats_with_counts(*given, None, None, 0.1, 1e-3, counts)
    assert without[0].tolist() == [1, 1, 1]


def test_depthwise_convolution_and_masked_scale() -> None:
    """As a convolution in as many groups as channels; as a product with a mask."""
    x, weight = torch.randn(2, 3, 6, 6), torch.randn(3, 1, 3, 3)
    found = torch.ops.aten._conv_depthwise2d(x.npu(), weight.npu(), [3, 3], None, [2, 2], [1, 1], [1, 1])
    torch.testing.assert_close(found.cpu(), functional.conv2d(x, weight, None, 2, 1, groups=3))
    mask = torch.tensor([1, 0, 1], dtype=torch.uint8, device="npu")
    assert torch._masked_scale(torch.tensor([1.0, 2.0, 3.0]).npu(), mask, 2.0).tolist() == [2.0, 0.0, 6.0]


def test_calls_that_only_a_device_takes() -> None:
    """Indices of int32, pads of packed 4-bit floats, sparse gradients, recurrent parameters of another dtype."""
    hot = torch.nn.functional.one_hot(torch.tensor([1, 0], dtype=torch.int32).npu(), 3)
    assert hot.dtype == torch.int32
    assert hot.tolist() == [[0, 1, 0], [1, 0, 0]]
    compiled = torch.compile(lambda x: torch.nn.functional.one_hot(x, 3), backend="aot_eager")
    assert compiled(torch.tensor([1, 0]).npu()).tolist() == [[0, 1, 0], [1, 0, 0]]

    for error in (IndexError, RuntimeError):  # torch's, and an NPU's
        with pytest.raises(error, match="Dimension out of range"):
            torch.ones(1, 1).npu().sum(-3)

    places = torch.empty(1, dtype=torch.int32).npu()
    ordered, value = torch.arange(3.0).npu(), torch.tensor([0.5]).npu()
    assert torch.searchsorted(ordered, value, out_int32=True, out=places).tolist() == [1]
    with pytest.raises(RuntimeError, match="dtype is wrong"):
        torch.searchsorted(ordered, value, out=places)

    pairs = torch.tensor([[0x21, 0x43]], dtype=torch.uint8)
    padded = torch.constant_pad_nd(pairs.view(torch.float4_e2m1fn_x2).npu(), (2, 0, 0, 1), -1.5)
    assert padded.view(torch.uint8).tolist() == [[0xBB, 0x21, 0x43], [0xBB, 0xBB, 0xBB]]
    for pad, value in (((1, 0), 0), ((-2, 0), 0), ((2, 2), 0.3)):
        with pytest.raises(RuntimeError, match="constant_pad_nd"):
            torch.constant_pad_nd(pairs.view(torch.float4_e2m1fn_x2).npu(), pad, value)

    gradients = []
    for device in ("cpu", "npu"):
        x = torch.arange(6.0).view(2, 3).to(device).requires_grad_()
        index = torch.tensor([[0, 2], [1, 1]], device=device)
        (
            torch.gather(x, 1, index, sparse_grad=True) * torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device)
        ).sum().backward()
        assert x.grad.is_sparse
        gradients.append(x.grad.to_dense().cpu())
    assert torch.equal(*gradients)

    half, wide = torch.randn(2, 3).half(), torch.randn(2, 3)
    wanted = half.clone().float().requires_grad_()
    (torch.log_softmax(wanted, 1) * wide).sum().backward()
    x = half.npu().requires_grad_()
    found = torch.log_softmax(x, 1, dtype=torch.float32)
    assert found.dtype == torch.float32
    (found * wide.npu()).sum().backward()
    torch.testing.assert_close(found.cpu(), torch.log_softmax(half.float(), 1))
    torch.testing.assert_close(x.grad.cpu(), wanted.grad.half())

    image, weight = torch.randn(1, 2, 3, 4, 4).half(), torch.randn(1, 2, 3, 3, 3).half()
    volume = torch._C._nn.slow_conv3d(image.npu(), weight.npu(), (3, 3, 3))
    assert volume.dtype == torch.float16
    torch.testing.assert_close(
        volume.cpu().float(), functional.conv3d(image.float(), weight.float()), atol=2e-2, rtol=2e-3
    )

    cell = torch.nn.LSTMCell(3, 4)
    given = torch.randn(2, 3).half()
    expected, _ = cell(given.float())
    hidden, _ = copy.deepcopy(cell).npu()(given.npu())
    assert hidden.dtype == torch.float16
    torch.testing.assert_close(hidden.cpu().float(), expected, atol=2e-3, rtol=2e-3)


_FALLBACKS = """
import os, warnings
import torch
x, y = torch.tensor([1.0, float("nan")]).npu(), torch.tensor([2.0, 3.0]).npu()
os.environ["TORCH_NPU_FALLBACK_CPU_DISABLE"] = "1"
try:
    torch.heaviside(y, y)
except RuntimeError as error:
    assert "aten::heaviside.out has no kernel for the NPU" in str(error), error
else:
    raise AssertionError("computed")
del os.environ["TORCH_NPU_FALLBACK_CPU_DISABLE"]
for call, name in ((torch.heaviside, "heaviside"), (torch.nextafter, "nextafter")):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        results = [call(y, y).tolist() for _ in range(2)]
    said = [str(warning.message) for warning in seen]
    assert len(said) == 1 and f"'aten::{name}.out' is not currently supported" in said[0], said
    assert results == [call(y.cpu(), y.cpu()).tolist()] * 2
warnings.simplefilter("error")
assert torch.maximum(y, y).tolist() == [2.0, 3.0]
assert (x[:1] + y[:1]).tolist() == [3.0]
"""


def test_what_torch_npu_would_leave_to_the_cpu_says_so_once(program: Callable[..., Any]) -> None:
    """One warning a process for an operator and its out form each; the variable that forbids it; none where there is a kernel."""
    done = program(_FALLBACKS, "--quiet")
    assert done.returncode == 0, done.stderr


_PRIVATE_COPIES = """
import torch, torch_npu
x = torch.arange(64.0).reshape(8, 8).half()
nz = torch_npu.npu_format_cast(x.npu(), 29)
assert torch_npu.get_npu_format(nz) == 29, torch_npu.get_npu_format(nz)
for target, source in ((nz, x), (nz, nz.clone()), (x.npu(), nz)):
    try:
        target.copy_(source)
    except RuntimeError as error:
        assert "not supported on Ascend950" in str(error), error
    else:
        raise AssertionError("copied")
assert torch.equal(nz.cpu(), x)
assert torch.equal(torch.zeros(8, 8).half().copy_(nz), x)
"""


@pytest.mark.slow
def test_an_ascend950_copies_private_formats_to_the_host_alone(program: Callable[..., Any]) -> None:
    """Refused from the host, between private formats, and to plain order; a copy to the host has the values."""
    done = program(_PRIVATE_COPIES, "--quiet", "--soc", "Ascend950PR_9579")
    assert done.returncode == 0, done.stderr


def test_a_kernel_that_cannot_be_written_says_why() -> None:
    """Weights that CANN's own library compresses cannot be read: the error names the operator and the reason."""
    codes = torch.zeros(8, dtype=torch.int8, device="npu")
    bias, scale = (torch.zeros(1, 4, dtype=dtype, device="npu") for dtype in (torch.int32, torch.uint64))
    with pytest.raises(
        KernelMissingError, match=r"npu_matmul_compress_dequant; no public document .* compresses its weights"
    ):
        torch_npu.npu_matmul_compress_dequant(codes.view(2, 4), codes, codes, bias, scale)
