"""The names of TorchAir: what the page docs/reference/torchair.md says of each is true, and no public name is left out."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch_npu

from npugraph_ex.compat.torchair_names import ABSENT, ACCEPTED, NAMES, WITHOUT_EFFECT

_WHEEL = Path(torch_npu.__file__).parent / "dynamo" / "torchair"
_MODULES = {"ops", "scope"}
"""Packages of TorchAir that say by no `__all__` what is public: every function without an underscore is."""
pytestmark = pytest.mark.usefixtures("as_torchair")


def _resolved(name: str) -> Any:
    """What the dotted name is: the longest module that can be imported, and attributes of it."""
    *parents, last = ["torchair", *name.split(".")]
    try:
        return importlib.import_module(".".join([*parents, last]))
    except ModuleNotFoundError:
        return getattr(importlib.import_module(".".join(parents)), last)


@pytest.mark.parametrize("name", [name for name, known in NAMES.items() if known.state != ABSENT])
def test_an_accepted_name_is_there(name: str) -> None:
    """As a module or as an attribute of one; what is accepted without effect is a module with nothing in it."""
    found = _resolved(name)
    assert NAMES[name].state in {ACCEPTED, WITHOUT_EFFECT}
    if NAMES[name].state == WITHOUT_EFFECT:
        assert [one for one in vars(found) if not one.startswith("__")] == []


@pytest.mark.parametrize("name", [name for name, known in NAMES.items() if known.state == ABSENT])
def test_an_absent_name_is_an_error_of_the_usual_class(name: str) -> None:
    """A script that tries an import or an attribute, and has another way, goes on. Each error says what there is instead."""
    remark = NAMES[name].differs
    assert remark
    module, _, last = f"torchair.{name}".rpartition(".")
    statements = [f"import torchair.{name}"]
    if not name.startswith(
        "ge_concrete_graph."
    ):  # modules in a package without names: there Python has words of its own
        statements.append(f"from {module} import {last}")
        with pytest.raises(AttributeError) as missing:
            getattr(importlib.import_module(module), last)
        assert remark in str(missing.value)
    for statement in statements:
        with pytest.raises(ModuleNotFoundError) as found:
            exec(statement)  # noqa: S102 - statements that differ by the name alone
        assert (found.value.name, remark in str(found.value)) == (f"torchair.{name}", True)


def _public() -> Iterator[str]:
    """The public names of the TorchAir that torch_npu ships, read from its source: it needs CANN to be imported."""
    for file in sorted(_WHEEL.rglob("*.py")):
        parts = file.relative_to(_WHEEL).with_suffix("").parts
        module = ".".join(parts).removesuffix("__init__").removesuffix(".")
        if any(part.startswith("_") and part != "__init__" for part in parts):
            continue
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names = ast.literal_eval(node.value)
            elif isinstance(node, ast.FunctionDef) and module in _MODULES and not node.name.startswith("_"):
                names = [node.name]
            else:
                continue
            yield from (f"{module}.{name}".removeprefix(".") for name in names)


def test_no_public_name_of_torchair_is_left_out() -> None:
    """A name has a row, or the module that holds it."""
    public = set(_public())
    assert {"dynamo_export", "scope.super_kernel", "ge.Const", "llm_datadist.create_npu_tensors"} <= public
    assert (
        sorted(
            name
            for name in public
            if name not in NAMES and name.rpartition(".")[0] not in NAMES and name.split(".")[0] not in NAMES
        )
        == []
    )


def test_the_errors_say_what_there_is_instead() -> None:
    """A name that TorchAir has not either is an error without a remark; `hasattr` is false."""
    import torchair

    with pytest.raises(ModuleNotFoundError, match="has no 'ge': no graph of GE is built"):
        importlib.import_module("torchair.ge")
    with pytest.raises(AttributeError, match="has no 'dynamo_export': no model is exported"):
        torchair.dynamo_export  # noqa: B018 - the attribute is what is looked for
    with pytest.raises(
        AttributeError, match=r"has no 'record': `ops.npu_tagged_event_record` and .* The module has npu_create"
    ):
        torchair.ops.record  # noqa: B018
    with pytest.raises(
        AttributeError, match=r"has no 'nothing'\. The module has deterministic, limit_core_num, npu_stream_switch$"
    ):
        torchair.scope.nothing  # noqa: B018
    assert not hasattr(torchair.inference, "set_dim_gears")
    with pytest.raises(ModuleNotFoundError, match="No module named"):
        importlib.import_module("torchair.nothing")


def test_dir_lists_the_names() -> None:
    """And none that the module itself uses."""
    import torchair

    assert {name for name in dir(torchair) if not name.startswith("_")} >= {*torchair.__all__}
    assert {"TYPE_CHECKING", "annotations", "instead", "npugraph_ex"}.isdisjoint(dir(torchair))


def test_torchair_itself_is_left_alone(ask: Callable[..., Any]) -> None:
    """Where another module has the name, this library's finder says nothing of it."""
    code = """
import sys, types
from npugraph_ex.compat import use_as_torchair
use_as_torchair()
use_as_torchair()
other = types.ModuleType("torchair")
other.__path__ = []
finders = sum(type(one).__name__ == "AbsentModules" for one in sys.meta_path)
sys.modules["torchair"] = other
try:
    import torchair.ge
except ModuleNotFoundError as error:
    answer = [finders, str(error)]
"""
    assert ask(code) == [1, "No module named 'torchair.ge'"]
