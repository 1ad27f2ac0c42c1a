"""When a graph is captured, and why: keys, limits, reasons, options."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch_npu
from device_helpers import NPU, agree, check, compiled, random

from npugraph_ex import invalidate
from npugraph_ex.aclgraph.scalar_churn import MAX_CAPTURES_WITHOUT_HIT
from npugraph_ex.frontend.entry.explain import Watch
from npugraph_ex.report.captures import capture_records, captures_so_far


@pytest.mark.slow
def test_a_new_size_is_captured_once_and_not_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its results may not lie, because graphs of other sizes write there, is known before: results that are held stay."""
    begun, begin = [], torch.npu.NPUGraph.capture_begin
    monkeypatch.setattr(
        torch.npu.NPUGraph, "capture_begin", lambda graph, **options: begun.append(graph) or begin(graph, **options)
    )

    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = ((x * 2).relu() @ x.t()).exp()
        return y.sum(0), (y @ x).repeat(2, 1)

    graph = compiled(function, dynamic=True)
    held = []
    for size in (40, 4, 90, 17, 64, 33, 8, 70):
        x = random(size, 16)
        held.append((graph(x), function(x)))
    for got, expected in held:
        torch.testing.assert_close(got, expected)
    assert len(begun) == len(held)


@pytest.mark.slow
def test_dynamic_shapes_capture_once_a_size() -> None:
    """A size seen before replays its graph; a new one captures, and the reason says so, without what has not changed."""
    graph = compiled(lambda x: x.cumsum(0) * 2, dynamic=True)
    mark = captures_so_far()
    for size in (3, 7, 3, 9, 7, 3):
        x = random(size, 5)
        result = graph(x)
        torch.testing.assert_close(result.cpu(), x.cpu().cumsum(0) * 2)
        del result
    records = capture_records(after=mark)
    assert len(records) == 3
    assert [{*record.numbers} for record in records] == [{3, 5}, {7, 5}, {9, 5}]
    assert [record.reason for record in records] == [
        "the first call",
        *(f"new sizes or scalars ({n},)" for n in (7, 9)),
    ]


def test_capture_limit_evicts_the_least_recently_used(caplog: pytest.LogCaptureFixture) -> None:
    """At the limit one graph goes for each new one, with one warning, and values stay right."""
    graph = compiled(lambda x: x * 3, dynamic=True, capture_limit=2)
    mark = captures_so_far()
    for size in (3, 5, 3, 7, 3, 5):
        x = random(size)
        result = graph(x)
        torch.testing.assert_close(result.cpu(), x.cpu() * 3)
        del result
    assert len(capture_records(after=mark)) == 4  # 3, 5, 7 (drops 5), 5 again; 3 was used recently
    assert [record.message for record in caplog.records if "capture_limit=2" in record.message].__len__() == 1


def test_capture_limit_of_one() -> None:
    """Even the only graph can be replaced: its pool outlives it."""
    graph = compiled(lambda x: x * 3 + 1, dynamic=True, capture_limit=1)
    for size in (3, 5, 7, 3):
        x = random(size)
        torch.testing.assert_close(graph(x).cpu(), x.cpu() * 3 + 1)


def test_a_moved_parameter_is_named_as_the_reason() -> None:
    """Replacing a weight's memory after capture recaptures, and the record names the weight."""
    model = torch.nn.Linear(4, 4, device=NPU)
    graph = compiled(model)
    x = random(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(graph(x), model(x), rtol=0, atol=0)
        model.weight.data = torch.ones(4, 4, device=NPU)
        torch.testing.assert_close(graph(x), model(x), rtol=0, atol=0)
    assert capture_records()[-1].reason == "a new address of L['fn'].weight"


def test_updating_a_parameter_in_place_needs_no_capture() -> None:
    """Parameters are read where they are."""
    model = torch.nn.Linear(4, 4, device=NPU)
    graph = compiled(model)
    x = random(2, 4)
    with torch.no_grad():
        graph(x)
        mark = captures_so_far()
        model.weight.mul_(2)
        torch.testing.assert_close(graph(x), model(x), rtol=0, atol=0)
    assert not capture_records(after=mark)


def test_clone_input_false_adopts_the_first_callers_tensors() -> None:
    """Without buffers of its own the graph copies later inputs into the first caller's tensor."""
    graph = compiled(lambda x: x + 1, clone_input=False)
    first, second = torch.zeros(4, device=NPU), torch.ones(4, device=NPU)
    graph(first)
    assert graph(second).cpu().tolist() == [2.0] * 4
    assert first.cpu().tolist() == [1.0] * 4


def test_an_adopted_tensor_is_not_written_by_its_own_call() -> None:
    """What eager mode saved of it still goes back; the same memory turned round is another input."""
    x = random(4, 4).requires_grad_()
    saved = x * x
    graph = compiled(lambda x: x + 1, clone_input=False)
    with torch.no_grad():
        for given in (x.detach(), x.detach()):
            assert torch.equal(graph(given), given + 1)
    (gradient,) = torch.autograd.grad(saved.sum(), x)
    assert torch.equal(gradient, 2 * x)
    turned = x.detach().t()
    assert torch.equal(graph(turned), turned + 1)


def test_force_eager_captures_nothing() -> None:
    """`force_eager=True` runs the optimised graph operator by operator."""
    mark = captures_so_far()
    check(lambda x: x * 2 + 1, [(random(4),) for _ in range(3)], force_eager=True)
    assert not capture_records(after=mark)


def test_invalidate_captures_anew() -> None:
    """`invalidate()` drops what was captured; the next call captures and says why."""
    graph = compiled(lambda x: x + 1)
    graph(random(3))
    assert invalidate() >= 1
    mark = captures_so_far()
    x = random(3)
    torch.testing.assert_close(graph(x).cpu(), x.cpu() + 1)
    assert [record.reason for record in capture_records(after=mark)] == [
        "invalidate() having dropped the earlier graphs"
    ]


def test_frozen_parameters_are_not_compared() -> None:
    """With `frozen_parameter=True` a moved weight is not noticed: that is what the option gives up."""
    model = torch.nn.Linear(4, 4, device=NPU)
    graph = compiled(model, frozen_parameter=True)
    x = random(2, 4)
    with torch.no_grad():
        old = graph(x).cpu()
        model.weight.data = torch.ones(4, 4, device=NPU)
        torch.testing.assert_close(graph(x).cpu(), old, rtol=0, atol=0)


def _step(cache: torch.Tensor, position: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    cache[:, position] = x
    return cache.sum(1)


def test_a_frozen_graph_writes_the_cache_of_this_call() -> None:
    """Each request has a KV cache of its own as an input, which three steps write: no parameter, so not taken as frozen."""
    graph, kept = compiled(_step, frozen_parameter=True), []
    for _ in range(3):
        cache, twin = torch.zeros(1, 4, 2, device=NPU), torch.zeros(1, 4, 2, device=NPU)
        for position in range(3):
            at, x = torch.tensor([position], device=NPU), random(1, 1, 2)
            kept.append((graph(cache, at, x), _step(twin, at, x)))
        kept.append((cache, twin))
    agree(kept)


@pytest.mark.parametrize("write", [
    lambda state, x: state.add_(x) * 2,
    lambda state, x: torch.add(x, 1, out=state),
    lambda state, x: state[1:].copy_(x[1:]).sum(),
], ids=["in place", "out=", "a part"])  # fmt: skip
@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter], ids=["tensor", "parameter"])
def test_a_frozen_graph_writes_the_input_of_this_call(write: Callable[..., torch.Tensor], kind: type) -> None:
    """What the graph writes is compared whatever it is, a parameter too."""
    states = [random(4) for _ in range(6)]  # more than the captures whose results can be lent
    twins, inputs = [state.clone() for state in states], [random(4) for _ in states]
    states = (
        [torch.nn.Parameter(state, requires_grad=False) for state in states] if kind is not torch.Tensor else states
    )
    graph, kept = compiled(write, frozen_parameter=True), []
    for state, twin, x in zip(states, twins, inputs, strict=True):
        kept.append((graph(state, x), write(twin, x)))
    agree([*kept, *zip(states, twins, strict=True)])


class _Scaled(torch.nn.Module):
    """One parameter and one buffer, both only read."""

    shift: torch.Tensor

    def __init__(self, scale: float, shift: float) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((4,), scale), requires_grad=False)
        self.register_buffer("shift", torch.full((4,), shift))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_frozen_are_a_models_own_parameters_only(*, dynamic: bool) -> None:
    """A buffer or a parameter that is assigned anew counts, and so do another model's, called by the same function."""
    graph = compiled(lambda model, x: model(x), dynamic=dynamic, frozen_parameter=True)
    models, kept = [_Scaled(2, 3).to(NPU), _Scaled(4, 5).to(NPU)], []
    for number in range(12):
        model, x = models[number % 2], random(4)
        kept.append((graph(model, x), model(x)))
        kept.append((graph(model, x), model(x)))
        if number % 3 == 0:
            model.shift = random(4)
        if number % 3 == 1:
            model.scale = torch.nn.Parameter(random(4), requires_grad=False)
    agree(kept)


def test_a_frozen_parameter_whose_place_another_object_takes() -> None:
    """A new parameter may get the id of a freed one; it is not taken for it."""
    graph, kept = compiled(lambda x, scale: x * scale, frozen_parameter=True), []
    for _ in range(8):
        x, scale = random(4), torch.nn.Parameter(random(4), requires_grad=False)
        kept.append((graph(x, scale), x * scale))
        del scale
    agree(kept)


def test_joining_the_callers_pool() -> None:
    """`use_graph_pool` captures into the pool that the caller names."""
    pool = torch.npu.graph_pool_handle()
    check(lambda x: (x @ x).relu() + 1, [(random(8, 8),) for _ in range(4)], use_graph_pool=pool)
    check(lambda x: (x @ x).exp() - 1, [(random(8, 8),) for _ in range(4)], use_graph_pool=pool)


@pytest.mark.slow
def test_a_float_attribute_under_dynamic_shapes_is_part_of_the_key() -> None:
    """Dynamo hands it over as a scalar on the CPU: captured, and captured anew for another value, down to zero's sign."""

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 2.5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x) + 1 / (x.abs() * self.scale)

    model, watch = Scaled(), Watch()
    graph, mark = compiled(model, dynamic=True), captures_so_far()
    for scale in (2.5, 3.5, 0.0, -0.0, 2.5):
        model.scale = scale
        for size in (3, 5):
            x = random(size, 4)
            assert torch.equal(graph(x).cpu(), model(x).cpu()), scale
    assert len(capture_records(after=mark)) == 8
    kinds = {given.name: given.kind for given in watch.explanation().graphs[0].graph.inputs}
    assert next(kind for name, kind in kinds.items() if name.endswith("scale")) == "key"


def _divided_in_place(x: torch.Tensor) -> torch.Tensor:
    factor = torch.tensor(2.0)
    factor.div_(x.shape[0])
    return x * factor


HOST_SCALARS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "interpolate": lambda x: torch.nn.functional.interpolate(x[None], scale_factor=2) * 2,
    "a constant": lambda x: x * torch.tensor(2.5),
    "a size": lambda x: x * torch.tensor(x.shape[0]),
    "computed": lambda x: torch.clamp(x, torch.tensor(-0.1) * x.shape[0], torch.full((), 0.25 * x.shape[1])),
    "written in place": _divided_in_place,
}


@pytest.mark.parametrize("name", HOST_SCALARS)
def test_what_the_host_computes_from_sizes_is_captured_for_each_size(name: str) -> None:
    """The sizes of `interpolate` are divided in scalars on the CPU; the graph key has the sizes, so each capture has its own."""
    function = HOST_SCALARS[name]
    graph, mark = compiled(function, dynamic=True, require_capture=True), captures_so_far()
    for rows in (3, 5, 3, 5):
        x = random(rows, 4)
        assert torch.equal(graph(x).cpu(), function(x).cpu())
    assert len(capture_records(after=mark)) == 2


class Shifted(torch.nn.Module):
    """A module with a number that Dynamo does not bake in."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Every element, by the number."""
        return torch.relu(x) + x * self.shift


@pytest.mark.slow
def test_a_number_that_is_another_at_every_call_is_not_captured_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    """After some captures for values that do not come again, new ones run uncaptured, and one warning names the number."""
    model = Shifted()
    graph, mark, kept = compiled(model, dynamic=True), captures_so_far(), []
    for step in range(30):
        model.shift = 0.5 + step
        x = random(3, 4)
        kept.append((graph(x), model(x)))
    assert all(torch.equal(have.cpu(), want.cpu()) for have, want in kept)
    # Dynamo bakes the first value in and compiles again.
    assert len(capture_records(after=mark)) <= MAX_CAPTURES_WITHOUT_HIT + 2
    (warning,) = [record for record in caplog.records if "came again" in record.getMessage()]
    assert "shift" in str(warning.args)


@pytest.mark.slow
def test_values_that_come_again_are_all_captured() -> None:
    """Twenty values in turn are new only once: each gets its capture, though not all in the first round."""
    model = Shifted()
    graph, start = compiled(model, dynamic=True), captures_so_far()
    for _ in range(3):
        for step in range(20):
            model.shift = 0.5 + step
            x = random(3, 4)
            assert torch.equal(graph(x).cpu(), model(x).cpu())
    mark = captures_so_far()
    assert mark - start >= 20
    for step in range(20):
        model.shift = 0.5 + step
        graph(random(3, 4))
    assert captures_so_far() == mark


@pytest.mark.slow
@pytest.mark.parametrize("way", ["sizes", "require_capture"])
def test_what_is_captured_for_each_value_all_the_same(way: str) -> None:
    """A size that grows is meant, and whoever demands captures gets them."""
    if way == "sizes":
        graph = compiled(lambda x: torch.relu(x) + 1, dynamic=True)
        calls = [(random(size, 4),) for size in range(3, 3 + MAX_CAPTURES_WITHOUT_HIT + 4)]
    else:
        graph = compiled(lambda x, shift: torch.relu(x) + x * shift, dynamic=True, require_capture=True)
        calls = [(random(3, 4), 2 + step) for step in range(MAX_CAPTURES_WITHOUT_HIT + 4)]
    mark = captures_so_far()
    kept = [graph(*call) for call in calls]
    assert captures_so_far() - mark >= len(calls)
    assert len(kept) == len(calls)


@pytest.mark.parametrize("returns_view", [False, True])
def test_where_the_storage_begins_is_part_of_the_key(returns_view: bool) -> None:
    """A tensor at the address of an earlier one, whose storage begins elsewhere: what is read from there is its own."""

    def function(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        start = x.as_strided((2,), (1,), 0)
        return start if returns_view else start * 2

    graph, whole = compiled(function), torch.arange(300.0, device=NPU)
    inside = whole[128:140]
    # As the allocator may give it once `whole` is gone.
    storage = torch_npu._C._construct_storage_from_data_pointer(inside.data_ptr(), whole.device, 12 * 4)
    alone = torch.empty(0, device=NPU).set_(storage, 0, (12,), (1,))
    assert alone.data_ptr() == inside.data_ptr()
    assert graph(inside).tolist() == ([0, 1] if returns_view else [0, 2])
    assert graph(alone).tolist() == ([130, 131] if returns_view else [260, 262])
    assert graph(inside).tolist() == ([0, 1] if returns_view else [0, 2])
