"""What the operator documents of a checkout list for each argument: dtypes, layouts and modes. Reads Markdown; calls nothing.

A document names its operator in its first heading and has a list item for each argument, `- **name** (type)：text`, below the
heading of the arguments. A listed value is a dtype, a name or a number that stands behind a word of listing, or a number or a
truth value of which the text says what it means.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from npugraph_ex.errors import UsageError

DTYPES = (
    "float8_e4m3fn|float8_e5m2|float8_e8m0fnu|float4_e2m1fn_x2|float16|bfloat16|float32|float64|hifloat8|complex64|"
    "quint4x2|uint8|uint16|uint32|uint64|int4|int8|int16|int32|int64|float|double|bool"
)
_TITLE = re.compile(r"^# *(?:（beta）)?torch_npu\.(?:atb\.)?(\w+)\b(?!\.)", re.MULTILINE)
_ARGUMENTS = re.compile(r"^## 参数说明.*?$(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_ARGUMENT = re.compile(
    r"^- *(?:\*\*|<strong>)(\w+)(?:\*\*|</strong>) *[（(](\w+)[^）)]*[）)](.*?)(?=^- |^ *>|\Z)",
    re.MULTILINE | re.DOTALL,
)
_BETWEEN = r"(?:\s|、|，|,|和|或|及|与|/|以|torch\.|torch_npu\.)*"
_LISTS = r"(?:支持|取值|包括|可选值|传入)[^(（。；;、，\[\n\d]{0,12}?"
_DTYPE_LIST = re.compile(rf"{_LISTS}{_BETWEEN}((?:(?:{DTYPES})(?![A-Za-z0-9_]){_BETWEEN})+)")
_NAME_LIST = re.compile(rf"{_LISTS}((?:[\"“'‘]?[A-Za-z][A-Za-z_0-9]{{2,}}[\"”'’]?{_BETWEEN})+)(?![A-Za-z0-9_>=<.*-])")
_NUMBERS = rf"(-?\d+(?:{_BETWEEN}-?\d+)*)(?![\d~^.]|\s*(?:维|个|位|种|的|对齐|\*|-D|D))"
_NUMBER_LIST = re.compile(
    rf"(?:支持|取值|传入|配置)(?:(?!大于(?!等于)|小于(?!等于)|长度)[^。；;、，\[\nA-Za-z\d]){{0,12}}?{_NUMBERS}"
)
_ONLY_NOW = re.compile(rf"当前(?:版本)?[仅只]支持[^。；;、，\[\nA-Za-z\d]{{0,12}}?{_NUMBERS}")
_ONLY_NONE = re.compile(r"当前仅支持传入默认值None。?\s*\Z")
_MEANS = re.compile(r"(?<![\d.^\-])((?:-?\d+/)*-?\d+)(?:（[^）]*）)?-?(?:表示|代表|为[A-Za-z])")
_ANY_DTYPE, _OWN_DTYPE = re.compile(r"数据类型[^。；，]*"), re.compile(r"数据类型为[^。；，]*")


class Listed(NamedTuple):
    """One value that a document lists: an operator, an argument, its type as the document writes it, and the value."""

    operator: str
    argument: str
    type: str
    value: str


def listed(folder: Path, pattern: str = "*") -> Iterator[Listed]:
    """Every listed value of the documents below a folder whose names match, in the order of those, each value once.

    Raises:
        UsageError: there is no such document.
    """
    files = [
        file for file in sorted(folder.rglob("*torch_npu-*.md")) if fnmatch(file.stem, pattern) or pattern in file.stem
    ]
    if not files:
        raise UsageError(
            f"no document torch_npu-*.md below {str(folder)!r} matches {pattern!r}; name a checkout of op-plugin"
        )
    for file in files:
        text = re.sub(r"[\\`$]", "", file.read_text(encoding="utf-8", errors="replace"))
        title, arguments = _TITLE.search(text), _ARGUMENTS.search(text)
        if title and arguments:
            for name, kind, said in _ARGUMENT.findall(arguments[1]):
                yield from (Listed(title[1], name, kind, value) for value in dict.fromkeys(_values(name, kind, said)))


def _values(name: str, kind: str, said: str) -> Iterator[str]:
    if _ONLY_NONE.search(said):
        return
    if kind.startswith("Tensor") or "dtype" in name or name == "dst_type":
        named = said if kind.startswith("Tensor") else _OWN_DTYPE.sub("", said)
        for found in _DTYPE_LIST.findall(named):
            yield from re.findall(DTYPES, found)
    if kind.startswith("int") and "world_size" not in name:  # a group has the ranks that it has
        said = _ANY_DTYPE.sub("", said)
        for found in _ONLY_NOW.findall(said) or (*_NUMBER_LIST.findall(said), *_MEANS.findall(said)):
            yield from re.findall(r"-?\d+", found)
    elif kind.startswith("str"):
        for found in _NAME_LIST.findall(said):
            yield from (word for word in re.findall(r"[A-Za-z][A-Za-z_0-9]+", found) if word != "None")
    elif kind == "bool":
        only = re.search(r"仅支持(True|False)", said)
        yield from [only[1]] if only else [value for value in ("True", "False") if value in said]
