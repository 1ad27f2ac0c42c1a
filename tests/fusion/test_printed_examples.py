"""The specification's examples of ``register_replacement`` run as printed, and the registered rule then fuses."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import npu_emulator
from npugraph_ex.versions import torchair_of_cann

EXAMPLES = Path(__file__).parent / "examples"

USE = """

import npugraph_ex


def model(x1, x2, gamma):
    y, _ = torch_npu.npu_rms_norm(x1 + x2, gamma)
    return y * 2, x1 + x2


for size, expected in ((7168, 1), (4096, 0)):
    torch.compiler.reset()
    inputs = [torch.randn(shape, dtype=torch.float16).npu() for shape in ((1, 3, size), (1, 3, size), (size,))]
    compiled = torch.compile(model, backend="npugraph_ex", fullgraph=True, dynamic=False)
    with torch.no_grad():
        for _ in range(2):
            for eager, replayed in zip(model(*inputs), compiled(*inputs), strict=True):
                torch.testing.assert_close(replayed, eager)
    report = npugraph_ex.last_report()
    (name,) = [rule.name for rule in report.rules if rule.name.endswith("search_fn")]
    assert report.fusions(name) == expected, report.table()
    if not expected:
        (miss,) = report.near_misses(name)
        assert miss.reason == "extra_check extra_check returned False", miss
print("fused", size)
"""


def printed(name: str) -> str:
    """The code block of an example file, unchanged."""
    (code,) = re.findall(r"```python\n(.*?)```", (EXAMPLES / name).read_text(encoding="utf-8"), re.DOTALL)
    return code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("example", "flags"),
    [("guide.md", ["--as-torchair"]), ("guide_zh.md", [])],
    ids=["import torchair", "import npugraph_ex"],
)
def test_runs_as_printed(
    example: str, flags: list[str], command: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """Registration works unchanged; at the size that extra_check asks for the rule fuses, at another it does not."""
    if flags and torchair_of_cann.DIFFERENCE.older:
        pytest.skip(torchair_of_cann.DIFFERENCE.what)
    script = tmp_path / "example.py"
    script.write_text(printed(example) + USE, encoding="utf-8")
    emulate = ["--emulate"] if npu_emulator.is_active() else []
    done = command("run", *emulate, *flags, str(script))
    assert done.returncode == 0, done.stderr
    assert "fused 4096" in done.stdout
