"""AOT's descriptors of the values that a forward graph saves for its backward."""

from __future__ import annotations

from typing import Any

from npugraph_ex.versions.difference import VersionDifference

DIFFERENCE = VersionDifference(
    what="Torch 2.11 describes values that are saved without a check of their version by a class of their own.",
    since=(2, 11),
    new=("torch._functorch._aot_autograd.descriptors.SavedForBackwardsNoVcCheckAOTOutput",),
    test="tests/aclgraph/test_training.py",
)


def saved_value_classes() -> tuple[type[Any], ...]:
    """The classes of the descriptors."""
    from torch._functorch._aot_autograd import descriptors

    first: tuple[type[Any], ...] = (descriptors.SavedForBackwardsAOTOutput,)
    return first if DIFFERENCE.older else (*first, descriptors.SavedForBackwardsNoVcCheckAOTOutput)
