"""CANN's codes: what raises each, on the C interface where torch_npu would not let one get there, and in the page for users."""

from __future__ import annotations

import ctypes
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
import torch_npu

import npu_emulator
from npu_emulator import build, schedule
from npu_emulator.compilation import SOURCES
from npugraph_ex.commands.remedies import sections

NULL = ctypes.c_void_p()


def advice(acl: ctypes.CDLL) -> str:
    """Take what the runtime said of the last error apart: cause; advice. Python line: file:line. Return the advice."""
    said = re.fullmatch(
        r"\[emulated NPU\] (.+?); (.+)\. Python line: (.+)", acl.aclGetRecentErrMsg().decode(), re.DOTALL
    )
    assert said is not None
    assert __file__ in said[3]
    return said[2]


@pytest.fixture
def streams(acl: ctypes.CDLL) -> Iterator[list[ctypes.c_void_p]]:
    """Create two streams."""
    made = [ctypes.c_void_p(), ctypes.c_void_p()]
    for stream in made:
        assert acl.aclrtCreateStream(ctypes.byref(stream)) == 0
    yield made
    for stream in made:
        assert acl.aclrtDestroyStream(stream) == 0


def test_beginning_and_ending_captures(acl: ctypes.CDLL, streams: list[ctypes.c_void_p]) -> None:
    """A second beginning is 107027, an end without one 107029, an end on a stream that only joined 107036."""
    first, second = streams
    model, event = ctypes.c_void_p(), ctypes.c_void_p()
    assert acl.aclmdlRICaptureEnd(first, ctypes.byref(model)) == 107029
    assert "begin a capture on it" in advice(acl)
    assert acl.aclmdlRICaptureBegin(NULL, 2) == 107031
    assert "a stream of your own" in advice(acl)
    assert acl.aclmdlRICaptureBegin(first, 2) == 0
    assert acl.aclmdlRICaptureBegin(first, 2) == 107027
    assert "on another stream" in advice(acl)
    assert acl.aclrtCreateEvent(ctypes.byref(event)) == 0
    assert acl.aclrtRecordEvent(event, first) == 0
    assert acl.aclrtStreamWaitEvent(second, event) == 0
    assert acl.aclmdlRICaptureEnd(second, ctypes.byref(model)) == 107036
    assert "on the stream that began it" in advice(acl)
    assert acl.aclrtRecordEvent(event, second) == 0
    assert acl.aclrtStreamWaitEvent(first, event) == 0
    assert acl.aclmdlRICaptureEnd(first, ctypes.byref(model)) == 0
    assert acl.aclrtStreamWaitEvent(second, event) == 107028
    assert "record it again" in advice(acl)
    assert acl.aclmdlRIExecuteAsync(model, first) == 0
    assert acl.aclmdlRIDestroy(model) == 0
    assert acl.aclmdlRIExecuteAsync(model, first) == 107000
    assert "capture it anew" in advice(acl)
    assert acl.aclrtDestroyEvent(event) == 0


@pytest.mark.parametrize(("mode", "answer"), [(0, 107038), (1, 107038), (2, 0)])
def test_the_thread_that_begins_a_capture_ends_it(
    acl: ctypes.CDLL, streams: list[ctypes.c_void_p], mode: int, answer: int
) -> None:
    """On another thread the end is 107038 unless the mode is relaxed; the first thread still ends the capture well."""
    model, answers = ctypes.c_void_p(), []

    def end() -> None:
        answers.append(acl.aclmdlRICaptureEnd(streams[0], ctypes.byref(model)))
        if answers[0] != 0:
            assert "the thread that began it" in advice(acl)
            answers.append("advised")

    assert acl.aclmdlRICaptureBegin(streams[0], mode) == 0
    thread = threading.Thread(target=end)
    thread.start()
    thread.join()
    assert answers == ([answer, "advised"] if answer else [0])
    if answer:
        assert acl.aclmdlRICaptureEnd(streams[0], ctypes.byref(model)) == 0
    assert acl.aclmdlRIExecuteAsync(model, streams[0]) == 0
    assert acl.aclmdlRIDestroy(model) == 0


def test_devices_times_and_sizes_that_are_not_there(acl: ctypes.CDLL) -> None:
    """A device too many is 107001, more memory than there is 207001, times of events that never ran 507006 and 107006."""
    event, pointer, stamp, elapsed = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_float()
    assert acl.aclrtSetDevice(15) == 107001
    assert "NPU_EMULATOR_DEVICES" in advice(acl)
    assert acl.aclrtMalloc(ctypes.byref(pointer), ctypes.c_size_t(1 << 50), 0) == 207001
    assert "NPU_EMULATOR_MEMORY_GB" in advice(acl)
    assert acl.aclrtCreateEvent(ctypes.byref(event)) == 0
    assert acl.aclrtEventElapsedTime(ctypes.byref(elapsed), event, event) == 507006
    assert "record both and synchronise" in advice(acl)
    assert acl.aclrtEventGetTimestamp(event, ctypes.byref(stamp)) == 107006
    assert "record it and synchronise it" in advice(acl)
    assert acl.aclrtDestroyEvent(event) == 0


def test_waiting_for_what_nothing_will_signal_is_507046(acl: ctypes.CDLL, streams: list[ctypes.c_void_p]) -> None:
    """A stream that waits for an external event nobody records is a deadlock, said at once; recorded, it goes on."""
    event = torch.npu.ExternalEvent()
    side = torch.npu.Stream()
    with torch.npu.stream(side):
        event.wait(side)
        x = torch.ones(2, device="npu") + 1
    with pytest.raises(RuntimeError, match=r"(?s)507046.*deadlock.*record the event.*before synchronising"):
        side.synchronize()
    event.record(torch.npu.current_stream())
    side.synchronize()
    assert x.cpu().tolist() == [2, 2]


def test_a_capture_may_not_wait_for_unfinished_work_outside_it() -> None:
    """An event that a stream outside the capture recorded behind queued work is 107024; the capture is spoilt."""
    x, side, graph = torch.ones(2, device="npu"), torch.npu.Stream(), torch.npu.NPUGraph()
    capturing = torch.npu.Stream()
    torch.npu.synchronize()
    with schedule("lazy"):
        with torch.npu.stream(side):
            x.add_(1)
            event = side.record_event()
        with torch.npu.stream(capturing):
            graph.capture_begin()
            with pytest.raises(RuntimeError, match=r"(?s)107024.*synchronise before the capture"):
                event.wait(capturing)
            with pytest.raises(RuntimeError, match=r"(?s)107026.*capture again"):
                graph.capture_end()
    assert x.cpu().tolist() == [2, 2]


def test_a_graph_printed_to_where_nothing_can_be_written(tmp_path: Path) -> None:
    """`debug_dump` into a folder that does not exist is 107009 with the path; into one that does, it writes."""
    x, graph = torch.ones(2, device="npu"), torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        x.add_(1)
    with pytest.raises(RuntimeError, match=r"(?s)107009.*cannot write /nowhere/graph.json"):
        graph.debug_dump("/nowhere/graph.json")
    graph.debug_dump(str(tmp_path / "graph.json"))
    assert "aten.add_" in (tmp_path / "graph.json").read_text()


def test_a_host_function_may_not_wait_for_its_device(acl: ctypes.CDLL, streams: list[ctypes.c_void_p]) -> None:
    """A host function that synchronises its stream or its device while work is queued behind it is answered 507009."""
    answers = []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    def waits(_: object) -> None:
        answers.extend([acl.aclrtSynchronizeStream(streams[0]), acl.aclrtSynchronizeDevice()])
        answers.append(acl.aclGetRecentErrMsg())

    with schedule("lazy"):
        assert acl.aclrtLaunchHostFunc(streams[0], waits, NULL) == 0
        assert acl.aclrtSynchronizeStream(streams[0]) == 0
    assert answers[:2] == [507009, 507009]
    assert b"may not wait for the device that runs it" in answers[2]
    assert b"synchronise from the program" in answers[2]


def test_a_kernel_that_raises_is_507015(acl: ctypes.CDLL, streams: list[ctypes.c_void_p]) -> None:
    """A kernel that raises is 507015 at the next synchronisation, which names the operator and the line; then all is well."""
    x = torch.ones(2, device="npu")
    launcher = npu_emulator.current().launcher

    def fails() -> None:
        raise ValueError("no such number")

    with schedule("lazy"):
        launcher.launch("mine.fails", launcher.number("mine.fails"), 0, fails, [], [])
        with pytest.raises(
            RuntimeError,
            match=r"(?s)507015.*mine.fails, launched at .*test_codes.py.*no such number; mend what that line launches: under the "
            r"schedule fifo it raises there \(NPU_EMULATOR_SCHEDULE=fifo, or pytest --npu=emulated --npu-schedule fifo\)",
        ):
            torch.npu.synchronize()
    assert (x + 1).cpu().tolist() == [2, 2]
    assert acl.aclrtSynchronizeStream(streams[0]) == 0


@pytest.mark.parametrize(
    ("order", "advice"),
    [("fifo", "run eagerly it raises there"), ("random:3", "run eagerly under the schedule fifo it raises there")],
)
def test_a_captured_kernel_that_raises_is_sent_to_eager_mode(order: str, advice: str) -> None:
    """Only what is captured: to run it eagerly is no advice for a line that is eager already."""
    x, index, graph = torch.ones(2, device="npu"), torch.full((1,), 9, device="npu"), torch.npu.NPUGraph()
    with schedule(order):
        with torch.npu.graph(graph):
            x.index_select(0, index)
        graph.replay()
        with pytest.raises(RuntimeError, match=f"failed on the device: .*; mend what that line launches: {advice}"):
            torch.npu.synchronize()


def test_a_kernel_behind_another_stream_has_no_other_order_to_raise_in(streams: list[ctypes.c_void_p]) -> None:
    """Under fifo an eager kernel is queued where its stream waits: neither eager mode nor another schedule is advice."""
    del streams
    x, index = torch.ones(2, device="npu"), torch.full((1,), 9, device="npu")
    side, event = torch.npu.Stream(), torch.npu.ExternalEvent()
    event.wait(side)
    with torch.npu.stream(side):
        x[index]
    event.record(torch.npu.current_stream())
    with pytest.raises(RuntimeError, match=r"failed on the device: .*; mend what that line launches(?!:)"):
        torch.npu.synchronize()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the note is a part of the message there")
@pytest.mark.parametrize("call", ["index_select", "gather"])
def test_a_kernel_that_raises_at_its_launch_has_line_and_remedy(call: str) -> None:
    """Below torch's own message, whose class stays."""
    x, index = torch.ones(2, device="npu"), torch.full((1,), 9, device="npu")
    with schedule("fifo"), pytest.raises((IndexError, RuntimeError)) as raised:
        getattr(x, call)(0, index)
    line = raised.traceback[0].lineno + 1
    (note,) = raised.value.__notes__
    assert f"aten.{call}.default, launched at {__file__}:{line}" in note
    assert note.endswith("\nhelp: npugraph-ex help 507015")


def test_a_kernel_that_raises_under_fifo_does_so_at_its_launch() -> None:
    """As the table of codes says: the launch in eager mode raises the kernel's own error; a later one, and waiting, do not."""
    x, index = torch.ones(2, device="npu"), torch.full((1,), 9, device="npu")
    for name, errors in (("fifo", (IndexError, None)), ("lazy", (None, RuntimeError))):
        with schedule(name):
            for step, error in zip((lambda: x.index_select(0, index), torch.npu.synchronize), errors, strict=True):
                with nullcontext() if error is None else pytest.raises(error):
                    step()
    assert (x + 1).cpu().tolist() == [2, 2]


@pytest.mark.parametrize("recording", [npu_emulator.kernel_log, npu_emulator.timeline, npu_emulator.detect_races])
def test_a_recorder_changes_no_place_of_an_error(recording: Callable[[], AbstractContextManager[object]]) -> None:
    """What a program catches at a line it catches there; a memory check that stops at the first fault does so too."""
    x, index = torch.ones(2, device="npu"), torch.full((1,), 9, device="npu")
    with recording():
        with pytest.raises(IndexError):
            x[index]
        with npu_emulator.check_memory(stop_at_first=True), pytest.raises(npu_emulator.MemoryFaultError):
            torch.empty(64, device="npu") * 2
        torch.npu.synchronize()
        assert (x * 2).tolist() == [2.0] * 2


def _arguments(source: str, start: int) -> list[str]:
    """Return the arguments of the call whose parenthesis opens just before `start`."""
    found, depth, quoted = [""], 0, False
    for place in range(start, len(source)):
        letter = source[place]
        if letter == '"' and source[place - 1] != "\\":
            quoted = not quoted
        elif not quoted and letter in "()":
            depth += 1 if letter == "(" else -1
            if depth < 0:
                return found
        elif not quoted and letter == "," and depth == 0:
            found.append("")
            continue
        found[-1] += letter
    raise AssertionError("the call does not end")


def test_every_error_of_the_runtime_has_a_cause_and_an_advice() -> None:
    """Each place that fails gives its code, why, and what to do: a clause of its own that is no second wording of the cause."""
    calls = []
    for path in sorted(SOURCES.glob("*.cpp")):
        source = path.read_text()
        calls += [_arguments(source, match.end()) for match in re.finditer(r"(?:return|=) fail\(", source)]
        given = [_arguments(source, match.end()) for match in re.finditer(r"(?<!aclError )refuse_in_capture\(", source)]
        calls += [["code", *arguments[1:]] for arguments in given if len(arguments) > 2]
    calls.remove(next(call for call in calls if call[2].strip() == "advice"))  # `refuse_in_capture` itself
    assert len(calls) > 40
    for code, cause, advice in calls:
        assert re.fullmatch(r'ACL_ERROR_\w+|code|answered\((decision|"[a-z-]+"), ACL_ERROR_\w+\)', code)
        words = " ".join(re.findall(r'"([^"]*)"', advice)).split()
        assert len(words) >= 4 or advice.strip() == "kKeepAllocated", (code, advice)
        assert ";" not in cause, "an advice that stands in the cause"


def test_what_does_not_exist_is_107000(acl: ctypes.CDLL, streams: list[ctypes.c_void_p]) -> None:
    """Task groups, updates, addresses, comparisons and core limits that nobody has: each says what to do."""
    first, handle = streams[0], ctypes.c_void_p()
    asks: list[tuple[Callable[[], int], int, str]] = [
        (lambda: acl.aclmdlRICaptureTaskGrpBegin(first), 107029, "begin it after the capture"),
        (lambda: acl.aclmdlRICaptureTaskGrpEnd(first, ctypes.byref(handle)), 107000, "begin one before"),
        (lambda: acl.aclmdlRICaptureTaskUpdateBegin(first, handle), 107000, "graphs that are kept"),
        (lambda: acl.aclmdlRICaptureTaskUpdateEnd(first), 107000, "begin one before"),
        (lambda: acl.aclrtFree(ctypes.c_void_p(64)), 107000, "what aclrtMalloc gave, once"),
        (lambda: acl.aclrtValueWait(NULL, ctypes.c_uint64(1), 9, first), 107000, "pass one of them"),
        (lambda: acl.aclrtSetStreamResLimit(first, 0, 0), 107000, "NPU_EMULATOR_CUBE_CORES"),
        (lambda: acl.aclrtSetDeviceResLimit(0, 0, 1000), 107000, "NPU_EMULATOR_CUBE_CORES"),
        (lambda: acl.aclrtSetCurrentContext(ctypes.c_void_p(64)), 107002, "aclrtGetCurrentContext"),
        (lambda: acl.emu_missing(b"aclrtOfTomorrow"), 207000, "do without it"),
    ]
    for ask, code, wanted in asks:
        assert ask() == code
        assert wanted in advice(acl)


def test_the_page_lists_every_code() -> None:
    """The table of the documentation holds exactly the codes that the runtime can return, by CANN's numbers and names."""
    headers = (build.torch_npu_folder() / "include/third_party/acl/inc/acl").rglob("*.h")
    numbers = {}
    for header in headers:
        numbers.update(re.findall(r"\b(ACL_ERROR_\w+)[\s=]+(\d+)", header.read_text(errors="replace")))
    used = {name for path in SOURCES.iterdir() for name in re.findall(r"\bACL_ERROR_\w+", path.read_text())}
    used.add("ACL_ERROR_RT_AICORE_EXCEPTION")  # launch.py: a kernel that raises
    page = (Path(__file__).parents[2] / "docs" / "reference" / "emulator-codes.md").read_text()
    from npu_emulator.kernels.communicating import _WRONG_GROUP
    from npu_emulator.kernels.refusals import INVALID_PARAMETER

    numbers["INNER_TILING_ERROR"] = str(_WRONG_GROUP)  # of aclnn, whose headers the wheel does not have
    numbers["ERR_PARAM_INVALID"] = str(INVALID_PARAMETER)
    used.update(("INNER_TILING_ERROR", "ERR_PARAM_INVALID"))
    listed = dict(re.findall(r"\| (\d{6}) `(\w+)` \|", page))
    here = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert not [number for number in listed if number not in here], "listed, and raised in no test of this folder"
    assert listed == {numbers[name]: name.removeprefix("ACL_ERROR_").removeprefix("RT_") for name in used}


def _capture(work: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(4, device="npu")
    with torch.npu.graph(torch.npu.NPUGraph()):
        work(x)


@pytest.mark.parametrize(
    ("named", "call"),
    [
        ("107001", lambda: torch.npu.set_device(77)),
        ("107030", lambda: _capture(lambda x: x.sum().item())),
        ("107030", lambda: _capture(lambda x: x.copy_(torch.ones(4)))),
        ("107030", lambda: _capture(lambda _: torch.npu.synchronize())),
        ("CallRefusedError", lambda: torch_npu.npu_rms_norm(*[torch.ones(n, device="npu") for n in (4, 3)])),
    ],
)
def test_a_device_code_is_the_address_of_its_row(named: str, call: Callable[[], None]) -> None:
    """Whether the emulated runtime refuses the call or a kernel does (161002 has a class); once, as the last line."""
    with pytest.raises(RuntimeError) as found:
        call()
    shown = "".join(traceback.format_exception_only(found.value)).rstrip()
    if sys.version_info >= (3, 11) or named.isdigit():
        assert re.findall(r"help: npugraph-ex help (\w+)", shown) == [named]
        assert shown.endswith(named)
    assert named in sections()
    assert ".. " not in shown
    torch.npu.synchronize()


def test_nothing_is_copied_at_a_null_address(acl: ctypes.CDLL) -> None:
    """The storage of a tensor that was resized to nothing has one; no bytes may be copied from anywhere."""
    x = torch.ones(4, device="npu")
    here, size, none = ctypes.c_void_p(x.data_ptr()), ctypes.c_size_t(16), ctypes.c_size_t(0)
    torch.npu.synchronize()
    for target, source in ((here, None), (None, here)):
        assert acl.aclrtMemcpy(target, size, source, size, 3) == 107000
        assert acl.aclrtMemcpyAsync(target, size, source, size, 3, None) == 107000
        assert acl.aclrtMemcpy(target, none, source, none, 3) == 0
    assert acl.aclrtMemset(None, size, 0, size) == acl.aclrtMemsetAsync(None, size, 0, size, None) == 107000
    assert b"null address" in acl.aclGetRecentErrMsg()
    assert x.tolist() == [1] * 4
