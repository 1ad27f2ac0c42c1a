"""Static kernels where CANN's compiler is missing, fails, hangs or writes rubbish: one warning, and everything runs."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from static_kernel_runs import is_alive, processes, run, warnings

from npugraph_ex.aclgraph.static_kernels import programs
from npugraph_ex_conformance.stand_in_cann import StandInCann, end_of_process


def test_without_cann_one_sentence(
    cann: StandInCann, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No op_compiler: said once, however many graphs there are, and everything runs."""
    monkeypatch.delenv("ASCEND_HOME_PATH")
    run(3, 5, dynamic=True)
    run(7)
    (said,) = warnings(caplog)
    assert re.search("op_compiler .* PATH .* ASCEND_HOME_PATH/bin; .* set_env.sh", said)
    assert cann.calls() == []


def test_the_compiler_is_found_on_the_path_first(
    cann: StandInCann, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PATH is what set_env.sh sets."""
    other = StandInCann.at(tmp_path / "other")
    monkeypatch.setenv("PATH", f"{other.home / 'bin'}{os.pathsep}{os.environ['PATH']}")
    assert programs.find_compiler() == other.home / "bin" / "op_compiler"
    del cann


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("fail", "op_compiler failed with exit status 3; it said: E10001: no such operator"),
        ("hang", "op_compiler was stopped after 1 seconds"),
        ("nothing", "op_compiler ended without an error and without a package"),
        ("rubbish", r"static_kernel_\d+.run (cannot be started|failed with exit status)"),
        ("broken", r"static_kernel_\d+.run failed with exit status 1; it said: archive damaged"),
        ("empty", r"static_kernel_\d+.run ended without an error and installed nothing"),
    ],
)
def test_a_compiler_that_does_not_work(
    cann: StandInCann, does: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning that says what happened, values as in eager, and neither processes nor files are left."""
    cann.does(does)
    run(3, 3, 3, static_kernel_time_limit=1 if does == "hang" else 60)
    (warning,) = warnings(caplog)
    assert re.search(said, warning), warning
    assert len(cann.calls()) == 1
    assert not is_alive(int(cann.calls()[0][0]))
    end_of_process()
    assert processes() == []
    assert cann.packages() == []
