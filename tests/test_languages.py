"""The Chinese pages say what the English ones say today: the same code, the same headings, and a record of the text translated."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

DOCS = Path(__file__).parents[1] / "docs"
LANGUAGES = runpy.run_path(str(DOCS / "languages.py"))
PAGES = list(LANGUAGES["pages"]())
PHRASES = LANGUAGES["phrases"]
WHOLE = {f"reference/{page}" for page in ("device-calls", "fidelity", "mutants", "operators", "options", "torchair")}
WHOLE |= {"how-to/fusion", "how-to/validate"}
"""Pages on which every phrase that a program writes has a Chinese text."""
_BLOCK = re.compile(r"^(```+)(\w+)\n(.*?)^\1$", re.MULTILINE | re.DOTALL)


def code(text: str) -> list[str]:
    """The fenced and indented code of a page, without comments."""
    fenced = [block[2] for block in _BLOCK.findall(text)]
    indented = re.findall(r"^    \S.*$", LANGUAGES["_COMMENT"].sub("", _BLOCK.sub("", text)), re.MULTILINE)
    return [
        re.sub(r"\s+#.*|(?<=\S)\s{3,}.*", "", line) for block in (*fenced, *indented) for line in block.splitlines()
    ]


def test_pages_are_found_and_every_chinese_page_has_an_english_one() -> None:
    """A Chinese page under a name that no English page has would never be read."""
    names = set(PAGES)
    assert {"index", "install", "how-to/streams", "reference/options"} <= names
    assert {path.relative_to(DOCS / "zh").with_suffix("").as_posix() for path in (DOCS / "zh").rglob("*.md")} <= names


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_a_chinese_one_that_is_up_to_date(name: str) -> None:
    """The English text has not changed since; code and the levels of headings are the same. Only `GENERATED` pages have none."""
    state = LANGUAGES["state"](name)
    assert state == "current", f"docs/zh/{name}.md is {state}: see `python docs/languages.py`"
    english, chinese = ((folder / f"{name}.md").read_text(encoding="utf-8") for folder in (DOCS, DOCS / "zh"))
    levels = [[level for level, _ in LANGUAGES["headings"](text)] for text in (english, chinese)]
    assert levels[0] == levels[1]
    assert code(LANGUAGES["_TABLE"].sub("", english)) == code(chinese)


@pytest.mark.parametrize("name", PAGES)
def test_a_chinese_page_has_every_table(name: str) -> None:
    """Each table that a program writes into the English page has its place, in the same order."""
    english, chinese = ((folder / f"{name}.md").read_text(encoding="utf-8") for folder in (DOCS, DOCS / "zh"))
    tables = [table[1] for table in LANGUAGES["_TABLE"].finditer(english)]
    assert re.findall(r"<!-- table of (\w+) -->", chinese) == tables


def written_by_programs(page: str) -> str:
    """The English of a page that no person wrote."""
    if page == "reference/options":
        return "\n".join(runpy.run_path(str(DOCS / "generated.py"))["options"]())
    if page == "reference/speed":
        return (DOCS / "reference" / "speed-tables.md").read_text(encoding="utf-8")
    return "\n".join(
        table[0] for table in LANGUAGES["_TABLE"].finditer((DOCS / f"{page}.md").read_text(encoding="utf-8"))
    )


@pytest.mark.parametrize("page", list(PHRASES.pages()))
def test_phrases_of_programs_are_chinese(page: str) -> None:
    """Each entry of phrases.toml is still on its page, and some pages have no phrase without one."""
    phrases = PHRASES.of(page)
    chinese = phrases.text(written_by_programs(page))
    assert phrases.unused == [], "their English has changed: translate it anew"
    assert re.search("[\u4e00-\u9fff]", chinese)
    if page in WHOLE:
        assert phrases.missing == [], "docs/zh/phrases.toml has no Chinese for them"


def test_pages_that_are_whole_have_phrases() -> None:
    """So that the test above looks at them."""
    assert set(PHRASES.pages()) >= WHOLE


def test_a_phrase_is_put_together() -> None:
    """Cells and lines, with parts that are translated and parts that stay; what has no entry is remembered."""
    phrases = PHRASES.Phrases(
        {"what": "内容", "{} or {}": "{}或{}", "a wait": "等待", "{=} of them": "其中 {=} 条", "gone": "无"}
    )
    text = phrases.text(
        "## what\n\n## lift\n\n3 of them\n\n| `rule` | what |\n|---|---|\n| `a` | a wait or what |\n| 1 | a wait or else |"
    )
    assert (
        text
        == "## 内容\n\n## lift\n\n其中 3 条\n\n| `rule` | 内容 |\n|---|---|\n| `a` | 等待或内容 |\n| 1 | a wait or else |"
    )
    assert phrases.missing == ["a wait or else"]
    assert phrases.unused == ["gone"]


def test_pages_that_stay_english_say_so() -> None:
    """What comes from docstrings, `--help` and the log, in the first lines and with the reason; on the Chinese site only."""
    for name in ("commands", "changelog", "returned-objects"):
        assert re.search("只有英文|是英文", LANGUAGES["chinese"](f"reference/{name}")[:200])
    for language, says in (("zh_CN", True), ("en", False)):
        app = SimpleNamespace(config=SimpleNamespace(language=language, npugraph_ex_pages=[]))
        source = ["npugraph_ex\n===========\n\n.. py:module:: npugraph_ex\n"]
        LANGUAGES["read_source"](app, "api/npugraph_ex/index", source)
        assert ("是英文" in source[0].partition(".. py:module")[0]) is says
        assert source[0].startswith("npugraph_ex\n===========\n")


def test_the_chinese_readme_links_to_chinese_pages() -> None:
    """Wherever there is one, and remarks in its code are Chinese. On the site English names lead to Chinese pages."""
    text = (DOCS.parent / "README.zh.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\(([\w./-]+)\.md[#)]", text)
    assert any(page.startswith("docs/zh/") for page in linked)
    assert not {f"docs/{page}" for page in PAGES} & set(linked)
    remarks = re.findall(r"(?:^|\s)# (.*)", "\n".join(body for _, _, body in _BLOCK.findall(text)))
    assert not [remark for remark in remarks if remark.isascii()]


def test_an_included_page_has_its_headings() -> None:
    """The anchors of the contributing page are those of the English file; the Chinese file has the same levels."""
    english = LANGUAGES["headings"](LANGUAGES["_with_included"]("how-to/contributing"))
    chinese = LANGUAGES["headings"]((DOCS.parent / "CONTRIBUTING.zh.md").read_text(encoding="utf-8"))
    assert [level for level, _ in english] == [level for level, _ in chinese]
    assert (3, "A fusion rule") in english
    assert code((DOCS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")) == code(
        (DOCS.parent / "CONTRIBUTING.zh.md").read_text(encoding="utf-8")
    )


def test_a_changed_english_page_is_noticed(tmp_path: Path) -> None:
    """State and digest: a translated page is current until the English text, and not its generated table, changes."""
    languages = runpy.run_path(str(DOCS / "languages.py"))
    languages["state"].__globals__.update(DOCS=tmp_path, CHINESE=tmp_path / "zh")
    english, chinese = tmp_path / "page.md", tmp_path / "zh" / "page.md"
    chinese.parent.mkdir()
    english.write_text(
        "# Page\n<!-- table of things: x -->\n1\n<!-- end of the table of things -->\n", encoding="utf-8"
    )
    assert languages["state"]("page") == "missing"
    chinese.write_text("# 页\n\n<!-- table of things -->\n", encoding="utf-8")
    assert languages["state"]("page") == "stale"
    languages["accept"]("page")
    assert languages["state"]("page") == "current"
    assert "\n1\n" in languages["chinese"]("page")
    english.write_text(english.read_text(encoding="utf-8").replace("\n1\n", "\n2\n"), encoding="utf-8")
    assert languages["state"]("page") == "current"
    english.write_text(english.read_text(encoding="utf-8") + "New.\n", encoding="utf-8")
    assert languages["state"]("page") == "stale"
    assert "可能不是最新" in languages["chinese"]("page")
