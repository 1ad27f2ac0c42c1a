"""Dynamo compiles the user's program and never the emulator's own Python, in a fresh process as a user has it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = {
    "boolean index": """
def f(x): return x[x > 0] * 2
x = torch.randn(8).npu()
torch.testing.assert_close(torch.compile(f, backend="npugraph_ex")(x), f(x))
""",
    "Module.compile": """
m = torch.nn.Linear(4, 4).npu(); x = torch.randn(2, 4).npu(); expected = m(x)
m.compile(backend="npugraph_ex")
torch.testing.assert_close(m(x), expected)
""",
}
_FRAMES = "print(torch._dynamo.utils.counters['frames']['total'])\n"
"""How many frames Dynamo looked at: few are the program's own, dozens those of one kernel."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_that_leave_the_compiled_frame(name: str, tmp_path: Path) -> None:
    """Operators between compiled frames run as kernels, with eager's values; Dynamo looks at the program's own frames alone."""
    script = tmp_path / "program.py"
    script.write_text(f"import torch, torch_npu, npugraph_ex\n{PROGRAMS[name]}{_FRAMES}")
    command = [sys.executable, "-m", "npu_emulator", "--quiet", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) <= 4, "Dynamo traced the emulator's kernels"
