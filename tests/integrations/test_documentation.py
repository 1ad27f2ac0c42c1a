"""The page for users of vLLM-Ascend: its examples are read by the code that reads their configuration."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from test_vllm_ascend_contract import SYMBOLS

from npugraph_ex.integrations.vllm import VllmSettings

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "vllm-ascend.md").read_text(encoding="utf-8")


def _offline() -> Any:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
    keywords = [keyword for call in calls for keyword in call.keywords if keyword.arg == "additional_config"]
    return ast.literal_eval(keywords[0].value)


def _online() -> Any:
    (block,) = re.findall(r"```shell\n(.*?)```", PAGE, re.DOTALL)
    return json.loads(re.findall(r"--additional-config '(.*?)'", block)[0])


@pytest.mark.parametrize("example", [_offline, _online])
def test_the_examples_switch_it_on(example: Any) -> None:
    """Both printed configurations mean: compile, without static kernels."""
    assert VllmSettings.of(example()) == VllmSettings(enable=True, enable_static_kernel=False)


def test_every_key_is_explained() -> None:
    """Each key of the examples has a row of the table."""
    for section, keys in _offline().items():
        for key in keys:
            assert f"| `{section}.{key}` |" in PAGE


def test_every_name_is_listed() -> None:
    """The page names each symbol that the contract test breaks."""
    for _, name in SYMBOLS:
        assert name.rpartition(".")[2] in PAGE
