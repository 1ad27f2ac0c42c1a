"""Streams that write disjoint parts of one buffer: no event is needed in the program, and none may be missed in the graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

import npu_emulator
from npugraph_ex import last_report, ops, scope
from npugraph_ex.errors import StreamOrderWarning
from npugraph_ex.report.findings import Code

SCHEDULES = ("lazy", "random:1", "random:2", "pct:1:3")
Tensors = tuple[torch.Tensor, torch.Tensor]
Write = Callable[[torch.Tensor, torch.Tensor, int], None]
"""Writes one of the parts 0, 1, 2 of a 6x8 buffer from a tensor of its shape."""


def _rows(buffer: torch.Tensor, number: int) -> torch.Tensor:
    return buffer[2 * number : 2 * number + 2]


def _copy(buffer: torch.Tensor, x: torch.Tensor, number: int) -> None:
    _rows(buffer, number).copy_(_rows(x, number) * 2)


def _assign(buffer: torch.Tensor, x: torch.Tensor, number: int) -> None:
    buffer[2 * number : 2 * number + 2] = _rows(x, number) * 3


def _add(buffer: torch.Tensor, x: torch.Tensor, number: int) -> None:
    _rows(buffer, number).add_(_rows(x, number))


def _select(buffer: torch.Tensor, x: torch.Tensor, number: int) -> None:
    buffer[2 * number].copy_(x[number])
    buffer.select(0, 2 * number + 1).mul_(5)


def _narrow_fill(buffer: torch.Tensor, x: torch.Tensor, number: int) -> None:
    del x
    buffer.narrow(0, 2 * number, 2).fill_(number)


def _views_of_views(buffer: torch.Tensor, x: torch.Tensor, number: int) -> None:
    _rows(buffer, number).view(-1)[3:][::2].add_(7)
    buffer.view(3, 16)[number].view(2, 8)[0].mul_(x[number])


def _transposed(buffer: torch.Tensor, x: torch.Tensor, number: int) -> None:
    buffer.t()[2 * number : 2 * number + 2].copy_(x.t()[:2])


def _strided(buffer: torch.Tensor, x: torch.Tensor, number: int) -> None:
    buffer[:, number::3].add_(x[:, number::3])


def _split(buffer: torch.Tensor, x: torch.Tensor, number: int) -> None:
    buffer.chunk(3)[number].unbind(0)[1].copy_(x[number])


def _out(buffer: torch.Tensor, x: torch.Tensor, number: int) -> None:
    torch.add(_rows(x, number), 1, out=_rows(buffer, number))


def _index(buffer: torch.Tensor, x: torch.Tensor, number: int) -> None:
    rows = torch.tensor([2 * number, 2 * number + 1], device=buffer.device)
    buffer[rows] = _rows(x, number)


def _diagonal(buffer: torch.Tensor, x: torch.Tensor, number: int) -> None:
    buffer.diagonal(number).add_(x.diagonal(number))


def _rows_of_columns(buffer: torch.Tensor, x: torch.Tensor, number: int) -> None:
    buffer[:, ::2][2 * number : 2 * number + 2].add_(_rows(x, number)[:, ::2])
    buffer[:, 1::2].t()[:, 2 * number].fill_(number)


WRITES = [
    _copy, _assign, _add, _select, _narrow_fill, _views_of_views, _transposed, _strided, _split, _out, _index, _diagonal,
    _rows_of_columns,
]  # fmt: skip


def three_streams(buffer: torch.Tensor, x: torch.Tensor, write: Write) -> torch.Tensor:
    """Each part on a stream of its own, forked and joined."""
    main, one, two = torch.npu.current_stream(), torch.npu.Stream(), torch.npu.Stream()
    one.wait_stream(main)
    two.wait_stream(main)
    with torch.npu.stream(one):
        write(buffer, x, 0)
    with torch.npu.stream(two):
        write(buffer, x, 1)
    write(buffer, x, 2)
    main.wait_stream(one)
    main.wait_stream(two)
    return buffer + 1


def of_an_input(write: Write) -> Callable[..., Tensors]:
    """The buffer is an input."""
    return lambda buffer, x: (three_streams(buffer, x, write), buffer)


def of_an_intermediate(write: Write) -> Callable[..., Tensors]:
    """The buffer is the graph's own."""
    return lambda buffer, x: (three_streams(buffer * 2, x, write), buffer)


def _compiled_is_right(
    function: Callable[..., Tensors], options: dict[str, Any], *, dynamic: bool = False, seen: bool = True
) -> None:
    """Compiled, it computes on every schedule what it computes in eager mode, and nobody is warned."""
    torch.compiler.reset()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error", StreamOrderWarning)
        compiled = torch.compile(function, backend="npugraph_ex", options=options, dynamic=dynamic or None)
        for seed, schedule in enumerate(SCHEDULES):
            given = [torch.randint(-9, 9, (6, 8), generator=torch.Generator().manual_seed(seed + at)) for at in (0, 50)]
            expected = function(*(tensor.npu() for tensor in given))
            torch.npu.synchronize()
            inputs = [tensor.npu() for tensor in given]
            with npu_emulator.schedule(schedule):
                results = [tensor.cpu().tolist() for tensor in compiled(*inputs)]
            assert results == [tensor.cpu().tolist() for tensor in expected], schedule
    if seen:
        assert last_report().streams is not None


@pytest.mark.parametrize(
    "options", [{}, {"inplace_pass": False, "input_inplace_pass": False, "stream_check": "off"}], ids=str
)
@pytest.mark.parametrize("buffer", [of_an_input, of_an_intermediate])
@pytest.mark.parametrize("write", WRITES)
def test_three_streams_write_disjoint_parts(write: Write, buffer: Callable[..., Any], options: dict[str, Any]) -> None:
    """Through every kind of view, in place and assigned; written back in place or left functional."""
    _compiled_is_right(buffer(write), options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"inplace_pass": False},
        {"input_inplace_pass": False},
        {"stream_check": "raise"},
        {"stream_check": "repair"},
        {"force_eager": True, "inplace_pass": False},
        {"clone_input": False, "clone_output": True, "input_inplace_pass": False},
        {"remove_noop_ops": False, "pattern_fusion_pass": False, "inplace_pass": False},
    ],
    ids=str,
)  # fmt: skip
def test_whatever_the_options_say(options: dict[str, Any]) -> None:
    """No option leaves the functional form of the writes without an order, and none blames the program."""
    _compiled_is_right(of_an_intermediate(_views_of_views), options)
    _compiled_is_right(of_an_input(_add), options)


def _in_turns(buffer: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Two streams write two columns each, now one, now the other, several times."""
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    _rows(buffer, 2).copy_(_rows(x, 2) * 3)
    side.wait_stream(main)
    with torch.npu.stream(side):
        buffer.t()[2:4].copy_(x.t()[2:4] * 4)
        buffer.t()[2:4] = x.t()[2:4] - 3
    buffer.t()[4:6].fill_(1)
    buffer.t()[4:6] = x.t()[4:6] - 1
    with torch.npu.stream(side):
        buffer.t()[2:4].fill_(2)
        buffer.t()[2:4].mul_(4)
    buffer.t()[4:6] = x.t()[4:6] - 2
    main.wait_stream(side)
    return buffer[1:]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"inplace_pass": False}, {"input_inplace_pass": False}, {"force_eager": True}], ids=str
)
def test_streams_write_an_input_in_turns(options: dict[str, Any]) -> None:
    """What is returned is a view of the input, which is read then, but only after it was written back as a whole."""
    _compiled_is_right(lambda buffer, x: (_in_turns(buffer, x), buffer), options)


@pytest.mark.slow
def test_writes_in_turns_through_a_transpose_go_back_in_place() -> None:
    """No write stays functional, so no stream waits for another but where the program says so."""
    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(_in_turns, backend="npugraph_ex")(*(torch.ones(6, 8).npu() for _ in range(2)))
    assert last_report().streams.of(Code.MADE_DEPENDENT) == ()


@pytest.mark.parametrize("options", [{}, {"inplace_pass": False}, {"remove_noop_ops": False}], ids=str)
def test_old_contents_that_are_needed_later(options: dict[str, Any]) -> None:
    """A copy of the buffer is returned: where the compiler takes the old memory for it, the writes cannot go there."""

    def keeping(buffer: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = buffer * 2
        old = own.clone()
        return three_streams(own, x, _add), old * 3, own

    _compiled_is_right(keeping, options)


@pytest.mark.slow
def test_symbolic_sizes() -> None:
    """Which bytes a part has is not known: nobody is blamed, and the order is kept."""

    def halves(buffer: torch.Tensor, x: torch.Tensor) -> Tensors:
        rows, side = x.shape[0] // 2, torch.npu.Stream()
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            buffer[rows:].copy_(x[rows:] * 2)
        buffer[:rows].add_(x[:rows])
        torch.npu.current_stream().wait_stream(side)
        return buffer + 1, buffer

    _compiled_is_right(halves, {}, dynamic=True)


def test_a_parameter_and_tagged_streams() -> None:
    """The same with a module's own memory and scopes."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache = torch.nn.Parameter(torch.zeros(6, 8, dtype=torch.int64, device="npu"), requires_grad=False)
            self.ready, self.done = (ops.npu_create_tagged_event(f"disjoint {name}") for name in ("ready", "done"))

        def forward(self, buffer: torch.Tensor, x: torch.Tensor) -> Tensors:
            self.cache.copy_(buffer)
            ops.npu_tagged_event_record(self.ready)
            with scope.npu_stream_switch("side"):
                ops.npu_tagged_event_wait(self.ready)
                _rows(self.cache, 0).copy_(_rows(x, 0))
                ops.npu_tagged_event_record(self.done)
            _rows(self.cache, 1).add_(_rows(x, 1))
            ops.npu_tagged_event_wait(self.done)
            return self.cache + 1, self.cache * 1

    _compiled_is_right(Model(), {})


@pytest.mark.slow
def test_parts_go_back_in_place_without_an_event() -> None:
    """The streams stay as free of each other as the program made them: no edge is added, nothing is functional."""
    torch.compiler.reset()
    with torch.no_grad():
        torch.compile(of_an_input(_strided), backend="npugraph_ex")(*(torch.ones(6, 8).npu() for _ in range(2)))
    assert last_report().streams.of(Code.MADE_DEPENDENT) == ()
    with torch.no_grad():
        torch.compiler.reset()
        options = {"input_inplace_pass": False}
        function = of_an_input(_strided)
        torch.compile(function, backend="npugraph_ex", options=options)(*(torch.ones(6, 8).npu() for _ in range(2)))
    found = last_report().streams.of(Code.MADE_DEPENDENT)
    assert found
    assert all(finding.repaired for finding in found)


@pytest.mark.parametrize("options", [{}, {"inplace_pass": False}], ids=str)
def test_overlapping_parts_that_events_order(options: dict[str, Any]) -> None:
    """One stream waits for the other before it writes some of the same bytes."""

    def ordered(buffer: torch.Tensor, x: torch.Tensor) -> Tensors:
        side, own = torch.npu.Stream(), buffer * 1
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            own[:4].copy_(x[:4] * 2)
            written = side.record_event()
            own[0].add_(1)
        own[5].mul_(2)
        torch.npu.current_stream().wait_event(written)
        own[2:].add_(x[2:])
        torch.npu.current_stream().wait_stream(side)
        return own, buffer

    _compiled_is_right(ordered, options)


def _racy(reads: bool) -> Callable[[torch.Tensor, torch.Tensor], Tensors]:
    """Row 3 is written on one stream, and written or read on another, with no event between; row 4 hides nothing."""

    def racy(buffer: torch.Tensor, x: torch.Tensor) -> Tensors:
        side, own = torch.npu.Stream(), buffer * 1
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            own[:4].copy_(x[:4] * 2)
            own[0].add_(1)
        result = own[3:] * 2 if reads else own[3:].add_(x[3:])
        torch.npu.current_stream().wait_stream(side)
        return own, result

    return racy


@pytest.mark.parametrize("reads", [False, True], ids=["writes", "reads"])
def test_a_race_of_the_program_is_still_refused(reads: bool) -> None:
    """With all writes back in place, the graph has the program's race."""
    torch.compiler.reset()
    compiled = torch.compile(_racy(reads), backend="npugraph_ex", options={"stream_check": "raise"})
    with (
        torch.no_grad(),
        pytest.raises(BackendCompilerFailed, match=r"StreamOrderError(.|\n)*error \[(read|write)-after-write\]"),
    ):
        compiled(*(torch.ones(6, 8).npu() for _ in range(2)))


@pytest.mark.parametrize("reads", [False, True], ids=["writes", "reads"])
def test_a_race_that_an_event_of_the_compiler_orders_is_no_error(reads: bool) -> None:
    """With writes that stay functional, the next access needs the result of the last write, and its event orders all of them."""
    _compiled_is_right(_racy(reads), {"inplace_pass": False, "stream_check": "raise"})
    assert last_report().streams.of(Code.MADE_DEPENDENT)


def _subtract_from_a_part(buffer: torch.Tensor) -> None:
    buffer[:4].sub_(1)


def _subtract_from_columns(buffer: torch.Tensor) -> None:
    buffer[:, 1:3].sub_(1)


def _subtract(buffer: torch.Tensor) -> None:
    buffer.sub_(1)


def _assign_by_index(buffer: torch.Tensor) -> None:
    buffer[torch.tensor([1, 2], device=buffer.device)] = 5


def _read_beside(write: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor, torch.Tensor], Tensors]:
    """A side stream reads a buffer and an input; then the main stream writes both, without a wait between."""

    def program(given: torch.Tensor, x: torch.Tensor) -> Tensors:
        own, side = x * 3, torch.npu.Stream()
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            read = given * 2 + own * 5
        write(given)
        write(own)
        torch.npu.current_stream().wait_stream(side)
        return read, given + own

    return program


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"inplace_pass": False}, {"input_inplace_pass": False}], ids=str)
@pytest.mark.parametrize("write", [_subtract_from_a_part, _subtract_from_columns, _subtract, _assign_by_index])
def test_a_race_that_only_eager_mode_has_is_no_error(
    write: Callable[[torch.Tensor], None], options: dict[str, Any]
) -> None:
    """A write stays functional until the read is over, whether it writes a part or all: the graph has no race to refuse."""
    program = _read_beside(write)
    with npu_emulator.detect_races() as races:
        program(torch.ones(6, 8).npu(), torch.ones(6, 8).npu())
    assert races, "a race of the program, as it is written"
    with npu_emulator.detect_races() as races:
        torch.compiler.reset()
        torch.compile(program, backend="npugraph_ex", options=options)(*(torch.ones(6, 8).npu() for _ in range(2)))
        torch.npu.synchronize()
    assert races == []
    _compiled_is_right(program, {**options, "stream_check": "raise"})
