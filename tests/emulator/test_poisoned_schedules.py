"""Searches for a wrong order find no right values by luck: memory is poisoned under every schedule but fifo."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import npu_emulator
from npu_emulator import RaceError, every_order, schedule
from npu_emulator.schedules import report_misfit

SEARCHES = ["lazy", *(f"random:{seed}" for seed in range(8)), *(f"pct:{seed}:3" for seed in range(4))]


def _step(x: torch.Tensor, w: torch.Tensor, *, mended: bool) -> torch.Tensor:
    """A product on a side stream, of a sum that the main stream computes; freed memory of earlier calls holds both."""
    main, side = torch.npu.current_stream(), torch.npu.Stream()
    y = x + 1
    if mended:
        side.wait_stream(main)
    with torch.npu.stream(side):
        z = y @ w
    main.wait_stream(side)
    return z + y


@pytest.fixture
def operands() -> tuple[torch.Tensor, torch.Tensor]:
    """Two small matrices on the device."""
    return torch.randn(8, 8).npu(), torch.randn(8, 8).npu()


@pytest.mark.parametrize(
    "text",
    ["choices:9.9", "choices:0.x", "choices:1..2", "choices", "pct:1", "pct:1:0", "pct:1:2:3", "random", "random:-1"],
)
def test_a_schedule_without_meaning_is_refused(text: str, operands: tuple[torch.Tensor, torch.Tensor]) -> None:
    """The message gives every form; a choice of a task that is not there is refused where it would be made."""
    expected = (
        "takes task 9, but only 0 to 1 were ready" if text == "choices:9.9" else r"'pct:SEED:DEPTH'.*'choices:0\.2\.1'"
    )
    with pytest.raises(npu_emulator.EmulatorError, match=expected), schedule(text):
        _step(*operands, mended=False).cpu()


def test_choices_without_decisions_are_refused(
    operands: tuple[torch.Tensor, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    """The message says how many decisions the program made, work included that is still queued, and what was left over.

    Of the schedule of a process it is a line on stderr.
    """

    def program() -> None:
        operands[0] + 1
        report_misfit(npu_emulator.current().runtime, "choices:9.9")

    said = r"decided 0 times.*choices for 2 decisions: 9\.9 was left"
    with pytest.raises(npu_emulator.EmulatorError, match=said), schedule("choices:9.9"):
        program()
    assert re.search(f"^npu_emulator: the program {said} over", capsys.readouterr().err)
    text = next(text for text, _ in every_order(lambda: _step(*operands, mended=False).cpu()))
    with schedule(text):
        _step(*operands, mended=False)  # still queued
    said = rf"'{text}\.1\.0' has choices.*: 1\.0 was left over"
    with pytest.raises(npu_emulator.EmulatorError, match=said), schedule(f"{text}.1.0"):
        _step(*operands, mended=False)


def test_a_block_in_a_block_uses_up_no_choices(operands: tuple[torch.Tensor, torch.Tensor]) -> None:
    """After the inner block the outer one goes on with the choices that it has not made yet."""

    def twice(between: Callable[[], object] = lambda: None) -> list[list[list[float]]]:
        first = _step(*operands, mended=False).cpu()
        between()
        return [first.tolist(), _step(*operands, mended=False).cpu().tolist()]

    def inner() -> None:
        with schedule("lazy"):
            _step(*operands, mended=True).cpu()

    orders = {str(result): text for text, result in every_order(twice)}
    assert len(orders) >= 4
    for result, text in orders.items():
        with schedule(text):
            assert str(twice(inner)) == result


def test_every_order_tells_the_racy_program_from_the_mended(operands: tuple[torch.Tensor, torch.Tensor]) -> None:
    """The product of what is not there yet is not a number; with the wait every order is right."""
    expected = _step(*operands, mended=True).cpu()
    racy = [torch.equal(result, expected) for _, result in every_order(lambda: _step(*operands, mended=False).cpu())]
    assert racy.count(False) == 2
    assert racy.count(True) == 1
    mended = [torch.equal(result, expected) for _, result in every_order(lambda: _step(*operands, mended=True).cpu())]
    assert mended
    assert all(mended)


def test_a_race_that_no_value_shows_is_an_error() -> None:
    """A buffer that lives on holds the right values from the run before; the race detector sees the race all the same."""
    source, buffer, side = torch.ones(8, device="npu"), torch.ones(8, device="npu"), torch.npu.Stream()

    def program(*, mended: bool) -> list[float]:
        side.wait_stream(torch.npu.current_stream())
        buffer.copy_(source)
        if mended:
            side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            doubled = buffer * 2
        torch.npu.current_stream().wait_stream(side)
        return doubled.cpu().tolist()  # type: ignore[no-any-return]

    with pytest.raises(RaceError, match=r"(?s)the same result, by luck.*copy_.*missing edge"):
        assert all(result == [2.0] * 8 for _, result in every_order(lambda: program(mended=False)))
    assert all(result == [2.0] * 8 for _, result in every_order(lambda: program(mended=True)))


def _differs(run: Callable[[], torch.Tensor], expected: torch.Tensor) -> list[str]:
    """The schedules under which a program is wrong."""
    wrong = []
    for text in SEARCHES:
        with schedule(text):
            if not torch.equal(run(), expected):
                wrong.append(text)
    return wrong


def test_a_block_of_a_schedule_is_poisoned(operands: tuple[torch.Tensor, torch.Tensor]) -> None:
    """The first run of a block meets nothing of the runs before it; the mended program is right under every schedule."""
    expected = _step(*operands, mended=True).cpu()
    assert _differs(lambda: _step(*operands, mended=False).cpu(), expected)
    assert _differs(lambda: _step(*operands, mended=True).cpu(), expected) == []


@pytest.mark.parametrize("mended", [False, True])
def test_a_replay_meets_nothing_of_the_replay_before_it(
    operands: tuple[torch.Tensor, torch.Tensor], mended: bool
) -> None:
    """What a captured lane reads too early is not a number, though an earlier replay left the right values there."""
    with schedule("lazy"):
        graph, stream = torch.npu.NPUGraph(), torch.npu.Stream()
        with torch.npu.graph(graph, stream=stream):
            side = torch.npu.Stream()
            side.wait_stream(torch.npu.current_stream())
            y = operands[0] + 1
            if mended:
                side.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(side):
                z = y @ operands[1]
            torch.npu.current_stream().wait_stream(side)
            result = z + y
            del y, z
    graph.replay()
    expected = result.cpu()

    def run() -> torch.Tensor:
        graph.replay()
        return result.cpu()

    assert torch.equal(expected, ((operands[0] + 1) @ operands[1] + (operands[0] + 1)).cpu())
    assert bool(_differs(run, expected)) != mended


def test_freed_memory_that_another_stream_still_reads_keeps_its_values() -> None:
    """A result of the side stream is dropped while the main stream, which has waited, still has to read it."""
    x, side = torch.ones(64, device="npu"), torch.npu.Stream()
    for text in SEARCHES:
        with schedule(text):
            for _ in range(3):
                side.wait_stream(torch.npu.current_stream())
                with torch.npu.stream(side):
                    middle = x * 3
                torch.npu.current_stream().wait_stream(side)
                total = middle + 1
                del middle
                assert total.cpu().tolist() == [4.0] * 64, text


@pytest.mark.slow
def test_threads_that_allocate_at_the_same_time_spoil_nothing_of_each_other() -> None:
    """Poison covers the thread's own block, where the allocator's totals have grown by another thread's block too."""
    results: list[list[torch.Tensor]] = [[] for _ in range(6)]

    def work(number: int) -> None:
        results[number] = [(torch.ones(4, device="npu") * number * 2 + 1).cumsum(0) for _ in range(5)]

    for _ in range(15):
        with schedule("lazy"):
            threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            found = [[result.cpu().tolist() for result in of_one] for of_one in results]
        expected = [[[(1.0 + 2 * number) * place for place in range(1, 5)]] * 5 for number in range(6)]
        assert found == expected


def test_what_a_program_throws_away_may_be_padding() -> None:
    """Rows that nothing wrote go through a product and an attention, and the rows that count are right."""
    rows = torch.randn(3, 8)
    expected = torch.softmax(rows @ rows.mT, -1) @ rows
    with schedule("lazy"):
        padded = torch.empty(16, 8, device="npu")
        padded[:3] = rows.npu()
        scores = (padded @ padded.mT)[:3, :3]
        result = torch.softmax(scores, -1) @ padded[:3]
        assert torch.allclose(result.cpu(), expected, atol=1e-6)


def test_poison_leaves_no_trace() -> None:
    """Poisoning is no kernel and no decision: counts, logs, costs and the orders of a program are as without it."""
    x, side = torch.ones(8, device="npu"), torch.npu.Stream()

    def program() -> list[float]:
        side.wait_stream(torch.npu.current_stream())
        with torch.npu.stream(side):
            y = x + 1
        z = x * 2
        torch.npu.current_stream().wait_stream(side)
        return (y + z).cpu().tolist()  # type: ignore[no-any-return]

    found = []
    for poison in (False, True):
        before = sum(npu_emulator.kernel_counts().values())
        with schedule("lazy", poison=poison), npu_emulator.kernel_log() as log:
            program()
            graph = torch.npu.NPUGraph()
            with torch.npu.graph(graph):
                y = x + 1
            graph.replay()
            torch.npu.synchronize()
        cost = npu_emulator.resources().captured[-1]
        counted = sum(npu_emulator.kernel_counts().values()) - before
        found.append(([ran.name for ran in log], counted, cost.kernels, cost.other_tasks))
        del graph, y
    assert found[0] == found[1]
    orders = [text for text, _ in every_order(program)]
    with schedule("fifo", poison=True):
        assert [text for text, _ in every_order(program)] == orders


@pytest.mark.slow
def test_the_setting_of_a_whole_program_and_its_children(program: Callable[..., Any]) -> None:
    """Under `--schedule lazy` fresh memory is poisoned unless NPU_EMULATOR_POISON says no, and a child's is as its parent's."""
    ask = "print(torch.empty(5, device='npu').cpu().isnan().all().item(), flush=True)"
    text = f"import torch\nx = torch.full((5,), 7.0, device='npu'); torch.npu.synchronize(); del x\n{ask}\n"
    child = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {f'import torch; {ask}'!r}], check=True)\n"
    done = program(text + child, "--quiet", "--schedule", "lazy")
    # A child whose torch loads torch_npu before this package has torch_npu's line about the missing CANN.
    said = [line for line in done.stdout.splitlines() if "ASCEND_HOME_PATH" not in line]
    assert said == ["True", "True"], done.stderr
    done = program(text, "--quiet", "--schedule", "lazy", NPU_EMULATOR_POISON="0")
    assert done.stdout == "False\n", done.stderr


def _into_new_memory(x: torch.Tensor) -> torch.Tensor:
    """Two side streams fill the halves of memory that is allocated after they were forked."""
    main = torch.npu.current_stream()
    sides = torch.npu.Stream(), torch.npu.Stream()
    x = x + 1
    for side in sides:
        side.wait_stream(main)
    halves = torch.empty_like(x)
    for side, part in zip(sides, (slice(4), slice(4, None)), strict=True):
        with torch.npu.stream(side):
            halves[part] = x[part] * 2
        main.wait_stream(side)
    return halves + 1


@pytest.mark.parametrize("backend", [None, "npugraph_ex"])
def test_memory_that_is_allocated_after_a_fork_may_be_written_at_once(backend: str | None) -> None:
    """Poison comes before the records of the fork, on which the writers wait, in eager mode and in a capture."""
    program = torch.compile(_into_new_memory, backend=backend) if backend else _into_new_memory
    values = torch.arange(64.0).reshape(8, 8)
    for text in SEARCHES:
        with schedule(text):
            for _ in range(3):
                assert torch.equal(program(values.npu()).cpu(), (values + 1) * 2 + 1), text


def test_new_memory_is_poisoned_before_the_work_that_its_stream_waits_for() -> None:
    """No queued work can use memory that was never used, so what reads it too early is not a number from the first time on."""
    x, side = torch.ones(4, device="npu"), torch.npu.Stream()
    with schedule("lazy"):
        kept, read = [], []
        for _ in range(4):
            side.wait_stream(torch.npu.current_stream())
            with torch.npu.stream(side):
                kept.append(x.new_empty(300_000).fill_(2))
            read.append(kept[-1].amax().item())
    assert all(map(math.isnan, read)), read
    assert [result.amax().item() for result in kept] == [2.0] * 4
