"""Builds the changelog of the version in `npugraph_ex/_version.py`, with towncrier: `python .ci/changelog.py`.

Where the newest section is already that version's, because no release closed it, towncrier alone would write a second one. Here the
fragments join the section that is there. It gets today's date, and the fragments are removed.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
KINDS = ("Added", "Changed", "Fixed", "Removed")
_ENTRY = re.compile(r"- .*?(?:\(#(\d+)\)\n|\Z)", re.DOTALL)
"""One fragment, which may have several points: it ends with its issue."""


def entries(section: str) -> dict[str, list[tuple[int, str]]]:
    """The fragments of a section by kind, each with its issue."""
    kinds = dict(re.findall(r"^### (\w+)\n\n(.*?)(?=^### |\Z)", section, re.MULTILINE | re.DOTALL))
    return {
        kind: [(int(found[1] or 0), found[0].rstrip()) for found in _ENTRY.finditer(body)]
        for kind, body in kinds.items()
    }


def joined(changelog: str, section: str) -> str:
    """The changelog with a new section, first of all, or within the newest one where that is the same version's."""
    mark = "<!-- towncrier release notes start -->\n"
    head, _, rest = changelog.partition(mark)
    title = section.strip().splitlines()[0]
    newest, *older = re.split(r"(?=^## )", rest.lstrip(), flags=re.MULTILINE)[1:] or [""]
    if newest.split()[:2] != title.split()[:2]:
        newest, older = "", [newest, *older]
    parts = [f"{head}{mark}", title]
    for kind in KINDS:
        found = sorted((*entries(newest).get(kind, []), *entries(section).get(kind, [])), key=lambda entry: entry[0])
        if found:
            parts += [f"### {kind}", "\n".join(text for _, text in found)]
    return "\n\n".join(part.rstrip() for part in (*parts, *older) if part) + "\n"


def main() -> None:
    """Write the changelog, and remove the fragments that it has now."""
    version = runpy.run_path(str(ROOT / "npugraph_ex" / "_version.py"))["__version__"]
    fragments = [path for path in (ROOT / "changelog.d").glob("*.md") if path.name != "README.md"]
    if not fragments:
        raise SystemExit("changelog.d/ has no fragments: there is nothing to build")
    draft = subprocess.run(
        [sys.executable, "-m", "towncrier", "build", "--draft", "--version", version],
        cwd=ROOT,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    )
    path = ROOT / "CHANGELOG.md"
    path.write_text(joined(path.read_text(encoding="utf-8"), draft.stdout), encoding="utf-8")
    for fragment in fragments:
        fragment.unlink()
    # The Chinese page shows the same file.
    runpy.run_path(str(ROOT / "docs" / "languages.py"))["accept"]("reference/changelog")


if __name__ == "__main__":
    main()
