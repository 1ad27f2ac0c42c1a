"""Counting the products of a kernel changes nothing that the kernel computes."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from npu_emulator.clock.products import ProductCounter


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counting_changes_no_bit(dtype: torch.dtype) -> None:
    """Within a count of products each kernel of torch's examples, and of their gradients, computes what it computes without it."""
    with _Twice() as seen, torch.enable_grad():
        for op in op_db:
            if dtype not in op.dtypes or op.name.startswith("jiterator"):  # of other devices
                continue
            for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd), 3):
                with suppress(RuntimeError, NotImplementedError):  # the CPU has no such kernel
                    results = tree_leaves(op(sample.input, *sample.args, **sample.kwargs))
                    ends = [
                        one.abs().square().sum()
                        for one in results
                        if isinstance(one, torch.Tensor) and one.requires_grad
                    ]
                    torch.autograd.backward(ends)
    assert not seen.other
    assert len(seen.same) > 300
    assert torch.ops.aten.silu_backward.default in seen.same


_UNWRITTEN = {
    getattr(torch.ops.aten, name)
    for name in (
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "empty_permuted",
        "_ctc_loss",
    )
}
"""They leave memory, or a part of a result, as it was."""


class _Twice(TorchDispatchMode):
    """Runs each kernel that writes no argument and draws no number once more, within a count of products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.same: set[object] = set()
        self.other: set[object] = set()

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if (
            func._schema.is_mutable
            or torch.Tag.nondeterministic_seeded in func.tags
            or func.overloadpacket in _UNWRITTEN
        ):
            return func(*args, **kwargs)
        wanted = func(*args, **kwargs)
        with ProductCounter():
            found = func(*args, **kwargs)
        plain = [
            [one for one in tree_leaves(of) if isinstance(one, torch.Tensor) and one.layout is torch.strided]
            for of in (wanted, found)
        ]
        (self.same if all(map(_has_same_bits, *plain)) else self.other).add(func)
        return wanted


def _has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(_bytes(one), _bytes(other))


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return (
        value.detach()
        .flatten()
        .resolve_conj()
        .resolve_neg()
        .clone(memory_format=torch.contiguous_format)
        .view(torch.uint8)
    )
