"""What is fused in each model, by this library and by the bundled backend, in the same engine with the same requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from npugraph_ex._plurals import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from npugraph_ex_conformance.vllm_ascend.runs import Judged

__all__ = ["HEADERS", "compared"]

HEADERS = ("model", "what", "ours", "bundled")


def compared(name: str, found: Sequence[Judged]) -> list[tuple[str, ...]]:
    """The rows of a model that ran both ways: figures of values, kernels a replay, and what this library's rules did.

    A kernel has a row if the two backends launch it a different number of times, or if it is a fused one. The rules' figures are
    for each of the compiled graphs, which have the same operators: one for long batches, one for short ones. A refusal costs
    the kernels that the fusion would save. A site of the bundled backend is a fused kernel in its replays.
    """
    bundled = [one for one in found if one.plan.bundled]
    ours = [
        one for one in found if one.plan.compiled and one.plan.mode == "FULL_DECODE_ONLY" and one.seen.compiled_graphs
    ]
    if not (bundled and ours):
        return []
    both = (ours[0], bundled[0])
    launched = [_a_replay(one) for one in both]
    put_in = [rule.partition(" -> ")[2] for rule in both[0].seen.fusions]
    of_fusions = {kernel for kernel in launched[0] if any(f".{one}." in kernel for one in put_in)}
    differing = {
        kernel for kernel in {*launched[0], *launched[1]} if launched[0].get(kernel) != launched[1].get(kernel)
    }
    seen, graphs = both[0].seen, both[0].seen.compiled_graphs
    fused, refused = sum(seen.fusions.values()), sum(seen.refused.values())
    return [
        (name, "largest difference of a logprob from eager's", *[f"{one.from_eager:.2g}" for one in both]),
        (name, "largest difference of a logprob from float32", *[f"{one.from_float32:.3f}" for one in both]),
        (name, "kernels in a replay", *[f"{sum(one.values()):g}" for one in launched]),
        *[
            (name, f"  {kernel}", *[f"{one.get(kernel, 0):g}" for one in launched])
            for kernel in sorted(of_fusions | differing)
        ],
        (name, "sites found", f"{(fused + refused) / graphs:g}", ""),
        (name, "sites fused", f"{fused / graphs:g}", f"{sum(launched[1].get(kernel, 0) for kernel in of_fusions):g}"),
        *[(name, f"  by {rule}", f"{count / graphs:g}", "") for rule, count in seen.fusions.items()],
        (name, "sites refused", f"{refused / graphs:g}", ""),
        *[
            (name, f"  by {why}", f"{count / graphs:g}, which costs {counted(seen.costs[why] // graphs, 'kernel')}", "")
            for why, count in seen.refused.items()
        ],
    ]


def _a_replay(judged: Judged) -> dict[str, float]:
    """How often each kernel runs in a replay, on average."""
    return {kernel: count / judged.seen.replays for kernel, count in judged.seen.replayed.items()}
