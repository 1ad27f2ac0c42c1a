"""Of a loss that uses some results only, gradients are those of eager mode: None where nothing that it uses needs a parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from device_helpers import NPU, compiled
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from npugraph_ex.frontend.upstream_repairs.undefined_gradients import without

Function = Callable[..., Sequence[torch.Tensor]]


@pytest.fixture(autouse=True)
def _gradients() -> Iterator[None]:
    with torch.enable_grad():
        yield


class _Heads(nn.Module):
    """A trunk with two heads, and a value that comes of neither."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.norm = nn.Linear(4, 6), nn.LayerNorm(6)
        self.first, self.second = nn.Linear(6, 2), nn.Linear(6, 3)
        self.alone = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = F.gelu(self.norm(self.trunk(x)))
        return self.first(hidden), self.second(hidden), self.alone.exp()


def _trained(function: Callable[[nn.Module], Callable[..., Any]], used: Sequence[Sequence[int]]) -> list[Any]:
    """Gradients and weights of some steps, each with a loss of the results at the positions in ``used``."""
    torch.manual_seed(0)
    model = _Heads().to(NPU)
    called, optimizer, found = function(model), torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), []
    for number, positions in enumerate(used):
        results = called(torch.randn(5 + number, 4, device=NPU))
        sum(results[position].square().sum() for position in positions).backward()
        found += [None if one.grad is None else one.grad.clone() for one in model.parameters()]
        optimizer.step()
        found += [one.detach().clone() for one in model.parameters()]
        optimizer.zero_grad()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "used", [[(0,), (0,), (0,)], [(1,), (0, 1), (0,)], [(0, 2), (2,), (0, 1, 2), (2,)]], ids=["one", "others", "alone"]
)
def test_steps_of_adamw_are_those_of_eager_mode(used: Sequence[Sequence[int]], *, dynamic: bool) -> None:
    """Each call uses other results: gradients, None among them, and weights after decay are those of eager mode."""
    _same(
        _trained(lambda model: compiled(model, dynamic=dynamic), used), _trained(lambda model: model, used), exact=False
    )


def _same(mine: Sequence[Any], own: Sequence[Any], *, exact: bool = True) -> None:
    assert [one is None for one in mine] == [one is None for one in own]
    for one, other in zip(mine, own, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, equal_nan=True, rtol=0 if exact else 2e-6, atol=0 if exact else 1e-5)


class _Summed(torch.autograd.Function):
    """Takes gradients of two results, zeros where one is undefined."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        del ctx
        return x + y, x - y

    @staticmethod
    def backward(ctx: Any, first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        del ctx
        return first + 2 * second, first.cos() - second


def _of_joined(x: torch.Tensor, y: torch.Tensor) -> Sequence[torch.Tensor]:
    joined = torch.cat([x * 2, y.sqrt()])
    parts = torch.stack([x.sin(), y + 1]).unbind()
    return joined[:2], joined.cos(), *parts


def _written(x: torch.Tensor, y: torch.Tensor) -> Sequence[torch.Tensor]:
    state = x * 1
    state[:2].mul_(y[:2])
    return state, y.sqrt(), state.sum()


def _of_masks(x: torch.Tensor, y: torch.Tensor) -> Sequence[torch.Tensor]:
    root, other = x.sqrt(), y.sqrt()
    moved = F.pad(root.clamp(max=1), (1, 1)).flip(0).roll(1).masked_fill(x.sum() > 99, 3)
    picked = torch.where(y > 0.5, other, 0.0)[torch.tensor([0, 2], device=y.device)].cumsum(0)
    return x * y, moved, picked.repeat(2), other.tril() if other.dim() > 1 else other.relu()


PROGRAMS: dict[str, Function] = {
    "infinite derivative": lambda x, y: (x.sum() * 2, torch.sqrt(x), y / y),
    "shared": lambda x, y: (x * y, x.sqrt() * y, (x - 1).log() + y.exp()),
    "views": lambda x, y: ((z := x.sqrt() + 1)[:2], z.view(-1, 1), y[1:], y.sqrt()),
    "of inputs": lambda x, y: (x, x.sqrt(), y.view(-1), y.exp()),
    "twice": lambda x, y: (z := x.sqrt(), z, (y * 2).sum()),
    "integers": lambda x, y: (x.argsort(), x.sqrt(), y.exp(), (y > 1)),
    "joined": _of_joined,
    "masks": _of_masks,
    "products": lambda x, y: (
        x @ y,
        x.sqrt()[None] @ y[:, None],
        (y.sqrt() / (x + 1)).mean(),
        F.layer_norm(y.sqrt(), y.shape),
    ),
    "written": _written,
    "function": lambda x, y: _Summed.apply(x.sqrt(), y * 2),  # type: ignore[no-untyped-call]
    "strided": lambda x, y: (x.sin(), x.sqrt().as_strided((2,), (2,)), torch.fill(y.sqrt(), x[1]), y.cos()),
    "broadcast": lambda x, y: (x[:, None] * y, y.sqrt(), x.sum(), F.softmax(y, 0)),
    "checkpoint": lambda x, y: (*checkpoint(lambda a: (a.sqrt(), a.sin()), x, use_reentrant=False), y.sqrt()),
}


def _gradients_of(function: Function, used: Sequence[int], size: int, *, retained: bool) -> list[Any]:
    x, y = (torch.linspace(0, 2, size, device=NPU, requires_grad=True) for _ in range(2))
    results = function(x, y)
    loss = torch.stack([results[place].float().square().sum() for place in used]).sum()
    found: list[Any] = [*torch.autograd.grad(loss, (x, y), allow_unused=True, retain_graph=retained)]
    if retained:
        loss.backward()
        found += [x.grad, y.grad]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_gradients_of_each_loss_are_those_of_eager_mode(program: Function, *, dynamic: bool) -> None:
    """Whatever results a loss uses: by `autograd.grad`, and then by `backward` on the same graph."""
    sample = program(*(torch.ones(4, requires_grad=True) for _ in range(2)))
    places = [place for place, one in enumerate(sample) if one.requires_grad]
    graph = compiled(program, dynamic=dynamic)
    for size in (4, 6) if dynamic else (4,):
        for count in range(1, len(places) + 1):
            for used in combinations(places, count):
                mine, own = (_gradients_of(one, used, size, retained=True) for one in (graph, program))
                _same(mine, own, exact=False)


def test_a_written_input_has_a_gradient_too() -> None:
    """An input that the graph writes is a result to autograd, which a loss may leave out."""

    def program(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(y.sqrt())
        return y * 2

    def run(function: Callable[..., torch.Tensor], of: str) -> list[Any]:
        y, z = torch.zeros(3, device=NPU, requires_grad=True), torch.ones(3, device=NPU, requires_grad=True)
        x = z * 1
        result = function(x, y)
        return [*torch.autograd.grad((result if of == "result" else x).sum(), (y, z), allow_unused=True)]

    graph = compiled(program)
    for of in ("result", "input"):
        _same(run(graph, of), run(program, of))


def test_an_undefined_gradient_passes_from_graph_to_graph() -> None:
    """The gradient of a graph's result is undefined if the next graph needs it for an unused result alone."""

    def program(x: torch.Tensor, y: torch.Tensor) -> Sequence[torch.Tensor]:
        first = x.sqrt()
        torch._dynamo.graph_break()
        return first * 2, y.exp()

    torch.compiler.reset()
    graph = torch.compile(program, backend="npugraph_ex")
    mine, own = (_gradients_of(one, (1,), 4, retained=False) for one in (graph, program))
    _same(mine, own)
    assert mine[0] is None


def test_an_unused_input_is_an_error_without_allow_unused() -> None:
    """`autograd.grad` says so, as in eager mode."""
    x, y = (torch.ones(3, device=NPU, requires_grad=True) for _ in range(2))
    first, _ = compiled(lambda x, y: (x * 2, y * 2))(x, y)
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(first.sum(), (x, y))


def test_a_hook_takes_zeros() -> None:
    """A hook of a parameter is called, as with torch's own backends, and never with None."""
    x, y = (torch.ones(3, device=NPU, requires_grad=True) for _ in range(2))
    seen: list[torch.Tensor] = []
    y.register_hook(lambda gradient: seen.append(gradient * 2))
    first, _ = compiled(lambda x, y: (x * 2, y.sqrt()))(x, y)
    first.sum().backward()
    torch.testing.assert_close(seen, [torch.zeros(3, device=NPU)])


@pytest.mark.slow
def test_a_random_draw_stays() -> None:
    """A call that draws numbers runs, with zeros, though all that it takes is an undefined gradient; others do not run."""
    graph = fx.Graph()
    gradients = [graph.placeholder(f"tangents_{number}") for number in (1, 2)]
    drawn = graph.call_function(torch.ops.aten.bernoulli.default, (gradients[1],))
    other = graph.call_function(torch.ops.aten.cos.default, (gradients[1],))
    for node in graph.nodes:
        node.meta["val"] = torch.ones(3)
    graph.output([gradients[0], drawn, other])
    shorter = without(fx.GraphModule({}, graph), {1})
    first, second, third = shorter(torch.ones(3), None)
    assert torch.equal(first, torch.ones(3))
    assert torch.equal(second, torch.zeros(3))
    assert third is None
    assert not shorter.graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default)
