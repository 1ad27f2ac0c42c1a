"""The core limit of one stream: which cores each kernel has, compiled as in eager mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch_npu

import npugraph_ex
from npugraph_ex import scope

Cores = tuple[str, int, int]
seen: list[Cores] = []

_library = torch.library.Library("nge_stream_limit", "DEF")
_library.define("look(Tensor x, str place) -> Tensor")
torch.library.register_fake("nge_stream_limit::look", lambda x, _: torch.empty_like(x), lib=_library)


@torch.library.impl(_library, "look", "PrivateUse1")
def _look(x: torch.Tensor, place: str) -> torch.Tensor:
    """Note the cores that the device gives to the stream on which the kernel is launched."""
    limits = torch.npu.get_stream_limit(torch.npu.current_stream())
    seen.append((place, limits["cube_core_num"], limits["vector_core_num"]))
    return x + 1


look = torch.ops.nge_stream_limit.look
outside = torch.npu.Stream()


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Nothing is compiled before, and no limit is left behind."""
    torch.compiler.reset()
    streams = (torch.npu.current_stream(), outside)
    before = [torch.npu.get_stream_limit(stream) for stream in streams]
    with torch.no_grad():
        yield
    assert [torch.npu.get_stream_limit(stream) for stream in streams] == before


def cores_of(function: Callable[..., Any], *args: Any) -> list[Cores]:
    """Which cores each kernel of a call has."""
    seen.clear()
    function(*args)
    return list(seen)


def around_the_block(x: torch.Tensor, side: torch.npu.Stream) -> torch.Tensor:
    """Work on both streams, before, in and after the block."""
    main = torch.npu.current_stream()
    x = look(x, "main before")
    side.wait_stream(main)
    with scope.limit_core_num(4, 8, stream=side):
        a = look(x, "main in")
        with torch.npu.stream(side):
            b = look(x, "side in")
            with scope.limit_core_num(2, -1, stream=side):
                b = look(b, "side further in")
            b = look(b, "side in again")
        a = look(a, "main in again")
    with torch.npu.stream(side):
        b = look(b, "side after")
    main.wait_stream(side)
    return look(a + b, "main after")


def made_inside(x: torch.Tensor) -> torch.Tensor:
    """The function makes its stream itself."""
    return around_the_block(x, torch.npu.Stream())


def made_outside(x: torch.Tensor) -> torch.Tensor:
    """The stream exists before the function is compiled."""
    return around_the_block(x, outside)


def both_limited(x: torch.Tensor) -> torch.Tensor:
    """Each stream has a limit of its own; the block of one encloses that of the other, and -1 keeps the stream's own."""
    main = torch.npu.current_stream()
    outside.wait_stream(main)
    with scope.limit_core_num(4, 8), torch.npu.stream(outside):
        b = look(x, "side in main's block")
        with scope.limit_core_num(3, -1, stream=outside), scope.limit_core_num(-1, 5, stream=main):
            b = look(b, "side limited")
            with torch.npu.stream(main):
                a = look(x, "main further limited")
        with torch.npu.stream(main):
            a = look(a, "main limited")
    main.wait_stream(outside)
    return look(a + b, "after")


def with_other_scopes(x: torch.Tensor) -> torch.Tensor:
    """A deterministic level inside the block keeps the limit."""
    outside.wait_stream(torch.npu.current_stream())
    with scope.limit_core_num(4, 8, stream=outside), scope.deterministic(1), torch.npu.stream(outside):
        y = look(x, "both")
    torch.npu.current_stream().wait_stream(outside)
    return y + 1


def no_other_stream(x: torch.Tensor) -> torch.Tensor:
    """The current stream by name."""
    with scope.limit_core_num(4, 8, stream=torch.npu.current_stream()):
        y = look(x, "in")
    return look(y, "after")


PROGRAMS = [made_inside, made_outside, both_limited, with_other_scopes, no_other_stream]


@pytest.mark.parametrize("options", [{}, {"force_eager": True}], ids=["captured", "uncaptured"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_each_kernel_has_the_cores_of_eager(program: Callable[..., Any], options: dict[str, object]) -> None:
    """Each launch has eager's cores; the values are eager's at every call, and a replay launches nothing anew."""
    x = torch.zeros(2, device="npu")
    eager = cores_of(program, x)
    fast = torch.compile(program, backend="npugraph_ex", fullgraph=True, options=options)
    assert sorted(cores_of(fast, x)) == sorted(eager)
    again = torch.full((2,), 5.0, device="npu")
    seen.clear()
    assert torch.equal(fast(again), program(again))
    runs = 2 if options else 1  # eager's, and without a capture the compiled one's
    assert sorted(seen) == sorted(eager * runs)


def test_inside_a_block_a_limit_is_the_streams() -> None:
    """The cores themselves, so that eager mode and compiled code cannot be wrong together."""
    found = {place: (cube, vector) for place, cube, vector in cores_of(made_outside, torch.zeros(1, device="npu"))}
    assert found == {
        "main before": (24, 48),
        "main in": (24, 48),
        "side in": (4, 8),
        "side further in": (2, 8),
        "side in again": (4, 8),
        "main in again": (24, 48),
        "side after": (24, 48),
        "main after": (24, 48),
    }


def on_two_streams(x: torch.Tensor) -> torch.Tensor:
    """One kernel on each stream."""
    outside.wait_stream(torch.npu.current_stream())
    a = look(x, "main")
    with torch.npu.stream(outside):
        b = look(x, "side")
    torch.npu.current_stream().wait_stream(outside)
    return a + b


def test_a_limit_around_the_call_is_that_streams_alone() -> None:
    """Each of the graph's streams is captured with the limit of the user's stream; another limit is another capture."""
    x = torch.zeros(1, device="npu")
    fast = torch.compile(on_two_streams, backend="npugraph_ex", fullgraph=True)
    blocks: list[Callable[[], Any]] = [
        lambda: scope.limit_core_num(6, 6),
        lambda: scope.limit_core_num(6, 6, stream=outside),
        lambda: scope.limit_core_num(7, -1, stream=outside),
    ]
    for block in blocks:
        with block():
            assert sorted(cores_of(fast, x)) == sorted(cores_of(on_two_streams, x))


def test_the_pool_may_hand_out_the_users_stream_again() -> None:
    """A capture takes another stream than the user's, whose limits would be mixed up with its own."""
    x = torch.zeros(1, device="npu")
    while torch.npu.Stream() != outside:  # the pool is a ring
        pass
    in_pool = 1
    while torch.npu.Stream() != outside:
        in_pool += 1
    for _ in range(in_pool - 1):
        torch.npu.Stream()
    fast = torch.compile(on_two_streams, backend="npugraph_ex", fullgraph=True)
    with scope.limit_core_num(6, 6, stream=outside):
        assert sorted(cores_of(fast, x)) == sorted(cores_of(on_two_streams, x))


def test_a_call_on_the_limited_stream_is_captured_apart() -> None:
    """Two calls under one scope, on the limited stream and on another, are two captures."""
    x = torch.zeros(1, device="npu")
    fast = torch.compile(lambda x: look(x, "only"), backend="npugraph_ex", fullgraph=True)
    with scope.limit_core_num(5, 5, stream=outside):
        assert cores_of(fast, x) == [("only", 24, 48)]
        with torch.npu.stream(outside):
            assert cores_of(fast, x) == [("only", 5, 5)]


def quantized(x: torch.Tensor, gamma: torch.Tensor, *, inside: bool) -> tuple[torch.Tensor, ...]:
    """Two operators of a default rule on one stream, the second under the stream's limit or without it."""
    outside.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(outside):
        with scope.limit_core_num(4, 8, stream=outside):
            y, _, total = torch_npu.npu_add_rms_norm(x, x, gamma)
            if inside:
                result = (*torch_npu.npu_dynamic_quant(y), total)
        if not inside:
            result = (*torch_npu.npu_dynamic_quant(y), total)
    torch.npu.current_stream().wait_stream(outside)
    return result


@pytest.mark.parametrize("inside", [True, False])
def test_nothing_is_fused_across_the_limits_of_a_stream(inside: bool) -> None:
    """Under one limit the two are one; where the limit ends between them they stay two, and the report says why."""
    halves = {"device": "npu", "dtype": torch.float16}
    explained = npugraph_ex.explain(
        lambda x, gamma: quantized(x, gamma, inside=inside), torch.randn(4, 32, **halves), torch.ones(32, **halves)
    )
    report = explained.graphs[0].graph.report
    assert report.fusions() == inside
    misses = [miss.reason for miss in report.near_misses("add_rms_norm_dynamic_quant")]
    assert any("core_limit" in reason for reason in misses) is not inside


@pytest.mark.parametrize("stream", ["side", 7])
def test_what_is_no_stream_is_refused(stream: object) -> None:
    """The error names what came, in eager mode and while the function is compiled."""

    def limited(x: torch.Tensor) -> torch.Tensor:
        with scope.limit_core_num(4, 8, stream=stream):  # type: ignore[arg-type] # which is what is refused
            return x + 1

    for function in (limited, torch.compile(limited, backend="npugraph_ex", fullgraph=True)):
        with pytest.raises(Exception, match=f"takes a torch.npu.Stream.*{stream!r}"):
            function(torch.ones(4, device="npu"))


@pytest.mark.parametrize("stream", [None, outside], ids=["the current stream", "another"])
def test_more_cores_than_there_are_are_refused_for_a_block_without_work(stream: torch.npu.Stream | None) -> None:
    """Compiled as in eager mode."""

    def program(x: torch.Tensor) -> torch.Tensor:
        with scope.limit_core_num(10000, 1, stream=stream):
            pass
        return x + 1

    x = torch.ones(3, device="npu")
    for function in (program, torch.compile(program, backend="npugraph_ex")):
        with pytest.raises(Exception, match="limit of 10000 cores"):
            function(x)
