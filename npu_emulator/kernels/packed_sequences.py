"""Packed sequences of recurrent layers, as torch_npu keeps them: with the rows behind a sequence's end.

torch packs the rows that lie inside their sequences. torch_npu packs all rows of the steps up to the longest sequence's end,
and its own `_pad_packed_sequence` expects them. The number of sequences of each step stays on the host in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["over_sequences", "packed_backward", "packing_kernels"]


def packing_kernels() -> dict[str, Callable[..., Any]]:
    """Return the kernel that packs, by operator name."""
    return {"aten::_pack_padded_sequence": _packed}


def _packed(
    padded: torch.Tensor,
    lengths: torch.Tensor,
    batch_first: bool,  # noqa: FBT001 - the operator's signature
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of the first steps of `padded` [T, B, ...], or [B, T, ...], and how many sequences each step has."""
    if lengths.device.type != "cpu":
        raise RuntimeError(
            f"'lengths' argument should be a CPU tensor, but got {lengths.device} tensor"
        )  # torch's own words
    rows = torch.empty(padded.shape[:2], device="cpu")
    _, of_each_step = torch.ops.aten._pack_padded_sequence.default(rows, lengths, batch_first)  # noqa: SLF001 - an operator's name
    steps = padded.transpose(0, 1) if batch_first else padded
    return steps[: len(of_each_step)].flatten(0, 1).clone(), of_each_step


def packed_backward(
    grad: torch.Tensor,
    input_size: Sequence[int],
    batch_sizes: torch.Tensor,
    batch_first: bool,  # noqa: FBT001 - the operator's signature
) -> torch.Tensor:
    """Return the gradient of `padded`: that of its rows, and zeros for the steps that were left out."""
    sizes = [input_size[1], input_size[0], *input_size[2:]] if batch_first else list(input_size)
    whole = grad.new_zeros(sizes)
    whole[: len(batch_sizes)] = grad.view(len(batch_sizes), *sizes[1:])
    return whole.transpose(0, 1) if batch_first else whole


def over_sequences(
    layer: Callable[..., tuple[torch.Tensor, ...]], data: torch.Tensor, batch_sizes: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, ...]:
    """Return what torch's form of a recurrent layer gives for a packed sequence; rows behind a sequence's end are 0.

    `data` may have torch's rows, too, as a sequence has that was packed on the host.
    """
    if len(data) == int(batch_sizes.sum()):
        return layer(data, batch_sizes, *others)
    inside = (
        (torch.arange(int(batch_sizes[0])) < batch_sizes.unsqueeze(1)).flatten().nonzero().flatten().to(data.device)
    )
    rows, *states = layer(data.index_select(0, inside), batch_sizes, *others)
    return rows.new_zeros(len(data), *rows.shape[1:]).index_copy(0, inside, rows), *states
