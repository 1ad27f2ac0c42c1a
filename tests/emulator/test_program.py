"""Running programs: the launcher, activation, and child processes."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import npu_emulator
from npu_emulator import activation
from npu_emulator.__main__ import main
from npu_emulator.warnings_filter import without_cann_warnings
from npugraph_ex.versions import missing_interfaces

Program = Callable[..., subprocess.CompletedProcess[str]]


def test_a_script_runs_with_its_arguments(program: Program) -> None:
    """`python -m npu_emulator script.py args` is `python script.py args` with a device."""
    text = "import sys, torch\nprint(sys.argv[1:], __name__, (torch.ones(2, device='npu') * 3).sum().item())"
    done = program(text, arguments=("--epochs", "1"))
    assert done.stdout == "['--epochs', '1'] __main__ 6.0\n"
    assert done.stderr.count("\n") == 1, done.stderr
    assert "emulated Ascend910B2" in done.stderr


def test_only_the_line_about_cann_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    """Torch_npu 2.10 writes the line with a space more; what is like it, but another line, passes."""
    with without_cann_warnings():
        print("Warning: ASCEND_HOME_PATH environment variable is not set.")
        print("a Warning: ASCEND_HOME_PATH environment variable is not set.")
        print("Warning : ASCEND_HOME_PATH environment variable is not set.")
        print("Warning: ASCEND_OPP_PATH environment variable is not set.")
    assert [line.split()[0:2] for line in capsys.readouterr().out.splitlines()] == [
        ["a", "Warning:"],
        ["Warning:", "ASCEND_OPP_PATH"],
    ]


@pytest.mark.parametrize("first", ["torch", "torch_npu"])
def test_a_child_says_nothing_of_cann(first: str, program: Program) -> None:
    """Whichever it imports first; its other lines, printed during the import or after it, are its own."""
    child = f"import {first}, torch; print(torch.ones(2, device='npu').tolist())"
    done = program(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {child!r}], check=True)", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "[1.0, 1.0]\n", "")


@pytest.mark.slow
def test_starting_does_not_pay_for_the_garbage_collector(program: Program) -> None:
    """Importing collects nothing (it would a thousand times), and a collection leaves alone what was imported.

    The program finds the collector on, and all output is its own.
    """
    text = """
import gc, torch
print(gc.isenabled(), len(gc.get_objects()) < 10_000, sum(row["collections"] for row in gc.get_stats()) < 200)
"""
    done = program(text, "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "True True True\n", "")


@pytest.mark.slow
def test_a_module_runs(fresh_environment: Callable[..., dict[str, str]]) -> None:
    """`-m module` runs a module as `python -m` would."""
    command = [
        sys.executable,
        "-m",
        "npu_emulator",
        "--quiet",
        "-m",
        "timeit",
        "-n1",
        "-r1",
        "import torch; torch.npu.init()",
    ]
    done = subprocess.run(command, env=fresh_environment(), capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "1 loop" in done.stdout


def test_the_working_folder_is_not_searched(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_npu looks for CANN's version below ASCEND_HOME_PATH, which without CANN is the folder with the user's data."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "ascend_toolkit_install.info").write_text("version=of_the_data\n")
    monkeypatch.chdir(tmp_path)
    look = "import os, torch, torch_npu; print(torch.version.cann, len(list(os.walk('.'))), os.walk.__module__, flush=True)"
    # The first one's activation looks ahead; in a child torch_npu may be imported before the emulation goes on.
    child = "{**os.environ, 'NPUGRAPH_EX': 'library', 'TORCH_DEVICE_BACKEND_AUTOLOAD': '0'}"
    text = f"{look}\nimport subprocess, sys\nsubprocess.run([sys.executable, '-c', {look!r}], env={child}, check=True)"
    done = program(text, NPUGRAPH_EX="bundled")
    said = [line for line in done.stdout.splitlines() if "ASCEND_HOME_PATH" not in line]
    assert said == 2 * ["not known 2 os"], done.stderr


def test_activating_after_torch_says_what_to_do(fresh_environment: Callable[..., dict[str, str]]) -> None:
    """When torch came first, the message says so and names both remedies."""
    code = "import torch, npu_emulator\nnpu_emulator.activate()"
    environment = fresh_environment(TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    assert "ActivationError" in done.stderr
    assert "came after `import torch`" in done.stderr
    assert "python -m npu_emulator" in done.stderr


def test_activating_after_an_import_of_torch_that_failed_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's import ended for want of CANN, as in the first cell of a notebook, a second import cannot work."""
    monkeypatch.setattr(activation, "_current", None)
    monkeypatch.delitem(sys.modules, "torch")
    with pytest.raises(npu_emulator.ActivationError, match="in a notebook the kernel"):
        npu_emulator.activate()


@pytest.mark.parametrize("wrong", ["--shedule", "--shedule=lazy"])
def test_an_option_that_is_none_is_answered_with_the_nearest(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As a mistyped variable is; the option's value may be a word of its own."""
    with pytest.raises(SystemExit) as ended:
        main([wrong, "lazy", "script.py"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"unrecognized arguments: {wrong}; did you mean '--schedule'?\n")


BAD = [
    (
        {"NPU_EMULATOR_DEVICE": "2"},
        r"unknown environment variable NPU_EMULATOR_DEVICE; did you mean NPU_EMULATOR_DEVICES\?",
    ),
    (
        {"NPU_EMULATOR_SHCEDULE": "lazy"},
        r"unknown environment variable NPU_EMULATOR_SHCEDULE; did you mean NPU_EMULATOR_SCHEDULE\?",
    ),
    (
        {"NPU_EMULATE_SCHEDULE": "lazy"},
        r"unknown environment variable NPU_EMULATE_SCHEDULE; did you mean NPU_EMULATOR_SCHEDULE\?",
    ),
    (
        {"npu_emulator_poison": "1"},
        r"unknown environment variable npu_emulator_poison; did you mean NPU_EMULATOR_POISON\?",
    ),
    ({"NPU_EMULATOR_DEVICES": "two"}, "NPU_EMULATOR_DEVICES must be a whole number, got 'two'"),
    ({"NPU_EMULATOR_DEVICES": "17"}, r"NPU_EMULATOR_DEVICES must lie in 1\.\.16, got 17"),
    ({"NPU_EMULATOR_SOC": "H100"}, "name of an Ascend chip that torch_npu knows, got 'H100'; for instance Ascend910B2"),
    ({"NPU_EMULATOR_SOC": "ascend910B2"}, r"got 'ascend910B2'; did you mean Ascend910B2\?"),
    ({"NPU_EMULATOR_STREAMS": "0"}, "NPU_EMULATOR_STREAMS must be at least 1, got 0"),
    ({"NPU_EMULATOR_POISON": "perhaps"}, "NPU_EMULATOR_POISON must be 0 or 1, got 'perhaps'"),
    ({"NPU_EMULATOR_SCHEDULE": "pct:x"}, "pct:SEED:DEPTH"),
    ({"NPU_EMULATOR_KERNEL_LOG": "/no/folder/log"}, "file in a folder that is there .* got '/no/folder/log'"),
    ({"NPU_EMULATOR_KERNEL_LOG": "/"}, "file in a folder that is there .* got '/'"),
]


@pytest.mark.parametrize(("variables", "message"), BAD, ids=[" ".join(next(iter(bad.items()))) for bad, _ in BAD])
def test_bad_settings_are_named(variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that is mistyped or impossible is refused with its name, its value and what to write instead."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(npu_emulator.EmulatorError, match=message):
        npu_emulator.Settings.from_environment()


def test_bad_options_end_the_launcher_with_usage_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    """A schedule, a chip, a module or a file that does not exist is refused before anything runs, as argparse refuses."""
    from npu_emulator.__main__ import main

    for arguments, message in (
        (["--schedule", "fastest", __file__], "pct:SEED:DEPTH"),
        (["--soc", "H100", __file__], "got 'H100'"),
        (["--kernel-log", "/no/folder/log", __file__], "error: --kernel-log must be a file in a folder that is there"),
        (["nowhere.py"], "there is no file 'nowhere.py'"),
        (["-m", "no_such_module.at_all"], "there is no module named 'no_such_module'"),
        ([], "program"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


def test_a_script_that_does_not_compile_is_told_as_python_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File, line and mistake, and none of the emulator's frames."""
    from npu_emulator.__main__ import main

    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    script = tmp_path / "script.py"
    script.write_text("x = 1\nif x\n")
    with pytest.raises(SystemExit) as stopped:
        main(["--quiet", str(script)])
    first, *_, last = str(stopped.value.code).splitlines()
    assert (first, last) == (f'  File "{script}", line 2', "SyntaxError: expected ':'")


_WITHOUT_KERNELS = """
import torch, torch_npu, npu_emulator
from npu_emulator.activation import registry

def refused(call):
    try:
        call()
    except npu_emulator.KernelMissingError as error:
        return str(error)

gelu, padded = torch.ops.npu.fast_gelu, torch.ops.aten.to_padded_tensor
x, square = torch.ones(2, device="npu"), torch.ones(2, 2, device="npu")
of_npu = refused(lambda: torch.ops.npu.obfuscation_finalize(x))
of_aten = refused(lambda: padded(square, 0.0)) if ATEN else "aten::to_padded_tensor npu_emulator."
npu_emulator.register_kernel("npu::fast_gelu", lambda x: torch.nn.functional.gelu(x))
before = gelu(x).tolist()
@npu_emulator.register_kernel("npu::fast_gelu")
def twice(x):
    return x * 2
npu_emulator.register_kernel("aten::to_padded_tensor", lambda a, *others: a * 3)
answers = [of_npu, of_aten, before, gelu(x).tolist(), twice(21), padded(square, 0.0)[0].tolist() if ATEN else [3.0, 3.0]]

calls = {
    "atb::_npu_group_topk": lambda: torch.ops.atb._npu_group_topk(x),
    "atb::_npu_quant_rms_norm": lambda: torch.ops.atb._npu_quant_rms_norm(x, x, x, x, x, x),
}
missing = {name: refused(call) for name, call in calls.items() if name not in registry.offered}
@npu_emulator.register_kernel("atb::_npu_group_topk")
def same(x, k=0, group_num=1, n=1):
    x.add_(k)
torch_npu._npu_group_topk(x, 3)
print([*answers, missing, x.tolist()])
torch.npu.utilization()
"""


def test_what_has_no_kernel_and_what_the_runtime_lacks_is_named(program: Program) -> None:
    """An operator of torch_npu, of torch, of the wheel's ATB: the error names it and the call that gives it a kernel; then it runs.

    Where torch_npu looks for a function of CANN in vain, the traceback ends with its name and whose lack it is.
    """
    done = program(f"ATEN = {not missing_interfaces.DIFFERENCE.older}\n{_WITHOUT_KERNELS}", "--quiet")
    assert done.stdout, done.stderr
    of_npu, of_aten, before, *rest, missing, of_atb = ast.literal_eval(done.stdout)
    assert "npu::obfuscation_finalize" in of_npu
    assert "npu_emulator.register_kernel" in of_npu
    assert "aten::to_padded_tensor" in of_aten
    assert "npu_emulator." in of_aten
    assert before == pytest.approx([0.8413] * 2, abs=1e-3)
    assert rest == [[2.0, 2.0], 42, [3.0, 3.0]]
    assert all(name in said for name, said in missing.items()), missing
    assert of_atb == [4.0, 4.0]
    assert done.returncode == 1
    (note,) = [line for line in done.stderr.splitlines() if line.startswith("npu_emulator: ")]
    assert "aclrtGetDeviceUtilizationRate" in note


_DEFINES = """
import torch
torch.library.define("made_program::alone", "(Tensor x) -> Tensor")
def test_it():
    torch.ops.made_program.alone(torch.ones(2, device="npu"))
"""


@pytest.mark.slow
def test_an_operator_that_no_library_gave_a_kernel_is_named_at_the_end(program: Program, tmp_path: Path) -> None:
    """Torch's error ends with what to do, in a script and in a test; not where the device has a kernel and the CPU has none."""
    suite = tmp_path / "test_made.py"
    suite.write_text(_DEFINES)
    as_a_test = f"import pytest; pytest.main(['--npu=emulated', {str(suite)!r}])"
    for said in (program(f"{_DEFINES}test_it()", "--quiet").stderr, program(as_a_test, "--quiet").stdout):
        assert "NotImplementedError: Could not run 'made_program::alone'" in said
        assert "npu_emulator.register_kernel('made_program::alone', function_of_cpu_tensors)\n" in said
        assert "help: npugraph-ex help KernelMissingError\n" in said
    of_the_device = program("import torch, torch_npu; torch.ops.npu.fast_gelu(torch.ones(2))", "--quiet").stderr
    assert "Could not run 'npu::fast_gelu'" in of_the_device
    assert "KernelMissingError" not in of_the_device


@pytest.mark.slow
def test_children_are_emulated_too(program: Program) -> None:
    """Whichever module a Python imports first, it has the device and its parent's settings; so have spawned workers of a loader.

    Workers by fork and by spawn import torch and this script; batches arrive pinned and go to the device.
    """
    text = """
import subprocess, sys, torch
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __init__(self, device): self.device = device
    def __getitem__(self, index):
        assert self.device == "cpu" or torch.npu.device_count() == 2
        return (torch.full((2,), float(index), device=self.device) + 1).cpu()
if __name__ == "__main__":
    for way, device, workers in (("fork", "cpu", 2), ("spawn", "npu", 1)):
        loader = torch.utils.data.DataLoader(
            Numbers(device), 4, num_workers=workers, pin_memory=True, multiprocessing_context=way
        )
        batches = list(loader)
        print([batch.is_pinned() for batch in batches], [batch.to("npu", non_blocking=True).sum().item() for batch in batches])
    code = "from torch_npu import npu\\nimport torch\\nprint(npu.device_count(), (torch.ones(3).npu() * 2).cpu())"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()[-1])
"""
    done = program(text, "--quiet", "--devices", "2")
    assert done.stdout.count("[True, True] [20.0, 52.0]") == 2, done.stderr
    assert done.stdout.splitlines()[-1] == "2 tensor([2., 2., 2.])", done.stderr


@pytest.mark.slow
def test_interrupting_leaves_no_process_and_tears_no_kernel(program: Program) -> None:
    """Ctrl-C ends a program as Python ends any; one that arrives inside a replay surfaces behind it, every kernel done."""
    text = """
import os, signal, torch, npu_emulator
def interrupt(x=None):
    os.kill(os.getpid(), signal.SIGINT)
    return x
npu_emulator.register_kernel("npu::fast_gelu", interrupt)
class Stop(Exception):
    pass
def stop(*_):
    raise Stop
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests in the background lets them ignore it
def run():
    x = torch.ones(4, device="npu")
    try:
        for step in range(1000):
            x = x + 1
            if step == 10:
                interrupt()
    except KeyboardInterrupt:
        print("stopped", (x * 0 + 5).sum().item())
    graph, y = torch.npu.NPUGraph(), torch.zeros(4, device="npu")
    with torch.npu.graph(graph):
        y.add_(1)
        z = torch.ops.npu.fast_gelu(y)
        y.add_(z)
    try:
        for _ in range(100):
            graph.replay()
            torch.npu.synchronize()
        print("never stopped")
    except KeyboardInterrupt:
        print("stopped", y.cpu().tolist())
    before = signal.signal(signal.SIGINT, stop)  # of the program's own
    try:
        graph.replay()
        torch.npu.synchronize()
        print("never stopped")
    except Stop:
        print("stopped", y.cpu().tolist())
    signal.signal(signal.SIGINT, before)
run()
with npu_emulator.schedule("fifo"):
    run()
"""
    done = program(text, "--quiet", "--schedule", "lazy")
    said = "stopped 20.0\nstopped [2.0, 2.0, 2.0, 2.0]\nstopped [6.0, 6.0, 6.0, 6.0]\n"
    assert (done.returncode, done.stdout) == (0, 2 * said), done.stderr


def _copies() -> list[Any]:
    a = torch.arange(4.0, device="npu:0") * 2
    b = a.to("npu:1", non_blocking=True)
    a.zero_()
    with torch.npu.device(1):
        c = b + 1
    back = c.to("npu:0")
    return [b.device.index, c.tolist(), back.device.index, (back * 10).tolist()]


def _events() -> list[Any]:
    first, second = torch.npu.Stream(device=0), torch.npu.Stream(device=1)
    a = torch.zeros(4, device="npu:0")
    torch.npu.synchronize(0)
    with torch.npu.stream(first):
        a.add_(3)
        done = first.record_event()
    with torch.npu.stream(second):
        second.wait_event(done)
        b = a.to("npu:1", non_blocking=True) * 2
        again = second.record_event()
    first.wait_event(again)
    with torch.npu.stream(first):
        a.zero_()
    first.synchronize()
    second.synchronize()
    return [b.tolist(), a.tolist(), torch.npu.current_device()]


def _graphs() -> list[Any]:
    made = []
    for index in (0, 1):
        with torch.npu.device(index):
            x, graph = torch.ones(2, device="npu"), torch.npu.NPUGraph()
            # A stream of this device: torch.npu.graph keeps one of its own, of the device that captured first.
            with torch.npu.graph(graph, stream=torch.npu.Stream()):
                y = x + index + 1
            made.append((x, graph, y))
    for index, (x, graph, _) in enumerate(made):
        with torch.npu.device(index):
            x.fill_(5)
            graph.replay()
    return [y.tolist() for _, _, y in made]


@pytest.mark.parametrize("order", ["fifo", "lazy", *(f"random:{seed}" for seed in range(8))])
def test_two_devices_work_side_by_side(order: str) -> None:
    """Copies between devices, blocking or not, and events recorded on one and waited for on the other, under every order."""
    with npu_emulator.schedule(order):
        assert _copies() == [1, [1.0, 3.0, 5.0, 7.0], 0, [10.0, 30.0, 50.0, 70.0]]
        assert _events() == [[6.0] * 4, [0.0] * 4, 0]
        assert _graphs() == [[6.0] * 2, [7.0] * 2]


def test_there_are_as_many_devices_as_were_asked_for() -> None:
    """They reach each other's memory, and there is no further one."""
    assert torch.npu.device_count() == 2
    assert torch.npu.can_device_access_peer(0, 1)
    with pytest.raises(RuntimeError, match=r"(?i)device"):
        torch.ones(1, device="npu:5")


@pytest.mark.slow
def test_the_bundled_backend_compiles_captures_and_replays(program: Program) -> None:
    """torch_npu's own npugraph_ex backend gives eager's values on the emulated device, and really replays a graph."""
    text = """
import torch, npu_emulator
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).npu().eval()
with torch.no_grad():
    compiled = torch.compile(model, backend="npugraph_ex", dynamic=False)
    first = torch.randn(3, 8, device="npu")
    compiled(first)
    for _ in range(2):
        x = torch.randn(3, 8, device="npu")
        expected = model(x).cpu()
        launched = npu_emulator.launch_count()
        found = compiled(x).cpu()
        print(torch.allclose(found, expected, atol=1e-6), npu_emulator.launch_count() - launched < 4)
import npugraph_ex
print("torch_npu" in (npugraph_ex.__file__ or npugraph_ex.__name__) or "torch_npu" in repr(npugraph_ex))
"""
    done = program(text, "--quiet", NPUGRAPH_EX="bundled")
    assert done.stdout.split() == ["True"] * 5, done.stdout + done.stderr
