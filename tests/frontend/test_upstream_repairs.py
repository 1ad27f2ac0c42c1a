"""The faults of torch that this library works around are still there; when one is mended, its repair may go."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from device_helpers import NPU
from torch._dynamo.variables.tensor import TensorVariable
from torch._library.simple_registry import singleton

from npugraph_ex._torch_private import traced_metadata
from npugraph_ex.frontend import upstream_repairs
from npugraph_ex.frontend.upstream_repairs import untold_gradients
from npugraph_ex.frontend.upstream_repairs.repair import Repair
from npugraph_ex.versions.difference import installed

ROOT = Path(__file__).parents[2]
Tensors = Sequence[torch.Tensor]


def _repairs() -> dict[str, Repair]:
    names = [module.name for module in pkgutil.iter_modules(upstream_repairs.__path__) if module.name != "repair"]
    return {name: importlib.import_module(f"{upstream_repairs.__name__}.{name}").REPAIR for name in names}


def _read_by_strides(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return torch.as_strided_copy(x, (3,), (2,))


def _scaled_and_counted(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    x.as_strided((2,), (1,), 2).add_(1)
    return x + 1


def _draw_after_none(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
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


def _scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + y


def _scaled_at_one_size(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _scaled(x, y) + torch.ones(5)


def _second_half(x: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    return x[x.shape[0] // 2 :]


def _written_from(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    x.copy_(y + z)
    return x * 2


def _second_draw(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    torch.rand(3)
    return x + torch.rand(3)


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


def _attended_by_heads(x: torch.Tensor) -> torch.Tensor:
    heads = x.view(1, x.shape[1], 2, x.shape[2] // 2).transpose(1, 2)
    return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)


def _halves_of(first: int, second: int) -> Tensors:
    base = torch.arange(float(first * second * 384)).view(first, second, 16, 24)
    return base[..., ::2], base[..., ::2], torch.ones(12)


def _overlapping(base: torch.Tensor) -> Tensors:
    return base[:4], base[2:6]


def _trained() -> Tensors:
    return torch.ones(4, device=NPU, requires_grad=True), torch.ones(4, device=NPU)


FAULTS: dict[str, tuple[Callable[..., torch.Tensor], Sequence[Callable[[], Tensors]]]] = {
    "attention_scales": (_attended_by_heads, [lambda: (torch.ones(1, 8, 32, device=NPU),)]),
    "counted_writes": (_scaled_and_counted, [lambda: (torch.ones(9)[1:],)]),
    "foreach_writes": (_twice, [lambda: (torch.ones(4),)]),
    "idle_dropouts": (_draw_after_none, [lambda: (torch.ones(4),)]),
    "layouts": (_read_by_strides, [lambda: (torch.arange(10)[::2],)]),
    "nary_products": (_written_from, [lambda: _halves_of(6, 5), lambda: _halves_of(5, 7)]),
    "rank_writes": (_ranked, [lambda: (torch.eye(4)[None], torch.tensor([7]))]),
    "region_writes": (_written_by_regions, [lambda: (torch.arange(4.0),)]),
    "returned_views": (_second_half, [lambda: (torch.arange(100.0).as_strided((3, 8), (10, 1), 7),)]),
    "replaced_memory": (_written_and_replaced, [lambda: (x := torch.ones(4), torch.ones(4), x.view(2, 2))]),
    "shared_inputs": (_scaled, [lambda: (torch.ones(4), torch.ones(4)), lambda: _overlapping(torch.ones(8))]),
    "specialised_sizes": (_scaled_at_one_size, [lambda: (x := torch.ones(5), x[:])]),
    "stale_metadata": (_turned_in_place, [lambda: (torch.ones(2, 3),)]),
    "untold_gradients": (torch.nn.functional.binary_cross_entropy_with_logits, [_trained]),
    "unused_draws": (_second_draw, [lambda: (torch.ones(3),)]),
    "watched_calls": (torch.linalg.pinv, [lambda: (torch.tensor([[1j, 2.0], [0.0, 1.0]]),)]),
    "whole_margin_loss": (_labelled, [lambda: (torch.linspace(-1, 1, 4).view(1, 4),)]),
    "whole_upsampling": (_enlarged, [lambda: (torch.linspace(-1, 1, 300).sin().view(1, 3, 10, 10),)]),
    "written_views": (_written_as_a_batch_of_one, [lambda: (torch.full((4,), -torch.inf),)]),
}
"""For each repair a program, and the inputs of calls of which ``aot_eager`` gets one wrong."""


def _is_right(
    compiled: Callable[..., torch.Tensor], program: Callable[..., torch.Tensor], mine: Tensors, own: Tensors
) -> bool:
    """Whether the compiled program gives what the program gives, and leaves its inputs as the program does."""
    try:
        got = compiled(*mine)
    except (AssertionError, RuntimeError):
        return False
    return torch.equal(got, program(*own)) and all(map(torch.equal, mine, own))


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_still_in_torch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own backend gets the program wrong; where this fails, say in the repair which torch mended it."""
    program, calls = FAULTS[name]
    for attribute in traced_metadata.ATTRIBUTES:  # of the two repairs that other backends have, too
        monkeypatch.delattr(TensorVariable, attribute)
    for repaired in untold_gradients.NAMES:
        monkeypatch.setattr(singleton.find(repaired).fake_impl, "kernels", [])
    torch._dynamo.reset()
    dynamic = name in {"attention_scales", "returned_views", "specialised_sizes"} or None
    compiled = torch.compile(program, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    with torch.set_grad_enabled(name == "untold_gradients"):
        right = all([_is_right(compiled, program, inputs(), inputs()) for inputs in calls])  # noqa: C419 - each call is made
    mended = _repairs()[name].mended
    assert right == (mended is not None and installed() >= mended)


def test_each_repair_says_what_it_repairs() -> None:
    """Every module of the folder has a record: its fault has a demonstration here, and its tests exist."""
    repairs = _repairs()
    assert repairs.keys() == FAULTS.keys()
    for name, repair in repairs.items():
        assert (ROOT / repair.test).is_file(), name
        assert repair.fault, name
        assert repair.torch, name
