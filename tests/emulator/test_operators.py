"""Every operator of PyTorch's own operator database gives the CPU's values and metadata on the device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_leaves, tree_map

_SAMPLES = 8

RANDOM = "draws random numbers, which come from the device's generator; see test_random_operators_have_the_right_shape"
UNWRITTEN = "returns memory that nobody wrote"
SPARSE = "a sparse layout, which the emulated device does not have"
HOST = "asks for, or returns, a host tensor by its definition"
LATER_CHIP = (
    "for the Ascend950, whose values test_scaled_products.py compares; other chips refuse it, as that test sees"
)
AUXILIARY = "returns fewer auxiliary outputs on the CPU than its meta kernel announces"

SKIPPED = {
    **dict.fromkeys(
        [
            "cauchy", "exponential", "geometric", "log_normal", "normal", "uniform", "bernoulli", "multinomial",
            "randn", "randn_like", "rand_like", "randint", "randint_like", "nn.functional.rrelu",
            "nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d",
            "nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout",
            "nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d",
            "nn.functional.multi_head_attention_forward", "nn.functional.scaled_dot_product_attention",
        ],
        RANDOM,
    ),
    **dict.fromkeys(
        ["empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"], UNWRITTEN
    ),
    "as_strided.partial_views": UNWRITTEN,
    **dict.fromkeys(["sparse.sampled_addmm", "sparse.mm", "to_sparse"], SPARSE),
    **dict.fromkeys(["to", "tensor_split"], HOST),
    **dict.fromkeys(["torch._scaled_mm", "torch._scaled_mm_v2"], LATER_CHIP),
    **dict.fromkeys(["native_batch_norm", "_native_batch_norm_legit", "linalg.lstsq"], AUXILIARY),
}  # fmt: skip
"""Operator name, or name.variant, and why its values are not compared."""


def _is_compared(op: OpInfo) -> bool:
    if "nested" in op.name or "jiterator" in op.name:
        return False  # another device's own operators
    return op.name not in SKIPPED and f"{op.name}.{op.variant_test_name}" not in SKIPPED


OPERATORS = [op for op in op_db if _is_compared(op)]


def _to_npu(value: Any) -> Any:
    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.npu()
        return torch.device("npu") if isinstance(leaf, torch.device) or leaf == "cpu" else leaf

    return tree_map(move, value)


def _compare(expected: Any, found: Any, *, notes: bool = True) -> None:
    expected_leaves, found_leaves = tree_leaves(expected), tree_leaves(found)
    assert len(expected_leaves) == len(found_leaves)
    for left, right in zip(expected_leaves, found_leaves, strict=True):
        if isinstance(left, torch.Tensor):
            assert right.device.type == "npu"
            assert not notes or right.is_conj() == left.is_conj()
            torch.testing.assert_close(right.cpu(), left, equal_nan=True)  # checks dtype and shape too
        elif isinstance(left, float):
            assert left == right or left != left  # noqa: PLR0124 - nan


def _run(op: OpInfo, sample: Any, *, notes: bool = True) -> bool:
    """Compare one sample; tell whether there was anything to compare."""
    if sample.kwargs.get("generator") is not None:
        return False
    try:
        expected = op(sample.input, *sample.args, **sample.kwargs)
    except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError):
        return False  # the CPU does not do it either
    _compare(expected, op(_to_npu(sample.input), *_to_npu(sample.args), **_to_npu(sample.kwargs)), notes=notes)
    return True


FORMS = (torch.int64, torch.bool, torch.complex64, torch.float32)
"""The dtypes in which other forms than the call are compared; each operator in one of them."""
OWN_FORMS = {
    "mode": "torch refuses the out form for other devices than its own",
    "conj_physical": "torch has no kernel of the in-place form for other devices than its own",
    "_native_batch_norm_legit": "the out form takes other arguments",
    "native_batch_norm": "the out form leaves statistics that nothing reads",
    "svd": "torch has no kernel of conj_physical_ for other devices than its own",
    "svd_lowrank": "draws numbers",
    "pca_lowrank": "draws numbers",
    "addbmm": "the CPU makes the tensor larger that is written in place",
}
"""Operators whose in-place or out form the CPU or torch treats in a way of its own."""


def _into(op: Callable[..., Any], sample: Any, move: Callable[[Any], Any]) -> Any:
    """The out form, into empty tensors."""
    arguments, options = move((sample.input, *sample.args)), move(sample.kwargs)
    out = tree_map(lambda leaf: leaf.new_empty(0), op(*arguments, **options))
    op(*arguments, **options, out=out)
    return out


def _in_place(op: Callable[..., Any], sample: Any, move: Callable[[Any], Any]) -> Any:
    """The in-place form, on a copy."""
    return op(move(sample.input).clone(), *move(sample.args), **move(sample.kwargs))


def _run_forms(op: OpInfo, sample: Any) -> int:
    """Compare the in-place and the out form of one sample; tell how many there were."""
    forms = [(_in_place, op.inplace_variant)] if op.inplace_variant is not None else []
    compared = 0
    for form, function in (*forms, *([(_into, op.op)] if op.supports_out else [])):
        try:
            expected = form(function, sample, lambda value: value)
        except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError, AttributeError):
            continue  # the CPU does not do it either
        _compare(
            expected, form(function, sample, _to_npu), notes=False
        )  # what is written needs no note of a conjugation
        compared += 1
    return compared


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_forms_and_other_dtypes_equal_the_cpus() -> None:
    """Calls, in-place and out forms of whole numbers, bools, complex numbers and floats, a sample of each operator in one dtype."""
    wrong, compared = [], 0
    for place, op in enumerate(OPERATORS):
        dtype = next((FORMS[(place + more) % 4] for more in range(4) if FORMS[(place + more) % 4] in op.dtypes), None)
        if dtype is None or op.name in OWN_FORMS:
            continue
        torch.manual_seed(0)
        for sample in itertools.islice(op.sample_inputs_func(op, "cpu", dtype, False), 1, 2):
            try:
                compared += _run(op, sample, notes=False) + _run_forms(op, sample)
            except (AssertionError, RuntimeError) as error:
                wrong.append(f"{op.name}.{op.variant_test_name} {dtype}: {' '.join(str(error).split())[:200]}")
                break
    assert not wrong, "\n".join(wrong)
    assert compared > 800


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(8))
def test_values_and_metadata_equal_the_cpus(part: int) -> None:
    """Each operator's samples give the same values, dtypes and shapes on both devices."""
    wrong = []
    compared = 0
    for op in OPERATORS[part::8]:
        dtype = torch.float32 if torch.float32 in op.dtypes or not op.dtypes else min(op.dtypes, key=str)
        torch.manual_seed(0)
        # Not `sample_inputs`: it reads the source of the whole call stack for each operator, nine tenths of this test's time.
        for sample in itertools.islice(op.sample_inputs_func(op, "cpu", dtype, False), _SAMPLES):
            try:
                compared += _run(op, sample)
            except (AssertionError, RuntimeError) as error:
                wrong.append(f"{op.name}.{op.variant_test_name}: {' '.join(str(error).split())[:200]}")
                break
    assert not wrong, "\n".join(wrong)
    assert compared > len(OPERATORS) // 8


def test_the_sweep_covers_the_database() -> None:
    """At least 640 operators are compared, and every skip still names an operator."""
    names = {op.name for op in op_db} | {f"{op.name}.{op.variant_test_name}" for op in op_db}
    assert len(OPERATORS) > 640
    assert set(SKIPPED) <= names


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randn(50, 60, device="npu"),
        lambda: torch.randint(3, 9, (50, 60), device="npu"),
        lambda: torch.empty(50, 60, device="npu").exponential_(),
        lambda: torch.nn.functional.dropout(torch.ones(50, 60, device="npu"), 0.5),
        lambda: torch.bernoulli(torch.full((50, 60), 0.5, device="npu")),
    ],
)
def test_random_operators_have_the_right_shape(draw: Any) -> None:
    """Random operators repeat with the seed, change without it, and keep to the distribution's rough mean."""
    torch.npu.manual_seed(1)
    first, second = draw().cpu().double(), draw().cpu().double()
    torch.npu.manual_seed(1)
    assert torch.equal(draw().cpu().double(), first)
    assert not torch.equal(first, second)
    assert first.shape == (50, 60)
    assert abs(first.mean() - second.mean()) < 0.2


def test_exponential_numbers_are_above_zero_and_distributed_as_the_cpu_s() -> None:
    """Each dtype and rate has the same quantiles as the CPU's numbers, and no zero; a rate of 0 or less is refused."""
    quantiles = torch.tensor([0.1, 0.5, 0.9, 0.99], dtype=torch.float64)
    for dtype, rate in ((torch.float32, 1.0), (torch.float16, 2.0), (torch.bfloat16, 0.5), (torch.float64, 3.0)):
        drawn = torch.empty(400, 500, device="npu", dtype=dtype).t().exponential_(rate).cpu().double()
        torch.testing.assert_close(drawn.quantile(quantiles), -torch.log1p(-quantiles) / rate, rtol=0.05, atol=0)
        assert drawn.min() > 0
    with pytest.raises(RuntimeError, match="expects lambda > 0"):
        torch.empty(1, device="npu").exponential_(-0.5)


NUMBERS = (
    "bitwise_and", "bitwise_left_shift", "copysign", "fmod", "remainder", "xlogy", "pow", "eq", "special_xlog1py",
    "special_zeta", "special_hermite_polynomial_h",
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64, torch.int8], ids=str)
def test_operators_take_a_number_in_place_of_a_tensor(dtype: torch.dtype) -> None:
    """On either side, in place and with `out=`: values and dtypes are the CPU's, wherever the CPU takes the number."""
    compared = 0
    for name, number in itertools.product(NUMBERS, (2, 2.1, True)):
        function = getattr(torch, name, None) or getattr(torch.special, name.removeprefix("special_"))
        x = torch.tensor([1, 2, 3], dtype=dtype)
        forms = {
            "left": lambda x, of=function, number=number: of(x, number),
            "right": lambda x, of=function, number=number: of(number, x),
            "in place": lambda x, of=name, number=number: getattr(x.clone(), f"{of}_")(number),
            "out": lambda x, of=function, number=number: of(x, number, out=torch.empty_like(x)),
        }
        for form in forms.values():
            try:
                wanted = form(x)
            except (RuntimeError, TypeError, AttributeError):
                continue  # neither does the device
            torch.testing.assert_close(form(x.npu()).cpu(), wanted, equal_nan=True)
            compared += 1
    assert compared > 30


def test_foreach_operators_write_in_place() -> None:
    """A foreach operator changes each tensor of its list."""
    tensors = [torch.ones(3, device="npu"), torch.ones(2, 2, device="npu")]
    torch._foreach_mul_(tensors, 3.0)
    torch._foreach_add_(tensors, tensors, alpha=2)
    assert [tensor.sum().item() for tensor in tensors] == [27.0, 36.0]


def test_out_variants_resize_and_write() -> None:
    """`out=` takes the result, and the right shape."""
    out = torch.empty(0, device="npu")
    torch.add(torch.ones(3, device="npu"), 2, out=out)
    assert out.cpu().tolist() == [3, 3, 3]


def test_out_variants_whose_shapes_nothing_tells_beforehand() -> None:
    """`lstsq` has no meta kernel and gives residuals for some inputs only: shapes, values and gradients are the CPU's."""
    torch.manual_seed(0)
    given, found = [torch.randn(3, 2), torch.randn(3, 1)], []
    for device in ("cpu", "npu"):
        left, right = (value.clone().to(device).requires_grad_() for value in given)
        results = torch.linalg.lstsq(left, right)
        gradients = torch.autograd.grad(results.solution.sin().sum(), (left, right))
        found.append([value.detach().cpu() for value in (*results, *gradients)])
    torch.testing.assert_close(found[1], found[0])
    assert found[1][0].shape == (2, 1)


@pytest.mark.parametrize("groups", [1, 2])
def test_attention_with_and_without_a_mask_equals_the_cpu(groups: int) -> None:
    """Scaled dot-product attention, which torch_npu turns into its fused operator, gives the CPU's values and gradients."""
    torch.manual_seed(0)
    query, upstream = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 8, 16)
    key, value = torch.randn(2, 4 // groups, 8, 16), torch.randn(2, 4 // groups, 8, 16)
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    for options in ({}, {"is_causal": True}, {"attn_mask": mask}):
        results = []
        for device in ("cpu", "npu"):
            q, k, v = (operand.clone().to(device).requires_grad_() for operand in (query, key, value))
            moved = {
                name: item.to(device) if isinstance(item, torch.Tensor) else item for name, item in options.items()
            }
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=groups > 1, **moved)
            out.backward(upstream.to(device))
            results.append([out.detach().cpu(), q.grad.cpu(), k.grad.cpu(), v.grad.cpu()])
        for expected, found in zip(*results, strict=True):
            torch.testing.assert_close(found, expected)


def test_gradients_that_nobody_wants_keep_their_place() -> None:
    """A convolution whose input needs no gradient gets its weight's gradient, not the input's place of it."""
    found = []
    for device in ("cpu", "npu"):
        torch.manual_seed(0)
        model = torch.nn.Conv1d(2, 3, 2)
        data = torch.randn(4, 2, 6)
        model.to(device)(data.to(device)).square().sum().backward()
        found.append([parameter.grad.cpu() for parameter in model.parameters()])
    for expected, given in zip(*found, strict=True):
        torch.testing.assert_close(given, expected)


def test_format_casts_change_no_value() -> None:
    """A tensor in FRACTAL_NZ (29) has that format's name and padded storage, and the same numbers, shape and strides."""
    import torch_npu

    torch_npu.npu.config.allow_internal_format = True
    try:
        x = torch.randn(4, 6).npu()
        cast = torch_npu.npu_format_cast(x, 29)
        assert torch_npu.get_npu_format(cast) == 29
        assert cast.untyped_storage().nbytes() == 16 * 16 * 4  # whole blocks of 16 x 16
        assert torch.equal(cast.cpu(), x.cpu())
        assert cast.stride() == x.stride()
        assert torch_npu.npu_format_cast(cast, 29) is cast
        assert torch.equal((cast.t() @ x).cpu(), x.cpu().t() @ x.cpu())  # kernels read it by its strides
        back = torch_npu.npu_format_cast(cast, 2)
        assert torch_npu.get_npu_format(back) == 2
        assert torch.equal(back.cpu(), x.cpu())
        cast.zero_()
        assert x.any()
        values = x.cpu()
        assert torch_npu.npu_format_cast_(x, 29) is x
        assert torch_npu.get_npu_format(x) == 29
        assert torch.equal(x.cpu(), values)
    finally:
        torch_npu.npu.config.allow_internal_format = False


def test_a_saved_format_is_loaded(tmp_path: Path) -> None:
    """A tensor that was saved in FRACTAL_NZ has that format again, its values, and its need of a gradient."""
    import torch_npu

    torch_npu.npu.config.allow_internal_format = True
    try:
        cast = torch_npu.npu_format_cast(torch.randn(40, 24).npu(), 29).requires_grad_()
        torch.save(cast, tmp_path / "file")
        loaded = torch.load(tmp_path / "file")
        assert torch_npu.get_npu_format(loaded) == 29
        assert loaded.requires_grad
        assert torch.equal(loaded.cpu(), cast.cpu())
    finally:
        torch_npu.npu.config.allow_internal_format = False


def test_a_format_cast_is_differentiated() -> None:
    """The gradient of a cast is the gradient of its result."""
    import torch_npu

    x = torch.randn(2, 3).npu().requires_grad_()
    weight = torch.randn(2, 3).npu()
    (torch_npu.npu_format_cast(x, 29) * weight).sum().backward()
    assert torch.equal(x.grad, weight)


def test_operators_refuse_memory_that_recovery_has_marked() -> None:
    """With torch_npu's check on, an operator refuses marked memory, and a copy of safe data makes it safe."""
    from torch_npu.npu import _recovery

    marked, target = torch.ones(300, 300).npu(), torch.ones(300, 300).npu()
    _recovery.mark_all_npu_tensor_unsafe(0)
    _recovery.set_npu_tensor_unsafe_check_flag(True)
    try:
        for refused in (
            lambda: marked + 1,
            lambda: marked.add_(1),
            marked.sum,
            lambda: target.copy_(marked),
            marked.cpu,
        ):
            with pytest.raises(RuntimeError, match="unsafe data in the input tensor"):
                refused()
        target.copy_(torch.zeros(300, 300))
        assert not target.any()
    finally:
        _recovery.set_npu_tensor_unsafe_check_flag(False)
        for tensor in (marked, target):
            _recovery.update_npu_tensor_to_safe(tensor)


def test_views_are_no_copies() -> None:
    """A write through any kind of view is seen in the tensor that it is a view of."""
    for view in (
        lambda x: x.unsqueeze(0), lambda x: x.view(1, 16).squeeze(), lambda x: x.view(1, 16).squeeze(0), lambda x: x[3:],
        lambda x: x.view(4, 4).t(), lambda x: x.view(4, 4).diagonal(), lambda x: x.unfold(0, 2, 2), lambda x: x.chunk(2)[1],
        lambda x: x.view(2, 8).unbind()[0], lambda x: x.view(4, 4).movedim(0, 1), lambda x: x.reshape(4, 4),
        lambda x: x.contiguous(), lambda x: x.as_strided((2, 2), (4, 1)), lambda x: x.view(torch.int16),
    ):  # fmt: skip
        ours, cpus = torch.arange(16, dtype=torch.int32, device="npu"), torch.arange(16, dtype=torch.int32)
        view(ours).add_(1)
        view(cpus).add_(1)
        assert ours.cpu().tolist() == cpus.tolist()


@pytest.mark.parametrize("median", [torch.median, torch.nanmedian])
@pytest.mark.parametrize("dim", [0, 1])
def test_the_median_of_elements_at_one_place(median: Callable[..., Any], dim: int) -> None:
    """Of rows or columns that `expand` made, the CPU's kernel gives memory that nobody wrote."""
    x = torch.arange(12, dtype=torch.float32).view(4, 3).npu()
    for part in (x[:, :1].expand(4, 8), x[:1].expand(8, 3)):
        values, places = median(part, dim)
        assert torch.equal(values.cpu(), median(part.cpu().contiguous(), dim)[0])
        assert torch.equal(part.gather(dim, places.unsqueeze(dim)).squeeze(dim).cpu(), values.cpu())
