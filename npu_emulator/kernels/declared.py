"""Whether a kernel of the program does what its operator declares: it writes no other argument, and its results are as announced.

Neither is visible in the values of a first run: what an undeclared write leaves is found by whoever reads the argument next, and a
pass that reorders calls relies on the schema.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from npu_emulator.errors import EmulatorError
from npu_emulator.extents import meet

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["as_declared"]


def as_declared(
    name: str,
    compute: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    written: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor] | None = None,
) -> Callable[..., Any]:
    """The same function for one launch, with both questions asked.

    Args:
        name: of the operator.
        compute: the program's kernel.
        tensors: that it is given.
        written: those of them that the operator declares to write; what shares their memory may change, too.
        results: the new tensors that its results go to; None for an operator that writes arguments alone.

    Raises:
        EmulatorError: the kernel changed another argument, or returned something else; raised by the function that is returned.
    """
    kept = {at: one for at, one in enumerate(tensors) if not any(meet(one, other) for other in written)}

    def checked(*args: Any, **kwargs: Any) -> Any:
        before = {at: _bytes(one).clone() for at, one in kept.items()}
        found = compute(*args, **kwargs)
        changed = [str(at) for at, one in kept.items() if not torch.equal(before[at], _bytes(one))]
        if changed:
            raise EmulatorError(
                f"The kernel of {name} changed its tensor {' and '.join(changed)} (the first is 0), and the schema says that the "
                'operator does not write it. Declare the write, by "Tensor(a!) x" or mutates_args, or write into a new tensor.'
            )
        if results is not None:
            _refuse_other_results(name, tree_leaves(found), results)
        return found

    return checked


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The contents as bytes: NaN differs from itself, and the zeros do not differ."""
    return tensor.resolve_conj().resolve_neg().flatten().view(torch.uint8)


def _refuse_other_results(name: str, results: Sequence[Any], targets: Sequence[torch.Tensor]) -> None:
    """Raise if a kernel has returned something else than its operator's fake implementation says.

    A floating-point dtype may differ from another one: what was computed in float32 is rounded.
    """
    same = len(results) == len(targets) and all(
        isinstance(result, torch.Tensor)
        and result.device.type == "cpu"
        and result.size() == target.size()
        and torch.can_cast(result.dtype, target.dtype)
        for result, target in zip(results, targets, strict=True)
    )
    if not same:
        raise EmulatorError(
            f"The kernel of {name} returned {_shown(results)}; the operator's fake implementation says {_shown(targets)}. Return "
            "CPU tensors of these sizes, one for each result."
        )


def _shown(values: Sequence[Any]) -> str:
    each = [
        f"{value.dtype} {list(value.size())}" + ("" if value.device.type == "cpu" else f" on {value.device}")
        if isinstance(value, torch.Tensor)
        else repr(value)
        if value is None or isinstance(value, (bool, int, float, complex, str))
        else f"a {type(value).__name__}"
        for value in values
    ]
    return " and ".join(each) or "nothing"
