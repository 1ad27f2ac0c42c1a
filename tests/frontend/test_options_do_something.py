"""Every option that this version honours changes something that can be seen; an option that did nothing would fail here."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from option_effects import COVERED, chain, compiled, fresh, ones, shows, told

from npugraph_ex import ops, scope
from npugraph_ex.config import OPTION_TABLE
from npugraph_ex.errors import CollectiveDeadlockWarning, StreamOrderWarning
from npugraph_ex.frontend.entry.explain import explain
from npugraph_ex.report.findings import Code
from npugraph_ex_conformance.stand_in_cann import StandInCann, end_of_process


def test_every_honoured_option_has_such_a_test() -> None:
    """The table is covered: an option is refused (only its default is honoured), or a test of this folder shows its effect."""
    for path in Path(__file__).parent.glob("test_options_*.py"):
        importlib.import_module(path.stem)  # `shows` notes while it is imported, also where pytest runs only this file
    available = {name for name, row in OPTION_TABLE.items() if row.honoured is None or len(row.honoured) > 1}
    assert available == set(COVERED)


@shows("mode")
def test_mode() -> None:
    """Both names of this backend capture; TorchAir's third is handed over or refused, not run as if it were one of them."""
    for mode in ("npugraph_ex", "reduce-overhead"):
        assert told(chain, *fresh(2), mode=mode).graph.fate == "captured"
    with pytest.raises(
        torch._dynamo.exc.BackendCompilerFailed, match="mode 'max-autotune' passes the graph to"
    ) as refused:
        compiled(chain, mode="max-autotune")(*fresh(1)[0])
    assert isinstance(refused.value.inner_exception, NotImplementedError)


@pytest.mark.parametrize("given", [[], ["force_eager"], [("force_eager", True)]])
def test_options_are_a_dict(given: object) -> None:
    """A list is refused, an empty one and one of pairs too, whichever way it comes."""
    if given:  # torch.compile itself drops what is empty
        with pytest.raises(Exception, match="options takes a dict"):
            torch.compile(chain, backend="npugraph_ex", options=given)(ones())
    with pytest.raises(ValueError, match="options takes a dict"):
        explain(chain, ones(), options=given)


@pytest.mark.slow
@shows("static_kernel_compile", "disable_static_kernel_compile_cache", "static_kernel_time_limit")
def test_static_kernels(cann: StandInCann, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The compiler is asked, what it makes is kept or not, and it is stopped after the seconds that the option gives."""
    told(chain, *fresh(2), static_kernel_compile=True, disable_static_kernel_compile_cache=True)
    assert len(cann.calls()) == len(cann.packages()) == 1
    assert list(tmp_path.rglob("packages")) == []
    end_of_process()
    told(chain, *fresh(2), static_kernel_compile=True)
    assert len(list(tmp_path.rglob("packages/*/*.run"))) == 1
    end_of_process()
    cann.does("hang")
    options = {"disable_static_kernel_compile_cache": True, "static_kernel_time_limit": 1}
    told(chain, *fresh(1), static_kernel_compile=True, **options)
    assert "op_compiler was stopped after 1 seconds" in caplog.text


@pytest.mark.slow
@shows("stream_check")
def test_stream_check() -> None:
    """A race is reported and kept, refused, repaired or passed over, as the option says."""
    event = ops.npu_create_tagged_event("computed")

    def racy(x: torch.Tensor) -> torch.Tensor:
        with scope.npu_stream_switch("side"):
            y = x * 3
            ops.npu_tagged_event_record(event)
        return y + 1

    with pytest.warns(StreamOrderWarning, match=r"add `ops\.npu_tagged_event_wait\(event\)`"):
        warned = told(racy, *fresh(1))
    assert [finding.code for finding in warned.graph.report.streams.errors] == [Code.READ_AFTER_WRITE]
    with pytest.raises(Exception, match="StreamOrderError"):
        told(racy, *fresh(1), stream_check="raise")
    repaired = told(racy, *fresh(1), stream_check="repair").graph.report.streams
    assert [finding.repaired for finding in repaired.of(Code.READ_AFTER_WRITE)] == [True]
    assert not told(racy, *fresh(1), stream_check="off").graph.report.streams
    assert [finding.repaired for finding in explain(racy, ones(2), options={"stream_check": "repair"}).streams] == [
        True
    ]


@pytest.mark.slow
@shows("deadlock_check")
def test_deadlock_check() -> None:
    """Two operators that meet other processes, at once on two streams: told beforehand if asked; the program runs on."""

    @torch.library.custom_op("option_test::meet", mutates_args=())
    def meet(x: torch.Tensor, group: str) -> torch.Tensor:
        del group
        return x * 2

    meet.register_fake(lambda x, group: torch.empty_like(x))  # noqa: ARG005 - the operator's arguments

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with scope.npu_stream_switch("side"):
            y = meet(x, "experts")
        return y, meet(x, "tensors")

    with pytest.warns(CollectiveDeadlockWarning, match="need 96 vector cores; .* 48"):
        asked = told(both, *fresh(3), deadlock_check=True)
    assert [finding.code for finding in asked.graph.report.streams] == [Code.COLLECTIVES_EXCEED_CORES]
    (finding,) = asked.graph.report.streams
    sources = [place.source for place in (finding.first, finding.second) if place is not None]
    assert [Path(source.rpartition(":")[0]).name for source in sources] == 2 * [Path(__file__).name]
    assert not told(both, *fresh(1)).graph.report.streams
