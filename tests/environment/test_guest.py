"""The package as a guest: installed beside other people's projects, it changes none of their runs, strict or not.

Each test runs in a virtual environment of its own, because what counts is what installing brings: the start-up file and
the entry points of torch and pytest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Guest

_SUITE = {
    "pytest.ini": "[pytest]\nfilterwarnings = error\n",
    "plain.py": "def double(x):\n    return 2 * x\n",
    "test_plain.py": "from plain import double\n\ndef test_double():\n    assert double(2) == 4\n",
}


@pytest.mark.slow
def test_a_strict_suite_passes_and_hears_nothing(bare: Guest) -> None:
    """`pytest -W error` of a project that imports no torch passes, and neither a warning nor torch comes in."""
    bare.write({**_SUITE, "test_torch.py": "import sys\n\ndef test_torch():\n    assert 'torch' not in sys.modules\n"})
    done = bare.run("-m", "pytest", "-W", "error")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout
    assert "warning" not in (done.stdout + done.stderr).lower()


@pytest.mark.slow
def test_a_strict_suite_under_coverage(bare: Guest) -> None:
    """Coverage of a strict suite counts the project's lines, all of them, and warns of nothing."""
    bare.write(_SUITE)
    done = bare.run("-W", "error", "-m", "coverage", "run", "--source=.", "-m", "pytest", "test_plain.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    report = bare.run("-W", "error", "-m", "coverage", "json", "-o", "-", "-q")
    files = json.loads(report.stdout)["files"]
    assert files["plain.py"]["summary"]["percent_covered"] == 100


@pytest.mark.slow
@pytest.mark.parametrize("first", ["npugraph_ex", "npu_emulator", "npu_emulator.build"])
def test_pytest_after_this_package(bare: Guest, first: str) -> None:
    """Where a program imports this package and then runs pytest, pytest does not complain that it came too late."""
    bare.write(_SUITE)
    code = f"import {first}, pytest, sys; sys.exit(pytest.main(['-W', 'error', 'test_plain.py']))"
    done = bare.run("-W", "error", "-c", code)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in (done.stdout + done.stderr).lower()


def test_an_isolated_strict_interpreter_starts_silently(bare: Guest) -> None:
    """`python -I -W error` has the hook and nothing else of this package, and says nothing."""
    code = "import sys; print(sorted(name for name in sys.modules if name.startswith(('npu', 'torch', 'logging'))))"
    done = bare.run("-I", "-W", "error", "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "['npugraph_ex_autoload']\n", "")


@pytest.mark.slow
def test_torch_without_torch_npu(with_torch: Guest) -> None:
    """A strict `import torch` where torch_npu is absent: nothing is said, and of this package only the hook is loaded."""
    code = "import torch, sys; print(sorted(name for name in sys.modules if name.startswith('npu')), float(torch.ones(2).sum()))"
    done = with_torch.run("-W", "error", "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "['npugraph_ex_autoload'] 2.0\n", "")


_OLDER_TORCH = """
import torch, torch._dynamo, torch._dynamo.source
del torch._dynamo.source.CallFunctionNoArgsSource  # a private name that an older torch lacks
import torch_npu.dynamo
torch_npu.dynamo._register_backends()
"""
_DYNAMO = """
import sys
class Lazy: pass
def _exec(gm, inputs, **options):
    return gm.forward
def _npugraph_ex_backend_entrypoint(gm, inputs, **options):
    return _exec(gm, inputs)
def _get_npugraph_ex_backend():
    sys.modules["npugraph_ex"] = Lazy()
    return _exec
sys.modules["npugraph_ex"] = Lazy()
def _register_backends():
    from torch._dynamo.backends.registry import register_backend
    register_backend(_get_npugraph_ex_backend(), "npugraph_ex")
"""


@pytest.fixture
def stub(with_torch: Guest) -> Iterator[Guest]:
    """An environment in which a test writes its own torch_npu, which torch loads at the end of its import."""
    entry = "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"
    about = "Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n"
    files = {"torch_npu-2.13.0.dist-info/entry_points.txt": entry, "torch_npu-2.13.0.dist-info/METADATA": about}
    with_torch.write(files)
    yield with_torch
    for path in sorted(with_torch.work.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "error"), [("__init__", "ImportError"), ("__init__", "OSError"), ("dynamo", "AttributeError")]
)
def test_a_broken_torch_npu_is_blamed_and_nobody_else(stub: Guest, error: str, where: str) -> None:
    """What torch_npu raises arrives as torch and torch_npu raise it, and torch alone works as it does without this package."""
    broken = f"raise {error}('libhccl.so: half a driver')"
    package, dynamo = (
        (broken, "") if where == "__init__" else ("import torch_npu.dynamo\ndef _autoload(): pass", broken)
    )
    stub.write({"torch_npu/__init__.py": package, "torch_npu/dynamo/__init__.py": dynamo})
    code = f"""
import torch
for attempt in range(2):
    try:
        import torch_npu
    except {error} as error:
        print(type(error).__name__, error)
try:
    import torch_npu
except {error}:
    import npugraph_ex, pytest
    print(npugraph_ex.CompilerConfig().mode)
"""
    done = stub.run("-W", "error", "-c", code, TORCH_DEVICE_BACKEND_AUTOLOAD="0", PYTHONPATH=".")
    told = f"{error} libhccl.so: half a driver\n"
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(2 * told)
    assert done.stderr == ""
    done = stub.run("-W", "error", "-c", "import torch", PYTHONPATH=".")
    assert done.returncode == 1
    assert "backend extension: torch_npu" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_an_older_torch_lacks_a_private_name(stub: Guest) -> None:
    """Neither `import torch` nor another backend suffers; who asks for this backend reads why it is not there."""
    stub.write(
        {"torch_npu/__init__.py": _OLDER_TORCH + "def _autoload(): pass\n", "torch_npu/dynamo/__init__.py": _DYNAMO}
    )
    code = """
import torch
print(torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item())
import torch._inductor.pattern_matcher
del torch._inductor.pattern_matcher.fwd_only  # and another, without which the library does not load
try:
    torch.compile(lambda x: x + 2, backend="npugraph_ex")(torch.ones(1))
except Exception as error:
    print("npugraph-ex cannot be loaded beside" in str(error), "fwd_only" in str(error), "NPUGRAPH_EX=bundled" in str(error))
"""
    done = stub.run("-W", "ignore::DeprecationWarning", "-W", "error::RuntimeWarning", "-c", code, PYTHONPATH=".")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "2.0\nTrue True True\n"
    *_, line = done.stderr.splitlines()  # before it, that the releases are no tested pair
    assert line.startswith(
        "dynamo could not be prepared for npugraph-ex (ImportError: cannot import name 'CallFunctionNoArgsSource'"
    )


@pytest.mark.slow
def test_a_torch_npu_of_another_shape_keeps_its_name(stub: Guest) -> None:
    """The hook fails half way: everything is put back, `import torch` works, and one line says so."""
    package = (
        "import torch._dynamo.backends.registry as registry\n"
        "register, registry.register_backend = registry.register_backend, None\n"
        "import torch_npu.dynamo\n"
        "registry.register_backend = register\n"
        "def _autoload(): pass\n"
    )
    register = _DYNAMO.replace(
        "def _register_backends():",
        "import torch._dynamo.backends.registry as r\n"
        "r._COMPILER_FNS['npugraph_ex'] = _exec\ndef _register_backends(): return\ndef _unused():",
    )
    stub.write({"torch_npu/__init__.py": package, "torch_npu/dynamo/__init__.py": register})
    code = """
import torch, sys, torch_npu
d = torch_npu.dynamo
print(type(sys.modules["npugraph_ex"]).__name__, d._get_npugraph_ex_backend.__module__, "npugraph_ex" in vars(d))
print(torch.compile(lambda x: x + 2, backend="npugraph_ex")(torch.ones(1)).item())
"""
    done = stub.run("-W", "error::RuntimeWarning", "-c", code, PYTHONPATH=".")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "Lazy torch_npu.dynamo False\n3.0\n"
    (line,) = done.stderr.splitlines()
    assert line.startswith("npugraph-ex ")
