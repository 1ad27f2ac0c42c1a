"""Random programs with collectives and decoders, over emulated devices in processes of their own."""

from __future__ import annotations

from npugraph_ex.testing.mutation import active_mutant
from npugraph_ex_conformance.ranks.processes import shared_ranks


def rank_example(seed: int, ranks: int = 2) -> str:
    """What some rank finds wrong with the program of a seed; empty if nothing. The mutant that is on is on there too."""
    return _said(shared_ranks(ranks).ask("npugraph_ex_conformance.ranks.checks:program_faults", seed, active_mutant()))


def rank_decoder(kind: str, new: int, ranks: int = 2) -> str:
    """What some rank finds wrong with a decoder of ``kind``, "tensor" or "experts" parallel; empty if nothing."""
    return _said(shared_ranks(ranks).ask("npugraph_ex_conformance.ranks.decoders:decoder_faults", kind, new))


def _said(answers: list[str]) -> str:
    return "; ".join(f"rank {rank}: {said}" for rank, said in enumerate(answers) if said)
