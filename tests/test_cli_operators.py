"""`npugraph-ex operators`: the list, what a script needs, and whether a user's own record is right."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from npugraph_ex import cli
from npugraph_ex.commands.operators import _as_lines
from npugraph_ex.operators import OPERATORS

SCRIPT = """
import sys, torch, torch_npu
x = torch.ones(4, 4, dtype=torch.float16, device="npu")
y = torch_npu.npu_swiglu(torch_npu.npu_swiglu(x))
z = torch_npu.obfuscation_finalize(x)
print("sum", z.sum().item(), sys.argv[1:])
"""

KERNELS = {
    "aten::relu": "torch's CPU kernel",
    "aten::_embedding_bag_dense_backward": "torch's CPU kernel, on hardware too",
    "aten::normal_": "torch's CPU kernel, with the device's random numbers",
    "aten::addmm.dtype": "a formula of npu_emulator",
    "aten::conj": "composed of other operators",
    "aten::relu.out": "torch's CPU kernel",
    "aten::view": "torch_npu's own",
    "aten::clone": "a copy or a conversion",
    "npu::_npu_format_cast": "a copy or a conversion",
    "npu::npu_apply_rotary_pos_emb": "operator documentation of torch_npu.npu_apply_rotary_pos_emb",
}
"""How each kind of kernel is described."""

MODULE = """
import torch
from npugraph_ex.operators import Operator, call

torch.library.define("cli_operators::right", "(Tensor x, float scale=1.0) -> Tensor")
torch.library.define("cli_operators::wrong", "(Tensor x, float scale=1.0) -> Tensor")
torch.library.register_fake("cli_operators::wrong", lambda x, scale=1.0: x.new_empty(3))
both = dict(dtypes=(torch.float16,), examples=(lambda: call(torch.randn(4, 16)),))

@Operator(name="cli_operators::right", source="by hand", **both)
def right(x, scale=1.0):
    return torch.nn.functional.silu(x.double()).to(x.dtype) * scale

@Operator(name="cli_operators::wrong", source="by hand", **both)
def wrong(x, scale=2.0):
    return torch.nn.functional.silu(x).bfloat16().to(x.dtype)

Operator(name="cli_operators::absent", source="by hand", **both)(lambda x: x)

for name in ("raising", "exampleless"):
    torch.library.define(f"cli_operators::{name}", "(Tensor x, float scale=1.0) -> Tensor")

@Operator(name="cli_operators::raising", source="by hand", **both)
def raising(x, scale=2.0):
    raise ValueError("no square root\\nof this")

torch.library.define("cli_operators::widening", "(Tensor x, float scale=1.0) -> Tensor")
torch.library.register_fake("cli_operators::widening", lambda x, scale=1.0: torch.empty_like(x, dtype=torch.float32))

@Operator(name="cli_operators::widening", source="by hand", **both)
def widening(x, scale=1.0):
    return x * scale

torch.library.define("cli_operators::wide_alone", "(Tensor x) -> Tensor")
torch.library.register_fake("cli_operators::wide_alone", torch.empty_like)

@Operator(name="cli_operators::wide_alone", source="by hand", dtypes=(torch.float32,),
          examples=(lambda: call(torch.ones(4)), lambda: call(torch.ones(4, dtype=torch.bfloat16))))
def wide_alone(x):
    return x * (2 if x.dtype in {torch.float32, torch.float64} else 3)

@Operator(name="cli_operators::exampleless", source="by hand", dtypes=(torch.float16,), examples=(lambda: 1 / 0,))
def exampleless(x, scale=1.0):
    return x
"""


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """What commands change of the process is put back."""
    for name in ("_records", "_listeners"):
        monkeypatch.setattr(OPERATORS, name, type(getattr(OPERATORS, name))(getattr(OPERATORS, name)))
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_the_list_has_every_formula(capsys: pytest.CaptureFixture[str]) -> None:
    """With dtypes and source, for people and as JSON."""
    assert cli.main(["operators", "--json"]) == 0
    rows = {row["operator"]: row for row in json.loads(capsys.readouterr().out)}
    ours = {name for name, row in rows.items() if row["kernel"] == "a record of this library"}
    assert ours == {name for name, record in OPERATORS.items() if record.formula}
    assert rows["npu::npu_swiglu"]["dtypes"] == ["float16", "bfloat16", "float32"]
    assert cli.main(["operators"]) == 0
    said = capsys.readouterr().out
    assert OPERATORS["npu::npu_swiglu"].source in said
    for name, kernel in KERNELS.items():
        assert rows[name]["source"].startswith(kernel), name
        assert f"\n{name} " in said
    for name in ("npu::npu_matmul_compress_dequant", "aten::cudnn_convolution", "aten::cudnn_convolution.out"):
        assert not rows[name]["covered"]
        assert f"\n{name} " not in said
    assert rows["aten::relu"]["dtypes"] == []
    library = [row for name, row in rows.items() if name.startswith("aten::")]
    assert f"\naten: {sum(row['covered'] for row in library)} of {len(library):,} operators covered\n" in said


def test_the_list_can_be_cut_to_a_part_of_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    """Each overload that has the text, and the figures of those alone."""
    assert cli.main(["operators", "--having", "aten::addmm_"]) == 0
    assert capsys.readouterr().out == (
        "aten::addmm_  torch's CPU kernel\n\naten: 1 of 1 operator covered\n      1  torch's CPU kernel\n"
    )


@pytest.mark.slow
def test_a_script_is_told_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Operators that ran with their number, the missing one marked; the script went on with zeros, and had its arguments."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    assert cli.main(["operators", "--json", str(path), "--steps", "3"]) == 1
    captured = capsys.readouterr()
    assert "sum 0.0 ['--steps', '3']" in captured.err
    found = json.loads(captured.out)
    assert (found["script_failed"], found["without_kernel"]) == (False, [])
    needed = {row["operator"]: row for row in found["operators"]}
    assert needed["npu::obfuscation_finalize"] == {"operator": "npu::obfuscation_finalize", "calls": 1, "missing": True}
    assert not needed["npu::npu_swiglu"]["missing"]
    assert not any(name.startswith("aten") for name in needed)

    defined = """
torch.library.define("cli_script::bare", "(Tensor x) -> Tensor")
torch.library.define("cli_script::on_the_cpu", "(Tensor x) -> Tensor")
torch.library.impl("cli_script::on_the_cpu", "cpu", lambda x: x + 1)
torch.library.custom_op("cli_script::whole", lambda x: x + 1, mutates_args=(), schema="(Tensor x) -> Tensor")
torch.library.custom_op("cli_script::elsewhere", lambda x: x, mutates_args=(), device_types="cuda", schema="(Tensor x) -> Tensor")
"""
    path.write_text(SCRIPT.replace("z = torch_npu.obfuscation_finalize(x)", "z = y") + defined)
    assert cli.main(["operators", str(path)]) == 0
    said = capsys.readouterr().out
    assert [line.split(",")[0] for line in said.splitlines() if "no kernel" in line] == [
        "cli_script::bare",
        "cli_script::elsewhere",
    ]
    assert "npu::npu_swiglu" in said
    assert "0 of " in said
    assert "MISSING" not in said

    path.write_text(SCRIPT + "raise ValueError\n")
    assert cli.main(["operators", str(path)]) == 1
    said = capsys.readouterr().out
    assert "The script failed" in said
    assert said.endswith("How to give it one:\nhelp: npugraph-ex help KernelMissingError\n")

    path.write_text("raise ValueError\n")
    assert cli.main(["operators", str(path)]) == 1
    said = capsys.readouterr().out
    assert "The script failed before it called an operator" in said
    assert "calls" not in said


@pytest.mark.parametrize("missing", [0, 1, 2])
@pytest.mark.parametrize("needed", [1, 2, 3])
def test_the_sentence_agrees_with_its_numbers(needed: int, missing: int) -> None:
    """One operator is missing, and one of which none is missing is one, too."""
    rows = [{"operator": f"npu::{number}", "calls": 1, "missing": number < missing} for number in range(needed)]
    said = "".join(_as_lines(rows, "s.py", failed=False))
    verb = "is" if needed == 1 or missing == 1 else "are"
    assert f"{min(missing, needed)} of {needed} operator{'s' * (needed > 1)} {verb} missing." in said


@pytest.mark.slow
def test_a_script_may_end_by_exit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it called is told all the same; the status is 1 where it failed, so that 2 means wrong use."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + "sys.exit(int(sys.argv[1]))\n")
    assert cli.main(["operators", str(path), "0"]) == 1
    assert "npu::obfuscation_finalize" in capsys.readouterr().out
    assert cli.main(["operators", "--json", str(path), "7"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["script_failed"]
    assert any(row["missing"] for row in found["operators"])
    path.write_text("raise SystemExit\n")
    assert cli.main(["operators", str(path)]) == 0
    assert "calls no operator of npu or atb" in capsys.readouterr().out


@pytest.mark.slow
def test_a_call_is_counted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also of an operator whose results have sizes that only its kernel knows: each result is copied by a kernel of its own."""
    path = tmp_path / "script.py"
    path.write_text("""
import torch, torch_npu
boxes, scores = torch.rand(8, 5, device="npu"), torch.rand(8, device="npu")
indices, count = torch_npu.npu_nms_rotated(boxes, scores, 0.5)
assert indices.shape == (count.item(),)
""")
    assert cli.main(["operators", "--json", str(path)]) == 0
    needed = json.loads(capsys.readouterr().out)["operators"]
    assert needed == [{"operator": "npu::npu_nms_rotated", "calls": 1, "missing": False}]


def test_a_missing_operator_is_refused_outside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The zeros are this command's alone; a script that fails is told with its traceback."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    assert cli.main(["run", "--emulate", str(path)]) == 1
    assert "no kernel for npu::obfuscation_finalize" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:there is no operator")
def test_a_users_records_are_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    """Right is said of the right one; of the wrong one, what differs from schema, meta function and float64.

    A formula or an example that raises is a fault of its record alone, and hides no other fault.
    """
    path = tmp_path / "my_operators_of_a_test.py"
    path.write_text(MODULE)
    assert cli.main(["operators", "--json", "--check", str(path)]) == 1
    said = capsys.readouterr()
    assert not [one for one in recwarn if "TypedStorage" in str(one.message)]
    told = {name: found["faults"] for name, found in json.loads(said.out).items()}
    assert told["cli_operators::right"] == []
    assert re.findall(r"(\S+): no fake function", said.err) == [
        "cli_operators::right",
        "cli_operators::raising",
        "cli_operators::exampleless",
    ]
    signature, *raised = told["cli_operators::raising"]
    assert "('scale', 2.0, False)" in signature
    line = MODULE[: MODULE.index("raise ValueError")].count("\n") + 1
    assert raised == [
        f"torch.float16: {path}:{line}: ValueError: no square root of this",
        f"dtype of example 1: {path}:{line}: ValueError: no square root of this",
        "example 1: opcheck's test_schema: no square root\nof this",
    ]
    (raised_by_example,) = told["cli_operators::exampleless"]
    assert raised_by_example.endswith(": ZeroDivisionError: division by zero")
    assert "define it" in told["cli_operators::absent"][0]
    (widening,) = told["cli_operators::widening"]  # right in the example's own dtype
    assert widening.startswith(
        "example 1 in torch.float16: the results (shape, dtype, strides) are [((4, 16), torch.float16"
    )
    (of_its_own,) = told["cli_operators::wide_alone"]  # right in the dtype that the record names
    assert of_its_own.startswith("example 2 in torch.bfloat16 is not close to float64")
    signature, dtype, _, metadata = told["cli_operators::wrong"][:4]
    assert "('scale', 2.0, False); the schema has ('scale', 1.0, False)" in signature
    assert "example 1 in torch.float16 is not close to float64" in dtype
    assert "[((3,), torch.float32, (1,))]" in metadata


def test_wrong_use_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both at once, a file that is not there, a module without a record."""
    empty = tmp_path / "empty_module_of_a_test.py"
    empty.write_text("")
    for arguments, words in (
        (["--check", "x.py", "y.py"], "leave one out"),
        (["absent.py"], "'absent.py'"),
        (["--check", "absent.py"], "absent.py"),
        (["--check", str(empty)], "adds no record"),
    ):
        assert cli.main(["operators", *arguments]) == 2
        assert words in capsys.readouterr().err
