"""What the CPU's kernels lack and a device has: out forms above autograd, integers, small floats; the values are the CPU's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch_npu
from torch.nn import functional

import npu_emulator
from npugraph_ex.operators import OPERATORS
from npugraph_ex_conformance.operator_checks import widened

_EYE = torch.eye(3) * 2 + 0.1
_INDEX = torch.tensor([2, 0, 1])
OUT_FORMS: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "max": (torch.max, [torch.tensor([1, 5, 3]), torch.tensor([4, 2, 6])]),
    "min": (torch.min, [torch.tensor([1, 5, 3]), torch.tensor([4, 2, 6])]),
    "max of floats": (torch.max, [torch.randn(3, 4), torch.randn(4)]),
    "nanmean": (torch.nanmean, [torch.tensor([1.0, float("nan"), 4.0])]),
    "nanmean in bfloat16": (torch.nanmean, [torch.tensor([1.0, float("nan"), 4.0], dtype=torch.bfloat16)]),
    "matmul": (torch.matmul, [torch.randn(2, 3), torch.randn(3, 4)]),
    "gather": (lambda x, index, **to: torch.gather(x, 0, index, **to), [torch.randn(3), _INDEX]),
    "inverse": (torch.inverse, [_EYE]),
    "cholesky": (torch.linalg.cholesky, [_EYE @ _EYE.mT]),
    "renorm": (lambda x, **to: torch.renorm(x, 2, 0, 1.0, **to), [torch.randn(3, 3)]),
    "log_sigmoid": (torch._C._nn.log_sigmoid, [torch.randn(4)]),
    "rfft": (torch.fft.rfft, [torch.randn(6)]),
    "irfft": (torch.fft.irfft, [torch.randn(4, dtype=torch.complex64)]),
}


def _same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("name", OUT_FORMS)
def test_out_forms_that_torch_npu_takes_above_autograd(name: str) -> None:
    """With gradients on and off: the given tensor is filled, grown if it is too small, and returned."""
    function, operands = OUT_FORMS[name]
    expected = function(*operands)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            out = torch.empty(0, dtype=expected.dtype, device="npu")
            found = function(*[operand.npu() for operand in operands], out=out)
            assert found is out
            _same(out, expected)


@pytest.mark.parametrize("name", ["arange", "linspace", "logspace", "range"])
@pytest.mark.filterwarnings("ignore:torch.range is deprecated")
def test_a_range_fills_what_it_is_given_in_its_own_shape(name: str) -> None:
    """A strided `out` of as many elements stays where it is, and what lies between its elements stays, too."""
    arguments = {"arange": (4,), "range": (0, 3)}.get(name, (0, 3, 4))
    host, device = torch.full((2, 3), 7.0), torch.full((2, 3), 7.0, device="npu")
    for whole in (host, device):
        getattr(torch, name)(*arguments, out=whole.narrow(1, 1, 2))
    _same(device, host)


def test_lists_may_lie_on_host_and_device() -> None:
    """Copies of lists go each its own way; factors of a list may be a tensor of the host."""
    mixed = [torch.zeros(3, device="npu"), torch.zeros(2, device="npu"), torch.zeros(2)]
    torch._foreach_copy_(mixed, [torch.ones(3), torch.ones(2, device="npu") * 2, torch.ones(2, device="npu") * 3])
    assert [found.tolist() for found in mixed] == [[1, 1, 1], [2, 2], [3, 3]]
    values = [torch.arange(1.0, 4), torch.tensor([2.0])]
    device, factors = [value.npu() for value in values], torch.tensor([0.5, -3.0])
    for name in ("_foreach_addcdiv", "_foreach_addcmul"):
        expected = getattr(torch, name)(values, values, values, factors)
        for found, wanted in zip(getattr(torch, name)(device, device, device, factors), expected, strict=True):
            _same(found, wanted)


def test_an_out_form_is_refused_by_the_kernels_own_rules() -> None:
    """Not by those of torch's Python metas, which know fewer casts and speak otherwise; in a capture at the launch."""
    codes, out = torch.ones(2, 3, dtype=torch.uint8, device="npu"), torch.zeros(3, dtype=torch.bool, device="npu")
    assert torch.all(codes, dim=0, out=out).tolist() == [True, True, True]
    x, small = torch.ones(3, device="npu"), torch.ones(3, dtype=torch.int8, device="npu")
    with pytest.raises(RuntimeError, match=r"Float can't be cast .* Char"):
        torch.addcmul(small, x, small, out=small)
    with torch.npu.graph(torch.npu.NPUGraph()), pytest.raises(RuntimeError, match="can't be cast"):
        torch.addcmul(small, x, small, out=small)


def test_an_out_form_refuses_what_needs_a_gradient() -> None:
    """As torch does on every device."""
    x = torch.randn(3, device="npu", requires_grad=True)
    with pytest.raises(RuntimeError, match=r"max\(\): functions with out=.*automatic differentiation"):
        torch.max(x, x, out=torch.zeros(3, device="npu"))
    with torch.no_grad():
        assert torch.equal(torch.max(x, x, out=torch.zeros(3, device="npu")), x)


_SMALL = [torch.float16, torch.bfloat16]
_WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]


@pytest.mark.parametrize("dtype", _WHOLE)
def test_a_histogram_of_integers(dtype: torch.dtype) -> None:
    """Counts by hand, of the dtype of the input; the out form and a captured graph count the same."""
    x = torch.tensor([0, 1, 1, 3], dtype=dtype, device="npu")
    counts = torch.histc(x, bins=4, min=0, max=3)
    assert (counts.dtype, counts.tolist()) == (dtype, [1, 2, 0, 1])
    out = torch.zeros(4, dtype=dtype, device="npu")
    assert torch.histc(x, bins=4, min=0, max=3, out=out) is out
    assert out.tolist() == [1, 2, 0, 1]
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        replayed = torch.histc(x, bins=4, min=0, max=3)
    x.fill_(2)
    graph.replay()
    assert replayed.tolist() == [0, 0, 4, 0]


WIDER: dict[str, tuple[Callable[..., Any], list[torch.dtype]]] = {
    "histc": (lambda x: torch.histc(x, bins=4, min=0, max=3), _SMALL),
    "add_relu": (lambda x: torch._VF._add_relu(x - 2, x, alpha=2), _SMALL),
    "cdist": (lambda x: torch.cdist(x, x + 1), _SMALL),
    "in place": (lambda x: x.clone().lgamma_(), _SMALL),
    "renorm in place": (lambda x: x.clone().reshape(2, 2).renorm_(2, 0, 1.0), _SMALL),
}


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, (_, types) in WIDER.items() for dtype in types])
def test_small_floats_are_computed_in_float32_and_rounded_once(name: str, dtype: torch.dtype) -> None:
    """What the CPU may refuse in float16 or bfloat16 is float32's result, rounded."""
    function, _ = WIDER[name]
    x = torch.tensor([0.25, 1.5, 1.75, 3.0], dtype=dtype)
    found = function(x.reshape(4, 1).npu() if name == "cdist" else x.npu())
    expected = function(x.reshape(4, 1).float() if name == "cdist" else x.float())
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu(), expected.to(dtype), rtol=2e-2, atol=1e-2)


ONCE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "addbmm": lambda x: torch.addbmm(x[0], x, x),
    "addr": lambda x: torch.addr(x[0], x[0, 0], x[1, 1], beta=0.3, alpha=1.7),
    "prod": lambda x: x.prod(0),
    "prod, out form": lambda x: torch.prod(x, 1, out=x.new_zeros(0)),
    "interpolate": lambda x: functional.interpolate(x, scale_factor=3, mode="linear"),
    "adaptive_avg_pool3d": lambda x: functional.adaptive_avg_pool3d(x[None] * 9, (2, 3, 1)),
    "grid_sample": lambda x: functional.grid_sample(x[None], x[None, :, :, :2], align_corners=False),
    "add": lambda x: torch.add(x[0], x[1], alpha=-0.7),
    "log_softmax": lambda x: functional.log_softmax(x, -1),
    "logit": torch.logit,
    "fold": lambda x: functional.fold(x.reshape(1, 49, 7)[:, :48, :4], (4, 5), (3, 4)),
    "linspace": lambda x: torch.linspace(-10, 10, 57, dtype=x.dtype, device=x.device),
    "nll_loss": lambda x: functional.nll_loss(x.reshape(49, 7), torch.arange(49, device=x.device) % 7),
    "index_put": lambda x: x[0].index_put(
        (torch.zeros(49, dtype=torch.int64, device=x.device),), x.reshape(49, 7), accumulate=True
    ),
    "matmul's gradient": lambda x: _gradient(lambda y: x @ y, x[0]),
    "conv2d": lambda x: functional.conv2d(x[None], x[:, :, :3, None]),
    "conv2d's gradient": lambda x: _gradient(lambda y: functional.conv2d(x[None], y), x[:, :, :3, None]),
    "batch_norm": lambda x: functional.batch_norm(x, None, None, x[0, 0], x[0, 1], training=True),
    "batch_norm's gradient": lambda x: _gradient(
        lambda y: functional.batch_norm(x, None, None, y, training=True), x[0, 0]
    ),
    "layer_norm's gradient": lambda x: _gradient(lambda y: functional.layer_norm(x, (7,), y), x[0, 0]),
}


def test_lists_of_float16_are_added_as_the_cpu_adds_them() -> None:
    """In steps; those of bfloat16 are rounded once, as the vendor's tests say of its device."""
    torch.manual_seed(0)
    for dtype in _SMALL:
        x, y = torch.rand(2, 500).to(dtype)
        found = torch._foreach_sub([x.npu()], [y.npu()], alpha=0.7)[0].cpu()
        assert torch.equal(found, (x.float() - y.float() * 0.7).to(dtype)) == (dtype == torch.bfloat16)
        assert torch.equal(found, torch._foreach_sub([x], [y], alpha=0.7)[0]) == (dtype == torch.float16)


@pytest.mark.parametrize("dtype", [*_SMALL, torch.float32], ids=str)
def test_batch_norm_writes_running_statistics_while_it_trains(dtype: torch.dtype) -> None:
    """Those of float32, rounded once, though the schema declares no write; another stream's read of them is a race."""
    torch.manual_seed(0)
    x, running = torch.randn(4, 3, 5).to(dtype), [torch.randn(3).to(dtype), torch.rand(3).to(dtype) + 1]
    expected, found = [value.float() for value in running], [value.npu() for value in running]
    functional.batch_norm(x.float(), *expected, training=True)
    device, side = x.npu(), torch.npu.Stream()
    for training in (True, False):
        with npu_emulator.detect_races() as races:
            functional.batch_norm(device, *found, training=training)
            with torch.npu.stream(side):
                copies = [value + 0 for value in found]
            torch.npu.synchronize()
        assert bool(races) is training
    for value, whole in zip(copies, expected, strict=True):
        assert torch.equal(value.cpu(), whole.to(dtype))


def test_the_gradient_of_the_largest_difference_meets_a_rounded_distance() -> None:
    """In float16 the distance may lie below the difference that it is, which has the gradient then; float32 is the CPU's."""
    torch.manual_seed(0)
    x, y = torch.rand(2, 5, 7)
    for dtype in (torch.float16, torch.float32):
        here, there = x.to(dtype).float(), y.to(dtype).float()
        differences = here[:, None] - there[None]
        rounded = differences.abs().amax(-1, keepdim=True).to(dtype).float()
        expected = (differences.sign() * (differences.abs() >= rounded)).sum(1)
        device = there.to(dtype).npu()
        found = _gradient(lambda at, to=device: torch.cdist(at, to, p=float("inf")).sum(), here.to(dtype).npu())
        assert expected.any()
        assert torch.equal(found.cpu(), expected.to(dtype))


def _gradient(function: Callable[[torch.Tensor], torch.Tensor], at: torch.Tensor) -> torch.Tensor:
    at = at.detach().requires_grad_()
    found = function(at)
    upstream = torch.arange(found.numel(), device=at.device) % 5 + 1  # sums of which are far from 0
    return torch.autograd.grad(found, at, upstream.to(at.dtype).reshape(found.shape))[0]


@pytest.mark.parametrize("dtype", _SMALL)
@pytest.mark.parametrize("name", ONCE)
def test_small_floats_are_not_rounded_in_between(name: str, dtype: torch.dtype) -> None:
    """The CPU's own kernels are some steps off here; a device computes in float32 and rounds once."""
    torch.manual_seed(0)
    x = torch.rand(7, 7, 7).to(dtype)
    found, expected = ONCE[name](x.npu()).cpu(), ONCE[name](x.float())
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=torch.finfo(dtype).eps / 2 * 1.001, atol=1e-7)


INDEXED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "put_": lambda x, index: x.clone().put_(index, -x[:2]),
    "take": lambda x, index: x.take(index),
    "gather": lambda x, index: x.gather(0, index),
    "scatter_add_": lambda x, index: x.clone().scatter_add_(0, index, x),
    "index_copy_": lambda x, index: x.clone().index_copy_(0, index, -x[:2]),
    "index_fill": lambda x, index: x.index_fill(0, index, 7.0),
    "nll_loss": lambda x, index: functional.nll_loss(x.reshape(2, 2), index // 2),
    "cross_entropy": lambda x, index: functional.cross_entropy(x.reshape(2, 2), index // 2),
}


@pytest.mark.parametrize("name", INDEXED)
def test_indices_may_be_of_32_bits(name: str) -> None:
    """Where the CPU takes int64 alone, a device takes int32 as well; the values are those of int64."""
    x, index = torch.tensor([0.25, 1.5, 1.75, 3.0]), torch.tensor([3, 1])
    expected = INDEXED[name](x, index)
    found = INDEXED[name](x.npu(), index.int().npu())
    assert found.dtype == expected.dtype
    _same(found, expected)


COMPOSED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slogdet": lambda x: torch.slogdet(x)[1],
    "fill_diagonal_": lambda x: (x * 1).fill_diagonal_(2.0),
    "conv_tbc": lambda x: torch.conv_tbc(x.unsqueeze(0), x.unsqueeze(0), x[0], 1),
    "affine_grid": lambda x: functional.affine_grid(x[:2].unsqueeze(0), [1, 1, 3, 3], align_corners=False),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_what_torch_npu_takes_at_its_autograd_key_has_its_gradient(name: str) -> None:
    """Values and gradients are those of the CPU."""
    host, device = _EYE.clone().requires_grad_(), _EYE.npu().requires_grad_()
    expected, found = COMPOSED[name](host), COMPOSED[name](device)
    _same(found, expected)
    expected.sum().backward()
    found.sum().backward()
    assert host.grad is not None
    assert device.grad is not None
    torch.testing.assert_close(device.grad.cpu(), host.grad, rtol=1e-4, atol=1e-5)


def test_numbers_in_place_of_tensors() -> None:
    """Bitwise operators take a number, in place and in a captured graph, too."""
    x, graph = torch.tensor([1, 2, 4], dtype=torch.int32, device="npu"), torch.npu.NPUGraph()
    assert (x | 8).tolist() == [9, 10, 12]
    with torch.npu.graph(graph):
        y = (x | 8) ^ 1
    x |= 3
    x &= 6
    assert x.tolist() == [2, 2, 6]
    graph.replay()
    assert (y.dtype, y.tolist()) == (torch.int32, [11, 11, 15])


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_has_no_gradient_can_be_traced(dynamic: bool) -> None:
    """A mixture of experts makes its mask so; the operator's fake result is asked for at the autograd key, too."""
    index = torch.tensor([[3, 1], [0, 2]], device="npu")
    traced = torch.compile(lambda at: functional.one_hot(at, 4).permute(2, 1, 0), backend="eager", dynamic=dynamic)
    _same(traced(index), functional.one_hot(index.cpu(), 4).permute(2, 1, 0))


def test_what_the_device_answers_in_its_own_way() -> None:
    """An unwanted quantisation has results of one element, this chip turns no quarters, and a code of no dtype is refused."""
    x, weight = torch.randn(3, 16).half().npu(), torch.ones(16).half().npu()
    given = torch_npu.npu_add_rms_norm_dynamic_quant(x, x, weight, output_mask=[True, False])
    assert [tuple(result.shape) for result in given] == [(3, 16), (), (3, 16), (3,), ()]
    assert [result.dtype for result in given[:2]] == [torch.int8, torch.int8]
    empty = torch_npu.npu_add_rms_norm_dynamic_quant(x[:0], x[:0], weight)
    assert empty[0].shape == (0, 16)
    cosine = torch.ones(1, 1, 1, 16).half().npu()
    with pytest.raises(RuntimeError, match="should be half or interleave, but got quarter"):
        torch_npu.npu_rotary_mul(x.reshape(1, 3, 1, 16), cosine, cosine, "quarter")
    with pytest.raises(RuntimeError, match="dst_dtype=-10 is the code of no dtype"):
        torch_npu.npu_anti_quant(x.to(torch.int8), torch.ones(1).npu(), dst_dtype=-10)


_OF_TWO_DTYPES: dict[str, Callable[..., object]] = {
    "mm": lambda a, b, *_: torch.mm(a, b),
    "bmm": lambda a, b, *_: torch.bmm(a[None], b[None]),
    "addmm": lambda a, b, *_: torch.addmm(a, a, b),
    "baddbmm": lambda a, b, *_: torch.baddbmm(a[None], a[None], b[None]),
    "mv": lambda a, b, *_: torch.mv(a, b[0]),
    "dot": lambda a, b, *_: torch.dot(a[0], b[0]),
    "addmv": lambda a, b, *_: torch.addmv(a[0], a, b[0]),
    "matmul": lambda a, b, *_: torch.matmul(a, b),
    "linear": lambda a, b, *_: functional.linear(a, b),
    "index_copy": lambda a, b, places, _: a.index_copy(0, places, b),
    "index_add": lambda a, b, places, _: a.clone().index_add_(0, places, b),
    "put": lambda a, b, places, _: a.clone().put_(places, b[0]),
    "scatter": lambda a, b, places, _: a.scatter(0, places[None], b),
    "scatter_add": lambda a, b, places, _: a.scatter_add(0, places[None], b),
    "masked_scatter": lambda a, b, _, kept: a.masked_scatter(kept, b),
}


@pytest.mark.parametrize("name", _OF_TWO_DTYPES)
@pytest.mark.parametrize("order", ["fifo", "lazy"])
def test_arguments_of_two_dtypes_are_refused_at_the_launch(name: str, order: str) -> None:
    """In a capture, too, where the kernel itself runs at a replay; a compiled function raises at its call."""
    x, places = torch.ones(2, 2).npu(), torch.arange(2).npu()
    call, given = _OF_TWO_DTYPES[name], (x, x.half(), places, x > 0)
    torch.compiler.reset()
    with npu_emulator.schedule(order):
        with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
            call(*given)
        torch.npu.synchronize()
        with pytest.raises(RuntimeError, match="same dtype"), torch.npu.graph(torch.npu.NPUGraph()):
            call(*given)
        with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
            torch.compile(call, backend="npugraph_ex")(*given)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool], ids=str)
def test_activations_and_norms_of_integers_are_refused_at_the_launch(dtype: torch.dtype) -> None:
    """The CPU's kernels lack them too, but not in the words of a device, and the emulated device widens for other operators."""
    x = torch.ones(2, 4, device="npu").to(dtype)
    calls: list[Callable[[], Any]] = [
        *(lambda one=one: one(x) for one in (functional.silu, functional.gelu, functional.mish, functional.elu)),
        lambda: functional.softmax(x, -1),
        lambda: functional.layer_norm(x, (4,)),
        lambda: functional.hardswish(x.clone(), inplace=True),
        lambda: torch_npu.npu_swiglu(x),
        lambda: torch_npu.npu_rms_norm(x, x[0]),
    ]
    before = npu_emulator.launch_count()
    for function in calls:
        with pytest.raises(RuntimeError, match=f"it is {dtype}.* error code is 161002"):
            function()
    assert npu_emulator.launch_count() - before <= 2, "the clone and the row are the only kernels"


def test_float64_is_for_judges_alone() -> None:
    """A formula takes it; the device refuses it where the operator's document lists floats and float64 is none of them."""
    x = torch.randn(2, 4, dtype=torch.float64)
    only = [record for record in OPERATORS.values() if record.floats_only]
    assert len(only) > 30
    for record in only:
        example = widened(record.calls()[0])
        with pytest.raises(RuntimeError, match=r"should be torch.float16 or .*it is torch.float64"):
            record.refuse_on_device(*example.args, **example.kwargs)
    _same(torch_npu.npu_swiglu(x.float().npu()), OPERATORS["npu::npu_swiglu"].formula(x).float())
    with pytest.raises(RuntimeError, match=r"npu_swiglu: input should be .*it is torch.float64"):
        torch_npu.npu_swiglu(x.npu())


def test_the_default_dtype_is_that_of_the_call() -> None:
    """What an operator gives without a dtype is known for one default dtype alone."""

    def dtypes(device: str) -> list[torch.dtype]:
        whole = torch.ones(3, dtype=torch.int64, device=device)
        given = [
            torch.ones(3, device=device),
            torch.arange(0.0, 3.0, device=device),
            whole / 2,
            whole.sqrt(),
            whole * 0.5,
        ]
        return [value.dtype for value in given]

    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float16, torch.float32):
            torch.set_default_dtype(dtype)
            assert dtypes("npu") == dtypes("cpu") == [dtype] * 5
    finally:
        torch.set_default_dtype(before)
