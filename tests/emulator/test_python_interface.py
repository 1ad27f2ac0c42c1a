"""The Python half of the emulator declares the C functions of the runtime as their source does."""

from __future__ import annotations

import ast
import re
from pathlib import Path

_EMULATOR = Path(__file__).parents[2] / "npu_emulator"
_DEVICE = ast.parse((_EMULATOR / "device.py").read_text(encoding="utf-8"))
_C_NAMES = {
    "pointer": "void*",
    "ctypes.c_char_p": "const char*",
    "u64": "uint64_t",
    "ctypes.c_uint32": "uint32_t",
    "i32": "int",
    "None": "void",
    "ctypes.py_object": "_object*",
}


def _c_functions() -> dict[str, tuple[str, list[str]]]:
    """Result and argument types of each function, as the C++ source writes them; callbacks are left out."""
    source = "".join(file.read_text(encoding="utf-8") for file in sorted((_EMULATOR / "runtime").glob("*.cpp")))
    found = {}
    for result, name, arguments in re.findall(r"EMU_API ([\w ]+?\*?) (emu_\w+)\(([^()]*)\) {", source):
        types = [re.sub(r" ?\w+$", "", argument.strip()) for argument in arguments.split(",") if argument]
        found[name] = (result, ["int" if kind == "int32_t" else kind for kind in types])
    return found


def test_declared_types_are_those_of_the_source() -> None:
    """A function that Python declares has the result and the arguments that C++ gives it."""
    written = _c_functions()
    declared = {
        node.args[0].value: [_C_NAMES[ast.unparse(kind)] for kind in node.args[1:]]
        for node in ast.walk(_DEVICE)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "self._declare"
        and node.args[0].value != "aclrtMemcpy"
    }
    assert len(declared) > 15, "the declarations were not found"
    assert declared == {name: [written[name][0], *written[name][1]] for name in declared}


def test_called_functions_take_as_many_arguments_as_the_source_says() -> None:
    """A function that Python calls by its name exists, and gets one value for each argument."""
    written = _c_functions()
    calls = [node for node in ast.walk(_DEVICE) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    called = {(node.func.attr, len(node.args)) for node in calls if node.func.attr in written}
    assert len(called) > 10, "the calls were not found"
    assert {(name, count) for name, count in called if count != len(written[name][1])} == set()
