"""Modules that CANN or a real device would bring: extensions, as shipped or from their schemas, and `acl`."""

from __future__ import annotations

import ctypes
import subprocess
import sysconfig
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest
import torch

import npu_emulator
from npu_emulator import build, extensions
from npu_emulator.compilation import OF_EXTENSIONS
from npu_emulator.errors import KernelMissingError
from npu_emulator.extensions import schemas_in

Program = Callable[..., subprocess.CompletedProcess[str]]

SCHEMAS = (
    "npu_add_rms_norm_bias(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta=None, float epsilon=1e-6)-> (Tensor, Tensor, Tensor)",
    "swap_blocks(Tensor! x, Tensor! y, Tensor z) -> ()",
)
OTHERS = ("operator()", "bad(Tensr x) -> Tensor", "see docs -> there", "isString() INTERNAL ASSERT -> no")

_USES_IT = """
import torch
import vllm_ascend.vllm_ascend_C
x, ones = torch.arange(8.0, device="npu").reshape(2, 4), torch.ones(4, device="npu")
ops = torch.ops._C_ascend
y, rstd, total = ops.npu_add_rms_norm_bias(x, x, ones, ones)
wanted = 1 + torch.nn.functional.rms_norm(2 * x.cpu(), [4], eps=1e-6)
print(torch.equal(total.cpu(), 2 * x.cpu()), torch.allclose(y.cpu(), wanted))
shaped = torch.empty(3, 4, device="meta")
print([tuple(result.shape) for result in ops.npu_add_rms_norm_bias(shaped, shaped, shaped[0])])
try:
    ops.swap_blocks(x, x, x)
except NotImplementedError as error:
    print(error)
"""

_SHIPPED = """
#include <Python.h>
extern "C" int aclrtBinaryLoadFromData(const void*, size_t, const void*, void**);
extern "C" int CheckLogLevel(int, int);
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "a_name_of_its_own", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit_made_extension() {
    void* binary = nullptr;
    if (aclrtBinaryLoadFromData("code", 4, nullptr, &binary) != 0 || CheckLogLevel(0, 0) != 0) return nullptr;
    if (PyRun_SimpleString(R"(
import torch
library = torch.library.Library("made_extension", "DEF")
for name, key, run in (
    ("on_device", "PrivateUse1", lambda x: x / 0), ("on_device", "Meta", lambda x: x[:1]), ("on_host", "CPU", lambda x: x + 1),
):
    if key != "Meta":
        library.define(name + "(Tensor x) -> Tensor")
    library.impl(name, run, key)
)") != 0) return nullptr;
    return PyModule_Create(&definition);
}
"""

_USES_ACL = """
import sys, torch
from acl.rt import memcpy
x, y = torch.arange(4.0, device="npu"), torch.zeros(4, device="npu")
print(memcpy(y.data_ptr(), 16, x.data_ptr(), 16, 3), y.cpu().tolist(), memcpy(y.data_ptr() + 2**33, 16, x.data_ptr(), 16, 3) != 0)
import acl
try:
    acl.rt.malloc_host
except AttributeError as error:
    print(error)
"""


def _library(folder: Path, strings: tuple[str, ...]) -> Path:
    """A shared object that holds constant strings, and needs a library that nobody has."""
    source, made = folder / "made.cpp", folder / "vllm_ascend_C.so"
    lines = (f'extern "C" const char text_{number}[] = "{text}";' for number, text in enumerate(strings))
    source.write_text(
        'extern "C" void nobody_has_it(); extern "C" void use() { nobody_has_it(); }\n' + "\n".join(lines)
    )
    subprocess.run([*build.compiler(), "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
    return made


def test_schemas_are_read_from_a_file_that_does_not_load(tmp_path: Path) -> None:
    """What looks like a schema and is none is left out."""
    assert schemas_in(_library(tmp_path, (*OTHERS, *SCHEMAS, SCHEMAS[0] + " "))) == [*SCHEMAS, SCHEMAS[0] + " "]


@pytest.mark.slow
def test_an_extension_has_its_operators(program: Program, tmp_path: Path) -> None:
    """Importing it defines them: with the kernel and metadata of a record, or with a refusal at the launch."""
    package = tmp_path / "vllm_ascend"
    package.mkdir()
    (package / "__init__.py").touch()
    _library(package, SCHEMAS)
    done = program(_USES_IT, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    values, shapes, refusal = done.stdout.splitlines()
    assert (values, shapes) == ("True True", "[(3, 4), (3, 1), (3, 4)]")
    assert "the emulated NPU has no kernel for _C_ascend::swap_blocks" in refusal
    assert "of its 2 operators 1 have a kernel here" in done.stderr


def test_an_extension_for_this_torch_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It finds CANN's libraries. Its metadata and what it has for the host stay; its device code is never run."""
    source, libraries = tmp_path / "made.cpp", build.libraries()[0].parent
    source.write_text(_SHIPPED)
    links = ["-shared", "-fPIC", "-Wl,--no-as-needed", f"-L{libraries}", *[f"-l:{name}" for name in OF_EXTENSIONS]]
    made = ["-I", sysconfig.get_path("include"), str(source), "-o", str(tmp_path / "made_extension.so")]
    subprocess.run([*build.compiler(), *links, *made], check=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(extensions.EXTENSIONS, "made_extension", extensions.Extension("made_extension", "none"))
    assert import_module("made_extension").__file__ == str(tmp_path / "made_extension.so")
    assert "made_extension is loaded as shipped; of its 2 operators 0 have a kernel here" in capfd.readouterr().err
    ops, x = torch.ops.made_extension, torch.arange(3.0, device="npu")
    with pytest.raises(KernelMissingError, match="has no kernel for made_extension::on_device"):
        ops.on_device(x)
    npu_emulator.register_kernel("made_extension::on_device", lambda x: x[:1] * 2)
    assert ops.on_device(x + 1).tolist() == [2.0]
    assert ops.on_device(x.to("meta")).shape == (1,)
    assert ops.on_host(x.cpu()).tolist() == [1.0, 2.0, 3.0]


def test_an_extension_for_another_torch_is_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package says which release it is for; a package that asks for none, or is not installed, leaves it to the loader."""
    monkeypatch.setattr(extensions.importlib.metadata, "requires", lambda _: ["numpy", "torch==2.1.0"])
    assert extensions._other_torch("client") == f"its package is for torch==2.1.0, this is {torch.__version__}"
    monkeypatch.setattr(extensions.importlib.metadata, "requires", lambda _: ["numpy", f"torch=={torch.__version__}"])
    assert not extensions._other_torch("client")
    monkeypatch.undo()
    assert not extensions._other_torch("no-such-distribution")


def test_pyacl_copies_and_names_what_it_lacks(program: Program) -> None:
    """`acl.rt.memcpy` is the runtime's own, faults included; every other name says whose module this is."""
    done = program(_USES_ACL)
    assert done.returncode == 0, done.stderr
    copied, refusal = done.stdout.splitlines()
    assert copied == "0 [0.0, 1.0, 2.0, 3.0] True"
    assert refusal.startswith("acl.rt.malloc_host is a function of CANN's Python module, which is not installed")


def test_a_program_links_with_the_runtime(tmp_path: Path) -> None:
    """A compiler that a program starts finds CANN's libraries, and the program's own library calls the emulated device."""
    source, library = tmp_path / "extension.cpp", tmp_path / "extension.so"
    source.write_text(
        'extern "C" int aclrtGetDeviceCount(unsigned *);\n'
        'extern "C" unsigned devices() { unsigned count = 0; aclrtGetDeviceCount(&count); return count; }\n'
    )
    subprocess.run(["c++", "-shared", "-fPIC", source, "-lascendcl", "-o", library], check=True)  # noqa: S607 - the compiler of the machine
    assert ctypes.CDLL(str(library)).devices() == torch.npu.device_count()
