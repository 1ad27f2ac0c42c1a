"""The name rule: after any order of imports, `npugraph_ex` means this library; an environment variable says otherwise.

Every case is a fresh interpreter, because a name is settled once a process.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from interpreter import PYTHON

import npugraph_ex_autoload

Ask = Callable[..., Any]

OURS = str(Path(npugraph_ex_autoload.__file__).parent / "npugraph_ex" / "__init__.py")
BUNDLED = "torch_npu/dynamo/npugraph_ex/__init__.py"
# `import torch` imports torch_npu too, and torch_npu torch: what comes after either changes nothing.
ORDERS = [
    ("torch", "torch_npu", "npugraph_ex"),
    ("torch_npu", "torch", "npugraph_ex"),
    ("npugraph_ex", "torch", "torch_npu"),
    ("npugraph_ex", "torch_npu", "torch"),
]

# What the name means, in each of the four places where a program can meet it.
MEANING = """
import sys
import torch, torch_npu
def meaning():
    import npugraph_ex
    from torch._dynamo.backends.registry import lookup_backend
    backend = lookup_backend("npugraph_ex")
    # Only the module that torch.npu reaches has this function.
    sys.modules["npugraph_ex"].compile_fx = lambda *given: ["reached", *given]
    return {
        "import": sys.modules["npugraph_ex"].__file__,
        "statement": npugraph_ex.__file__,
        "backend": f"{backend.__module__}.{backend.__qualname__}",
        "torch.npu": torch.npu.npugraph_ex.compile_fx(1, 2, 3),
        "is": torch.npu.npugraph_ex is npugraph_ex,
    }
"""


# `torch.npu.npugraph_ex.scope` asks torch_npu for its package.
OWN_REFERENCES = """[
    vars(torch_npu.dynamo)["npugraph_ex"].__file__,
    __import__("importlib").import_module("torch_npu.dynamo.npugraph_ex").__file__,
]"""


def _check_ours(found: dict[str, object]) -> None:
    assert found == {
        "import": OURS,
        "statement": OURS,
        "backend": "npugraph_ex_autoload.backend",
        "torch.npu": ["reached", 1, 2, 3],
        "is": True,
    }


def _check_bundled(found: dict[str, object]) -> None:
    assert str(found["import"]).endswith(BUNDLED)
    assert str(found["statement"]).endswith(BUNDLED)
    assert str(found["backend"]).startswith("torch_npu.dynamo.")


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_every_import_order_gives_this_library(ask: Ask, order: tuple[str, ...]) -> None:
    """The module, the backend string, torch.npu and torch_npu's own references to its package are this library's."""
    imports = "\n".join(f"import {name}" for name in order)
    found = ask(f"{imports}\n{MEANING}\nimport npugraph_ex.config\nanswer = [meaning(), {OWN_REFERENCES}]")
    assert found[1] == [OURS, OURS]
    _check_ours(found[0])


@pytest.mark.slow
def test_the_name_holds_without_the_start_up_file(tmp_path: Path) -> None:
    """A folder on PYTHONPATH, as `pip install --target` fills it; the emulated device asks for the library's kernels first."""
    script = tmp_path / "meaning.py"
    script.write_text(f"{MEANING}\nimport json; print(json.dumps(meaning()))")
    path = os.pathsep.join([str(Path(OURS).parents[1]), *filter(None, sys.path)])
    command = [*PYTHON, "-S", "-m", "npu_emulator", script]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True)
    _check_ours(json.loads(done.stdout))


@pytest.mark.parametrize("order", ORDERS[1:3], ids="-".join)
def test_bundled_restores_torch_npus_own(ask: Ask, order: tuple[str, ...]) -> None:
    """NPUGRAPH_EX=bundled gives torch_npu's package and backend, whichever import comes first.

    The emulated device gets this library's kernels all the same, and that changes nothing.
    """
    imports = "\n".join(f"import {name}" for name in order)
    code = f"""
{imports}
{MEANING}
import npugraph_ex.npu_fx_compiler
from importlib.metadata import entry_points
(entry,) = entry_points(group="npu_emulator.kernels", name="npugraph_ex")
before = sys.modules["npugraph_ex"]
kernel = entry.load()["npu::npu_add_rms_norm"].formula
y, _, x = kernel(torch.full((1, 4), 3.0), torch.full((1, 4), 4.0), torch.ones(4), 0.0)
answer = [y.tolist(), x.tolist(), sys.modules["npugraph_ex"] is before, meaning()]
"""
    *kernels, found = ask(code, NPUGRAPH_EX="bundled")
    assert kernels == [[[1.0] * 4], [[7.0] * 4], True]
    _check_bundled(found)


@pytest.mark.parametrize("order", [ORDERS[0], ORDERS[2]], ids="-".join)
def test_without_torchs_autoload(ask: Ask, order: tuple[str, ...]) -> None:
    """TORCH_DEVICE_BACKEND_AUTOLOAD=0 takes one of the hook's ways and leaves the others."""
    imports = "\n".join(f"import {name}" for name in order)
    _check_ours(ask(f"{imports}\n{MEANING}\nanswer = meaning()", TORCH_DEVICE_BACKEND_AUTOLOAD="0"))


def test_dynamo_imported_before_torch_npu(ask: Ask) -> None:
    """Dynamo being there already, torch_npu registers its backend while it is imported; ours stands all the same."""
    code = f"import torch, torch._dynamo, torch_npu\n{MEANING}\nanswer = meaning()"
    _check_ours(ask(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0"))


STUB_AND_COMPILE = """
import sys, types
import torch
seen = []
frontend = types.ModuleType("npugraph_ex.frontend.entry.backend")
def compile_graph(gm, example_inputs, **kwargs):
    seen.append({name: dict(value) for name, value in kwargs.items()})
    return gm.forward
frontend.npugraph_ex = compile_graph
sys.modules["npugraph_ex.frontend"] = types.ModuleType("npugraph_ex.frontend")
sys.modules["npugraph_ex.frontend.entry.backend"] = frontend
compiled = torch.compile(lambda x: x + 1, backend="npugraph_ex", options={"capture_limit": 3})
answer = {"value": compiled(torch.ones(2)).tolist(), "seen": seen}
"""


def test_the_string_alone_compiles_with_this_library(ask: Ask) -> None:
    """`import torch` and a backend string are enough, options arrive, and two entry points of one name do no harm."""
    answer = ask(STUB_AND_COMPILE, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert answer == {"value": [2.0, 2.0], "seen": [{"options": {"capture_limit": 3}}]}


@pytest.mark.slow
def test_a_backend_registered_before_the_hook_ran_is_replaced(ask: Ask) -> None:
    """Where the start-up file is missing and torch_npu came first, importing this library by path still settles it."""
    code = f"""
import sys
import npugraph_ex_autoload
sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "_HostWatcher"]
import torch_npu, torch._dynamo
before = torch._dynamo.backends.registry.lookup_backend("npugraph_ex").__module__
npugraph_ex_autoload.install()
{MEANING}
answer = [before, meaning()]
"""
    before, found = ask(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert before == "torch_npu.dynamo"
    _check_ours(found)


def test_a_bundled_package_in_use_is_not_torn_apart(ask: Ask) -> None:
    """Once torch_npu's package is loaded, a late hook leaves it whole."""
    code = f"""
import sys
import npugraph_ex_autoload
sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "_HostWatcher"]
import torch_npu
import npugraph_ex.core.utils
npugraph_ex_autoload.install()
{MEANING}
answer = meaning()
"""
    _check_bundled(ask(code, TORCH_DEVICE_BACKEND_AUTOLOAD="0"))


def test_a_broken_library_breaks_no_import(ask: Ask) -> None:
    """If this library cannot be imported, torch and torch_npu can, and one line of the log says whose the name is."""
    code = """
import logging, sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "npugraph_ex":
            raise ImportError("half an installation")
sys.meta_path.insert(0, Broken())
said = []
logging.getLogger("npugraph_ex").addFilter(lambda record: said.append(record.getMessage()))
import torch
answer = [said, type(sys.modules["npugraph_ex"]).__module__]
"""
    said, owner = ask(code)
    (line,) = said
    assert "(ImportError: half an installation)" in line
    assert "stays with torch_npu" in line
    assert owner == "torch_npu.dynamo"


def test_a_second_copy_that_comes_first_on_the_path_wins(ask: Ask, tmp_path: Path) -> None:
    """Beside an installed library, a checkout earlier on the path is what its user means; nothing loops or breaks."""
    copy = tmp_path / "npugraph_ex"
    copy.mkdir()
    for name in ("__init__.py", "__init__.pyi", "_facade.py"):
        shutil.copy(Path(OURS).parent / name, copy / name)
    code = "import torch, torch_npu, npugraph_ex\nanswer = npugraph_ex.__file__"
    assert ask(code, PYTHONPATH=str(tmp_path)) == str(copy / "__init__.py")


def test_a_wrong_value_of_the_switch_is_an_error_of_ours(ask: Ask) -> None:
    """A misspelt NPUGRAPH_EX is refused by `import npugraph_ex`, with the two right values."""
    code = "try:\n    import npugraph_ex\nexcept ImportError as error:\n    answer = [type(error).__name__, str(error)]"
    kind, message = ask(code, NPUGRAPH_EX="bundeld")
    assert kind == "NameRuleError"
    assert "'bundeld'" in message
    assert "'bundled'" in message
    assert "'library'" in message


def test_start_up_costs_nothing() -> None:
    """Loading and installing the hook brings in no module but itself: not typing, not importlib.metadata, not torch."""
    # -S: without site, so that nothing else has loaded a module first and hidden that the hook loads it.
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(npugraph_ex_autoload.__file__).parent)!r})
before = set(sys.modules)
import npugraph_ex_autoload
npugraph_ex_autoload.install()
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run([*PYTHON, "-S", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['__future__', 'npugraph_ex_autoload']"


def test_the_start_up_file_is_installed() -> None:
    """A plain interpreter has the hook loaded before any program runs."""
    code = "import sys; print('npugraph_ex_autoload' in sys.modules)"
    done = subprocess.run([*PYTHON, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.slow
def test_importing_the_library_does_not_import_torch() -> None:
    """The façade and the option table load without torch; only what computes needs it."""
    code = (
        "import sys, npugraph_ex.config, npugraph_ex.cli; npugraph_ex.CompilerConfig(); print('torch' in sys.modules)"
    )
    done = subprocess.run([*PYTHON, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
