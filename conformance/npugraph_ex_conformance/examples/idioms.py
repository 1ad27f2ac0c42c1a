"""Examples of what people write in PyTorch and no graph shows.

Pads of images in either memory format, writes through `reshape`, sizes read after `transpose_`, random numbers that nobody uses,
checkpointed segments, scalars of the host, numbers that change from call to call, alone and beside others (`alpha`), attention by
heads whose size is part of another, work on a side stream, gradients, losses that leave results out, and tangents of forward mode.
A random program of images runs by `torch.compile` and in eager mode, some calls one after the other, each with a mode of its own.
All plain calls are captured. Results, strides, gradients, tangents and the next random numbers are those of eager mode to the bit.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from npugraph_ex import ops, scope
from npugraph_ex.testing.generator.choices import Choices, Sampled

_Step = Callable[[torch.Tensor], torch.Tensor]
_Program = Callable[..., torch.Tensor]
"""Takes an image and a number."""
_CALLS, _STEPS = 4, 5
_HEIGHTS = (4, 4, 5, 6, 8)
"""Half of a third one is an expression of symbols; torch makes a number of that of the second."""
_RATES = ((2.0,), (2.0,), (0.5, 0.25, 3.0))
"""What the caller passes as a number: torch compiles a second time for one that changes."""
_Rated = Callable[[torch.Tensor, float], torch.Tensor]
_BOUNDED: tuple[_Rated, ...] = (lambda x, rate: x.clamp(max=9 - rate), lambda x, _: x.clamp(max=7))
"""With the number as a bound torch compiles for each one anew, so no other use of it sees a symbol."""
_RATED: tuple[_Rated, ...] = (
    torch.mul,
    torch.div,
    lambda x, rate: rate - x,
    lambda x, rate: x.add(rate, alpha=2),
    lambda x, rate: torch.sub(x, rate, alpha=0.5),
    lambda x, rate: torch.rsub(x, rate, alpha=3),
    lambda x, rate: (x + 1).add_(rate, alpha=-1),
    lambda x, rate: torch.add(x, x, alpha=rate),
    lambda x, rate: x.add(rate, alpha=rate),
    lambda x, rate: torch.div(x, rate, rounding_mode="floor"),
    lambda x, rate: torch.lerp(x, x * x, rate),
    lambda x, rate: F.leaky_relu(x - 0.5, rate),
    lambda x, rate: F.hardtanh(x, -rate, rate),
    lambda x, rate: x * (x < rate),
)
"""What a program does with the number."""
_FORMATS = (torch.contiguous_format, torch.channels_last)
_PADS = ("reflect", "replicate", "circular", "constant")
_SMOOTH: tuple[_Step, ...] = (torch.sin, lambda x: x * x, lambda x: x + 1, torch.sigmoid)
_DRAWS: tuple[Callable[[torch.Tensor], object], ...] = (
    torch.rand_like,
    lambda x: torch.randn(3, device=x.device),
    lambda x: F.dropout(x, 0.5),
    lambda x: F.dropout(x[:0], 0.5),
    lambda x: torch.bernoulli(torch.full_like(x, 0.5)).shape,
    lambda x: torch.empty_like(x).uniform_(),
)
_SCALAR_DTYPES = (None, None, torch.float32, torch.float64, torch.float16, torch.int32, torch.bool)
_SCALARS: tuple[Callable[[Any, torch.dtype | None], torch.Tensor], ...] = (
    lambda number, dtype: torch.tensor(number, dtype=dtype),
    lambda number, dtype: torch.tensor(number).to(dtype or torch.float32),
    lambda number, dtype: torch.full((), number, dtype=dtype),
    lambda number, dtype: torch.full((), 1.5).mul_(number).to(dtype or torch.float32),
    lambda number, _: torch.sqrt(torch.tensor(number)),
    lambda number, _: 1 / torch.tensor(float(number)),
)
_USES: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    torch.mul,
    torch.div,
    torch.maximum,
    lambda x, scalar: scalar + x,
    lambda x, scalar: x * (x < scalar),
    lambda x, scalar: torch.where(x > 1, x, scalar),
    lambda x, scalar: torch.where(x >= scalar, x, torch.tensor(0.0)),
    lambda x, scalar: x.masked_fill(x > 1, scalar),
    lambda x, scalar: (x + 1).mul_(scalar),
)
_MODES = ("plain", "trained", "dual")
_SEEN = ("the result", "the derivative", "the derivative by the weight", "the next random number")
_BESIDE: tuple[tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...], ...] = (
    (),
    (lambda _, weight: weight.exp(),),
    (lambda image, weight: (image - image.detach()).sqrt() * weight,),  # the derivative by the image is infinite
    (lambda image, _: image.mean(), lambda _, weight: weight.relu().sqrt()),
    (lambda image, weight: (image * weight).flatten(), lambda _, weight: (weight * 0).sqrt()),
)
"""Results beside the first, of which each takes the image at most once: a sum of three gradients has no order of its own."""


def idiom_example(seed: int) -> str:
    """What is wrong with one example; empty when nothing is."""
    choices = Choices(Sampled(f"idiom {seed}"))
    steps = [choices.pick(_MAKERS)(choices) for _ in range(choices.number(1, _STEPS))]
    among = choices.pick((_MODES[:1], _MODES))  # half of the programs are plain, so that all of them must be captured
    modes = [choices.pick(among) for _ in range(_CALLS)]
    # With symbolic sizes AOT asks for a gradient in channels_last by `contiguous`, which an NPU refuses; `aot_eager` fails, too.
    heights = [4 if "trained" in modes else choices.pick(_HEIGHTS) for _ in range(_CALLS)]
    memory = choices.pick(_FORMATS)
    rates = choices.pick(_RATES)
    uses = choices.pick(_RATED), choices.pick(_BOUNDED)
    if choices.chance(30) and not any(
        step.__name__ == "checkpointed" for step in steps
    ):  # torch refuses events beside those
        steps.insert(choices.number(0, len(steps)), _aside(seed))
    if choices.chance(40) and "dual" not in modes:  # torch_npu has no tangents of attention
        steps.insert(choices.number(0, len(steps)), _attended(choices))
    beside = choices.pick(_BESIDE)
    used = [[place for place in range(1 + len(beside)) if choices.chance(50)] or [0] for _ in range(_CALLS)]
    calls = [
        (mode, height, choices.pick(rates), places) for mode, height, places in zip(modes, heights, used, strict=True)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the device says of each operator that it lacks
        try:
            return _difference(partial(_results, partial(_run, steps, uses), beside), calls, memory, seed)
        except Exception as error:  # noqa: BLE001 - whatever a fault makes the library raise is what was found
            return f"raised {type(error).__name__}: {error}"


def _difference(
    function: _Program, calls: Sequence[tuple[str, int, float, list[int]]], memory: torch.memory_format, seed: int
) -> str:
    torch.compiler.reset()
    modes = {mode for mode, *_ in calls}
    dynamic = seed % 3 == 0 and "trained" not in modes
    strict: dict[str, Any] = {"require_capture": modes == {"plain"}}
    compiled = torch.compile(function, backend="npugraph_ex", dynamic=dynamic or None, options=strict)
    for call, (mode, height, rate, used) in enumerate(calls):
        generator = torch.Generator().manual_seed(seed + call)
        image, other = (torch.rand(2, 3, height, 4, generator=generator).npu() for _ in range(2))
        given = image.to(memory_format=memory)
        seen = [
            _seen(mode, partial(run, rate=rate), given.detach().clone(), other.clone(), used)
            for run in (function, compiled)
        ]
        for name, old, new in zip(_SEEN, *seen, strict=True):
            if old is None or new is None:
                if old is not new:
                    return f"call {call}, {mode}: {name} is None in one of eager mode and the compiled program"
            elif (old.shape, old.stride()) != (new.shape, new.stride()) or not torch.equal(
                old.nan_to_num(7), new.nan_to_num(7)
            ):
                return f"call {call}, {mode}: {name} is not what it is in eager mode"
    return ""


def _run(steps: Sequence[_Step], uses: tuple[_Rated, _Rated], image: torch.Tensor, rate: float) -> torch.Tensor:
    rated, bounded = uses
    return bounded(reduce(lambda value, step: step(value), steps, rated(image, rate)), rate)


def _results(
    first: _Program, beside: Sequence[_Program], image: torch.Tensor, weight: torch.Tensor, rate: float
) -> Any:
    # Only two gradients meet at the image, however often the first result takes it.
    return [first(image * 1, rate=rate), *(one(image, weight) for one in beside)]


def _seen(
    mode: str, function: _Program, image: torch.Tensor, other: torch.Tensor, used: Sequence[int]
) -> tuple[torch.Tensor | None, ...]:
    """The first result, derivatives in a mode that has them, and what is drawn afterwards; a loss is of the results in ``used``."""
    torch.manual_seed(3)
    derivatives: list[torch.Tensor | None] = [None, None]
    if mode == "plain":
        with torch.no_grad():
            result = function(image, other)[0]
    elif mode == "trained":
        leaves = image.requires_grad_(), other.requires_grad_()
        results = function(*leaves)
        result = results[0]
        loss = torch.stack([results[place].sum() for place in used]).sum()
        # AOT gives gradients the strides of what they are gradients of; eager mode does not.
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        derivatives = [None if one is None else one.contiguous() for one in found]
    else:
        with forward_ad.dual_level(), torch.no_grad():
            dual: Any = forward_ad.unpack_dual(function(forward_ad.make_dual(image, other), other)[0])
        result, derivatives[0] = dual.primal, dual.tangent
    return result.detach(), *derivatives, torch.rand(3, device=image.device)


def _smooth(choices: Choices) -> _Step:
    return choices.pick(_SMOOTH)


def _padded(choices: Choices) -> _Step:
    """A pad, and perhaps a write through a view of it: in eager mode `reshape` of a result is a view or a copy by its strides."""
    mode, edges = choices.pick(_PADS), (1, choices.number(0, 1), 1, 1)
    writes = choices.chance(60)

    def pad(value: torch.Tensor) -> torch.Tensor:
        padded = F.pad(value, edges, mode=mode)
        if writes:
            padded.reshape(-1).add_(1)
        return padded

    return pad


def _drawing(choices: Choices) -> _Step:
    """Random numbers that nobody uses, or that count."""
    draw, counts, p = choices.pick(_DRAWS), choices.chance(40), choices.pick((0.25, 0.25, 1.0))

    def drawn(value: torch.Tensor) -> torch.Tensor:
        draw(value)
        return F.dropout(value, p) if counts else value * 2

    return drawn


def _checkpointed(choices: Choices) -> _Step:
    """Steps that the backward computes again; none of them draws, because torch draws there from a generator of its own."""
    inner = [choices.pick(_SMOOTH) for _ in range(choices.number(1, 3))]

    def checkpointed(value: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(
            partial(_run, inner, (torch.mul, _BOUNDED[0]), rate=2), value, use_reentrant=False
        )
        return result

    return checkpointed


def _aside(seed: int) -> _Step:
    """Work on a side stream, between the events that order it."""
    begun, done = (ops.npu_create_tagged_event(f"idiom {seed} {name}") for name in ("begun", "done"))

    def aside(value: torch.Tensor) -> torch.Tensor:
        ops.npu_tagged_event_record(begun)
        with scope.npu_stream_switch("side"):
            ops.npu_tagged_event_wait(begun)
            other = value.cos()
            ops.npu_tagged_event_record(done)
        ops.npu_tagged_event_wait(done)
        return value + other

    return aside


def _attended(choices: Choices) -> _Step:
    """Attention, whose heads have half of the width or of the height, with or without torch's own scale and a mask.

    The height is the size that changes from call to call, so torch has a symbol for it.
    """
    settings: dict[str, Any] = choices.pick(({}, {}, {"is_causal": True}, {"scale": 0.5}))
    turned = choices.chance(50)

    def attended(value: torch.Tensor) -> torch.Tensor:
        value = value.transpose(2, 3) if turned else value
        value = value[..., : max(value.shape[-1] // 2 * 2, 1)]
        if value.shape[-1] > 1:
            heads = value.flatten(1, 2).unflatten(2, (2, value.shape[-1] // 2)).transpose(1, 2)
            others = heads.detach()  # the sum of three gradients has no order of its own
            found: torch.Tensor = F.scaled_dot_product_attention(heads, others, others, **settings)
            value = found.transpose(1, 2).reshape(value.shape)
        return value.transpose(2, 3) if turned else value

    return attended


def _turned(choices: Choices) -> _Step:
    memory = choices.pick(_FORMATS)
    return lambda value: value.transpose(2, 3).to(memory_format=memory)


def _turned_in_place(choices: Choices) -> _Step:
    """What is read afterwards of the sizes counts."""
    dims = choices.pick(((2, 3), (1, 3), (0, 1)))

    def turned(value: torch.Tensor) -> torch.Tensor:
        value = value * 2
        value.transpose_(*dims)
        found = value * value.shape[dims[0]] + value.new_ones(value.shape)
        return found.transpose(*dims)

    return turned


def _resized(choices: Choices) -> _Step:
    """By a factor, in contiguous memory: for a gradient in the other format, torch asks for a `contiguous` that NPUs refuse."""
    factor = choices.pick((2, 0.5, 1.5))
    return lambda value: F.interpolate(value.contiguous(), scale_factor=factor)


def _by_scalar(choices: Choices) -> _Step:
    """A number or a size in a tensor of the host, made and used in many ways. None is 0, so that no element is NaN."""
    number, of_size, dtype = choices.pick((2, 1.5, True, 3)), choices.chance(50), choices.pick(_SCALAR_DTYPES)
    made, use = choices.pick(_SCALARS), choices.pick(_USES)
    return lambda value: use(value, made(value.shape[2] * number if of_size else number, dtype))


def _in_columns(choices: Choices) -> _Step:
    """`unfold` of a module is another function than a tensor's, whose view may be written; a write in place stands beside it."""
    writes = choices.chance(70)

    def in_columns(value: torch.Tensor) -> torch.Tensor:
        value = value * 2
        if writes:
            value[:, :1].add_(1)
        return F.fold(F.unfold(value, 1), value.shape[2:], 1)

    return in_columns


_MAKERS: tuple[Callable[[Choices], _Step], ...] = (
    _padded, _padded, _drawing, _checkpointed, _smooth, _turned, _turned_in_place, _resized, _by_scalar, _in_columns,
)  # fmt: skip
