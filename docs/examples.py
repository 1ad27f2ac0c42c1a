"""An anchor for each public name, and for methods, at the block of `reference/examples.md` that shows it, for links.

The blocks are the same in both languages, so what is found in the English text is right for the Chinese page. A name's block is the
first one that uses it, below the heading of its module if there is one; an import alone is no use. A method's is below its class's.
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
_HEADING_OR_BLOCK = re.compile(r"^###? (?P<title>[^\n]+)$|^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def block_of(owner: str, name: str) -> int:
    """The number of the block that shows a name of a module, a method of a class, or a class itself, from 0.

    Raises:
        LookupError: no block does.
    """
    using = [(owner not in titles, number) for number, (titles, used) in enumerate(_blocks()) if name in used]
    if owner[0].isupper():
        using = [
            (False, number)
            for number, (titles, used) in enumerate(_blocks())
            if owner in titles and name in {owner, *used}
        ]
    if not using:
        raise LookupError(f"docs/{PAGE}.md has no example of {owner}.{name}")
    return min(using)[1]


def is_shown(owner: str, name: str) -> bool:
    """Whether a block shows the name."""
    try:
        return block_of(owner, name) >= 0
    except LookupError:
        return False


def uses(owner: str, name: str, method: str) -> bool:
    """Whether the block that shows a public class uses its method, too."""
    return method in _blocks()[block_of(owner, name)][1]


@cache
def _blocks() -> tuple[tuple[list[str], frozenset[str]], ...]:
    """For each block: the words of the heading above it, and the names that it uses."""
    text, title, found = (Path(__file__).parent / f"{PAGE}.md").read_text(encoding="utf-8"), "", []
    for part in _HEADING_OR_BLOCK.finditer(text):
        if part["title"]:
            title = part["title"]
        else:
            found.append((re.findall(r"[\w.]+", title), frozenset(_used(part["code"]))))
    return tuple(found)


def _used(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id


def anchor(owner: str, name: str) -> str:
    """The address of the example of a name."""
    return f"{owner}.{name}"


def add_anchors(page: nodes.document, names: Iterable[tuple[str, str]]) -> None:
    """Give what introduces each block, or the block, the anchors of the names that it shows."""
    from docutils import nodes

    blocks = [node for node in page.findall(nodes.literal_block) if node.get("language") == "python"]
    for owner, name in names:
        block = blocks[block_of(owner, name)]
        before = block.parent[max(block.parent.index(block) - 1, 0)]
        (before if isinstance(before, nodes.paragraph) else block)["ids"].append(anchor(owner, name))
