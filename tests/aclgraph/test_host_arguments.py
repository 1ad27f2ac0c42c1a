"""Host arguments that replays update: attention lengths and registered operators, against eager mode, under any schedule."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch_npu
from device_helpers import compiled, random

import npu_emulator
from npugraph_ex import register_host_arguments
from npugraph_ex.aclgraph import capture_set
from npugraph_ex.errors import HostArgumentError
from npugraph_ex.frontend.entry.explain import Watch
from npugraph_ex.operators import OPERATORS

FORMS = {
    "v1": (torch_npu.npu_fused_infer_attention_score, "actual_seq_lengths_kv", {"num_heads": 2, "scale": 0.5}),
    "v2": (
        torch_npu.npu_fused_infer_attention_score_v2,
        "actual_seq_kvlen",
        {"num_query_heads": 2, "softmax_scale": 0.5},
    ),
}
STEPS = ([2, 3], [6, 4], [3, 6], [3, 6], [2, 2])


def attention(form: str) -> Callable[..., torch.Tensor]:
    """Attention over caches of six rows, between two other kernels."""
    operator, lengths, rest = FORMS[form]

    def function(query: torch.Tensor, cache: torch.Tensor, steps: list[int]) -> torch.Tensor:
        found: torch.Tensor = operator(query * 2, cache, cache, input_layout="BSH", **{lengths: steps}, **rest)[0]
        return found + query

    return function


def caches(batch: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """A query of one row and a cache of six."""
    return random(batch, 1, 8), random(batch, 6, 8)


def agree(function: Callable[..., Any], calls: list[tuple[Any, ...]], **options: Any) -> Watch:
    """Call compiled without waiting for the device, keep all results, compare with eager at the end."""
    watch, graph = Watch(), compiled(function, dynamic=True, **options)
    results = [graph(*call) for call in calls]
    for call, result in zip(calls, results, strict=True):
        torch.testing.assert_close(result.cpu(), function(*call).cpu(), rtol=0, atol=0)
    return watch


@pytest.mark.slow
@pytest.mark.parametrize("order", ["fifo", "lazy", "random:3"])
@pytest.mark.parametrize("form", FORMS)
def test_new_lengths_need_no_new_graph(form: str, order: str) -> None:
    """Each replay sees its own lengths, queued replays too (vllm-ascend#4233, #9025), and nothing is captured for them."""
    with npu_emulator.schedule(order):
        watch = agree(attention(form), [(*caches(), list(lengths)) for lengths in STEPS], clone_output=True)
    (entry,) = watch.explanation().graphs
    assert len(entry.captures) == 1
    kinds = [record.kind for record in entry.graph.inputs]
    assert kinds.count("updated") == 2


@pytest.mark.slow
def test_graphs_of_several_sizes_keep_their_own_lengths() -> None:
    """One update list for all graphs of an FX graph would mix them; here sizes and lengths change in turn."""
    calls = []
    for step in range(6):
        batch = 2 + step % 3
        query, cache = random(batch, 1, 8), random(batch, 6, 8)
        calls.append((query, cache, [2 + step % 4, 3 + step % 3]))

    def function(query: torch.Tensor, cache: torch.Tensor, steps: list[int]) -> torch.Tensor:
        return attention("v1")(query[:2], cache[:2], steps).sum(0) + query

    with npu_emulator.schedule("random:1"):
        watch = agree(function, calls, clone_output=True)
    (entry,) = watch.explanation().graphs
    assert len(entry.captures) == 3


@pytest.mark.slow
def test_two_calls_in_one_graph_take_different_lengths() -> None:
    """Arguments belong to their call; numbers that are computed from inputs are updated as well."""

    def function(query: torch.Tensor, cache: torch.Tensor, steps: list[int]) -> torch.Tensor:
        first = attention("v1")(query, cache, steps)
        return attention("v2")(first, cache, [steps[1] + 1, steps[0] - 1])

    watch = agree(function, [(*caches(), list(lengths)) for lengths in ([2, 3], [5, 4], [4, 5], [2, 3])])
    (entry,) = watch.explanation().graphs
    assert {capture.reason for capture in entry.captures[1:]} == {capture_set._ALIVE}


@pytest.mark.slow
def test_a_number_that_is_also_a_size_is_captured() -> None:
    """A length that other kernels bake in, by name or through the shape of a tensor, belongs to the graph's key."""

    def function(query: torch.Tensor, cache: torch.Tensor, rows: int, other: torch.Tensor) -> torch.Tensor:
        one, two = other.shape[0] - 2, cache.sum() * rows
        return attention("v1")(query, cache, [rows, one]) + two + other.exp().sum()

    sizes = ((3, 4), (5, 4), (5, 7), (3, 4), (5, 7))  # unlike the other sizes: equal ones would share a symbol
    watch = agree(function, [(*caches(), rows, random(other)) for rows, other in sizes], clone_output=True)
    assert len(watch.explanation().graphs[0].captures) == 3


@pytest.fixture(scope="module")
def library() -> Iterator[torch.library.Library]:
    """Operators of a user's own: one takes numbers, one a tensor on the host, one returns new memory."""
    with torch.library._scoped_library("npugraph_ex_updates", "DEF") as made:
        made.define("scale(Tensor x, SymInt[] by, Tensor(a!) out) -> ()")
        made.define("shift(Tensor x, Tensor by, Tensor(a!) out) -> ()")
        made.define("fresh(Tensor x, SymInt[] by, str how) -> Tensor")
        made.define("scan(Tensor x, SymInt[] by) -> Tensor")
        made.define("scan.out(Tensor x, SymInt[] by, *, Tensor workspace, Tensor(a!) out) -> Tensor(a!)")
        made.define("scan_workspace(Tensor x, SymInt[] by) -> Tensor")
        made.impl("scan", lambda x, by: x * by[0] + by[1], "PrivateUse1")
        made.impl("scan.out", _scan, "PrivateUse1")
        made.impl("scan_workspace", lambda x, _: torch.empty_like(x), "PrivateUse1")
        torch.library.register_fake("npugraph_ex_updates::scan", lambda x, _: torch.empty_like(x), lib=made)
        made.impl("scale", lambda x, by, out: _ignore(torch.mul(x, by[0] + by[1], out=out)), "PrivateUse1")
        # The dispatcher takes the first device it finds among the arguments, and the host's comes second.
        made.impl(
            "shift", lambda x, by, out: _ignore(torch.add(x, int(by.sum()), out=out)), "CompositeExplicitAutograd"
        )
        for name in ("scale", "shift"):
            torch.library.register_fake(f"npugraph_ex_updates::{name}", lambda *_: None, lib=made)
        register_host_arguments("npugraph_ex_updates::scale", ["by"])
        register_host_arguments("npugraph_ex_updates::shift", ["by"])
        yield made


def _scan(x: torch.Tensor, by: list[int], *, workspace: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    torch.mul(x, by[0], out=workspace)
    return torch.add(workspace, by[1], out=out)


def _ignore(value: object) -> None:
    del value


@pytest.mark.slow
@pytest.mark.usefixtures("library")
def test_an_operator_of_the_users_own() -> None:
    """A registered operator that writes into an argument is launched again for it."""

    def function(x: torch.Tensor, by: list[int]) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.npugraph_ex_updates.scale(x + 1, by, out)
        return out * 2

    with npu_emulator.schedule("lazy"):
        watch = agree(function, [(random(5), [step, 2 * step]) for step in (2, 3, 4, 5)], clone_output=True)
    assert len(watch.explanation().graphs[0].captures) == 1


@pytest.mark.usefixtures("library")
def test_a_tensor_on_the_host_is_an_updated_argument() -> None:
    """Its values count as they are at the call, also when the caller writes to it afterwards."""

    def function(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        torch.ops.npugraph_ex_updates.shift(x, by, out)
        return out + 1

    watch, graph, by = Watch(), compiled(function, clone_output=True), torch.tensor([1, 2])
    kept = []
    for step in range(4):
        by[0] = step
        x = random(5)
        kept.append((graph(x, by), x + step + 2 + 1))
    for result, expected in kept:
        torch.testing.assert_close(result.cpu(), expected.cpu())
    (entry,) = watch.explanation().graphs
    assert (entry.graph.fate, len(entry.captures)) == ("captured", 1)


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("npugraph_ex_updates::missing", ["by"]), "there is no operator 'npugraph_ex_updates::missing'"),
        (("npugraph_ex_updates::scale", ["lengths"]), "'lengths'.*x, by, out"),
        (("npugraph_ex_updates::scale", "by"), "takes a list of names"),
        (("npugraph_ex_updates::fresh", ["how"]), "how is a str"),
        (("npugraph_ex_updates::fresh", ["by"]), "has no \\.out overload"),
        (("npugraph_ex_updates::scale", ["x"]), "registered already, with .*'by'"),
    ],
    ids=["operator", "argument", "no list", "kind", "new memory", "twice"],
)
def test_wrong_registrations(arguments: tuple[str, Any], message: str) -> None:
    """Each says what is wrong with which operator."""
    with pytest.raises(HostArgumentError, match=message):
        register_host_arguments(*arguments)


@pytest.mark.slow
@pytest.mark.usefixtures("library")
def test_a_workspace_lives_as_long_as_its_graph() -> None:
    """vllm-ascend#16794 (507011): what an updated call works in is freed with its graph and not after the capture.

    Freed, it would be the result of a graph captured later, which replays of the first would overwrite.
    """
    register_host_arguments("npugraph_ex_updates::scan", ["by"], workspace="npugraph_ex_updates::scan_workspace")

    def function(x: torch.Tensor, by: list[int]) -> torch.Tensor:
        return torch.ops.npugraph_ex_updates.scan(x, by) * 2

    first, kept, pressure = random(64), [], []
    with npu_emulator.check_memory() as faults:
        graph = compiled(function, dynamic=True, inplace_pass=False)
        graph(first, [2, 3])
        for step, size in enumerate((60, 50, 40, 60), start=4):
            x = random(size)
            kept.append((graph(x, [step, step + 5]), function(x, [step, step + 5])))
            assert torch.equal(graph(first, [step + 7, step]).cpu(), function(first, [step + 7, step]).cpu())
            gc.collect()
            torch.npu.empty_cache()
            pressure.append(torch.full((1 << 12,), -1.0, device="npu"))
        torch.npu.synchronize()
    for result, expected in kept:
        assert torch.equal(result.cpu(), expected.cpu())
    assert faults == []


@pytest.mark.parametrize("name", ["_npu_paged_attention", "npu_multi_head_latent_attention"])
def test_the_operators_of_atb(name: str) -> None:
    """Their records say which lengths may change, and the real operators take such an argument."""
    assert OPERATORS[f"atb::{name}"].host_arguments == ("context_lens",)
    register_host_arguments(f"atb::{name}", ["context_lens"])
