"""Compiled packages of static kernels: installed, kept by key, used again, taken away when their process ends."""

from __future__ import annotations

import stat

import pytest
from static_kernel_runs import choice_of_cann, processes, root, run, warnings

from npugraph_ex.aclgraph import _npu_private
from npugraph_ex_conformance.stand_in_cann import StandInCann, end_of_process


def test_kernels_go_into_canns_folder_and_out_of_it(cann: StandInCann) -> None:
    """An older CANN has one folder: packages are installed there, CANN chooses anew, and the end uninstalls them."""
    before = choice_of_cann()[0]
    run(3)
    assert len(cann.packages()) == 1
    assert choice_of_cann() == (before + 1, "")
    end_of_process()
    assert cann.packages() == []
    assert processes() == []


def test_a_newer_cann_takes_a_folder_of_the_processs_own(cann: StandInCann, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is told the folder, CANN is told the folder, and the end removes it."""
    monkeypatch.setattr(_npu_private, "kernels_in_a_folder", lambda: True)
    run(3)
    (process,) = processes()
    assert choice_of_cann()[1] == str(process / "kernels")
    assert [path.name.rpartition("_")[0] for path in (process / "kernels").iterdir()] == ["static_kernel"]
    assert [line.split()[1:] for line in cann.installs()] == [[f"--install-path={process / 'kernels'}", "-q"]]
    assert cann.packages() == []
    end_of_process()
    assert processes() == []


def test_the_next_process_reuses_what_was_built(cann: StandInCann) -> None:
    """Equal descriptions, equal key: the package is installed again and not compiled again."""
    run(3)
    end_of_process()
    run(3)
    assert len(cann.calls()) == 1
    assert len(cann.installs()) == 2
    run(4)
    assert len(cann.calls()) == 2


def test_the_level_is_part_of_the_key(cann: StandInCann) -> None:
    """Another deterministic level may want other kernels."""
    run(3)
    end_of_process()
    restore = _npu_private.set_deterministic_level(1)
    try:
        run(3)
    finally:
        restore()
    assert len(cann.calls()) == 2


def test_the_cache_can_be_switched_off(cann: StandInCann) -> None:
    """`disable_static_kernel_compile_cache`: compiled in every process, and nothing is kept."""
    for _ in range(2):
        run(3, disable_static_kernel_compile_cache=True)
        assert len(cann.packages()) == 1
        end_of_process()
    assert len(cann.calls()) == 2
    assert not (root() / "packages").exists()


@pytest.mark.parametrize("damage", ["changed", "writable", "gone"])
def test_a_package_that_is_not_as_it_was_built_is_not_run(
    cann: StandInCann, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It would be executed: what was changed, or what others can write, is compiled anew, and a warning says so."""
    run(3)
    end_of_process()
    (package,) = (root() / "packages").glob("*/*.run")
    assert stat.S_IMODE(package.stat().st_mode) == 0o700
    if damage == "changed":
        package.write_text(package.read_text() + "\necho foreign\n")
    elif damage == "writable":
        package.chmod(0o777)
    else:
        package.unlink()
    run(3)
    assert len(cann.calls()) == 2
    (said,) = warnings(caplog)
    assert "Static kernels are compiled anew" in said
