"""The stream check against the device: on a corpus and on random graphs both must say the same, and repairs must hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.strategies import one_of, sampled_from
from torch import fx

import npu_emulator
from npugraph_ex import compile_fx, last_report
from npugraph_ex.errors import StreamOrderError
from npugraph_ex.passes.stream_order import repair
from npugraph_ex.report.findings import Code
from npugraph_ex.report.passes import PassReport
from npugraph_ex.stream_check.analysis import analyse
from npugraph_ex.testing.streams.programs import StreamProgram
from npugraph_ex.testing.streams.strategies import parts_graphs, stream_graphs
from npugraph_ex.versions import stream_methods
from npugraph_ex_conformance.examples.device_programs import device_program_example
from npugraph_ex_conformance.examples.native_parts import draw, native_part_example
from npugraph_ex_conformance.examples.parts import OPTIONS, check_parts, check_races
from npugraph_ex_conformance.examples.side_streams import side_stream_example
from npugraph_ex_conformance.examples.stream_forms import check_form
from npugraph_ex_conformance.examples.stream_graphs import SCHEDULES, check_stream_graph
from npugraph_ex_conformance.models.stream_forms import FORM_NAMES
from npugraph_ex_conformance.session import Run
from npugraph_ex_conformance.stream_corpus.programs import stream_corpus
from npugraph_ex_conformance.stream_runs import judge, run_in_order

RACES = {Code.READ_AFTER_WRITE, Code.WRITE_AFTER_READ, Code.WRITE_AFTER_WRITE}
METHODS_TRACED = pytest.mark.skipif(stream_methods.DIFFERENCE.older, reason=stream_methods.DIFFERENCE.what)
PROGRAMS = [pytest.param(program, id=program.name) for program in stream_corpus()]

pytestmark = pytest.mark.skipif(not npu_emulator.is_active(), reason="schedules and races are the emulated device's")


@pytest.mark.parametrize("program", PROGRAMS)
def test_check_and_device_agree(run: Run, program: StreamProgram) -> None:
    """In the program as it is, mended, and repaired, the check finds an error where the device finds a race."""
    with run.entered("(streams) corpus: check and device", source=program.name):
        _agree(program)


def _agree(program: StreamProgram) -> None:
    for mended in (False, True):
        gm = program.graph(mended=mended)
        found, verdict = analyse(gm.graph), judge(gm, program.inputs())
        assert verdict.is_racy == bool(found.errors) == (not mended), f"{gm.graph}\n{found}\n{verdict}"
    gm = program.graph(mended=False)
    repair(gm.graph, analyse(gm.graph))
    verdict = judge(gm, program.inputs())
    assert not verdict.is_racy, f"{gm.graph}\n{verdict}"


@pytest.mark.parametrize("program", PROGRAMS)
def test_compiled(run: Run, program: StreamProgram) -> None:
    """Compiled, a race is refused or repaired as the option says; forks, joins and memory are the compiler's own affair."""
    with run.entered("(streams) corpus: compiled", source=program.name) as reports:
        _compile(program, reports)


def _compile(program: StreamProgram, reports: list[PassReport]) -> None:
    for mended in (False, True):
        assert _is_refused(program.graph(mended=mended)) == (not mended and bool(RACES & set(program.codes)))
        gm = program.graph(mended=mended)
        expected = run_in_order(gm, program.inputs())
        compiled = compile_fx(gm, None, {"stream_check": "repair"})
        reports.append(_report())
        for text in SCHEDULES:
            with npu_emulator.schedule(text):
                inputs = [tensor.npu() for tensor in program.inputs()]
                results = [tensor.cpu() for tensor in (*compiled(*inputs), *inputs)]
            _assert_equal(results, expected, text)


def _report() -> PassReport:
    report = last_report()
    assert report is not None
    return report


def _is_refused(gm: fx.GraphModule) -> bool:
    try:
        compile_fx(gm, None, {"stream_check": "raise"})
    except StreamOrderError:
        return True
    return False


def _assert_equal(results: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], text: str) -> None:
    for number, (result, meant) in enumerate(zip(results, expected, strict=True)):
        assert result.tolist() == meant.tolist(), f"value {number} under schedule {text}"


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    "form", [pytest.param(name, marks=METHODS_TRACED) if name.startswith("native") else name for name in FORM_NAMES]
)
def test_every_form(run: Run, form: str, dynamic: bool) -> None:
    """Written in every form, the program gives the plain one's integers, at other sizes too, without a race."""
    with run.entered(f"(streams) form: {form}") as reports:
        wrong, report = check_form(form, dynamic=dynamic, schedules=SCHEDULES)
        assert wrong == ""
        assert report is not None
        reports.append(report)


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "freed"])
def test_random_graphs(run: Run, keep: bool) -> None:
    """On random graphs, forks and joins left out of some, the check says racy exactly where the device does."""

    @seed(run.seed)
    @settings(max_examples=run.profile.streams, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(stream_graphs(keep=keep))
    def agree(gm: fx.GraphModule) -> None:
        with run.entered(f"(streams) random graphs, memory {'kept' if keep else 'freed'}", source=str(gm.graph)):
            assert check_stream_graph(gm) == ""

    agree()


def test_side_streams_of_the_compiler(run: Run) -> None:
    """Programs without streams, divided by `auto_streams`, mean on every schedule what they mean in eager mode, without a race."""
    for number in range(run.seed, run.seed + run.profile.callers // 3):
        with run.entered("(streams) auto_streams", source=f"side_stream_example({number})") as reports:
            assert side_stream_example(number) == ""
            reports.append(_report())


def test_random_parts(run: Run) -> None:
    """Compiled, random programs whose streams write parts of one buffer mean on every schedule what they mean in order.

    So do those whose values die soon, so that their memory may be written again.
    """

    @seed(run.seed)
    @settings(
        max_examples=run.profile.streams // 2, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(one_of(parts_graphs(), stream_graphs(keep=False)), sampled_from(OPTIONS))
    def agree(gm: fx.GraphModule, options: Mapping[str, Any]) -> None:
        with run.entered("(streams) random parts of one buffer", source=str(gm.graph)) as reports:
            assert check_parts(gm, options) == ""
            reports.append(_report())

    agree()


def test_random_races(run: Run) -> None:
    """Compiled, random programs, most of them racy, are refused only where the device finds a race; repaired, they are right."""

    @seed(run.seed)
    @settings(
        max_examples=run.profile.streams // 4, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(one_of(parts_graphs(), stream_graphs()))
    def agree(gm: fx.GraphModule) -> None:
        with run.entered("(streams) random races, refused and repaired", source=str(gm.graph)) as reports:
            assert check_races(gm) == ""
            reports.append(_report())

    agree()


@METHODS_TRACED
def test_random_native_programs(run: Run) -> None:
    """Native programs whose streams write parts of a buffer in turns mean on every schedule what they mean in eager mode."""
    for number in range(run.seed, run.seed + run.profile.streams // 2):
        with run.entered("(streams) native streams, parts of one buffer", source=str(draw(number))):
            assert native_part_example(number) == ""


def test_device_programs(run: Run) -> None:
    """What the device tells of random programs: values, races, unwritten and freed memory, its log, its clock, every order."""
    what = "(streams) what the device tells"
    run.check_examples(device_program_example, run.profile.streams, what=what, kind="device program")
