"""Losses, activations and normalisations are trained in one compiled graph: results and gradients are eager mode's to the bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from device_helpers import NPU, compiled, describe
from torch.nn import functional

Tensors = Sequence[torch.Tensor]
REDUCTIONS = ("none", "mean", "sum")
BY_BOTH = {"kl_div", "margin_ranking_loss", "cosine_embedding_loss", "triplet_margin_loss", "layer_norm", "group_norm"}
"""The functions that are differentiated by their first two inputs; the others by the first one."""


def _labels(size: int) -> torch.Tensor:
    return torch.arange(size) % 5


def _signs(size: int) -> torch.Tensor:
    return torch.where(torch.arange(size) % 2 == 0, 1.0, -1.0)


def _padded(size: int) -> torch.Tensor:
    return torch.tensor([3, 0, -1, -1, -1]).repeat(size, 1)


LOSSES: dict[str, Callable[[int], Tensors]] = {
    **dict.fromkeys(
        ("l1_loss", "mse_loss", "smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss", "soft_margin_loss"),
        lambda size: (torch.randn(size, 5), torch.rand(size, 5)),
    ),
    "binary_cross_entropy": lambda size: (torch.rand(size, 5), torch.rand(size, 5), torch.rand(5)),
    "binary_cross_entropy_with_logits": lambda size: (torch.randn(size, 5), torch.rand(size, 5), torch.rand(5)),
    "nll_loss": lambda size: (torch.randn(size, 5), _labels(size), torch.rand(5)),
    "cross_entropy": lambda size: (torch.randn(size, 5), _labels(size), torch.rand(5)),
    "margin_ranking_loss": lambda size: (torch.randn(size), torch.randn(size), _signs(size)),
    "multilabel_margin_loss": lambda size: (torch.randn(size, 5), _padded(size)),
    "cosine_embedding_loss": lambda size: (torch.randn(size, 5), torch.randn(size, 5), _signs(size)),
    "triplet_margin_loss": lambda size: (torch.randn(size, 5), torch.randn(size, 5), torch.randn(size, 5)),
}
SETTINGS = {"cross_entropy": {"label_smoothing": 0.1, "ignore_index": 2}, "nll_loss": {"ignore_index": 2}}
ACTIVATIONS = (
    "relu", "elu", "selu", "leaky_relu", "gelu", "silu", "mish", "softplus", "hardswish", "hardsigmoid", "hardshrink",
    "softshrink", "logsigmoid", "tanhshrink", "glu",
)  # fmt: skip


def _calls(dtype: torch.dtype, inputs: Callable[[int], Tensors], sizes: Sequence[int]) -> list[Tensors]:
    torch.manual_seed(0)
    made = [inputs(size) for size in sizes]
    return [[x.to(NPU, dtype if x.is_floating_point() else x.dtype) for x in one] for one in made]


def _trained(function: Callable[..., torch.Tensor], inputs: Tensors, by: int) -> Tensors:
    """The result and the gradients by the first inputs, of a weighted sum."""
    own = [x.detach().clone().requires_grad_(place < by) for place, x in enumerate(inputs)]
    result = function(*own)
    weights = torch.linspace(0.5, 1.5, result.numel()).to(result).view(result.shape)
    return [result.detach(), *torch.autograd.grad(result, own[:by], weights)]


@torch.enable_grad()  # type: ignore[untyped-decorator]
def _agree(function: Callable[..., torch.Tensor], calls: Sequence[Tensors], by: int, *, dynamic: bool) -> None:
    graph = compiled(function, dynamic=dynamic)
    for inputs in calls:
        for got, wanted in zip(_trained(graph, inputs, by), _trained(function, inputs, by), strict=True):
            assert describe(got) == describe(wanted)
            assert torch.equal(got.cpu(), wanted.cpu())


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    """The mean, which is torch's default, of sizes that are symbols."""
    loss = partial(getattr(functional, name), **SETTINGS.get(name, {}))
    _agree(loss, _calls(torch.float32, LOSSES[name], (4, 6)), 1 + (name in BY_BOTH), dynamic=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_binary_cross_entropy_of_logits(reduction: str, dtype: torch.dtype) -> None:
    """With the weights of elements and of positive examples."""

    def loss(x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor, positive: torch.Tensor) -> torch.Tensor:
        return functional.binary_cross_entropy_with_logits(x, target, weight, reduction=reduction, pos_weight=positive)

    calls = _calls(dtype, lambda size: (torch.randn(size, 5), torch.rand(size, 5), torch.rand(5), torch.rand(5)), (4,))
    _agree(loss, calls, 1, dynamic=False)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", ["multilabel_margin_loss", "kl_div", "cross_entropy"])
def test_other_reductions(name: str, reduction: str) -> None:
    """Of the losses that torch or torch_npu treat apart, and of one with products by numbers, in 16 bits."""
    loss = partial(getattr(functional, name), reduction=reduction, **SETTINGS.get(name, {}))
    _agree(loss, _calls(torch.float16, LOSSES[name], (4,)), 1 + (name in BY_BOTH), dynamic=False)


@pytest.mark.slow
def test_activations() -> None:
    """Each of them, on columns of its own, in one graph."""

    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([getattr(functional, name)(x) for name in ACTIVATIONS], dim=-1)

    _agree(program, _calls(torch.float32, lambda size: (torch.randn(size, 8),), (4, 6)), 1, dynamic=True)


@pytest.mark.slow
def test_normalisations() -> None:
    """Of layers, roots of mean squares, groups, instances and batches."""

    def program(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = functional.rms_norm(functional.layer_norm(x, (8,), weight), (8,), weight)
        grouped = functional.group_norm(x.view(-1, 8, 2, 1), 4, weight).view(x.shape)
        per_instance = functional.instance_norm(x, weight=weight[:2]).add(functional.normalize(x, dim=-1))
        return wide + grouped + per_instance + functional.batch_norm(x, None, None, weight[:2], training=True)

    _agree(
        program, _calls(torch.float32, lambda size: (torch.randn(size, 2, 8), torch.rand(8)), (4,)), 2, dynamic=False
    )


TRANSFORMS: dict[str, tuple[Callable[..., torch.Tensor], Callable[[int], Tensors]]] = {
    "renorm": (lambda x: torch.renorm(x, 2, 0, 1.0), lambda size: (torch.randn(size, 8),)),
    "copies": (
        lambda x, counts: x.repeat_interleave(counts, 0, output_size=x.shape[0] * 2),
        lambda size: (torch.randn(size, 3).t().contiguous().t(), torch.tensor([1, 3]).repeat(size // 2)),
    ),
    "rfft and irfft": (
        lambda x: torch.fft.irfft2(torch.fft.rfft2(x).mul(2)) + torch.fft.fft(x).real,
        lambda size: (torch.randn(size, 8),),
    ),
    "stft": (
        lambda x: torch.stft(x, 8, window=x[0, :8].detach(), return_complex=True).abs(),
        lambda size: (torch.randn(size, 32),),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRANSFORMS)
def test_functions_that_torch_npu_differentiates(name: str) -> None:
    """By operators without a meta function of torch_npu's own."""
    function, inputs = TRANSFORMS[name]
    _agree(function, _calls(torch.float32, inputs, (4,)), 1, dynamic=False)
