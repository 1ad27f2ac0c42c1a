"""The lines that advice gives in place of a spelling: who writes them gets the fusion, and the values of before."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import npu_emulator
from npugraph_ex.commands.advise import advising
from npugraph_ex.report.passes import last_report

SIZE = 64


def _by_slots(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> Any:
    keys.view(-1, 2, 16)[slots], values.view(-1, 2, 16)[slots] = key, value
    return keys + 0.5, values + 0.5


def _by_index_copy(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> Any:
    keys.view(-1, 2, 16).index_copy_(0, slots, key)
    values.view(-1, 2, 16).index_copy_(0, slots, value)
    return keys + 0.5, values + 0.5


def _pages() -> tuple[torch.Tensor, ...]:
    rows, cache = (_half(3, 2, 16), _half(3, 2, 16)), (_half(5, 4, 2, 16), _half(5, 4, 2, 16))
    return (*rows, *cache, torch.tensor([7, 0, 12]).npu())


def _added_norm(x: torch.Tensor, y: torch.Tensor, *vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = x + y
    return functional.layer_norm(total, (SIZE,), *vectors), total


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _by_sort(x: torch.Tensor) -> Any:
    scores, experts = torch.softmax(x.float(), -1).sort(-1, descending=True)
    weights, experts = scores[:, :2], experts[:, :2]
    return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), experts


def _by_topk(x: torch.Tensor) -> Any:
    weights, experts = torch.topk(torch.softmax(x.float(), -1), 2)
    return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), experts


def _half(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).half().npu()


def _tables(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return _half(2, 4, 5, SIZE), _half(1, 1, 5, SIZE).to(dtype), _half(1, 1, 5, SIZE)


_Call = tuple[Callable[..., Any], Callable[[], tuple[torch.Tensor, ...]]]
SPELLED: dict[str, tuple[_Call, _Call, str]] = {
    "cache.index_copy_(0, slots, rows)": ((_by_slots, _pages), (_by_index_copy, _pages), "lift_paged_cache"),
    "torch.nn.LayerNorm(size)": (
        (_added_norm, lambda: (_half(5, SIZE), _half(5, SIZE))),
        (_added_norm, lambda: (_half(5, SIZE), _half(5, SIZE), _half(SIZE) * 0 + 1, _half(SIZE) * 0)), "lift_add_layer_norm",
    ),
    "cos.to(x.dtype)": (
        (_rotated, lambda: _tables(torch.float32)), (_rotated, lambda: _tables(torch.float16)), "lift_rotary",
    ),
    "weights, experts = torch.topk(scores, 2)": (
        (_by_sort, lambda: (_half(5, SIZE),)), (_by_topk, lambda: (_half(5, SIZE),)), "lift_gating",
    ),
}  # fmt: skip
"""By what the lines say: the spelling and its inputs, both after the advised lines, and the form."""


@pytest.mark.parametrize("name", SPELLED)
def test_the_lines_of_a_spelling_bring_the_fusion(name: str) -> None:
    """The form is not lifted before and is lifted after, with the values of before but for one rounding."""
    (call, inputs), (followed, others), form = SPELLED[name]
    options = {"lift": "judged"}
    with torch.no_grad(), advising() as found:
        torch.compiler.reset()
        expected = torch.compile(call, backend="npugraph_ex", options=options)(*inputs())
        assert not last_report().fusions(form)
        result = torch.compile(followed, backend="npugraph_ex", options=options)(*others())
    assert last_report().fusions(form), last_report().near_misses()
    (advised,) = (one for one in found.advice if one.rule == form and one.kind == "spelling")
    assert name in advised.change
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one.float(), other.float(), rtol=2e-3, atol=4e-3)


def _epsilon_and_a_length(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.norm(dim=-1, keepdim=True) * SIZE**-0.5 + 1e-5) * weight


def _least_mean(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True).clamp(min=1e-5))
    return (wide * root * (1 + weight.float())).to(x.dtype)


def _normalised(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return functional.normalize(x, dim=-1) * weight


def _rolled(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + x.roll(SIZE // 2, -1) * sin


def _difference(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(logits, -1) - logits.gather(-1, target[:, None])[:, 0]


def _by_indices(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -torch.log_softmax(logits, -1)[torch.arange(len(target), device="npu"), target]


def _one_hot(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -(functional.one_hot(target, SIZE) * torch.log_softmax(logits, -1)).sum(-1)


def _norm() -> tuple[torch.Tensor, ...]:
    return _half(2, 5, SIZE), _half(SIZE)


def _classes() -> tuple[torch.Tensor, ...]:
    return _half(3, SIZE).float(), torch.tensor([1, 63, 0]).npu()


def _called(function: Callable[..., torch.Tensor], *given: torch.Tensor, **more: bool) -> tuple[int, torch.Tensor]:
    """How many kernels a replayed call launches, and its result."""
    compiled = torch.compile(function, backend="npugraph_ex", options={"lift": "judged", **more}, dynamic=False)
    for _ in range(4):
        compiled(*given)
    torch.npu.synchronize()
    with npu_emulator.kernel_log() as log:
        result = compiled(*given)
        torch.npu.synchronize()
    return len(log), result


PRINTED = {
    _epsilon_and_a_length: (_norm, "lift_rms_norm"), _least_mean: (_norm, "lift_rms_norm"), _normalised: (_norm, "lift_rms_norm"),
    _rolled: (lambda: _tables(torch.float16), "lift_rotary"), _difference: (_classes, "lift_cross_entropy"),
    _by_indices: (_classes, "lift_cross_entropy"), _one_hot: (_classes, "lift_cross_entropy"),
}  # fmt: skip


@pytest.mark.parametrize("call", PRINTED, ids=lambda call: call.__name__[1:])
def test_advised_lines_run_as_they_are_printed(call: Callable[..., torch.Tensor]) -> None:
    """Put in the place of the spelling, the lines bring the fusion, the values, and what is promised where that is counted."""
    make, form = PRINTED[call]
    torch.compiler.reset()
    with torch.no_grad(), advising() as found:
        before, expected = _called(call, *make())
        assert not last_report().fusions(form)
        (advised,) = (one for one in found.advice if one.rule == form and one.kind == "spelling")
        lines = advised.change.splitlines()
        names = list(inspect.signature(call).parameters)
        scope: dict[str, Any] = {"torch": torch, **dict(zip(names, make(), strict=True))}
        source = [f"def followed({', '.join(names)}):", *(line for line in lines if " # once" not in line)]
        source.append(f"return {lines[-1].split(' = ')[0]}")
        once = [line for line in lines if " # once" in line]
        exec("\n".join((*once, "\n    ".join(source))), scope)  # noqa: S102 - the lines are the library's own
        after, result = _called(scope["followed"], *(scope[name] for name in names))
    assert last_report().fusions(form), last_report().near_misses()
    assert before - after == advised.saves.kernels if advised.saves.kernels else before > after
    torch.testing.assert_close(result.float(), expected.float(), rtol=2e-3, atol=4e-3)


def _by_std(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6) * weight + bias


def _by_std_alone(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)


def _by_var(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + 1e-6) * weight + bias


def _by_root_of_var(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True).sqrt() + 1e-6)


@pytest.mark.parametrize("call", [_by_std, _by_std_alone, _by_var, _by_root_of_var], ids=lambda call: call.__name__[1:])
def test_lines_of_a_layer_norm_with_a_correction(call: Callable[..., torch.Tensor]) -> None:
    """They say what differs, and run as they are printed: the weight makes up for the other divisor of the variance."""
    names = list(inspect.signature(call).parameters)
    made = {"x": _half(5, SIZE).float(), "weight": _half(SIZE).float(), "bias": _half(SIZE).float() + 1}
    given = [made[name] for name in names]
    torch.compiler.reset()
    with torch.no_grad(), advising() as found:
        before, expected = _called(call, *given)
    (advised,) = (one for one in found.advice if one.rule == "lift_layer_norm")
    assert advised.kind == "spelling"
    assert "divided by size - 1; the operator divides it by the size" in advised.why
    assert ("epsilon is added to the root" in advised.why) == (call is not _by_var)
    *_, once, line = advised.change.splitlines()
    scope = {"torch": torch, "size": SIZE, "epsilon": 1e-6, "weight": torch.ones(SIZE).npu(), "bias": None}
    scope |= dict(zip(names, given, strict=True))
    exec(f"{once}\ndef followed(x):\n    {line}\n    return y", scope)  # noqa: S102 - the lines are the library's own
    after, result = _called(scope["followed"], made["x"])  # type: ignore[arg-type]
    assert after < before
    torch.testing.assert_close(result, expected)


ATTENDED: dict[str, tuple[tuple[int, ...], torch.dtype, str, float, bool]] = {
    "a mask": ((2, 5, 32), torch.float16, "added", 32**-0.5, True),
    "a mask for heads": ((2, 3, 5, 32), torch.float16, "added", 32**-0.5, True),
    "as wide as Llama's": ((2, 4, 7, 128), torch.float16, "added", 128**-0.5, True),
    "bfloat16": ((2, 4, 7, 128), torch.bfloat16, "added", 128**-0.5, True),
    "no mask": ((2, 5, 32), torch.bfloat16, "", 0.3, True),
    "no mask, so that torch_npu has a kernel": ((2, 3, 5, 32), torch.bfloat16, "", 0.3, True),
    "products beyond the range": ((2, 3, 5, 32), torch.bfloat16, "added", 2.5, None),
    "a mask that fills": ((2, 3, 5, 32), torch.float16, "filled", 32**-0.5, True),
    "a mask that chooses": ((2, 3, 5, 32), torch.bfloat16, "chosen", 32**-0.5, True),
}
"""Shape and dtype of queries, how there is a mask, the scale, and whether the lines are advised; None where a processor decides.

Its order of summation says which products leave the range of float32, and so whether the judge refuses the operator.
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTENDED)
def test_attention_wins_what_is_promised_or_nothing_is(name: str) -> None:
    """A plain softmax: where advice names torch's own attention, it saves so many kernels; otherwise it would start more.

    So does the option by which the user declares that each row has a key.
    """
    shape, dtype, how, scale, advised = ATTENDED[name]
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype).npu() for _ in range(3))
    bias = torch.randn(shape[-2], shape[-2], generator=generator).to(dtype).npu()
    hidden = (bias > 0) & ~torch.eye(shape[-2], dtype=torch.bool).npu()
    masks = {"": (), "added": (bias,), "filled": (hidden,), "chosen": (~hidden,)}[how]

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *mask: torch.Tensor) -> torch.Tensor:
        scores = (q @ k.transpose(-1, -2)) * scale
        if how == "filled":
            scores = scores.masked_fill(mask[0], float("-inf"))
        elif how == "chosen":
            scores = torch.where(mask[0], scores, float("-inf"))
        elif mask:
            scores = scores + mask[0]
        return torch.softmax(scores, -1) @ v

    def followed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        mask = given[0] if given else None
        if mask is not None and how == "filled":
            mask = ~mask
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)

    given = (q, k, v, *masks)
    torch.compiler.reset()
    with torch.no_grad(), advising() as found:
        before, expected = _called(plain, *given)
        (one,) = (one for one in found.advice if one.rule == "lift_attention" and one.kind != "declaration")
        after, result = _called(followed, *given)
        torch.compiler.reset()
        declared, same = _called(plain, *given, every_row_attends=True)
    if advised is None:
        advised = one.kind == "spelling"
    assert (one.kind == "spelling") == advised, one.change
    if advised:
        assert before - after == one.saves.kernels > 0
        named = {"": "", "filled": ", attn_mask=~hidden", "chosen": ", attn_mask=kept"}.get(how, ", attn_mask=mask")
        assert f"scaled_dot_product_attention(q, k, v{named}, scale=scale)" in one.change
        assert ("is true where a score" in one.change) == (how in {"filled", "chosen"})
    else:
        assert one.saves.kernels == 0
        assert "scaled_dot_product_attention would launch 14 kernels here, because" in one.change
        assert after > before
    promised = [one.saves.kernels for one in found.advice if one.rule == "lift_attention" and one.kind == "declaration"]
    assert promised == [before - declared] or (not promised and declared == before)
    truth = plain(*(value.cpu().double() if value.is_floating_point() else value.cpu() for value in given))
    far, also, farther = ((value.cpu() - truth).abs().max() for value in (result, same, expected))
    assert far <= farther
    assert also <= farther


@pytest.mark.slow
@pytest.mark.parametrize("lift", ["off", "judged"])
def test_lines_of_a_form_name_the_option_that_the_program_lacks(lift: str) -> None:
    """What the lines win is counted with lifting; without, torch's own attention of three dimensions starts more kernels."""

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.transpose(-1, -2) * 32**-0.5, -1) @ v

    torch.compiler.reset()
    with torch.no_grad(), advising() as found:
        torch.compile(plain, backend="npugraph_ex", options={"lift": lift})(*(_half(2, 5, 32) for _ in range(3)))
    (one,) = (one for one in found.advice if one.rule == "lift_attention" and one.kind == "spelling")
    assert one.saves.kernels > 0
    assert ('# with options={"lift": "judged"}' in one.change) == (lift == "off")
