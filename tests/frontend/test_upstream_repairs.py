"""Each fault of torch that this library works around: a program that is wrong without the repair, and right with it."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from device_helpers import NPU
from torch._dynamo.variables.tensor import TensorVariable
from torch._library.simple_registry import singleton
from torch.utils._pytree import tree_leaves

from npugraph_ex import _torch_private, tracing_repairs
from npugraph_ex._torch_private import traced_metadata
from npugraph_ex.frontend import upstream_repairs
from npugraph_ex.frontend.upstream_repairs import untold_gradients, version_counters
from npugraph_ex.tracing_repairs import as_aot, unused_draws
from npugraph_ex.versions.difference import installed
from npugraph_ex.versions.repair import SUPPORTED, Repair

ROOT = Path(__file__).parents[2]
Arguments = Sequence[Any]


def _repairs() -> dict[str, Repair]:
    modules = [
        importlib.import_module(f"{room.__name__}.{module.name}")
        for room in (upstream_repairs, tracing_repairs)
        for module in pkgutil.iter_modules(room.__path__)
    ]
    repairs = [module for module in modules if module is not as_aot]
    return {module.__name__.rpartition(".")[2]: module.REPAIR for module in repairs}


def _read_by_strides(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return torch.as_strided_copy(x, (3,), (2,))


def _scaled_and_counted(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    x.as_strided((2,), (1,), 2).add_(1)
    return x + 1


def _added_twice(x: torch.Tensor, number: float) -> torch.Tensor:
    return x.add(number, alpha=2)


def _draw_after_none(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.dropout(x, 1.0) + torch.rand(4)


def _written_as_a_batch_of_one(x: torch.Tensor) -> torch.Tensor:
    x[None].expand(1, -1).fill_(3)
    return x * 2


def _written_and_replaced(x: torch.Tensor, y: torch.Tensor, shares_the_earlier_memory: torch.Tensor) -> torch.Tensor:
    del shares_the_earlier_memory
    x.add_(1)
    x.data = y
    return x * 2


def _turned_in_place(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.t_()
    return torch.ones(y.shape)


def _written_and_turned(x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    y = x.to(x.dtype)
    y.t_()
    y.mul_(2)
    return y + 1


def _scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + y


def _scaled_at_one_size(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _scaled(x, y) + torch.ones(5)


def _counted_beside(x: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.mul_(2)
    return x + 1, count.add_(1)


def _second_half(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x[x.shape[0] // 2 :]


def _written_from(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    x.copy_(y + z)
    return x * 2


def _second_draw(x: torch.Tensor) -> torch.Tensor:
    torch.rand(3)
    return x + torch.rand(3)


def _second_draw_of_two_results(x: torch.Tensor) -> torch.Tensor:
    torch.nn.functional.dropout(x, 0.5)
    return x * x + torch.rand(3)


def _enlarged(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.interpolate(x, scale_factor=1.7, mode="bilinear")


def _labelled(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.multilabel_margin_loss(x, torch.tensor([[2, 1, -1, -1]]))


def _twice(x: torch.Tensor) -> torch.Tensor:
    torch._foreach_mul_([x, x], 2)
    return x + 1


def _ranked(x: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
    torch.linalg.matrix_rank(x, out=ranks)
    return ranks * 2


@torch.compiler.nested_compile_region
def _out(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    torch.add(y, 1, out=x)
    return x * y


def _written_by_regions(x: torch.Tensor) -> torch.Tensor:
    first, second = x + 1, x + 2
    return _out(first, x) + _out(second, x) + first + second


def _inverted(x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.pinv(x)


def _loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(x, target)


def _attended_by_heads(x: torch.Tensor) -> torch.Tensor:
    heads = x.view(1, x.shape[1], 2, x.shape[2] // 2).transpose(1, 2)
    return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)


def _halves_of(first: int, second: int) -> Arguments:
    base = torch.arange(float(first * second * 384)).view(first, second, 16, 24)
    return base[..., ::2], base[..., ::2], torch.ones(12)


def _overlapping(base: torch.Tensor) -> Arguments:
    return base[:4], base[2:6]


def _written_through_a_pad(x: torch.Tensor) -> torch.Tensor:
    padded = torch.nn.functional.pad(x, (1, 1, 1, 1), mode="reflect")
    padded.reshape(-1).add_(1)
    return padded


@torch.library.custom_op("npugraph_ex_faults::summed", mutates_args=("total",))
def _summed(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    total.add_(x.sum())
    return x * 1


@_summed.register_fake
def _(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def _summed_within(x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _summed(x, x[0])
    return result


def _images() -> torch.Tensor:
    return torch.ones(2, 3, 4, 4, device=NPU).to(memory_format=torch.channels_last)


def _one_trained() -> Arguments:
    return (torch.ones(3, requires_grad=True),)


def _trained() -> Arguments:
    return torch.ones(4, device=NPU, requires_grad=True), torch.ones(4, device=NPU)


def _is_right(
    compiled: Callable[..., Any],
    program: Callable[..., Any],
    call: Callable[[], Arguments],
    error: str,
) -> bool:
    """Whether the compiled program gives what the program gives, and leaves its inputs as the program does.

    Only the ``error`` that is the fault is an answer; another one says that the demonstration shows nothing.
    """
    mine, own = call(), call()
    torch.manual_seed(0)
    try:
        got = compiled(*mine)
    except Exception as raised:
        if not error or error not in str(raised):
            raise
        return False
    torch.manual_seed(0)
    return all(map(_are_equal, (*tree_leaves(got), *mine), (*tree_leaves(program(*own)), *own)))


def _are_equal(left: object, right: object) -> bool:
    return (
        torch.equal(left, right)
        if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
        else left == right
    )


def _compiled(
    program: Callable[..., Any],
    *calls: Callable[[], Arguments],
    dynamic: bool | None = None,
    trained: bool = False,
    error: str = "",
    without: str = "aot_eager",
) -> Callable[[str], bool]:
    """Whether a backend gets each call of a program right; ``without`` is torch's own one that shows the fault."""

    def is_right(backend: str) -> bool:
        torch.compiler.reset()
        compiled = torch.compile(program, backend=backend or without, fullgraph=True, dynamic=dynamic)
        # A trained graph has a repair of its own; the one of other graphs alone must not be enough.
        with torch.set_grad_enabled(trained), unused_draws.kept() if trained else nullcontext():
            return all([_is_right(compiled, program, call, error) for call in calls])  # noqa: C419 - each call is made

    return is_right


def _counted(backend: str) -> bool:
    """Whether a write of a list on an NPU is counted: by torch_npu's kernel alone, or after the repair."""
    written = torch.ones(3, device=NPU)
    if backend == UPSTREAM:
        with _torch_private.below_version_counting():
            torch._foreach_neg_([written])
    else:
        version_counters.count_writes()
        torch._foreach_neg_([written])
    return written._version == 1


def _left_undefined(backend: str) -> bool:
    """Whether a parameter that only an unused result needs has no gradient."""
    torch.compiler.reset()
    parameter = torch.ones(3, requires_grad=True)
    with torch.enable_grad():
        used = torch.ones(3, requires_grad=True)
        result, _ = torch.compile(lambda x, y: (x * 2, y * 2), backend=backend or "aot_eager")(used, parameter)
        result.sum().backward()
    return parameter.grad is None


UPSTREAM = ""
"""Stands for a backend of torch's own, which has no repair but those that all backends get."""

FAULTS: dict[str, Callable[[str], bool]] = {
    "as_strided_writes": _compiled(_scaled_and_counted, lambda: (torch.ones(9)[1:],)),
    "attention_scales": _compiled(_attended_by_heads, lambda: (torch.ones(1, 8, 32, device=NPU),), dynamic=True),
    "foreach_writes": _compiled(_twice, lambda: (torch.ones(4),)),
    "idle_dropouts": _compiled(_draw_after_none, lambda: (torch.ones(4),)),
    "layouts": _compiled(_read_by_strides, lambda: (torch.arange(10)[::2],)),
    "nary_products": _compiled(_written_from, lambda: _halves_of(6, 5), lambda: _halves_of(5, 7)),
    "number_keywords": _compiled(_added_twice, lambda: (torch.ones(4), 3.0), dynamic=True),
    "pads": _compiled(_written_through_a_pad, lambda: (_images(),)),
    "partition": _compiled(
        _second_draw_of_two_results,
        _one_trained,
        trained=True,
        error="Expected native_dropout to be a tensor",
        without="aot_eager_default_partitioner",
    ),
    "rank_writes": _compiled(_ranked, lambda: (torch.eye(4)[None], torch.tensor([7]))),
    "region_writes": _compiled(_written_by_regions, lambda: (torch.arange(4.0),)),
    "returned_inputs": _compiled(
        _counted_beside, lambda: (torch.ones(3, requires_grad=True) * 1, torch.zeros(3)), trained=True
    ),
    "returned_views": _compiled(
        _second_half, lambda: (torch.arange(100.0).as_strided((3, 8), (10, 1), 7),), dynamic=True
    ),
    "replaced_memory": _compiled(_written_and_replaced, lambda: (x := torch.ones(4), torch.ones(4), x.view(2, 2))),
    "shared_arguments": _compiled(_summed_within, lambda: (torch.ones(4),)),
    "shared_inputs": _compiled(_scaled, lambda: (torch.ones(4), torch.ones(4)), lambda: _overlapping(torch.ones(8))),
    "specialised_sizes": _compiled(
        _scaled_at_one_size, lambda: (x := torch.ones(5), x[:]), dynamic=True, error="Cannot call numel()"
    ),
    "stale_metadata": _compiled(_turned_in_place, lambda: (torch.ones(2, 3),)),
    "turned_arguments": _compiled(_written_and_turned, lambda: ((x := torch.arange(9.0))[5:].view(2, 2), x)),
    "undefined_gradients": _left_undefined,
    "untold_gradients": _compiled(_loss, _trained, trained=True, error="AssertionError"),
    "unused_draws": _compiled(_second_draw, lambda: (torch.ones(3),)),
    "version_counters": _counted,
    "watched_calls": _compiled(_inverted, lambda: (torch.tensor([[1j, 2.0], [0.0, 1.0]]),)),
    "whole_margin_loss": _compiled(_labelled, lambda: (torch.linspace(-1, 1, 4).view(1, 4),)),
    "whole_upsampling": _compiled(_enlarged, lambda: (torch.linspace(-1, 1, 300).sin().view(1, 3, 10, 10),)),
    "written_views": _compiled(_written_as_a_batch_of_one, lambda: (torch.full((4,), -torch.inf),)),
}
"""For each repair, whether a backend gets a program right that shows the fault."""


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_still_in_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the repair the program is wrong in the releases that the record names, and right in others."""
    for attribute in traced_metadata.ATTRIBUTES:  # of the two repairs that other backends have, too
        monkeypatch.delattr(TensorVariable, attribute)
    for repaired in untold_gradients.NAMES:
        monkeypatch.setattr(singleton.find(repaired).fake_impl, "kernels", [])
    release = ".".join(map(str, installed()))
    assert FAULTS[name](UPSTREAM) == (release not in _repairs()[name].torch)


@pytest.mark.parametrize("name", FAULTS)
def test_the_repair_mends_it(name: str) -> None:
    """The same program is right with this library."""
    assert FAULTS[name]("npugraph_ex")


def test_each_repair_says_what_it_repairs() -> None:
    """Every module of the two folders has a record: its fault has a demonstration here, its tests exist, and a release needs it."""
    repairs = _repairs()
    assert repairs.keys() == FAULTS.keys()
    for name, repair in repairs.items():
        assert (ROOT / repair.test).is_file(), name
        assert repair.fault, name
        assert all(re.fullmatch(r"pytorch#\d+", thread) for thread in repair.threads), name
        assert set(repair.torch) <= set(SUPPORTED), name
        assert not repair.may_go, name
