"""Results are ordinary tensors, whatever earlier results the caller holds: to autograd, in their storage, in what may be done."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from device_helpers import NPU, compiled
from torch.fx.experimental.proxy_tensor import make_fx

from npugraph_ex.aclgraph import capture_set, compile_graph
from npugraph_ex.config import CompilerConfig
from npugraph_ex.report.captures import capture_records, captures_so_far
from npugraph_ex.testing.oracle.observation import observe, visible_difference

Results = tuple[torch.Tensor, ...]


def _pair(x: torch.Tensor) -> Results:
    return x.sin() + 1, x * 2


def _saved_bytes(a: torch.Tensor, b: torch.Tensor) -> int:
    del b
    text = io.BytesIO()
    torch.save(a, text)
    return len(text.getvalue())


def _written_beside_a_saved_one(a: torch.Tensor, b: torch.Tensor) -> float:
    """Autograd keeps ``b`` for the backward; what is written is ``a``."""
    weight = torch.ones(4, 4, device=NPU, requires_grad=True)
    loss = (weight * b).sum()
    a.add_(1)
    loss.backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    return weight.grad[0, 0].item()


def _scaled_by_a_weight(a: torch.Tensor, b: torch.Tensor) -> tuple[bool, ...]:
    a.mul_(torch.ones(4, 4, device=NPU, requires_grad=True))
    return a.requires_grad, a.is_leaf, b.requires_grad


def _assigned(a: torch.Tensor, b: torch.Tensor) -> tuple[Any, ...]:
    a.data = torch.zeros(2, device=NPU)
    return tuple(a.shape), b.tolist()


TRIES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "views": lambda a, b: (a._is_view(), b._is_view()),
    "storage bytes": lambda a, b: (a.untyped_storage().nbytes(), b.untyped_storage().nbytes()),
    "storage offsets": lambda a, b: (a.storage_offset(), b.storage_offset()),
    "a shared storage": lambda a, b: a.untyped_storage()._cdata == b.untyped_storage()._cdata,
    "versions": lambda a, b: (a._version, a.add_(1)._version, b._version),
    "detach_": lambda a, b: (a.detach_().tolist(), b.detach_().tolist()),
    "set_": lambda a, b: a.set_(b).tolist(),
    "t_": lambda a, b: (a.t_().stride(), b.unsqueeze_(0).stride()),
    "data": _assigned,
    "requires_grad_": lambda a, b: (a.requires_grad_().is_leaf, b.add_(a.detach()).tolist()),
    "a parameter": lambda a, b: (torch.nn.Parameter(a).is_leaf, b.is_leaf),
    "saved bytes": _saved_bytes,
    "written, then backward": _written_beside_a_saved_one,
    "scaled by a weight": _scaled_by_a_weight,
    # The last: results are copied from then on.
    "resize_": lambda a, b: (tuple(a.resize_(8, 8).shape), b.tolist()),
}
HELD: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": lambda _: None,
    "results": lambda result: result,
    "views": lambda result: result.view(-1),
    "reinterpreted views": lambda result: result.view(-1).view(torch.int32),
}


@pytest.mark.parametrize("held", HELD)
def test_what_a_caller_does_with_results(held: str) -> None:
    """Whatever is held of earlier calls, and whatever was done with them, each call's results behave as eager mode's."""
    graph = compiled(_pair)
    for what, attempt in TRIES.items():
        kept = []
        for call in range(5):
            x = torch.full((4, 4), float(call), device=NPU)
            results, expected = graph(x), _pair(x)
            assert [result.tolist() for result in results] == [one.tolist() for one in expected], f"{what}, call {call}"
            kept += [HELD[held](result) for result in results]
            assert attempt(*results) == attempt(*expected), f"{what}, call {call}"


@pytest.mark.parametrize("clone_output", [None, False])
@pytest.mark.parametrize("size", [0, 4096])
def test_a_storage_that_was_resized_is_no_capture_s(size: int, clone_output: bool | None) -> None:
    """Other memory than the graph writes: the next results are those of eager mode, and nothing is captured at each call."""
    graph, mark = compiled(_pair, clone_output=clone_output), captures_so_far()
    for call in range(6):
        x = torch.full((4, 4), float(call), device=NPU)
        results = graph(x)
        assert [result.tolist() for result in results] == [result.tolist() for result in _pair(x)], f"call {call}"
        results[call % 2].untyped_storage().resize_(size)
    assert len(capture_records(after=mark)) == 2


def _whole_and_parts(x: torch.Tensor) -> Results:
    y = x.sin()
    return y[1:], y, y.t(), x.cos()


def _parts_of_what_is_not_returned(x: torch.Tensor) -> Results:
    y = x.sin()
    return y[1:], y[:, 2].view(torch.int32), x + 1


def _lazily_read(x: torch.Tensor) -> Results:
    y = torch.complex(x, x + 1)
    return y.conj(), y.conj().imag, torch.complex(x, x).conj().imag, y.real


def _without_elements(x: torch.Tensor) -> Results:
    y, z = torch.complex(x, x)[:0].clone(), x + 1
    return y.conj(), y.conj().imag, z[:0], x[2:2].sin(), x[4:], z


def _of_another_layout(x: torch.Tensor) -> Results:
    y = x.to(torch.uint8).view(-1)[:7].clone()
    return y[2:6].view(torch.int16), torch.empty_strided((3, 2), (5, 2), device=x.device).copy_(x[:3, :2]), x.exp().t()


def _undeclared_views(x: torch.Tensor) -> Results:
    split, shape = torch.ops.aten.unsafe_split.Tensor, torch.ops.aten._unsafe_view.default
    upper, lower = split(x.sin(), 2)
    (_, right), whole = split(x[:0] * 2, 2, 1), x.cos()
    return lower[1:], upper, right, shape(whole, [16]), whole, lower


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("route", ["captured", "copied"])
@pytest.mark.parametrize(
    "function",
    [
        _pair,
        _whole_and_parts,
        _parts_of_what_is_not_returned,
        _lazily_read,
        _without_elements,
        _of_another_layout,
        _undeclared_views,
    ],
)
def test_how_results_lie(function: Callable[[torch.Tensor], Results], route: str, *, inference: bool) -> None:
    """Views, version counters, lazy bits, storages and offsets are as in eager mode; in the graph's memory and in copies."""
    graph, kept = compiled(function, clone_output=None if route == "captured" else True), []
    with torch.inference_mode() if inference else torch.no_grad():
        for call in range(4):
            x = torch.arange(16.0, device=NPU).view(4, 4) + call
            results, expected = graph(x), function(x)
            kept.append(results)
            difference = visible_difference(observe([x], expected), observe([x], results))
            assert difference is None, f"call {call}: {difference}"
            for result, want in zip(results, expected, strict=True):
                torch.testing.assert_close(result.cpu(), want.cpu(), rtol=0, atol=0)


def _written_after_a_copy(x: torch.Tensor) -> Results:
    x.add_(1)
    own = x.clone()
    own.view(-1, 2, 4).transpose(0, 1).zero_()
    return (own.neg(),)


def test_a_result_does_not_lie_as_an_argument_does() -> None:
    """A functional copy of a part of an argument has its own memory, without what lies before that part."""
    expected, *results = (
        observe([], call(torch.arange(9.0, device=NPU)[1:]))
        for call in (_written_after_a_copy, compiled(_written_after_a_copy))
    )
    assert visible_difference(expected, *results) is None


def test_a_part_keeps_no_more_memory_than_in_eager_mode() -> None:
    """Of two results the caller keeps one: the other's memory is free, as it is in eager mode."""

    def grown(call: Callable[[torch.Tensor], Results]) -> int:
        torch.npu.empty_cache()  # a cached block that is a little larger would be counted whole
        x = torch.ones(512, 512, device=NPU)
        held = [call(x) for _ in range(4)]
        before = torch.npu.memory_allocated()
        parts = [call(x)[0] for _ in range(4)]
        after = torch.npu.memory_allocated()
        del held, parts
        return after - before

    assert grown(compiled(_pair, stable_inputs_in_place=False)) == grown(_pair)


def test_results_with_a_gradient() -> None:
    """In training, a result may be written before the backward exactly where eager mode lets it be."""

    def model(x: torch.Tensor, weight: torch.Tensor) -> Results:
        return (x * weight).sin(), (x * weight).exp()

    def outcome(call: Callable[..., Results], x: torch.Tensor, written: int) -> tuple[Any, ...]:
        weight = torch.full((4, 4), 2.0, device=NPU, requires_grad=True)
        results = call(x, weight)
        views, versions = [t._is_view() for t in results], [t._version for t in results]
        results[written].mul_(3)
        try:
            (results[0] + results[1]).sum().backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            return views, versions, "modified by an inplace operation" in str(error)
        assert weight.grad is not None
        return views, versions, weight.grad.tolist(), results

    graph, kept = compiled(model), []
    for call in range(6):
        x = torch.full((4, 4), call / 10, device=NPU)
        got, expected = outcome(graph, x, call % 2), outcome(model, x, call % 2)
        kept.append(got)
        assert got[:3] == expected[:3], f"call {call}"


def test_one_tensor_returned_twice_is_one_object() -> None:
    """Whether the graph was captured, or is replayed while its earlier results are alive."""

    def program(x: torch.Tensor) -> Results:
        y = x * 2
        wide, _ = torch.broadcast_tensors(x, x.view(x.shape))
        y.add_(1)
        return y, y.resolve_neg(), wide

    run, kept = compiled(program), []
    for _ in range(3):
        x = torch.ones(4, device=NPU)
        kept.append(run(x))
        assert kept[-1][0] is kept[-1][1]
        assert kept[-1][2] is x


def test_of_two_inputs_in_one_memory_the_returned_one_comes_back() -> None:
    """The same elements, but another object, whose Python attributes a caller may have set."""

    def program(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Results:
        x.copy_(z)
        return z * 2, y

    graph = make_fx(program)(*(torch.ones(4, device=NPU) for _ in range(3)))
    run = compile_graph(graph, [torch.ones(4, device=NPU)] * 3, CompilerConfig().to_options())
    for _ in range(3):
        x, z = torch.rand(4).to(NPU), torch.rand(4).to(NPU)
        y = x.as_strided(x.shape, x.stride())
        double, back = run(x, y, z)
        assert back is y
        assert torch.equal(double, z * 2)
        assert torch.equal(back, z)


def _reasons(use: Callable[[Callable[..., torch.Tensor]], object]) -> list[str]:
    """Why captures were made, in order."""
    mark = captures_so_far()
    with torch.no_grad():
        use(compiled(lambda x: x * 2))
    return [capture.reason for capture in capture_records(after=mark)]


@pytest.mark.slow
def test_a_further_capture_says_why() -> None:
    """A variable of a loop has the last result; a list has all, of which later ones are copied; a caller resizes one."""
    x = torch.ones(4, device=NPU)

    def dropped(step: Callable[..., torch.Tensor]) -> None:
        for _ in range(4):
            step(x)

    def assigned(step: Callable[..., torch.Tensor]) -> None:
        for _ in range(4):
            out = step(x)
        assert out is not None

    def resized(step: Callable[..., torch.Tensor]) -> None:
        for _ in range(4):
            step(x).untyped_storage().resize_(1 << 12)

    first = ["the first call"]
    assert _reasons(dropped) == first
    assert _reasons(assigned) == [*first, capture_set._ALIVE]
    assert _reasons(lambda step: [step(x) for _ in range(5)]) == [*first, capture_set._ALIVE, capture_set._ALIVE]
    assert _reasons(resized) == [*first, "a caller having resized a result"]
