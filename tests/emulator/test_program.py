"""Running programs: the launcher, activation, and child processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

Program = Callable[..., subprocess.CompletedProcess[str]]


def test_a_script_runs_with_its_arguments(program: Program) -> None:
    """`python -m npu_emulator script.py args` is `python script.py args` with a device."""
    text = "import sys, torch\nprint(sys.argv[1:], __name__, (torch.ones(2, device='npu') * 3).sum().item())"
    done = program(text, arguments=("--epochs", "1"))
    assert done.stdout == "['--epochs', '1'] __main__ 6.0\n"
    assert done.stderr.count("\n") == 1, done.stderr
    assert "emulated Ascend910B3" in done.stderr


def test_quiet_prints_nothing(program: Program) -> None:
    """With `--quiet` a program's output is its own."""
    done = program("import torch\ntorch.ones(2, device='npu')", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


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
    done = subprocess.run(command, env=fresh_environment(), capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "1 loop" in done.stdout


def test_a_missing_script_is_one_sentence(fresh_environment: Callable[..., dict[str, str]]) -> None:
    """A file that is not there is named, with the hint that modules need -m."""
    command = [sys.executable, "-m", "npu_emulator", "nowhere.py"]
    done = subprocess.run(command, env=fresh_environment(), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "there is no file 'nowhere.py'" in done.stderr


def test_activating_after_torch_says_what_to_do(fresh_environment: Callable[..., dict[str, str]]) -> None:
    """When torch came first, the message says so and names both remedies."""
    code = "import torch, npu_emulator\nnpu_emulator.activate()"
    environment = fresh_environment(TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert "ActivationError" in done.stderr
    assert "came after `import torch`" in done.stderr
    assert "python -m npu_emulator" in done.stderr


def test_settings_are_checked(program: Program) -> None:
    """A schedule that does not exist is refused before anything runs."""
    done = program("print('ran')", "--schedule", "fastest")
    assert done.returncode == 1
    assert "pct:SEED:DEPTH" in done.stderr
    assert "ran" not in done.stdout


def test_an_operator_without_a_kernel_says_how_to_give_it_one(program: Program) -> None:
    """Launching such an operator names it and the call that adds a kernel; afterwards it runs."""
    text = """
import torch, npu_emulator
x = torch.ones(4, device="npu")
try:
    torch.ops.npu.npu_sign_bits_pack(x, 1)
except npu_emulator.KernelMissingError as error:
    print(error)
npu_emulator.register_kernel("npu::fast_gelu", lambda x: torch.nn.functional.gelu(x))
print(torch.ops.npu.fast_gelu(x).cpu())
"""
    done = program(text, "--quiet")
    assert "npu::npu_sign_bits_pack" in done.stdout
    assert "npu_emulator.register_kernel" in done.stdout
    assert "0.84" in done.stdout, done.stderr


def test_python_children_are_emulated_too(program: Program) -> None:
    """A Python that the program starts has the device, and the settings of its parent."""
    text = """
import subprocess, sys, torch
code = "import torch; print((torch.ones(3, device='npu') * 2).sum().item(), torch.npu.get_device_name(), torch.npu.device_count())"
print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()[-1])
"""
    done = program(text, "--quiet", "--devices", "2")
    assert done.stdout == "6.0 Ascend910B3 (emulated) 2\n", done.stderr


def test_data_loader_workers_start_by_fork_and_by_spawn(program: Program) -> None:
    """Workers import torch and this script; their batches arrive pinned and go to the device."""
    text = """
import torch
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.full((2,), float(index))
if __name__ == "__main__":
    for way in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(Numbers(), 4, num_workers=2, pin_memory=True, multiprocessing_context=way)
        print([batch.to("npu", non_blocking=True).sum().item() for batch in loader])
"""
    done = program(text, "--quiet")
    assert done.stdout.count("[12.0, 44.0]") == 2, done.stderr


def test_interrupting_leaves_no_process(program: Program) -> None:
    """Ctrl-C in the middle of device work ends the program as Python ends any."""
    text = """
import os, signal, torch
x = torch.ones(4, device="npu")
def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
try:
    for step in range(1000):
        x = x + 1
        if step == 10:
            interrupt()
except KeyboardInterrupt:
    print("stopped", (x * 0 + 5).sum().item())
"""
    done = program(text, "--quiet", "--schedule", "lazy")
    assert done.stdout == "stopped 20.0\n", done.stderr


def test_two_devices_copy_between_each_other(program: Program) -> None:
    """With two devices a copy between them waits for its source."""
    text = """
import torch
a = torch.arange(4.0, device="npu:0") * 2
b = a.to("npu:1")
with torch.npu.device(1):
    c = b + 1
print(b.device, c.cpu().tolist(), torch.npu.device_count())
try:
    torch.ones(1, device="npu:5")
except RuntimeError as error:
    print("device" in str(error).lower())
"""
    for policy in ("fifo", "lazy"):
        done = program(text, "--quiet", "--devices", "2", "--schedule", policy)
        assert done.stdout == "npu:1 [1.0, 3.0, 5.0, 7.0] 2\nTrue\n", done.stderr


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
