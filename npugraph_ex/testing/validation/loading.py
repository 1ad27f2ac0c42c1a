"""Finds the replacements of a module: imports it, calls the named function, and compares the registry before and after."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from npugraph_ex.fusion.registry import USER_RULES
from npugraph_ex.fusion.rule import PreparedRule
from npugraph_ex.testing.arguments import checked
from npugraph_ex.testing.rule_places import RulesNotFoundError, a_folder, no_module, split


@checked
def load_rules(spec: str, *, registration: int = 0) -> tuple[PreparedRule, ...]:
    """Import a module and return the replacements that it registers with ``register_replacement``.

    Args:
        spec: "module", "package.module" or "path/to/file.py", and, after a colon if only a part is meant, the name
            of a search function, or of a function without required arguments that registers when it is called.
        registration: of replacements with one name, unregister all but this one, from 1 in the order of registration; 0
            keeps all.

    Raises:
        RulesNotFoundError: there is no such module or name, importing it or the call failed, or nothing is registered.
    """
    found = _loaded(spec)
    if not registration:
        return found
    by_name: dict[str, list[PreparedRule]] = {}
    for rule in USER_RULES.snapshot():
        by_name.setdefault(rule.rule.name, []).append(rule)
    others = [
        rule
        for name in dict.fromkeys(rule.rule.name for rule in found)
        for number, rule in enumerate(by_name[name], start=1)
        if len(by_name[name]) > 1 and number != registration
    ]
    USER_RULES.drop(others)
    dropped = {rule.key for rule in others}
    return tuple(rule for rule in found if rule.key not in dropped)


def _loaded(spec: str) -> tuple[PreparedRule, ...]:
    source, name = split(spec)
    before = USER_RULES.snapshot()
    module = load_module(source)
    found = _new(before) or _of_module(module)
    if not name:
        if not found:
            raise RulesNotFoundError(
                f"{source} registers no replacement when it is imported; if a function of it does, name that: "
                f"{source}:function."
            )
        return found
    target = getattr(module, name, None)
    named = tuple(rule for rule in found if rule.rule.search is target or rule.rule.name.endswith(f".{name}"))
    if named:
        return named
    if target is None:
        names = ", ".join(rule.rule.name for rule in found) or "none"
        raise RulesNotFoundError(f"{source} has no {name!r}; the replacements that it registers are: {names}.")
    return _registered_by(target, source, name)


def _new(before: Sequence[PreparedRule]) -> tuple[PreparedRule, ...]:
    return tuple(rule for rule in USER_RULES.snapshot() if not any(rule is earlier for earlier in before))


def _of_module(module: ModuleType) -> tuple[PreparedRule, ...]:
    """The registrations of a module that was imported earlier."""
    own = module.__name__
    return tuple(rule for rule in USER_RULES.snapshot() if getattr(rule.rule.search, "__module__", None) == own)


def load_module(source: str) -> ModuleType:
    """Import a module by its name or from a .py file.

    Raises:
        RulesNotFoundError: there is none, or importing it failed.
    """
    try:
        return _from_file(Path(source)) if source.endswith(".py") else _by_name(source)
    except (RulesNotFoundError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise RulesNotFoundError(f"importing {source} failed{_where(error, source)}: {_said(error)}") from error


def _by_name(name: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        spec = None
        if not (error.name and name.startswith(error.name)):
            raise
    if spec is None:
        raise no_module(name)
    if spec.origin is None:
        raise a_folder(name)
    return importlib.import_module(name)


def _from_file(path: Path) -> ModuleType:
    resolved = path.resolve()
    known = next((m for m in sys.modules.values() if getattr(m, "__file__", None) == str(resolved)), None)
    if known is not None:
        return known
    if resolved.stem.isidentifier() and _is_package(resolved.parent):
        return _of_package(resolved)
    spec = importlib.util.spec_from_file_location(path.stem, resolved)
    if spec is None or spec.loader is None:
        raise RulesNotFoundError(f"{str(path)!r} cannot be loaded as Python.")
    module = importlib.util.module_from_spec(spec)
    # What stands beside the file is importable, as if it were run as a script.
    sys.path.insert(0, str(resolved.parent))
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]  # or the next attempt would find half a module
        raise
    return module


def _is_package(folder: Path) -> bool:
    return folder.name.isidentifier() and (folder / "__init__.py").is_file()


def _of_package(path: Path) -> ModuleType:
    """Import a file by its dotted name, from the folder above its outermost package, so that its relative imports work."""
    parts = [] if path.stem == "__init__" else [path.stem]
    folder = path.parent
    while _is_package(folder):
        parts.insert(0, folder.name)
        folder = folder.parent
    name = ".".join(parts)
    sys.path.insert(0, str(folder))
    module = importlib.import_module(name)
    if not (module.__file__ and path.samefile(module.__file__)):
        raise RulesNotFoundError(
            f"{str(path)!r} is the module {name}, and Python imports that from {module.__file__}; two packages have one "
            f"name. Uninstall the other one, or install {str(folder)!r} in editable form: pip install -e."
        )
    return module


def _registered_by(target: object, source: str, name: str) -> tuple[PreparedRule, ...]:
    """The registrations of one call of a function."""
    named = f"{source}:{name}"
    if not callable(target):
        raise RulesNotFoundError(
            f"{named} is of type {type(target).__name__}, no search function of a registered replacement."
        )
    required = [
        parameter.name
        for parameter in inspect.signature(target).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD}
    ]
    if required:
        raise RulesNotFoundError(
            f"{named} is no search function of a registered replacement, and cannot be called to register one: "
            f"it wants {', '.join(required)}."
        )
    before = USER_RULES.snapshot()
    try:
        target()
    except (Exception, SystemExit) as error:
        raise RulesNotFoundError(f"calling {named}() failed{_where(error, source)}: {_said(error)}") from error
    found = _new(before)
    if not found:
        raise RulesNotFoundError(f"{named}() registers no replacement that was not there before.")
    return found


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    told = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if not isinstance(error, ModuleNotFoundError):
        return told
    return f"{told}. Install it for {sys.executable}, or name the folder that holds it in PYTHONPATH"


def _where(error: BaseException, source: str) -> str:
    """The last line of the user's own files in the traceback, with the file where it is another than ``source``."""
    stem = Path(source).stem if source.endswith(".py") else source.rpartition(".")[2]
    at: list[tuple[str, int | None]]
    if isinstance(error, SyntaxError):
        at = [(error.filename or "", error.lineno)] if error.lineno else []
    else:
        frames = traceback.extract_tb(error.__traceback__)
        at = [(one.filename, one.lineno) for one in frames if Path(one.filename).stem == stem or _is_own(one.filename)]
    if not at:
        return ""
    file, line = at[-1]
    return f" at line {line}" if Path(file).stem == stem else f" at line {line} of {file}"


_LIBRARIES = tuple(f"{folder}/" for folder in (Path(__file__).parents[2], sysconfig.get_path("stdlib")))


def _is_own(file: str) -> bool:
    """Whether a file belongs to the user: no library that is installed, and nothing of this one."""
    return not file.startswith(("<", *_LIBRARIES)) and "site-packages" not in Path(file).parts
