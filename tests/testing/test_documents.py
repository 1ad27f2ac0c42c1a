"""`npugraph-ex upstream --documents`: what a small document of this test's own lists, and what the formulas say to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from npugraph_ex.cli import main
from npugraph_ex_conformance.upstream.documents import listed

ROTATE = """# torch_npu.npu\\_rotate\\_quant

## 参数说明

- **x**（`Tensor`）：输入。数据类型支持`float16`、`bfloat16`和`complex64`，shape支持2维。
- **alpha**（`Tensor`）：数据类型支持`bfloat16`。
- **dst\\_dtype**（`int`）：数据类型为`int64`，支持取值`torch.int8`、`torch.float8_e5m2`、`torch_npu.float4_e2m1fn_x2`。
- **round_mode**（`str`）：支持"rint"、"floor"和"away"，默认值为"rint"。
- **beta**（`Tensor`）：数据类型支持`bfloat16`，当前仅支持传入默认值None。
- **scale_alg**（`int`）：支持取值0、2；1/7表示别的，取值范围[3, 5]，取值需大于8，传入长度为9。
- **transpose_y**（`bool`）：默认值为False，当前版本仅支持False。
- **more** (`bool`)：值为True或False。

## 约束说明

- **y**（`Tensor`）：数据类型支持`int8`。
"""
OTHER = "# （beta）torch_npu.npu_of_a_test\n\n## 参数说明\n\n- **mode** (`int`)：0表示一，当前只支持为1。\n"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Two documents, as a checkout of op-plugin has them."""
    folder = tmp_path / "op-plugin" / "docs"
    folder.mkdir(parents=True)
    (folder / "torch_npu-npu_rotate_quant.md").write_text(ROTATE, encoding="utf-8")
    (folder / "（beta）torch_npu-npu_of_a_test.md").write_text(OTHER, encoding="utf-8")
    return folder.parent


def test_what_documents_list(checkout: Path) -> None:
    """Dtypes, names, numbers and their meanings; no sizes, no ranges, no results, and what alone is supported now."""
    found: dict[str, list[str]] = {}
    for one in listed(checkout):
        found.setdefault(f"{one.operator}.{one.argument}", []).append(one.value)
    assert found == {
        "npu_rotate_quant.x": ["float16", "bfloat16", "complex64"],
        "npu_rotate_quant.alpha": ["bfloat16"],
        "npu_rotate_quant.dst_dtype": ["int8", "float8_e5m2", "float4_e2m1fn_x2"],
        "npu_rotate_quant.round_mode": ["rint", "floor", "away"],
        "npu_rotate_quant.scale_alg": ["0", "2", "1", "7"],
        "npu_rotate_quant.transpose_y": ["False"],
        "npu_rotate_quant.more": ["True", "False"],
        "npu_of_a_test.mode": ["1"],
    }


def test_formulas_are_asked(checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Values that only another mode makes possible are taken; refusals are known, new, or gone; the rest has a reason."""
    known, results = tmp_path / "known.toml", tmp_path / "results.json"
    known.write_text(
        '[op-plugin-documents.mistake]\n"npu_rotate_quant::*=away" = "no such rounding"\n'
        '"npu_rotate_quant::*=rint" = "was refused once"\n'
    )
    assert main(["upstream", str(checkout), "--documents", "--known", str(known), "--json", str(results)]) == 1
    said = capsys.readouterr().out
    assert "npu_rotate_quant::round_mode=away  known (mistake): no such rounding" in said
    assert (
        "npu_rotate_quant::scale_alg=7      npu_rotate_quant: round_mode, scale_alg and dst_type_max should be" in said
    )
    assert "gone; delete their lines\n  npu_rotate_quant::*=rint" in said
    assert said.endswith("given to a formula: 15 of 1 operator; 3 refused (1 known)\n")
    states = {(one["test"], one["state"], one["cause"]) for one in json.loads(results.read_text())["outcomes"]}
    assert {
        ("round_mode=floor", "passed", ""),
        ("dst_dtype=float8_e5m2", "passed", ""),
        ("more=True", "skipped", "no such argument in the record"),
        ("mode=1", "skipped", "no record of the operator"),
    } <= states
    assert main(["upstream", str(tmp_path / "absent"), "--documents"]) == 2
    assert "no document torch_npu-*.md below" in capsys.readouterr().err
