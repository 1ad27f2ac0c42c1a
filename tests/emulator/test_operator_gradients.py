"""Gradients of PyTorch's operator database on the device equal the CPU's: torch_npu replaces some by operators of its own.

Every run takes those operators that torch_npu differentiates itself and every thirteenth of the others, a sample each.
`SWEEP=wide python -m pytest tests/emulator/test_operator_gradients.py` takes all, three samples each (minutes).
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo
from torch.utils._pytree import tree_leaves, tree_map

WIDE = os.environ.get("SWEEP") == "wide"
PARTS = 4

CHANCE = "draws random numbers, which come from the device's generator"
SPARSE = "a sparse layout, which the emulated device does not have"
HOST = "asks for a host tensor by its definition"
NO_TARGET = "torch_npu differentiates this loss by its first input alone"

SKIPPED = {
    **dict.fromkeys(
        [
            "nn.functional.rrelu", "nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d",
            "nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout.with_train",
            "nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d",
            "nn.functional.multi_head_attention_forward", "nn.functional.scaled_dot_product_attention", "normal",
            "pca_lowrank", "svd_lowrank",
        ],
        CHANCE,
    ),
    **dict.fromkeys(["sparse.mm.reduce", "sparse.sampled_addmm", "to_sparse"], SPARSE),
    **dict.fromkeys(["to", "tensor_split"], HOST),
    "nn.functional.binary_cross_entropy_with_logits": NO_TARGET,
}  # fmt: skip
"""Operator name, or name.variant, and why its gradients are not compared."""

TORCH_NPUS_OWN = frozenset(
    [
        "fft.rfft", "fft.rfft2", "fft.rfftn", "fft.irfft", "fft.irfft2", "fft.irfftn", "fft.hfft", "fft.ihfft",
        "fft.fftshift", "stft", "istft", "cdist", "where", "gather", "linalg.inv", "linalg.cholesky",
        "linalg.slogdet", "logdet", "matmul", "__rmatmul__", "softmax", "log_softmax", "max", "min", "nanmean",
        "argsort", "nn.functional.adaptive_avg_pool2d", "nn.functional.embedding_bag", "nn.functional.kl_div",
        "nn.functional.l1_loss", "nn.functional.logsigmoid", "nn.functional.pdist",
        "nn.functional.multilabel_margin_loss", "nn.functional.linear", "nn.functional.mish", "nn.functional.silu",
        "repeat_interleave", "renorm", "contiguous", "true_divide", "cov", "corrcoef", "bfloat16", "half", "double",
        "float",
    ]
)  # fmt: skip
"""Operators of which torch_npu registers the gradient, or a part of it, itself; and one with auxiliary results."""


def _is_compared(op: OpInfo) -> bool:
    if "nested" in op.name or "jiterator" in op.name or not op.supports_autograd or torch.float32 not in op.dtypes:
        return False
    return op.name not in SKIPPED and f"{op.name}.{op.variant_test_name}" not in SKIPPED


EVERY = [op for op in op_db if _is_compared(op)]
CHOSEN = [op for place, op in enumerate(EVERY) if WIDE or place % 13 == 0 or op.name in TORCH_NPUS_OWN]


def _on(device: str, value: Any) -> Any:
    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone().to(device).requires_grad_(leaf.requires_grad)
        return torch.device(device) if isinstance(leaf, torch.device) or leaf == "cpu" else leaf

    return tree_map(move, value)


def _gradients(op: OpInfo, sample: Any, device: str) -> list[torch.Tensor | None]:
    """Differentiate the sum of the sines of the outputs by every input that wants it."""
    given = _on(device, (sample.input, sample.args, sample.kwargs))
    out = op(given[0], *given[1], **given[2])
    if sample.output_process_fn_grad is not None:
        out = sample.output_process_fn_grad(out)
    outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    wanted = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not outs or not wanted:
        return []
    parts = [torch.view_as_real(leaf) if leaf.is_complex() else leaf for leaf in outs]
    found = torch.autograd.grad(sum(part.sin().sum() for part in parts), wanted, allow_unused=True)
    return [gradient if gradient is None else gradient.to("cpu") for gradient in found]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
def test_gradients_equal_the_cpus(part: int) -> None:
    """Each chosen operator's samples give the same gradients, and None for the same inputs, on both devices."""
    wrong, compared = [], 0
    for op in CHOSEN[part::PARTS]:
        torch.manual_seed(0)
        for sample in itertools.islice(op.sample_inputs_func(op, "cpu", torch.float32, True), 3 if WIDE else 1):
            try:
                expected = _gradients(op, sample, "cpu")
            except (RuntimeError, NotImplementedError, IndexError, TypeError, ValueError):
                continue  # the CPU does not do it either
            try:
                found = _gradients(op, sample, "npu")
                torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4, equal_nan=True)
            except (AssertionError, RuntimeError, TypeError, ValueError) as error:
                wrong.append(f"{op.name}.{op.variant_test_name}: {' '.join(str(error).split())[:200]}")
                break
            compared += bool(expected)
    assert not wrong, "\n".join(wrong)
    assert compared > 0.8 * len(CHOSEN) // PARTS


def test_every_skip_names_an_operator() -> None:
    """What is left out, and what is always taken, exists."""
    names = {op.name for op in op_db} | {f"{op.name}.{op.variant_test_name}" for op in op_db}
    assert set(SKIPPED) | TORCH_NPUS_OWN <= names
    assert len(EVERY) > 450
