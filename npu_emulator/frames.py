"""The lines of the user's program, and its modules, that led to a launch.

Frames of torch, torch_npu and this package are skipped. So are those of a package that runs other people's code and says so
with `__npu_emulator_hides__ = True` in its `__init__`. What started the program (pytest, unittest, runpy, or a module that says
`__npu_emulator_starts__ = True`) ends the list. A frame that runs an FX graph (an interpreter or generated code) is replaced by
the lines from which the running node was traced. So a kernel of compiled code names the model's line, captured or not, without
help from the compiler.
"""

from __future__ import annotations

import re
import sys
from enum import Enum, auto
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import fx

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import CodeType, FrameType

__all__ = ["are_addresses_compared", "said_line", "split_frame", "user_frames", "user_line", "user_stack"]

_NOT_THE_USERS = ("/npu_emulator/", "/torch/", "/torch_npu/", "<frozen ", "<eval_with_key>")
_RUNNERS = {"_pytest", "pluggy", "unittest", "runpy"}
"""Packages that start a user's program: above their frames is none of it."""
_HIDES, _STARTS = "__npu_emulator_hides__", "__npu_emulator_starts__"
_COMPARES_ADDRESSES = "__npu_emulator_compares_addresses__"
_RUNS_A_NODE = fx.Interpreter.run_node.__code__
_CALLS_A_MODULE = torch.nn.Module._call_impl.__code__  # noqa: SLF001 - as above: the frame that tells which module runs
_GENERATED = "<eval_with_key>"
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (.+)')
_ROOT = re.compile(r"^[A-Za-z_]\w*(\['[^']*'\])?")
_STEP = re.compile(r"_modules\['([^']+)'\]|\['?([^\]']+)'?\]")


def said_line() -> str:
    """Return what an error says of the innermost line of the user's program and its module; nothing where there is none."""
    frames = user_frames(1)
    return f". Python line: {frames[0]}" if frames else ""


def split_frame(frame: str) -> tuple[str, str]:
    """Return (`file:line`, the module's path or nothing) of a frame as `user_frames` names it."""
    line, _, rest = frame.partition(" in ")
    return line, rest.partition(" of ")[2]


def user_line() -> str:
    """Return the innermost line of the user's program on the stack, and the function of torch or torch_npu that it called."""
    frame: Any = sys._getframe(1)  # noqa: SLF001 - as in _walk
    called = ""
    while frame is not None:
        code = frame.f_code
        traced = next(_traced_from(_node_of(frame)), "")
        if traced or _is_the_users(code.co_filename, frame.f_globals.get("__name__")):
            return f"{traced.partition(' in ')[0] or f'{code.co_filename}:{frame.f_lineno}'}{called}"
        if _is_a_runner(frame.f_globals.get("__name__")):
            break
        if "/torch" in code.co_filename:
            called = f" (in {frame.f_globals.get('__name__', '')}.{_function_of(frame)})"
        frame = frame.f_back
    return "an unknown line"


def _function_of(frame: Any) -> str:
    """The name of the function that a frame runs, with its class. Python 3.10 does not say the class."""
    known: str | None = getattr(frame.f_code, "co_qualname", None)
    owner = frame.f_locals.get("self")
    return known or (f"{type(owner).__name__}." if owner is not None else "") + frame.f_code.co_name


def user_stack() -> str:
    """Return the innermost lines of the user's program on the stack, as one line of text."""
    return ", from ".join(user_frames(4)) or "an unknown line"


def user_frames(limit: int = 6) -> tuple[str, ...]:
    """Return the lines of the user's program on the stack, innermost first, as `file:line in function`.

    The first ends in ` of layers.0.norm`, the path from the outermost module, if a module of torch.nn runs there.
    """
    found, modules, node = _walk(limit)
    if not found:
        return ()
    path = ".".join(filter(None, (_path_of(modules[::-1]), _traced_path(node))))
    return (f"{found[0]} of {path}" if path else found[0], *found[1:limit])


def are_addresses_compared() -> bool:
    """Tell whether a module on the stack says that each replay of what it captures is preceded by a comparison of addresses."""
    frame: Any = sys._getframe(1)  # noqa: SLF001 - as in _walk
    while frame is not None:
        if frame.f_globals.get(_COMPARES_ADDRESSES, False):
            return True
        frame = frame.f_back
    return False


def _walk(limit: int) -> tuple[list[str], list[torch.nn.Module], fx.Node | None]:
    """Return the lines, the modules around them (or around the graph that runs), innermost first, and that graph's node."""
    lines: list[tuple[Any, str]] = []
    modules: list[torch.nn.Module] = []
    running: fx.Node | None = None
    frame: Any = sys._getframe(2)  # noqa: SLF001 - walking frames one by one is far cheaper than traceback.extract_stack
    known_code = _codes.get
    while frame is not None:
        code = frame.f_code
        known = known_code(id(code)) or _learn(code, frame.f_globals.get("__name__"))
        kind = known.kind
        if kind is None:
            pass
        elif kind is _USERS:
            if len(lines) < limit:
                lines.append((frame, known.lines.get(frame.f_lasti) or known.line(frame)))
        elif kind is _MODULE:
            modules.append(frame.f_locals["self"])
        elif kind is _RUNNER:
            break
        elif (node := _node_of(frame)) is not None:
            runner = frame.f_locals["self"]  # a subclass of the interpreter is not part of the program that it runs
            lines = [line for line in lines if line[0] is None or line[0].f_locals.get("self") is not runner]
            lines += [(None, line) for line in _traced_from(node)]
            if running is None:
                running = node
                modules.clear()
        frame = frame.f_back
    return [line for _, line in lines], modules, running


class _FrameKind(Enum):
    """What a frame runs, if that matters."""

    USERS = auto()
    RUNNER = auto()
    MODULE = auto()
    """The call of a torch.nn.Module."""
    NODE = auto()
    """A node of an FX graph: by an interpreter, or in generated code."""


_USERS, _RUNNER, _MODULE = _FrameKind.USERS, _FrameKind.RUNNER, _FrameKind.MODULE
"""To read them of the class takes as long as the rest of a frame, and there are twenty frames a launch."""


class _KnownCode:
    """The facts about some code, one question for each frame of each launch, so they are kept."""

    __slots__ = ("_code", "kind", "lines")

    def __init__(self, code: CodeType, kind: _FrameKind | None) -> None:
        # Weak, because Dynamo hangs on code what it compiled of it, captures with their memory. It goes before its id is another's.
        self._code = ref(code, partial(_forget, id(code)))
        self.kind = kind
        self.lines: dict[int, str] = {}  # by the place in the bytecode

    def line(self, frame: FrameType) -> str:
        """The line that a frame of this code runs, as `user_frames` names it."""
        code = frame.f_code
        line = self.lines[frame.f_lasti] = f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        return line


_codes: dict[int, _KnownCode] = {}
"""By the code's id: to hash code takes longer than all else that is asked of a frame."""


def _forget(number: int, dead: ref[CodeType]) -> None:
    del dead
    _codes.pop(number, None)


def _learn(code: CodeType, module: str | None) -> _KnownCode:
    known = _codes[id(code)] = _KnownCode(code, _kind(code, module))
    return known


def _kind(code: CodeType, module: str | None) -> _FrameKind | None:
    if code is _CALLS_A_MODULE:
        return _FrameKind.MODULE
    if code is _RUNS_A_NODE or code.co_filename.startswith(_GENERATED):
        return _FrameKind.NODE
    if _is_a_runner(module):
        return _FrameKind.RUNNER
    return _FrameKind.USERS if _is_the_users(code.co_filename, module) else None


@cache
def _is_the_users(file: str, module: str | None) -> bool:
    """Whether a file is part of the user's program."""
    package = sys.modules.get(module.partition(".")[0]) if module else None
    if any(part in file for part in _NOT_THE_USERS) or _is_a_runner(module):
        return False
    return not getattr(package, _HIDES, False)


@cache
def _is_a_runner(module: str | None) -> bool:
    """Whether a module starts the user's program."""
    package = module.partition(".")[0] if module else ""
    return package in _RUNNERS or getattr(sys.modules.get(package), _STARTS, False)


def _node_of(frame: Any) -> fx.Node | None:
    """Return the node of an FX graph that a frame runs: an interpreter's method, or a graph's generated code."""
    if frame.f_code is _RUNS_A_NODE:
        node: fx.Node | None = frame.f_locals.get("n")
        return node
    if not frame.f_code.co_filename.startswith(_GENERATED):
        return None
    module = frame.f_locals.get("self")
    if not isinstance(module, fx.GraphModule):
        return None
    number = (getattr(module, "_lineno_map", None) or {}).get(frame.f_lineno - getattr(module, "_prologue_start", 0))
    nodes = list(module.graph.nodes)
    return nodes[number] if number is not None and number < len(nodes) else None


def _traced_from(node: fx.Node | None) -> Iterator[str]:
    """The lines of the program in a graph node's metadata, innermost first."""
    trace = node.meta.get("stack_trace") or "" if node is not None else ""
    for file, line, name in reversed(_FRAME.findall(trace)):
        if not any(part in file for part in _NOT_THE_USERS):
            yield f"{file}:{line} in {name}"


def _traced_path(node: fx.Node | None) -> str:
    """The path of the module that a node was traced in, as torch.compile notes it: `L['self'].layers[0].norm`."""
    stack = node.meta.get("nn_module_stack") if node is not None else None
    if not stack:
        return ""
    path = str(list(stack.values())[-1][0])
    path = _STEP.sub(lambda step: f".{step[1] or step[2]}", _ROOT.sub("", path))
    return ".".join(part for part in path.split(".") if part)


_names: dict[tuple[int, int], str] = {}
"""The path of a module below another, by the ids of both: a guess, as an id may come back, so `_name_in` looks there."""
_MOST_NAMES = 20_000


def _path_of(modules: Sequence[torch.nn.Module]) -> str:
    """The path from the first of some modules, each of which calls the next, to the last."""
    path: list[str] = []
    parent: torch.nn.Module | None = None
    for module in modules:
        if isinstance(module, fx.GraphModule):
            continue
        if parent is not None and module is not parent:
            name = _name_in(parent, module)
            path = [*path, name] if name is not None else []
        parent = module
    # The wrapper of torch.compile around a module is not part of the model.
    return ".".join(part for part in ".".join(path).split(".") if part not in {"", "_orig_mod"})


def _name_in(parent: torch.nn.Module, child: torch.nn.Module) -> str | None:
    """The path of a module below another; None if there is none."""
    pair = id(parent), id(child)
    name = _names.get(pair)
    if name is None or _at(parent, name) is not child:
        name = next((path for path, module in parent.named_modules() if module is child), None)
        if name is not None:
            if len(_names) >= _MOST_NAMES:
                _names.clear()
            _names[pair] = name
    return name


def _at(parent: torch.nn.Module, name: str) -> torch.nn.Module | None:
    module: torch.nn.Module | None = parent
    for part in name.split("."):
        # `get_submodule` takes twenty times as long, attributes ten times, and this is once for each launch.
        module = module._modules.get(part) if module is not None else None  # noqa: SLF001 - see above
    return module
