"""How `npugraph-ex advise` tells what it found: rows and totals, in text, JSON and on the page."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from npugraph_ex.cli import main
from npugraph_ex.commands.advise import Advised, _page, advising
from npugraph_ex.frontend.entry.advice import Advice
from npugraph_ex.graph.launches import Launched
from npugraph_ex.observe.modelled import modelled_us


def test_the_rows_of_a_function_that_was_compiled_again_are_one() -> None:
    """Three sizes of one function are three graphs with the same advice: one row, which names them; other advice stays."""

    def one(graph: int, size: int, rule: str = "lift_layer_norm") -> Advice:
        return Advice(graph, "option", rule, "model.py:3", 1, Launched(2, size), 'lift="judged"')

    found = Advised(graphs=4, advice=[one(1, 0), one(2, 10**6), one(4, 10**7), one(3, 0, "lift_rms_norm")])
    rows = [re.split(r"  +", line) for line in str(_page("s.py", found)).splitlines() if "model.py" in line]
    least, most = (f"{modelled_us(Launched(2, size)):.2f}" for size in (0, 10**7))
    assert rows == [
        ["2", f"{least} to {most}", "1", "1, 2, 4 (3 graphs)", "lift_layer_norm", "model.py:3"],
        ["2", least, "1", "3", "lift_rms_norm", "model.py:3"],
    ]


def test_one_refusal_of_a_line_is_one_row() -> None:
    """Whatever nodes its reasons name: a line in a loop refuses once for each layer. The reasons stand below."""
    reasons = ["neg is also used by mul", "neg_1 is also used by mul_1", "it writes"]
    found = Advised(graphs=2, advice=[
        Advice(graph, "refused", "lift_gelu", "model.py:3", times, Launched(times, 0), reason)
        for graph in (1, 2) for times, reason in enumerate(reasons)
    ])  # fmt: skip
    page = str(_page("s.py", found))
    rows = [re.split(r"  +", line) for line in page.splitlines() if "model.py" in line]
    assert rows == [["3", f"{modelled_us(Launched(3, 0)):.2f}", "3", "1, 2 (2 graphs)", "lift_gelu", "model.py:3"]]
    assert [page.splitlines().count(reason) for reason in reasons] == [1, 1, 1]


@pytest.mark.parametrize(
    "text", ["print('nothing')\n", "raise RuntimeError('at once')\n"], ids=["no compile", "an error"]
)
def test_nothing_compiled_is_told_as_such(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In text, in JSON and on the page, with the script's own status."""
    script, page = tmp_path / "script.py", tmp_path / "advice.html"
    script.write_text(text)
    status = int("raise" in text)
    for options in ([], ["--json", "--html", str(page)]):
        with pytest.MonkeyPatch.context() as patch:
            for variable in ("argv", "path"):
                patch.setattr(sys, variable, list(getattr(sys, variable)))
            assert main(["advise", *options, str(script)]) == status
        said = capsys.readouterr().out
        if options:
            assert json.loads(said) == {
                "graphs": 0,
                "trained": 0,
                "kernels": 0,
                "modelled_us": 0,
                "rolled_back": [],
                "advice": [],
            }
            assert "Nothing was compiled by this backend in this process" in page.read_text()
        else:
            assert "Nothing was compiled by this backend in this process" in said
            assert "nothing to win" not in said


def test_lines_that_nobody_counted_are_in_no_total() -> None:
    """They stand by themselves, without numbers; what is said of other kinds of rows stands where there are such rows."""
    counted, uncounted, joined, losing = (
        Advice(1, "spelling", rule, "model.py:3", 1, Launched(kernels, 0), "y = f(x)")
        for rule, kernels in (("lift_gelu", 2), ("lift_norm", 0), ("shared projection", 1), ("lift_softmax", -1))
    )
    page = str(_page("s.py", Advised(graphs=1, advice=[uncounted])))
    assert "nothing to win that is counted" in page
    assert "0 kernels" not in page
    assert [re.split(r"  +", line) for line in page.splitlines() if "model.py" in line] == [
        ["1", "1", "lift_norm", "model.py:3"]
    ]
    page = str(_page("s.py", Advised(graphs=1, advice=[counted, uncounted])))
    assert page.index("lift_gelu") < page.index("nobody counted") < page.index("lift_norm")
    assert "shared projection" not in page
    assert "below zero" not in page
    page = str(_page("s.py", Advised(graphs=1, advice=[joined, losing])))
    assert "Of a shared projection" in page
    assert "below zero" in page


@pytest.mark.slow
def test_lines_that_change_values_say_how_far(tmp_path: Path) -> None:
    """Text, JSON and page say what the lines compute, and the largest distance, which is that of the two functions."""
    script, page = tmp_path / "model.py", tmp_path / "advice.html"
    script.write_text(
        "import torch\n"
        "compiled = torch.compile(lambda x: x * torch.sigmoid(1.7 * x), backend='npugraph_ex', options={'lift': 'judged'})\n"
        "compiled(torch.ones(4, 64).half().npu())\n"
    )
    command = [sys.executable, "-m", "npugraph_ex", "advise", "--emulate", "--html", str(page)]
    text, data = (
        subprocess.run([*command, *more, str(script)], capture_output=True, text=True, check=True).stdout
        for more in ([], ["--json"])
    )
    (one,) = json.loads(data)["advice"]
    x = torch.linspace(-6, 6, 61, dtype=torch.float64)
    far = float((x * torch.sigmoid(1.7 * x) - x * torch.sigmoid(1.702 * x)).abs().max())
    (told,) = re.findall(r"values are up to (\S+) from", one["why"])
    assert float(told) == float(f"{far:.1g}")
    assert "x * sigmoid(1.702 * x)" in one["why"]
    assert f"# {one['why']}\n{one['change']}" in text
    assert f"# {one['why']}\n{one['change']}" in page.read_text()


@pytest.mark.parametrize(
    ("dtype", "differs"), [(torch.float16, False), (torch.float32, True)], ids=["float16", "float32"]
)
def test_another_weight_and_another_epsilon_are_both_told(dtype: torch.dtype, *, differs: bool) -> None:
    """`normalize` has a least length, which rows of float32 come near, and rows of float16 do not."""
    with torch.no_grad(), advising() as found:
        compile_ = torch.compile(lambda x, w: functional.normalize(x, dim=-1) * w, backend="npugraph_ex")
        compile_(torch.ones(4, 64, dtype=dtype).npu(), torch.ones(64, dtype=dtype).npu())
    (one,) = (one for one in found.advice if one.kind == "spelling")
    assert ("the operator adds epsilon under the root" in one.why) == differs


@pytest.mark.slow
def test_command(tmp_path: Path) -> None:
    """Table, JSON and page tell the same; other options of the script's functions do not matter."""
    script = tmp_path / "model.py"
    script.write_text(
        "import torch\n"
        "def norm(x, w):\n"
        "    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w\n"
        "compiled = torch.compile(norm, backend='npugraph_ex')\n"
        "compiled(torch.ones(4, 64).half().npu(), torch.ones(64).half().npu())\n"
    )
    page = tmp_path / "advice.html"
    command = [sys.executable, "-m", "npugraph_ex", "advise", "--emulate", "--json", "--html", str(page), str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    (one,) = told["advice"]
    assert (told["graphs"], told["trained"]) == (1, 0)
    assert (one["kind"], one["rule"], one["source"]) == ("option", "lift_rms_norm", f"{script}:3")
    assert one["saves"]["kernels"] == 5
    assert 'options={"lift": "judged"}' in one["change"]
    shown = page.read_text()
    assert "lift_rms_norm" in shown
    assert f"{one['modelled_us']:.2f}" in shown
