"""How Sphinx builds the pages: Markdown in, one theme, warnings as errors (see tox.ini)."""

from pathlib import Path

from npugraph_ex._version import __version__
from npugraph_ex.config import OPTION_TABLE

project = "npugraph_ex"
author = "the npugraph_ex authors"
project_copyright = author
release = __version__

extensions = ["myst_parser"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"npugraph_ex {release}"

# The option table as a page: written at every build, never by hand.
_GENERATED = Path(__file__).parent / "_generated"
_GENERATED.mkdir(exist_ok=True)
_ROWS = ["| option | default | allowed | meaning |", "|---|---|---|---|"]
_ROWS += [f"| `{row.name}` | `{row.default!r}` | {row.kind.allowed} | {row.meaning} |" for row in OPTION_TABLE.values()]
(_GENERATED / "options.md").write_text("\n".join(_ROWS) + "\n", encoding="utf-8")
exclude_patterns += ["_generated", "speed-tables.md"]
