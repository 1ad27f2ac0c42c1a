"""The models of the specifications on streams, as printed: right under every schedule, and the race of one found and mended."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from npugraph_ex.versions import torchair_of_cann

EXAMPLES = Path(__file__).parent / "examples"

Command = Callable[..., subprocess.CompletedProcess[str]]

UNDER_SCHEDULES = """
import npu_emulator

add, mm = in1 + in2, torch.mm(in3, in4)
three = torch.full((1000, 1000), 3, dtype=torch.float16)
expected = [tensor.cpu() for tensor in (add, mm, mm, in3 + in4, three)]

def check(schedule):
    with npu_emulator.schedule(schedule):
        for have, want in zip(model(in1, in2, in3, in4), expected, strict=True):
            assert torch.equal(have.cpu(), want), schedule

for schedule in ("fifo", "random:3", "pct:5:3"):
    check(schedule)
with npu_emulator.detect_races() as races:
    check("lazy")
assert not races, races[0]
print("right under every schedule")
"""

REPAIRED = """
import npu_emulator, npugraph_ex

def said():
    return [(finding.level, finding.code.value, finding.first.node, finding.second.node, finding.repaired)
            for finding in npugraph_ex.last_report().streams]

print("as printed:", said())
config.stream_check = "repair"
torch.compiler.reset()
mended = torch.compile(Model().npu(), backend=torchair.get_npu_backend(compiler_config=config))
for schedule in ("fifo", "lazy", "random:3", "pct:5:3"):
    with torch.no_grad(), npu_emulator.schedule(schedule), npu_emulator.detect_races() as races:
        for scale in (1, 2):
            y = x * scale
            for have, want in zip(mended(y), Model()(y), strict=True):
                assert torch.equal(have.cpu(), want.cpu()), schedule
    assert not races, races[0]
print("repaired:", said())
"""


def printed(name: str) -> str:
    """The code block of an example file, unchanged."""
    (code,) = re.findall(r"```python\n(.*?)```", (EXAMPLES / name).read_text(encoding="utf-8"), re.DOTALL)
    return code


def run(command: Command, folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run a script with `import torchair` opted in, on the emulated device, as a person would; it must succeed."""
    if torchair_of_cann.DIFFERENCE.older:
        pytest.skip(torchair_of_cann.DIFFERENCE.what)
    script = folder / "example.py"
    script.write_text(code, encoding="utf-8")
    done = command("run", "--emulate", "--as-torchair", str(script))
    assert done.returncode == 0, done.stderr
    return done


def test_the_model_with_tagged_events(command: Command, tmp_path: Path) -> None:
    """Spec 004: the values of eager mode under every schedule, and no word about its order."""
    done = run(command, tmp_path, printed("multi_stream.md") + UNDER_SCHEDULES)
    assert "right under every schedule" in done.stdout
    assert "StreamOrderWarning" not in done.stderr


@pytest.fixture(scope="module")
def custom_pass(command: Command, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """What the example with a custom pass prints and warns of, its profiler part included, and the name of the script."""
    folder = tmp_path_factory.mktemp("custom_pass")
    done = run(command, folder, printed("custom_pass.md") + REPAIRED)
    return done.stdout, done.stderr, str(folder / "example.py")


def test_the_race_of_the_custom_pass(custom_pass: tuple[str, str, str]) -> None:
    """Spec 002: exactly one race, with both nodes, lines and the repair; on request it is repaired, and values are right."""
    said, warned, script = custom_pass
    lines = printed("custom_pass.md").splitlines()
    absolute, add = (f"{script}:{1 + _first(lines, text)}" for text in ("torch.abs(mm)", "torch.add(abs, 1)"))
    line = "graph.call_function(torch.ops.air.wait.default, ([record_default],))"
    assert (
        "error [read-after-write]: add reads abs_1 while abs_1 may still be computing it: "
        "the main stream does not wait for stream 'stream_1' there\n"
        f"  abs_1 (aten.abs.default writes abs_1) on stream 'stream_1' at {absolute}\n"
        f"  add (aten.add.Tensor reads abs_1) on the main stream at {add}\n"
        "  missing: abs_1 before add\n"
        f"  repair: before {add} add `{line}` on the main stream\n"
    ) in warned
    assert len(re.findall(r"^(?:error|warning) \[", warned, re.MULTILINE)) == 1
    race = "'read-after-write', 'abs_1', 'add'"
    assert f"as printed: [('error', {race}, False)]" in said
    repaired = next(text for text in said.splitlines() if text.startswith("repaired: "))
    assert repaired.count("'error'") == 1
    assert f"('error', {race}, True)" in repaired


def test_the_profiler_says_what_it_needs(custom_pass: tuple[str, str, str]) -> None:
    """Its part of the example ends in a message, not in an exception: it needs CANN's profiling library, which needs an NPU."""
    said, warned, _ = custom_pass
    (reason,) = [text for text in (said + warned).splitlines() if "profiler" in text and "ERROR" in text]
    assert "Failed to find function aclprofInit" in reason
    assert "PROF resource not found" in said + warned


def _first(lines: list[str], text: str) -> int:
    return next(number for number, line in enumerate(lines) if text in line)
