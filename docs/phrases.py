"""Chinese for what a program writes into a page: titles, cells and sentences of tables, and the sections of the options.

`docs/zh/phrases.toml` has the Chinese of each English phrase, by page. In a phrase, `{}` stands for a phrase with an entry of its
own, and `{=}` for anything, which stays as it is. An English phrase that changes finds no entry: `missing` and `unused` say so.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = Path(__file__).parent / "zh" / "phrases.toml"
_CODE = re.compile(r"`[^`]*`|<[^>]*>")
_NAME = re.compile(r"[^A-Za-z]*|.*[\d_/].*|bool,?")
_NEEDLESS_SPACE = re.compile(r" +(?=[，。；：）])|(?<=[，。；：（]) +")


class Phrases:
    """The phrases of one page; it remembers which of them a text had, and what it had besides."""

    def __init__(self, chinese: Mapping[str, str]) -> None:
        self._chinese = chinese
        self._patterns = {english: _pattern(english) for english in chinese if "{" in english}
        self.missing: list[str] = []
        self._used: set[str] = set()

    @property
    def unused(self) -> list[str]:
        """The English of the entries that no text had."""
        return [english for english in self._chinese if english not in self._used]

    def text(self, english: str) -> str:
        """The text in Chinese, line by line: a line of a table by its cells. Comments, and headings without an entry, stay."""
        return "\n".join(map(self._line, english.split("\n")))

    def _line(self, line: str) -> str:
        if line.startswith("| "):
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            return f"| {' | '.join(self._phrase(cell.strip()) for cell in cells)} |"
        if line.startswith("#"):
            marks, _, title = line.partition(" ")
            return f"{marks} {self._find(title) or title}"
        return line if line.startswith(("<!--", "|--")) else self._phrase(line)

    def _phrase(self, english: str) -> str:
        if all(_NAME.fullmatch(word) for word in _CODE.sub("", english).split()):
            return english
        found = self._find(english)
        if found is None:
            self.missing.append(english)
        return found or english

    def _find(self, english: str) -> str | None:
        if english in self._chinese:
            self._used.add(english)
            return self._chinese[english]
        for pattern, expression in self._patterns.items():
            match = expression.fullmatch(english)
            parts = match and [self._find(part) if name[0] == "p" else part for name, part in match.groupdict().items()]
            if parts and None not in parts:
                self._used.add(pattern)
                return _filled(self._chinese[pattern], parts)
        return None


def _filled(chinese: str, parts: list[str]) -> str:
    """The phrase with its parts, in their order, and no space beside a Chinese punctuation mark."""
    rest = iter(parts)
    return _NEEDLESS_SPACE.sub("", re.sub(r"\{=?\}", lambda _: next(rest), chinese))


def _pattern(english: str) -> re.Pattern[str]:
    """The phrase as a regular expression: a group named `p…` is a phrase, one named `k…` is kept."""
    parts = re.split(r"(\{=?\})", english)
    groups = {"{}": "(?P<p{0}>.+?)", "{=}": "(?P<k{0}>.+?)"}
    return re.compile(
        "".join(groups.get(part, re.escape(part)).replace("{0}", str(place)) for place, part in enumerate(parts))
    )


@cache
def _entries() -> Mapping[str, Mapping[str, str]]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def of(page: str) -> Phrases:
    """The phrases of a page, as Sphinx names it; none where the file has none."""
    return Phrases(_entries().get(page, {}))


def pages() -> Iterator[str]:
    """The pages with phrases."""
    yield from _entries()
