"""The known traps of capture between device and host: copies that wait, tensors on the host, too few streams."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from device_helpers import NPU, Kept, agree, check, compiled, random

from npugraph_ex.report.captures import capture_records, captures_so_far


@pytest.fixture(scope="module")
def copies_inside() -> Callable[[torch.Tensor], torch.Tensor]:
    """A custom operator whose kernel copies through the host."""

    @torch.library.custom_op("npugraph_ex_tests::through_the_host", mutates_args=())
    def function(x: torch.Tensor) -> torch.Tensor:
        return x + x.cpu().mul(2).npu()

    function.register_fake(torch.empty_like)
    return torch.ops.npugraph_ex_tests.through_the_host


OFFSET = torch.tensor([1.0, 2.0])


def constant_on_the_device(x: torch.Tensor) -> torch.Tensor:
    """A tensor made from numbers, on the device."""
    return x + torch.tensor([1.0, 2.0], device=NPU)


def constant_from_the_host(x: torch.Tensor) -> torch.Tensor:
    """A tensor made on the host and copied."""
    return x + torch.tensor([1.0, 2.0]).to(NPU)


def closure_from_the_host(x: torch.Tensor) -> torch.Tensor:
    """A tensor that changes on the host between calls."""
    return x + OFFSET.to(NPU)


def there_and_back(x: torch.Tensor) -> torch.Tensor:
    """A copy to the host and one back."""
    return x.cpu().mul(2).to(NPU) + x


@pytest.mark.parametrize(
    "program",
    [constant_on_the_device, constant_from_the_host, closure_from_the_host, there_and_back],
    ids=lambda program: program.__name__,
)
def test_synchronous_copies(program: Callable[..., Any]) -> None:
    """vllm-ascend#6002, #11514: a copy that waits, which capture forbids (107030), is made at each call or captured soundly."""
    graph, kept = compiled(program), Kept()
    for _ in range(4):
        x = random(2)
        kept.append((graph(x), program(x)))
        OFFSET.add_(1)
    agree(kept)


def test_a_synchronous_copy_inside_an_operator(copies_inside: Callable[..., torch.Tensor]) -> None:
    """vllm-ascend#6002, #11514: what only the device sees is refused there; the graph runs uncaptured, each write once."""

    def function(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.mul_(2).add_(x)
        return copies_inside(state) * 2

    mark = captures_so_far()
    check(function, [(random(3), random(3)) for _ in range(4)])
    assert not capture_records(after=mark)


STREAMS = """
import torch
import npu_emulator

def model(number):
    return lambda x: (x + number).relu() * 2

def compiled(function, **how):
    return torch.compile(function, backend="npugraph_ex", fullgraph=True, **how)

def agree(kept):
    assert all(torch.equal(have, want) for have, want in kept)

with torch.no_grad():
    for number in range(8):  # three captures each; the models are dropped and not collected
        torch.compiler.reset()
        function = model(number)
        graph, kept = compiled(function, dynamic=False), []
        for _ in range(3):
            x = torch.randn(4, device="npu")
            kept.append((graph(x), function(x)))
        agree(kept)
    print("dropped", npu_emulator.resources().graphs != ())
    del graph, kept
    function = model(9)
    graph, kept = compiled(function, dynamic=True), []
    for size in [*range(2, 18), *range(2, 18)]:
        x = torch.randn(size, device="npu")
        kept.append((graph(x), function(x)))
    agree(kept)
    kept.clear()
    strict = compiled(lambda x: x * 3, dynamic=True, options={"require_capture": True})
    try:
        for size in range(2, 18):
            x = torch.randn(size, device="npu")
            kept.append((strict(x), x * 3))
    except RuntimeError as error:
        print(len(kept) > 2, "refused to begin a capture" in str(error), "207008" in str(error))
    agree(kept)
"""


@pytest.mark.slow
def test_more_captures_than_streams(command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    """vllm-ascend#9564, #3869, #9691: short of streams, dropped models give theirs back, and what finds none runs uncaptured.

    Values are right throughout; one warning says why; `require_capture` raises it.
    """
    script = tmp_path / "script.py"
    script.write_text(STREAMS)
    done = command("run", "--emulate", str(script), NPU_EMULATOR_STREAMS="44", NPU_EMULATOR_FORCE="1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-3:-1] == ["dropped True", "True True True"], done.stdout
    assert done.stderr.count("refused to begin a capture") == 1
    assert "operator by operator" in done.stderr


@pytest.mark.parametrize(
    "function",
    [
        lambda x, host: x + host.to(NPU),
        lambda x, host: (x * 2, host + 1),
        lambda x, host: (x * 2, host.add_(1)),
        lambda x, host: x * 2 + x[host.long().abs() % 3],
        lambda x, host: (x + 1, host),
    ],
    ids=["copied", "beside", "written", "index", "handed back"],
)
def test_tensors_on_the_host_among_the_inputs(function: Callable[..., Any]) -> None:
    """A CPU tensor with dimensions, whose values change from call to call, is read at each call and never frozen."""
    check(function, [(random(3), torch.arange(3.0) + step) for step in range(4)])


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interrupted_capture_is_ended(interruption: type[BaseException]) -> None:
    """Ctrl-C in the middle of a capture: the device can be used again, and the next call captures."""
    graph, x = compiled(lambda x: torch.ops.npugraph_ex_tests.interrupted(x) + 1), random(4)
    with torch.library._scoped_library("npugraph_ex_tests", "FRAGMENT") as library:
        library.define("interrupted(Tensor x) -> Tensor")
        library.impl("interrupted", torch.empty_like, "Meta")
        pending = [interruption]

        def kernel(x: torch.Tensor) -> torch.Tensor:
            if pending:
                raise pending.pop()
            return x * 2

        library.impl("interrupted", kernel, "PrivateUse1")
        with pytest.raises(interruption):
            graph(x)
        assert not torch.npu.is_current_stream_capturing()
        for _ in range(2):
            assert torch.equal(graph(x).cpu(), x.cpu() * 2 + 1)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", ["capture_begin", "capture_end"])
def test_an_interrupt_where_a_capture_begins_or_ends(
    step: str, monkeypatch: pytest.MonkeyPatch, *, after: bool
) -> None:
    """Python raises Ctrl-C as soon as a call into the device returns, thus between the beginning and the first operator, too."""
    graph, x = compiled(lambda x: (x @ x).tanh() + 1), random(4, 4)
    real, pending = getattr(torch.npu.NPUGraph, step), [KeyboardInterrupt]

    def call(*args: Any, **kwargs: Any) -> None:
        if after or not pending:
            real(*args, **kwargs)
        if pending:
            raise pending.pop()

    monkeypatch.setattr(torch.npu.NPUGraph, step, call)
    with pytest.raises(KeyboardInterrupt):
        graph(x)
    assert not torch.npu.is_current_stream_capturing()
    for _ in range(2):
        torch.testing.assert_close(graph(x).cpu(), ((x @ x).tanh() + 1).cpu())
