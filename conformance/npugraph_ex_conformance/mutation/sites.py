"""Where faults can be made in a module, and the function of the running program with one of them in it.

A fault changes the code of one function in place (``__code__``), so whoever holds the function has the fault. It is written in
some ninety lines on `ast`: mutmut and cosmic-ray change files, and so would import torch and the library anew for each fault, which
takes a hundred times as long as most examples.
"""

from __future__ import annotations

import ast
import copy
import gc
import hashlib
import inspect
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

_SHIFTED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class FaultIdentity(NamedTuple):
    """What a fault is, without its line; a `FaultSite` has the same fields."""

    module: str
    function: str
    change: str
    text: str
    turn: int = 0


@dataclass(frozen=True, order=True)
class FaultSite:
    """A fault that can be made.

    Attributes:
        module: its name.
        function: the outermost function of the module, or the method, that has it.
        line: in the module.
        position: of the changed node among those of the function, in the order of `ast.walk`.
        change: what is done to the node.
        text: the source of what is changed: an expression, a condition, a statement with a number or a truth.
        turn: which it is, of the changes of this kind to the same text in the function.
    """

    module: str
    function: str
    line: int
    position: int
    change: str
    text: str
    turn: int

    @property
    def name(self) -> str:
        """For people, and in files."""
        return f"{self.module}:{self.line} {self.function}: {self.change}"

    @property
    def identity(self) -> FaultIdentity:
        """What it is, wherever the function stands and whatever else is in it."""
        return FaultIdentity(self.module, self.function, self.change, self.text, self.turn)


def sites(module: str) -> list[FaultSite]:
    """All faults that can be made in a module."""
    found, source = [], Path(parsed(module)[1]).read_bytes().splitlines()
    for function, tree in _functions(module).items():
        around = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
        turns: Counter[tuple[str, str]] = Counter()
        for position, node in enumerate(ast.walk(tree)):
            line = _line(node, tree)
            for change in _changes(node):
                text = _text(node, around, source)
                found.append(FaultSite(module, function, line, position, change, text, turns[change, text]))
                turns[change, text] += 1
    return found


def _text(node: ast.AST, around: Mapping[ast.AST, ast.AST], source: Sequence[bytes]) -> str:
    """The source of a node that is changed, in one line; of a compound statement its condition, of a function what it takes."""
    while isinstance(node, (ast.Constant, ast.UnaryOp, ast.keyword, ast.arguments)):  # a number says little
        node = around[node]
    if isinstance(node, _FUNCTIONS):
        return f"{node.name}({ast.unparse(node.args)})"
    if isinstance(node, (ast.If, ast.While)):
        node = node.test
    part: Any = node
    first, last = (part.target, part.ifs[-1]) if isinstance(node, ast.comprehension) else (part, part)
    lines = list(source[first.lineno - 1 : last.end_lineno])
    lines[-1] = lines[-1][: last.end_col_offset]
    lines[0] = lines[0][first.col_offset :]
    return b" ".join(b" ".join(lines).split()).decode()


def chosen(modules: Sequence[str], count: int) -> list[FaultSite]:
    """So many of the faults of some modules, the same everywhere: by a hash of what they are."""
    every = [site for module in modules for site in sites(module)]
    return sorted(sorted(every, key=by_chance)[:count])


def by_chance(site: FaultSite) -> bytes:
    """A key that orders faults by chance, the same everywhere and as long as the fault is there."""
    return hashlib.sha256(repr(tuple(site.identity)).encode()).digest()


@contextmanager
def made(site: FaultSite) -> Iterator[None]:
    """The fault, for the length of a block; functions that the function has made before have it, too.

    Raises:
        LookupError: the function cannot be reached by its name.
    """
    function, code = running(site.module, site.function), _code(site)
    with ExitStack() as stack:
        for inner, changed in _made_before(function.__code__, code):
            stack.enter_context(with_code(inner, changed))
        stack.enter_context(with_code(function, code))
        yield


def _made_before(before: CodeType, after: CodeType) -> Iterator[tuple[FunctionType, CodeType]]:
    """Nested functions, such as those of a rule, whose code differs between ``before`` and ``after``, with the new code."""
    changed = dict(_codes_in(after))
    for key, old in _codes_in(before):
        new = changed.get(key, old)
        if (
            new == old or new.co_freevars != old.co_freevars
        ):  # the fault is elsewhere, or takes the variable that it names
            continue
        yield from ((one, new) for one in _functions_with(old))
        yield from _made_before(old, new)


def _functions_with(code: CodeType) -> list[FunctionType]:
    """The functions of the running program with a code; those that are frozen away from collections are found as well."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    found = [one for one in gc.get_referrers(code) if isinstance(one, FunctionType) and one.__code__ is code]
    if frozen:
        gc.freeze()
    return found


def _codes_in(code: CodeType) -> Iterator[tuple[tuple[str, int, int], CodeType]]:
    """The codes of the functions in a function, by name, line and turn."""
    turns: Counter[tuple[str, int]] = Counter()
    for part in code.co_consts:
        if isinstance(part, CodeType):
            key = part.co_name, part.co_firstlineno
            yield (*key, turns[key]), part
            turns[key] += 1


@contextmanager
def with_code(function: FunctionType, code: CodeType) -> Iterator[None]:
    """A function with other code, for the length of a block.

    Raises:
        LookupError: the code is that of another closure.
    """
    before = function.__code__
    if code.co_freevars != before.co_freevars:
        raise LookupError(f"{function.__qualname__}: the function is a closure of its decorator's")
    function.__code__ = code
    try:
        yield
    finally:
        function.__code__ = before


def lines_of_function(site: FaultSite) -> range:
    """The lines in the innermost function that has the fault."""
    function = _functions(site.module)[site.function]
    return range(function.body[0].lineno, (function.end_lineno or function.lineno) + 1)


def lines_of(site: FaultSite) -> range:
    """The lines of the innermost statement that has the fault; of a compound one those of its head."""
    function = _functions(site.module)[site.function]
    node = _node(function, site)
    if isinstance(node, ast.FunctionDef):  # an early return
        first = next((one for one in node.body if not _is_text(one)), node.body[-1])
        return range(first.lineno, (first.end_lineno or first.lineno) + 1)
    line = _line(node, function)
    inside = [
        one for one in ast.walk(function)
        if isinstance(one, ast.stmt) and one is not function and one.lineno <= line <= (one.end_lineno or one.lineno)
    ]  # fmt: skip
    statement = max(inside, key=lambda one: (one.lineno, -(one.end_lineno or one.lineno)), default=function)
    body = getattr(statement, "body", None)
    end = body[0].lineno if body else (statement.end_lineno or statement.lineno) + 1
    return range(statement.lineno, max(end, line + 1))


def _node(function: ast.FunctionDef, site: FaultSite) -> ast.AST:
    return next(node for position, node in enumerate(ast.walk(function)) if position == site.position)


def _is_text(statement: ast.stmt) -> bool:
    """A docstring, which runs nothing."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _line(node: ast.AST, function: ast.FunctionDef) -> int:
    """Where a node stands; a part of a comprehension has no line of its own."""
    found: int = getattr(node.target if isinstance(node, ast.comprehension) else node, "lineno", function.lineno)
    return found


def _names_super(node: ast.AST) -> bool:
    """Whether it has `super`, a variable of the closure: without it the code has another closure, which no function takes."""
    return any(isinstance(part, ast.Name) and part.id == "super" for part in ast.walk(node))


def _changes(node: ast.AST) -> Iterator[str]:  # noqa: C901 - one test a change
    """What can be done to a node."""
    if isinstance(node, (ast.If, ast.IfExp, ast.While)):
        yield "condition negated"
    if isinstance(node, ast.If):
        yield "condition dropped"
    if isinstance(node, ast.comprehension) and node.ifs:
        yield "filter dropped"
    if isinstance(node, ast.BoolOp):
        yield "first operand dropped"
        yield "last operand dropped"
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _SHIFTED:
        yield "comparison shifted"
    if (
        isinstance(node, ast.Call)
        and len(node.args) > 1
        and not any(isinstance(arg, ast.Starred) for arg in node.args[:2])
    ):
        yield "arguments swapped"
    if isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and not _names_super(node)
    ):
        yield "statement removed"
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "truth flipped"
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield "number increased"
    if isinstance(node, _FUNCTIONS):
        yield "early return"


def _change(node: Any, change: str) -> Any:  # noqa: C901 - one line a change
    """The node with a change; it may be another node."""
    match change:
        case "condition negated":
            node.test = ast.UnaryOp(ast.Not(), node.test)
        case "condition dropped":
            node.test = ast.Constant(value=True)
        case "filter dropped":
            node.ifs = node.ifs[1:]
        case "first operand dropped":
            node.values = node.values[1:]
            return node if len(node.values) > 1 else node.values[0]
        case "last operand dropped":
            node.values = node.values[:-1]
            return node if len(node.values) > 1 else node.values[0]
        case "comparison shifted":
            node.ops[0] = _SHIFTED[type(node.ops[0])]()
        case "arguments swapped":
            node.args[:2] = node.args[1], node.args[0]
        case "statement removed":
            return ast.Pass()
        case "truth flipped":
            node.value = not node.value
        case "number increased":
            node.value += 1
        case "early return":
            node.body = [ast.Return(value=None), *node.body]
    return node


class _Changer(ast.NodeTransformer):
    """Changes one node, which is known by its identity."""

    def __init__(self, node: ast.AST, change: str) -> None:
        self._node, self._change = node, change

    def visit(self, node: ast.AST) -> Any:
        return _change(node, self._change) if node is self._node else self.generic_visit(node)


def _code(site: FaultSite) -> CodeType:
    """The code of the function with the fault."""
    tree, source = parsed(site.module)
    tree = copy.deepcopy(tree)
    function = functions_of(tree)[site.function]
    node = _node(function, site)
    module = compile(ast.fix_missing_locations(_Changer(node, site.change).visit(tree)), source, "exec")
    return code_in(module, site.function)


def source_with(site: FaultSite) -> str:
    """The source of the module with the fault; all other functions keep their text, and what stands above its line."""
    tree, path = parsed(site.module)
    function = functions_of(copy.deepcopy(tree))[site.function]
    first = min([function.lineno, *(node.lineno for node in function.decorator_list)])
    text = ast.unparse(ast.fix_missing_locations(_Changer(_node(function, site), site.change).visit(function)))
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    lines[first - 1 : function.end_lineno] = textwrap.indent(text, " " * function.col_offset).splitlines()
    return "\n".join([*lines, ""])


def code_in(module: CodeType, name: str) -> CodeType:
    """The code of a function, in that of its module."""
    for part in name.split("."):
        module = next(c for c in module.co_consts if isinstance(c, CodeType) and c.co_name == part)
    return module


@lru_cache(maxsize=64)
def parsed(module: str) -> tuple[ast.Module, str]:
    """The tree of a module, which nobody may change, and its file."""
    path = Path(str(import_module(module).__file__))
    return ast.parse(path.read_text(encoding="utf-8")), str(path)


def _functions(module: str) -> dict[str, ast.FunctionDef]:
    return functions_of(parsed(module)[0])


def functions_of(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """The functions of a module and the methods of its classes, by name; one that is defined twice is left out."""
    found: dict[str, list[ast.FunctionDef]] = {}
    for node in tree.body:
        inner = node.body if isinstance(node, ast.ClassDef) else [node]
        for one in inner:
            if isinstance(one, ast.FunctionDef):
                name = f"{node.name}.{one.name}" if isinstance(node, ast.ClassDef) else one.name
                found.setdefault(name, []).append(one)
    return {name: functions[0] for name, functions in found.items() if len(functions) == 1}


def running(module: str, name: str) -> FunctionType:
    """The function of the running program, without what decorators put around it.

    Raises:
        LookupError: there is none of this name.
    """
    owner: Any = import_module(module)
    for part in name.split("."):
        owner = inspect.getattr_static(owner, part)
    for attribute in ("__func__", "fget", "func"):  # a static or class method, a property, a cached one
        owner = getattr(owner, attribute, owner)
    found = inspect.unwrap(owner)
    if not isinstance(found, FunctionType) or found.__code__.co_name != name.rpartition(".")[2]:
        raise LookupError(f"{module} {name}: not a function of the running program")
    return found
