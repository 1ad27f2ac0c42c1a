"""Two languages from one tree: a page below `docs/zh` is read in place of the English page of the same name.

`sphinx-build -D language=zh_CN docs …` builds the Chinese site. Links, anchors and code are those of the English pages, so that
each page has one address in both languages. A page without a Chinese text stays English and says so. Tables that
a program writes are translated phrase by phrase: see phrases.py.

A Chinese page records which English text it translates. `python docs/languages.py` lists pages that are missing or out of date.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import phrases

DOCS = Path(__file__).parent
CHINESE = DOCS / "zh"
GENERATED = {"reference/speed-tables"}
"""The pages that a program writes, tables of numbers: they have no Chinese page."""
_RECORD = re.compile(r"\A---\nenglish: (\w+)\n---\n")
_TABLE = re.compile(r"<!-- table of (\w+).*?<!-- end of the table of \1 -->", re.DOTALL)
_COMMENT = re.compile(r"^ *<!--.*?-->\n", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"^(```+)(.*?)^\1$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^(#{1,6}) (.+)$", re.MULTILINE)
_MISSING = "```{note}\n本页还没有中文版，以下是英文原文。\n```\n\n"
_DOCSTRINGS = "\n.. note::\n\n   以下说明取自代码中的 docstring，所以是英文，与 ``help()`` 和编辑器里显示的一致。\n"
_STALE = "```{warning}\n英文原文在翻译之后有修改，本页可能不是最新内容。\n```\n\n"


def pages() -> Iterator[str]:
    """The English pages that a person wrote, as Sphinx names them."""
    for path in sorted(DOCS.rglob("*.md")):
        name = path.relative_to(DOCS).with_suffix("").as_posix()
        if not name.startswith(("zh/", "_", "api/", "example/")) and name not in GENERATED:
            yield name


def fingerprint(name: str) -> str:
    """A digest of an English page. Generated tables and comments do not count; what the page includes does."""
    return hashlib.sha256(_COMMENT.sub("", _with_included(name)).encode()).hexdigest()[:12]


def _with_included(name: str) -> str:
    """An English page, and after it the files that it includes, without generated tables."""
    path = DOCS / f"{name}.md"
    text = _TABLE.sub("", path.read_text(encoding="utf-8"))
    for included in re.findall(r"^```\{include\} (\S+\.md)$", text, re.MULTILINE):
        if not included.startswith(("_", "../_")):
            text += (path.parent / included).read_text(encoding="utf-8")
    return text


def state(name: str) -> str:
    """Whether the Chinese page is `missing`, `stale` (the English text changed since) or `current`."""
    path = CHINESE / f"{name}.md"
    if not path.exists():
        return "missing"
    record = _RECORD.match(path.read_text(encoding="utf-8"))
    return "current" if record and record[1] == fingerprint(name) else "stale"


def accept(name: str) -> None:
    """Record that the Chinese page says what the English one says today."""
    path = CHINESE / f"{name}.md"
    text = _RECORD.sub("", path.read_text(encoding="utf-8"))
    path.write_text(f"---\nenglish: {fingerprint(name)}\n---\n{text}", encoding="utf-8")


def headings(text: str) -> list[tuple[int, str]]:
    """The headings of a page: level and text. What stands in a fence is none."""
    return [(len(marks), title) for marks, title in _HEADING.findall(_FENCE.sub("", text))]


def chinese(name: str) -> str:
    """The source of a page of the Chinese site. Tables that are written by a program come from the English page."""
    english = (DOCS / f"{name}.md").read_text(encoding="utf-8")
    found = state(name)
    if found == "missing":
        return _MISSING + english
    tables = {table[1]: table[0] for table in _TABLE.finditer(english)}
    text = _RECORD.sub("", (CHINESE / f"{name}.md").read_text(encoding="utf-8"))
    text = re.sub(r"<!-- table of (\w+) -->", lambda mark: phrases.of(name).text(tables[mark[1]]), text)
    return text if found == "current" else _STALE + text


def read_source(app, name, source):  # noqa: ANN001, ANN201 - Sphinx's hook
    """Give Sphinx the Chinese text where the Chinese site is built."""
    if app.config.language == "zh_CN" and name in app.config.npugraph_ex_pages:
        source[0] = chinese(name)
    elif app.config.language == "zh_CN" and name.startswith("api/"):
        source[0] = re.sub(r"\A(\s*.+\n=+\n)", rf"\1{_DOCSTRINGS}", source[0])


def outdated(app, env, _added, _changed, _removed):  # noqa: ANN001, ANN201 - Sphinx's hook
    """The pages whose Chinese text is newer than their last reading: Sphinx looks at the English file alone."""
    if app.config.language != "zh_CN":
        return []
    texts = {name: CHINESE / f"{name}.md" for name in app.config.npugraph_ex_pages}
    read = env.all_docs  # in microseconds
    return [
        name for name, text in texts.items() if text.exists() and text.stat().st_mtime_ns // 1000 > read.get(name, 0)
    ]


def share_anchors(app, doctree):  # noqa: ANN001, ANN201 - Sphinx's hook
    """Give each section the anchor of its English heading too: `page.html#results` is right in both languages."""
    from docutils import nodes
    from myst_parser.mdit_to_docutils import base

    name = app.env.docname
    if app.config.language != "zh_CN" or state(name) == "missing":
        return
    slugify = getattr(base, "github_slugify", base.default_slugify)
    known = app.env.metadata[name].setdefault("myst_slugs", {})
    titles = headings(_with_included(name))
    taken: set[str] = set()
    for section, (level, title) in zip(doctree.findall(nodes.section), titles, strict=False):
        slug = slugify(re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", title))
        if level <= app.config.myst_heading_anchors and slug not in taken:
            taken.add(slug)
            known.setdefault(slug, (section.line or 0, section["ids"][0], section[0].astext()))
            if slug not in section["ids"]:
                section["ids"].append(slug)


def main(accepted: list[str]) -> int:
    """List the state of each page, or record that the given Chinese pages are up to date.

    Returns:
        0, or 1 where a page is out of date.
    """
    for path in accepted:
        accept(Path(path).resolve().relative_to(CHINESE.resolve()).with_suffix("").as_posix())
    states = {name: state(name) for name in pages()}
    for name, found in states.items():
        if found != "current":
            print(f"{found:8} docs/zh/{name}.md")
            if found == "stale":
                print(f"         git diff $(git log -1 --format=%H -- docs/zh/{name}.md) -- docs/{name}.md")
    return 1 if "stale" in states.values() else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
