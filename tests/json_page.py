"""The page about `--json`, read: the keys that a row has with their types, and the type that JSON has for an annotation."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

from npu_emulator.clock.timeline import Span

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "json.md"
_NUMBERS, _TEXTS = (int, float), (str, Path)


def rows(text: str) -> list[tuple[str, str]]:
    """The rows of the tables with two columns: of what, and the keys."""
    return [row for row in re.findall(r"^\| (.+?) \| (.*) \|$", text, re.MULTILINE) if row[1] != "keys"]


def keys(row: str) -> list[tuple[str, str]]:
    """The keys of a row with their types: a string, where none is given."""
    return [(name, kind) for _, name, kind in nested_keys(row)]


def nested_keys(row: str) -> list[tuple[str, str, str]]:
    """The keys of a row, each with the key in whose brackets it stands (empty where in none) and its type."""
    found: list[tuple[str, str, str]] = []
    outer, last = [""], ""
    for token in re.finditer(r"as `(\w+)`|`(\w+)(?:: ([a-z ]+))?`|([()])", row):
        alike, name, kind, bracket = token.groups()
        if bracket == "(":
            outer.append(last)
        elif bracket == ")":
            outer.pop()
        elif alike:
            found += [(outer[-1], key, kind) for parent, key, kind in found if parent == alike]
        else:
            found.append((outer[-1], name, kind or "string"))
            last = name
    return found


def fields(kind: type[Any]) -> list[tuple[str, str]]:
    """The fields of a dataclass or a named tuple, with the types that JSON has for them."""
    hints = typing.get_type_hints(kind, localns={"Span": Span})
    names = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else hints
    return [(name, _json(hints[name])) for name in names]


def kind_of(value: object) -> str:
    """The type of a value that was read from JSON."""
    for kind, name in ((bool, "boolean"), (str, "string"), (_NUMBERS, "number"), (list, "list"), (dict, "object")):
        if isinstance(value, kind):  # type: ignore[arg-type]
            return name
    return "null"


def _json(hint: Any) -> str:
    origin = get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(sorted((_json(part) for part in get_args(hint)), key=lambda name: name == "null"))
    if origin is typing.Literal:
        return kind_of(get_args(hint)[0])
    plain = origin or hint
    for kind, name in (
        (type(None), "null"),
        (bool, "boolean"),
        (_NUMBERS, "number"),
        (_TEXTS, "string"),
        ((tuple, list), "list"),
    ):
        if issubclass(plain, kind):  # type: ignore[arg-type]
            return name
    assert dataclasses.is_dataclass(plain) or issubclass(plain, Mapping), plain
    return "object"
