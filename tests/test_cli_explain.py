"""`npugraph-ex explain script.py`: the script runs as it would, and what was compiled is told after it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import npu_emulator
import npugraph_ex
import npugraph_ex_conformance

Command = Callable[..., subprocess.CompletedProcess[str]]

SCRIPT = """
import sys
import torch, torch_npu, npugraph_ex

@torch.compile(backend="npugraph_ex")
def step(x, cache, rows, gamma):
    cache.add_(x)
    y, _, total = torch_npu.npu_add_rms_norm(rows, rows, gamma)
    fused = torch_npu.npu_dynamic_quant(y)
    y, _, total = torch_npu.npu_add_rms_norm(total, rows, gamma)
    nearly = torch_npu.npu_dynamic_quant(y)
    unlike = torch_npu.npu_rms_norm(y, gamma)[0]
    return x.relu() * 2, fused, nearly, unlike

cache = torch.zeros(8, device="npu")
rows, gamma = (torch.ones(shape, device="npu", dtype=torch.half) for shape in ((4, 64), (64,)))
for _ in range(int(sys.argv[1])):
    step(torch.ones(8, device="npu"), cache, rows, gamma)
print("sum", cache.sum().item())
sys.exit(int(sys.argv[2]))
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    """A program that compiles one graph, prints, and ends with the status it is given."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return str(path)


def test_tables_follow_the_scripts_output(command: Command, script: str) -> None:
    """With --full the script prints first; then its graph, inputs, passes and captures; its exit status is passed on."""
    done = command("explain", "--emulate", "--full", script, "3", "4", NPU_EMULATOR_FORCE="1")
    assert done.returncode == 4, done.stderr
    said = done.stdout
    assert said.index("sum 24.0") < said.index("graph 1")
    for words in ("captured graphs, replayed", "L['cache']", "in place", "reinplace_inputs", "the first call"):
        assert words in said
    line = {text: number for number, text in enumerate(SCRIPT.splitlines(), 1)}
    nearly, unlike = (
        next(number for text, number in line.items() if text.startswith(f"    {name} ="))
        for name in ("nearly", "unlike")
    )
    rows = [re.sub(r"  +", "|", row.strip()) for row in said.splitlines()]
    assert "fusion rule|fused|near-misses|inactive because" in rows
    assert "add_rms_norm_dynamic_quant|1|1" in rows
    assert "transpose_batchmatmul|0|0" in rows
    reason = "output 0 of npu_add_rms_norm_1 is also used by npu_rms_norm"
    assert f"add_rms_norm_dynamic_quant|npu_dynamic_quant_1|{reason}|{script}:{nearly}" in rows
    assert (
        f"npu_rms_norm|it goes to a result of the graph; no rule begins with npu.npu_rms_norm.default|{script}:{unlike}"
        in rows
    )


PRINTING = """\
import atexit, os, subprocess, threading, time, torch, npugraph_ex
from concurrent.futures import ThreadPoolExecutor

def late(who):
    time.sleep(0.2)
    print(who + "\\n", end="", flush=True)  # at once, for two may print

print("by Python")
atexit.register(print, "at the end")
threading.Thread(target=late, args=["by a thread"]).start()
pool = ThreadPoolExecutor(1)
pool.submit(late, "by an executor")
subprocess.run(["echo", "by a child"])
os.write(1, b"by the descriptor\\n")
if __name__ == "__main__":
    print(torch.compile(torch.relu, backend="npugraph_ex")(torch.ones(4, device="npu")).sum())
else:
    npugraph_ex.register_replacement(lambda x: (x * 2.5).relu(), lambda x: (x * 2.5).relu(), [torch.empty(4, 8)])
    from npugraph_ex.operators import Operator, call
    torch.library.define("printing::relu", "(Tensor x) -> Tensor")
    Operator(name="printing::relu", source="this test", examples=(lambda: call(torch.ones(4)),))(lambda x: x.relu())
"""


@pytest.mark.parametrize(
    "words",
    [
        ("explain", "--emulate", "printing.py"),
        ("advise", "--emulate", "printing.py"),
        ("timeline", "printing.py"),
        ("operators", "printing.py"),
        ("validate", "--target", "emulated", "--max-examples", "1", "printing.py"),
        ("operators", "--check", "printing.py"),
    ],
    ids=lambda words: " ".join(words[:-1]),
)
def test_what_else_prints_is_not_in_the_json(
    words: tuple[str, ...], command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child has the descriptor, and knows nothing of a stream that Python redirects; some print when the command has ended."""
    monkeypatch.chdir(tmp_path)  # where the timeline writes
    path = tmp_path / "printing.py"
    path.write_text(PRINTING)
    name, *others, _ = words
    done = command(name, "--json", *others, str(path), NPU_EMULATOR_FORCE="1")
    assert json.loads(done.stdout), done.stderr
    printed = {"by Python", "by a child", "by the descriptor", "by a thread", "by an executor", "at the end"}
    assert printed <= {*done.stderr.splitlines()}


THREADS = """\
import sys, threading, time, torch, npugraph_ex
from concurrent.futures import ThreadPoolExecutor

def one(x):
    return x.relu()

def two(x):
    return x.sigmoid()

def compiled(function):
    time.sleep(0.2)
    torch.compile(function, backend="npugraph_ex")(torch.ones(4, device="npu"))

threading.Thread(target=compiled, args=[one]).start()
pool = ThreadPoolExecutor(1)
pool.submit(compiled, two)
END
"""


@pytest.mark.parametrize(("end", "status"), [("", 0), ("sys.exit(3)", 3), ("raise ValueError", 1)])
def test_what_the_threads_do_that_a_program_leaves_is_explained(
    end: str, status: int, command: Command, tmp_path: Path
) -> None:
    """Python waits for them, and for what executors were given, before it ends."""
    path = tmp_path / "threads.py"
    path.write_text(THREADS.replace("END", end))
    done = command("explain", "--emulate", "--json", str(path), NPU_EMULATOR_FORCE="1")
    assert done.returncode == status, done.stderr
    graphs = json.loads(done.stdout)["graphs"]
    assert sorted(row["operator"] for graph in graphs for row in graph["graph"]["before"] if row["kernel"]) == [
        "aten.relu.default",
        "aten.sigmoid.default",
    ]


SAVED = """\
import sys, torch, torch_npu
from npugraph_ex import scope
from npugraph_ex.inference import cache_compile

def racy(x):
    y = x * 2
    with scope.npu_stream_switch("side"):
        z = y + 1
    return z * y

def square(x):
    return x * x

for function in [racy, square][int(sys.argv[1]):]:
    cache_compile(function, cache_dir="compiled")(torch.ones(64, device="npu"))
"""


def test_what_the_stream_check_found_is_told_again_in_the_next_process(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a graph is not saved, because only a compilation warns; that others were loaded is said."""
    monkeypatch.chdir(tmp_path)
    path, sarif = tmp_path / "saved.py", tmp_path / "streams.sarif"
    path.write_text(SAVED)
    for first, results, said in (
        ("0", 1, "fused"),
        ("0", 1, "loaded         1 saved compilation"),
        ("1", 0, "Nothing was compiled in this process: it loaded 1 saved compilation."),
    ):
        done = command("explain", "--emulate", "--sarif", str(sarif), str(path), first, NPU_EMULATOR_FORCE="1")
        assert said in done.stdout, done.stdout + done.stderr
        assert len(json.loads(sarif.read_text())["runs"][0]["results"]) == results
        assert done.stderr.count("StreamOrderWarning: Results may depend") == results


def test_pytest_is_explained_where_warnings_are_errors(command: Command, tmp_path: Path) -> None:
    """It warns of an installed plugin's packages that are there before it, unless they say that it need not rewrite them."""
    for package in (npu_emulator, npugraph_ex, npugraph_ex_conformance):
        assert "PYTEST_DONT_REWRITE" in str(package.__doc__)
    path = tmp_path / "test_one.py"
    path.write_text(
        'def test_one(npu):\n    import torch\n    torch.compile(torch.relu, backend="npugraph_ex")(torch.ones(2, device=npu))\n'
    )
    words = ("-W", "error", "-q", "-p", "no:cacheprovider", "--npu=emulated", str(path))
    done = command(
        "explain", "--emulate", pytest.__file__.replace("__init__", "__main__"), *words, NPU_EMULATOR_FORCE="1"
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    assert "captured graphs, replayed: graph 1" in done.stdout


def test_json_is_all_of_stdout_also_when_the_script_fails(command: Command, tmp_path: Path) -> None:
    """With --json stdout is one JSON object; what the script prints goes to stderr, then the traceback of its exception."""
    path = tmp_path / "fails.py"
    path.write_text(SCRIPT.replace("sys.exit(int(sys.argv[2]))", "raise ValueError('on purpose')"))
    sarif = tmp_path / "streams.sarif"
    page = tmp_path / "story.html"
    options = ("--json", "--emulate", "--sarif", str(sarif), "--html", str(page))
    done = command("explain", *options, str(path), "2", NPU_EMULATOR_FORCE="1")
    assert done.returncode == 1
    assert "ValueError: on purpose" in done.stderr
    (graph,) = json.loads(done.stdout)["graphs"]
    assert graph["graph"]["fate"] == "captured"
    assert [capture["reason"] for capture in graph["captures"]] == ["the first call"]
    assert graph["pool_bytes"] > 0
    (rule,) = [rule for rule in graph["graph"]["report"]["rules"] if rule["name"] == "add_rms_norm_dynamic_quant"]
    assert {"npu_add_rms_norm", "npu_dynamic_quant"} <= set(rule["fusions"][0]["replaced"])
    assert [miss["node"] for miss in rule["near_misses"]] == ["npu_dynamic_quant_1"]
    assert [norm["node"] for norm in graph["graph"]["report"]["unfused"]] == ["npu_rms_norm"]
    story = page.read_text()
    assert "fused by add_rms_norm_dynamic_quant" in story
    assert "near-miss of add_rms_norm_dynamic_quant: output 0 of npu_add_rms_norm_1 is also used" in story
    assert story.count('title="aten.add_.Tensor') == 2  # two replays on the modelled clock
    assert re.findall(r"<(?:script|link|img|iframe)\b|@import|url\(|(?:src|href)=\"(?!#)", story) == []  # no network
    assert "sum 16.0" in done.stderr
    assert json.loads(sarif.read_text())["runs"][0]["results"] == []
    assert f"written: {page}\nwritten: {sarif}\n" in done.stderr


RACY = """
import torch, npugraph_ex
from npugraph_ex import scope

@torch.compile(backend="npugraph_ex")
def step(x):
    with scope.npu_stream_switch("side"):
        y = x * 2
    return y + 1

step(torch.ones(8, device="npu"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", ["print('nothing')", "raise SystemExit(7)"])
def test_a_script_that_compiles_nothing_clears_the_sarif_file(command: Command, tmp_path: Path, script: str) -> None:
    """A finding of before would stay an accusation; the JSON has the same keys as any other."""
    path, sarif = tmp_path / "nothing.py", tmp_path / "streams.sarif"
    path.write_text(script)
    sarif.write_text("a finding of before")
    command("explain", "--emulate", "--sarif", str(sarif), str(path), NPU_EMULATOR_FORCE="1")
    assert json.loads(sarif.read_text())["runs"][0]["results"] == []
    found = json.loads(command("explain", "--emulate", "--json", str(path), NPU_EMULATOR_FORCE="1").stdout)
    assert found == {"graphs": [], "breaks": [], "peak_bytes": None, "function": "", "refused": [], "loaded": 0}


@pytest.mark.slow
def test_the_findings_of_a_racy_script_are_in_the_sarif_file(command: Command, tmp_path: Path) -> None:
    """The one race of the script: its rule, level, both places by line, and the repair in the message."""
    script, sarif = tmp_path / "racy.py", tmp_path / "streams.sarif"
    script.write_text(RACY)
    done = command("explain", "--emulate", "--sarif", str(sarif), str(script), NPU_EMULATOR_FORCE="1")
    assert done.returncode == 0, done.stderr
    assert "StreamOrderWarning" in done.stderr
    assert len(done.stdout.splitlines()) <= 20
    assert re.search(r"^stream check +error read-after-write: ", done.stdout, re.MULTILINE)
    assert f"npugraph-ex explain --full --emulate {script}  # " in done.stdout
    (run,) = json.loads(sarif.read_text())["runs"]
    (result,) = run["results"]
    assert (result["ruleId"], result["level"]) == ("read-after-write", "error")
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["read-after-write"]
    places = [where["physicalLocation"] for where in (*result["locations"], *result["relatedLocations"])]
    lines = RACY.splitlines()
    assert [place["region"]["startLine"] for place in places] == [
        1 + lines.index("    return y + 1"), 1 + lines.index("        y = x * 2")
    ]  # fmt: skip
    assert all(place["artifactLocation"]["uri"].endswith("/racy.py") for place in places)
    assert "npu_tagged_event_wait" in result["message"]["text"]


def test_bundled_is_refused(command: Command, script: str) -> None:
    """torch_npu's own backend keeps no such record; one sentence says so."""
    done = command("explain", "--emulate", script, "1", "0", NPUGRAPH_EX="bundled")
    assert done.returncode == 2
    assert "unset it" in done.stderr


@pytest.mark.slow
def test_each_rank_of_torchrun_is_explained(tmp_path: Path) -> None:
    """One value on stdout, files for each rank, and next commands that start torchrun again; pipes keep their names."""
    (tmp_path / "script.py").write_text(
        "import os, sys, torch, torch_npu\nrank = int(os.environ['LOCAL_RANK'])\ntorch.npu.set_device(rank)\n"
        "@torch.compile(backend='npugraph_ex', dynamic=False)\ndef step(x):\n    return x.relu() * 2\n"
        "step(torch.ones(8 + rank, device='npu'))\n"
        "print('from ' + sys.argv[1])\n"  # torchrun buffers nothing: several pieces of two ranks would mix
    )
    torchrun = [
        "-m",
        "npu_emulator",
        "--devices=2",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
    ]
    begin = [sys.executable, *torchrun, "-m", "npugraph_ex"]

    def explained(*words: str) -> subprocess.CompletedProcess[str]:
        command = [*begin, "explain", *words, "script.py", "a word"]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)

    done = explained("--json", "--html", "page.html", "--sarif", "/dev/stderr")
    assert done.returncode == 0, done.stderr
    texts = [done.stdout, (tmp_path / "script.rank1.explain.json").read_text()]
    inputs = [json.loads(text)["graphs"][0]["graph"]["inputs"][0]["value"] for text in texts]
    assert inputs == ["float32[8] npu:0", "float32[9] npu:1"]
    assert done.stderr.count("from a word") == done.stderr.count('"version": "2.1.0"') == 2
    for rank in range(2):
        assert f"float32[{8 + rank}] npu:{rank}" in (tmp_path / f"page.rank{rank}.html").read_text()
    assert not (tmp_path / "page.html").exists()
    done = explained()
    (line,) = re.findall(r"^next +(.*?)  #", done.stdout, re.MULTILINE)
    assert shlex.split(line)[1:] == [*torchrun, "-m", "npugraph_ex", "advise", "script.py", "a word"]
