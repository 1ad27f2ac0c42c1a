"""Rows that belong to groups, the tokens of the experts of a mixture: which group each row is in."""

from __future__ import annotations

import torch


class Groups:
    """The group of each row, from where the groups end or how many rows they have. Values are read on the device only."""

    def __init__(self, group_index: torch.Tensor, rows: int, *, counts: bool) -> None:
        """``group_index`` [E], of integers: the rows of each group with ``counts``, else the row after the last of each."""
        if group_index.dim() != 1 or group_index.numel() == 0:
            raise ValueError(
                f"the group index must be [E], with a number for each group; it has shape {tuple(group_index.shape)}."
            )
        ends = group_index.long()
        if counts:
            ends = ends.cumsum(0)
        row = torch.arange(rows, device=group_index.device)
        number = (row.unsqueeze(-1) >= ends).sum(-1)
        self.inside = number < ends.numel()
        """For each row, whether it is in a group; those after the last one are in none."""
        self._number = number.clamp(max=ends.numel() - 1)
        self._groups = ends.numel()

    def of_each_row(self, name: str, values: torch.Tensor) -> torch.Tensor:
        """``values`` [E, ...], one entry for each group, as [rows, ...]; rows of no group have the last one's."""
        if values.shape[:1] != (self._groups,):
            raise ValueError(
                f"{name} must have one entry for each of the {self._groups} groups; its shape is {tuple(values.shape)}."
            )
        return values[self._number]
