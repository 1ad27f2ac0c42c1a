"""An anchor for each public name at the block of `reference/examples.md` that shows it, for the links of the reference.

The blocks are the same in both languages, so what is found in the English text is right for the Chinese page. A name's block is the
first one that uses it, below the heading of its module if there is one; an import alone is no use.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from docutils import nodes

PAGE = "reference/examples"
_HEADING_OR_BLOCK = re.compile(r"^## (?P<title>[^\n]+)$|^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def block_of(module: str, name: str) -> int:
    """The number of the block that shows a public name, from 0.

    Raises:
        LookupError: no block does.
    """
    using = [(module not in title.split(), number) for number, (title, used) in enumerate(_blocks()) if name in used]
    if not using:
        raise LookupError(f"docs/{PAGE}.md has no example of {module}.{name}")
    return min(using)[1]


@cache
def _blocks() -> tuple[tuple[str, frozenset[str]], ...]:
    """For each block: the heading above it, and the names that it uses."""
    text, title, found = (Path(__file__).parent / f"{PAGE}.md").read_text(encoding="utf-8"), "", []
    for part in _HEADING_OR_BLOCK.finditer(text):
        if part["title"]:
            title = part["title"]
        else:
            found.append((title, frozenset(_used(part["code"]))))
    return tuple(found)


def _used(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id


def anchor(module: str, name: str) -> str:
    """The address of the example of a public name."""
    block_of(module, name)
    return f"{module}.{name}"


def add_anchors(page: nodes.document, names: Iterable[tuple[str, str]]) -> None:
    """Give what introduces each block, or the block, the anchors of the names that it shows."""
    from docutils import nodes

    blocks = [node for node in page.findall(nodes.literal_block) if node.get("language") == "python"]
    for module, name in names:
        block = blocks[block_of(module, name)]
        before = block.parent[max(block.parent.index(block) - 1, 0)]
        (before if isinstance(before, nodes.paragraph) else block)["ids"].append(anchor(module, name))
