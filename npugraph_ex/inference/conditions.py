"""What Dynamo's guards ask of globals, classes and functions, as expressions that another process can evaluate.

Torch writes down guards on the values of arguments; it leaves out those on identities and on globals, which mean nothing
elsewhere as they are. Each of those becomes an expression, such as ``G['LIMIT']`` or ``hasattr(G['settings'], 'scale')``, whose
value is known by its content. `Conditions` asks at each call whether all still hold.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import operator
import re
from collections.abc import Mapping
from types import CodeType, MethodType
from typing import Any

from npugraph_ex._torch_private.precompile import Guard, argument_of_guard
from npugraph_ex.cache.fingerprint import fingerprint
from npugraph_ex.report.names import program_name

OF_VALUES = frozenset(
    {"BUILTIN_MATCH", "CLASS_MATCH", "CLOSURE_MATCH", "CONSTANT_MATCH", "EQUALS_MATCH", "FUNCTION_MATCH", "ID_MATCH"}
)
"""Kinds of guards on a value itself."""
_LENGTH = dict.fromkeys(("SEQUENCE_LENGTH", "DICT_KEYS", "DICT_KEYS_MATCH", "MAPPING_KEYS_CHECK"), "len({0})")
_MEMBER = dict.fromkeys(("DICT_CONTAINS", "DICT_NOT_CONTAINS", "SET_CONTAINS", "SET_NOT_CONTAINS"), "{1!r} in {0}")
_EXPRESSIONS = {
    **dict.fromkeys(OF_VALUES, "{0}"),
    **_LENGTH,
    **_MEMBER,
    "HASATTR": "hasattr({0}, {1!r})",
    "NOT_NONE_MATCH": "{0} is None",
    "NOT_PRESENT_IN_GENERIC_DICT": "{1!r} in {0}.__dict__",
    "TENSOR_MATCH": "({0}.dtype, {0}.shape, {0}.stride(), {0}.device.type, {0}.requires_grad, type({0}))",
    "TYPE_MATCH": "type({0})",
}
"""By the kind of a guard, of a name and of what the guard was made with."""
_COPIED = re.compile(r"\bdict\((.+?\.__dict__)\)")
"""Dynamo copies the dictionary of a class to read one attribute."""
_GLOBAL = re.compile(r"G\['(\w+)'\]")


def expression_of(guard: Guard) -> tuple[str, str] | None:
    """The expression of a guard, and its value by content; None for a guard of another kind, or on what is not there."""
    said = argument_of_guard(guard)
    if not guard.has_value or guard.guard_type not in _EXPRESSIONS or not _is_plain(said):
        return None
    form = _EXPRESSIONS[guard.guard_type]
    try:
        value = eval(form.format("value", said), {"value": guard.value})  # noqa: S307 - one of the forms above
    except (RuntimeError, TypeError):  # as of a sparse tensor, which has no strides
        return None
    return form.format(_COPIED.sub(r"\1", guard.name), said), fingerprint(value)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def root(expression: str) -> str:
    """The variable that an expression starts from, beneath calls such as ``type(...)``."""
    names = [part.id for part in ast.walk(ast.parse(expression, mode="eval")) if isinstance(part, ast.Name)]
    return next((name for name in names if not hasattr(builtins, name)), "")


def modules(imports: Mapping[str, str]) -> dict[str, object]:
    """The modules by the names that Dynamo gave them, those of torch left out."""
    return {
        name: importlib.import_module(module) for name, module in imports.items() if module.split(".")[0] != "torch"
    }


class Conditions:
    """The expressions of one compilation, in this process.

    What holds is asked of the identities first, because a fingerprint takes long: an object that is the same one as before has the
    same content, or is one of which no content counts.

    Args:
        values: by expression, the value by content.
        f_globals: the function's globals.
        imports: the modules by Dynamo's names.
    """

    def __init__(self, values: Mapping[str, str], f_globals: Mapping[str, Any], imports: Mapping[str, str]) -> None:
        self._values = dict(values)
        self._modules = modules(imports)
        parts = [_GLOBAL.sub(self._from_module, one) for one in values]
        self._all = _compiled(f"[{','.join(parts)}]") if parts else None
        self._each = [_compiled(one) for one in parts]
        self._names = {"G": f_globals, "M": self._modules}
        self._seen: list[Any] = []

    def _from_module(self, found: re.Match[str]) -> str:
        return f"M['{found[1]}']" if found[1] in self._modules else found[0]

    def hold(self, f_locals: Mapping[str, Any]) -> bool:
        """Whether all hold in a call whose arguments, and what the function closes over, have these values."""
        if self._all is None:
            return True
        try:
            now = eval(self._all, self._names, f_locals)  # noqa: S307 - from a file that only this user can write
        except Exception:  # noqa: BLE001 - whatever it raises, something is not there
            return False
        if self._seen and (all(map(operator.is_, now, self._seen)) or all(map(_same, now, self._seen))):
            return True
        if self.broken(f_locals) is not None:
            return False
        self._seen = now
        return True

    def broken(self, f_locals: Mapping[str, Any]) -> str | None:
        """The first that does not hold, in words; None if all do."""
        for (expression, known), code in zip(self._values.items(), self._each, strict=True):
            try:
                value = eval(code, self._names, f_locals)  # noqa: S307 - as above
            except Exception as error:  # noqa: BLE001 - as above
                return f"{program_name(expression)} is not there: {error}"
            if fingerprint(value) != known:
                return f"{self._class_attribute(expression, f_locals) or program_name(expression)} has changed"
        return None

    def _class_attribute(self, expression: str, f_locals: Mapping[str, Any]) -> str:
        """Dynamo's ``type(self).__mro__[1].__dict__['K']`` as ``Base.K``; empty for what is no attribute of a class."""
        found = re.match(r"(?:len\()?(type\(.*\)(?:\.__mro__\[\d+\])?)\.__dict__\['(\w+)'\](.*?)\)?$", expression)
        if found is None:
            return ""
        owner = eval(_GLOBAL.sub(self._from_module, found[1]), dict(self._names), f_locals)  # noqa: S307 - as above
        return f"{owner.__qualname__}.{found[2]}{found[3]}"


def _same(now: Any, before: Any) -> bool:
    """Whether a value is the one before; a method is made anew at each look, and so are numbers and layouts."""
    return now is before or (
        isinstance(now, (MethodType, int, tuple)) and type(now) is type(before) and bool(now == before)
    )


def _compiled(expression: str) -> CodeType:
    return compile(expression, "<guards>", "eval")
