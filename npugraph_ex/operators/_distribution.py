"""Tokens that go to the ranks of their experts, and come back: what dispatch and combine of all releases have in common.

The experts lie on the ranks in order, as many on each. A choice is one of a token's k experts. What a rank receives lies by
expert, then by the rank that sent it, then by token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from npugraph_ex.operators._precision import INT8_MAX, compute_dtype, refused, round_to_int8, unsupported
from npugraph_ex.operators._ranks import Exchange, Ranks
from npugraph_ex.operators.npu_dynamic_quant import quotient_and_scale

_MOST_TOKENS, _MOST_CHOICES, _MOST_EXPERTS, _MOST_RANKS, _ALIGNED = 512, 16, 1024, 768, 32
_NOWHERE = -1
"""The expert of a choice that takes part in nothing."""
_PLAIN, _DYNAMIC = 0, 2


class Experts(NamedTuple):
    """Where experts lie. Those that compute nothing on a rank (zero, copy and constant experts) have the numbers behind ``number``.

    name: of the operator; group: of HCCL; number: of the experts on ranks; special: zero, copy and constant experts.
    """

    name: str
    group: str
    ranks: int
    rank: int
    number: int
    global_bs: int
    special: tuple[int, int, int] = (0, 0, 0)

    @property
    def local(self) -> int:
        """The experts of one rank."""
        return self.number // self.ranks

    def tokens(self, own: int) -> int:
        """The most tokens of one rank."""
        return self.global_bs // self.ranks if self.global_bs else own

    def exchange(self, *given: torch.Tensor) -> Exchange:
        """What this rank gives to all others."""
        alike = {"moe_expert_num": self.number, "global_bs": self.global_bs}
        return Exchange(self.group, given, ranks=self.ranks, rank=self.rank, alike=alike)

    def check(
        self,
        expert_ids: torch.Tensor,
        width: int,
        *,
        shared_expert_rank_num: int,
        tp_world_size: int,
        expert_shard_type: int,
    ) -> None:
        """Raise for what the device refuses, and for what is not covered."""
        if expert_ids.dim() != 2 or expert_ids.dtype != torch.int32:
            raise refused(
                self.name, "expert_ids", f"{list(expert_ids.shape)} {expert_ids.dtype}", "int32 [tokens, choices]"
            )
        tokens, choices = expert_ids.shape
        most, some = min(_MOST_TOKENS, self.tokens(tokens)), min(_MOST_CHOICES, self.number + sum(self.special))
        for name, value, fits, wanted in (
            ("ep_world_size", self.ranks, 2 <= self.ranks <= _MOST_RANKS, f"from 2 to {_MOST_RANKS}"),
            ("ep_rank_id", self.rank, 0 <= self.rank < self.ranks, f"from 0 to {self.ranks - 1}"),
            ("moe_expert_num", self.number, 1 <= self.number <= _MOST_EXPERTS and self.number % self.ranks == 0,
             f"a multiple of ep_world_size, {self.ranks}, up to {_MOST_EXPERTS}"),
            ("global_bs", self.global_bs, self.global_bs % self.ranks == 0, f"0, or the most tokens of a rank times {self.ranks}"),
            ("the number of tokens", tokens, 1 <= tokens <= most, f"from 1 to {most}, the most of one rank"),
            ("the choices of a token", choices, 1 <= choices <= some, f"from 1 to {some}"),
            ("the width of a token", width, width % _ALIGNED == 0, f"a multiple of {_ALIGNED}"),
            ("expert_shard_type", expert_shard_type, expert_shard_type == 0, "0"),
        ):  # fmt: skip
            if not fits:
                raise refused(self.name, name, value, wanted)
        for name, value in (("shared_expert_rank_num", shared_expert_rank_num), ("tp_world_size", tp_world_size // 2)):
            if value:
                raise unsupported(self.name, name, value, "0")

    def masked(self, expert_ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """The choices, ``_NOWHERE`` where ``mask`` [tokens] or [tokens, choices] says that one takes no part."""
        if mask is None:
            return expert_ids
        if mask.dtype != torch.bool or mask.shape not in (expert_ids.shape, expert_ids.shape[:1]):
            raise refused(
                self.name, "x_active_mask", (tuple(mask.shape), mask.dtype), "bool [tokens] or [tokens, choices]"
            )
        return torch.where(mask if mask.dim() == 2 else mask.unsqueeze(1), expert_ids, _NOWHERE)

    def check_values(self, expert_ids: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Raise for choices of no expert, and for an inactive token before an active one."""
        last = self.number + sum(self.special) - 1
        if int(expert_ids.min()) < 0 or int(expert_ids.max()) > last:
            raise refused(
                self.name, "expert_ids", f"from {int(expert_ids.min())} to {int(expert_ids.max())}", f"from 0 to {last}"
            )
        if mask is not None and mask.dim() == 1 and not bool((mask[:-1] >= mask[1:]).all()):
            raise refused(
                self.name, "x_active_mask", mask.tolist(), "True for the first tokens and False for the others"
            )


class Received(NamedTuple):
    """The choices that one rank receives, in the order of their rows.

    sender, token, choice, expert: int64 [rows]; counts: int64 [experts of the rank, ranks].
    """

    sender: torch.Tensor
    token: torch.Tensor
    choice: torch.Tensor
    expert: torch.Tensor
    counts: torch.Tensor


def received(experts: Experts, choices: torch.Tensor) -> Received:
    """What this rank receives, from the choices [ranks, tokens, k] of all ranks."""
    first = experts.rank * experts.local
    mine = ((choices >= first) & (choices < first + experts.local)).nonzero()
    expert = choices[tuple(mine.T)].long()
    order = torch.sort(expert, stable=True).indices
    expert, (sender, token, choice) = expert[order], mine[order].T
    places = (expert - first) * experts.ranks + sender
    counts = torch.bincount(places, minlength=experts.local * experts.ranks).view(experts.local, experts.ranks)
    return Received(sender, token, choice, expert, counts)


def padded(tensor: torch.Tensor, rows: int, value: float = 0) -> torch.Tensor:
    """``tensor`` with more rows, of ``value``."""
    return torch.cat([tensor, tensor.new_full((rows - tensor.shape[0], *tensor.shape[1:]), value)])


def stacked(everyone: Ranks, place: int) -> torch.Tensor:
    """One of the tensors that each rank gave, of all ranks: [ranks, ...]."""
    return torch.stack([given[place] for given in everyone.parts])


def quantised(
    name: str, x: torch.Tensor, experts: torch.Tensor, scales: torch.Tensor | None, mode: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The rows of ``x`` and, where they are quantised, one scale for each; ``scales`` [experts, h] smooths them by expert."""
    if mode == _PLAIN:
        return x, None
    dtype = compute_dtype(x, scales)
    quotient, scale = quotient_and_scale(x, None if scales is None else scales[experts], dtype, highest=INT8_MAX)
    return round_to_int8(quotient), scale


def check_quantisation(name: str, x: torch.Tensor, scales: torch.Tensor | None, mode: int, number: int) -> None:
    """Raise for modes that are not covered, and for scales that do not go with them."""
    if mode not in {_PLAIN, _DYNAMIC}:
        raise unsupported(name, "quant_mode", mode, "0 (no quantisation) and 2 (dynamic)")
    if x.dim() != 2 or not (x.is_floating_point() or x.dtype == torch.int32):
        raise refused(name, "x", (tuple(x.shape), x.dtype), "float16, bfloat16 or int32 [tokens, h]")
    if x.dtype == torch.int32:
        if mode != _PLAIN or scales is None or scales.shape != x.shape[:1]:
            raise refused(
                name,
                "scales and quant_mode",
                (None if scales is None else tuple(scales.shape), mode),
                "[tokens] and 0 for an int32 x",
            )
    elif scales is not None and (mode == _PLAIN or scales.shape != (number, x.shape[1])):
        raise refused(name, "scales", tuple(scales.shape), f"None, or [{number}, {x.shape[1]}] with quant_mode 2")


def filled(size: int, *shape: int, dtype: torch.dtype, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Zeros [size, *shape], and ``rows`` at the beginning."""
    out = torch.zeros(size, *shape, dtype=dtype)
    if rows is not None:
        out[: rows.shape[0]] = rows
    return out
