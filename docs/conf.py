"""How Sphinx builds the pages: Markdown in, one theme, warnings as errors (see tox.ini)."""

import ast
import logging
import re
import sys
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import examples
import generated
import languages
import search
from autoapi import _astroid_utils
from docutils import nodes
from sphinx.search.zh import SearchChinese

from npugraph_ex._version import __version__
from npugraph_ex.commands import public_names

project = "npugraph_ex"
author = "the npugraph_ex authors"
project_copyright = author
release = __version__

extensions = ["myst_parser", "sphinx.ext.napoleon", "autoapi.extension"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["keyboard.js"]
html_search_scorer = str(Path(__file__).parent / "_search" / "scorer.js")
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/language.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
html_title = f"npugraph_ex {release}"
napoleon_use_ivar = True  # an attribute that a class both annotates and describes stands on its page once
smartquotes = False  # what stands in quotes is often code
default_role = "code"  # docstrings write `name` as the pages do

# Sphinx 9 names the browser's stemmer after the language. Chinese search stems the English words of a text: a ChineseStemmer,
# which the page would then ask for, is nowhere, and no search would ever end.
SearchChinese.language_name = "English"


def _search_words(_self: SearchChinese, text: str) -> list[str]:
    """Words, and each pair of neighbours of what is Chinese: a dictionary of words knows no 算子, and a browser has none."""
    found = re.findall(r"[\u4e00-\u9fff]+|[a-zA-Z0-9_]+", text)
    return [pair for word in found for pair in ([word] if word.isascii() else map("".join, pairwise(word)))]


SearchChinese.split = _search_words
SearchChinese.js_splitter_code = """
window.splitQuery = (query) =>
  (query.match(/[\\u4e00-\\u9fff]+|[a-zA-Z0-9_]+/g) || []).flatMap((word) =>
    word.charCodeAt(0) < 0x4e00 ? [word] : Array.from(word.slice(1), (next, place) => word[place] + next));
"""

# The options and commands as pages: written at every build, never by hand.
_HERE = Path(__file__).parent
_ROOT = _HERE.parent
generated.write(_HERE / "_generated")
exclude_patterns += ["_generated", "reference/speed-tables.md", "zh", "example"]

# The reference of the public names, a page a module, from their docstrings. autoapi parses the sources and imports nothing, so no
# torch is needed.
_RETURNED = re.findall(
    r"autoapiclass:: ([\w.]+)", (_HERE / "reference" / "returned-objects.md").read_text(encoding="utf-8")
)
"""The classes on that page."""


def _homes(module: str) -> set[str]:
    """The modules from which a public module takes its names."""
    tree = ast.parse(public_names.source(module).read_text(encoding="utf-8"))
    return {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


_MODULES = {*public_names.MODULES, *(name.rpartition(".")[0] for name in _RETURNED)}
_MODULES = _MODULES.union(*map(_homes, public_names.MODULES))
_MODULES |= _homes("npugraph_ex.testing.validation")  # a package that gathers its names in turn
_DIRS = [_ROOT / "npugraph_ex", _ROOT / "npu_emulator", _ROOT / "conformance" / "npugraph_ex_conformance"]

autoapi_dirs = [str(folder) for folder in _DIRS]
autoapi_root = "api"
# autoapi leaves out what a package takes from another one; the toolkit takes the corpus from the suite.
_is_local = _astroid_utils.is_local_import_from
_astroid_utils.is_local_import_from = lambda node, package: (
    _is_local(node, package) or _is_local(node, "npugraph_ex_conformance")
)
autoapi_add_toctree_entry = False
autoapi_keep_files = False
autoapi_file_patterns = ["*.pyi", "*.py"]  # a façade's names are in its stub
autoapi_options = ["members", "imported-members", "show-inheritance"]
autoapi_ignore = [
    str(source)
    for folder in _DIRS
    for source in (*folder.rglob("*.py"), *folder.rglob("*.pyi"))
    if ".".join(source.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__") not in _MODULES
]
# autoapi does not see the names of `A, B = "a", "b"`. All of them are internal.
suppress_warnings = ["autoapi.python_import_resolution"]

nitpicky = True
nitpick_ignore_regex = [
    # Base classes: of the emulated device's errors, which nobody catches, and of the checks that `&` joins.
    (r"py:(obj|class)", r"_HelpedError|(.*\.)?MatchCheck"),
    # Other projects' names: a build fetches no inventory of theirs, so that it needs no network.
    (r"py:.*", rf"({'|'.join(sorted(sys.stdlib_module_names))}|torch|torch_npu|hypothesis)\..*"),
    # Short names of `Callable` and `tuple` types; a parameter's description says what is taken.
    (r"py:class", r"(.*\.)?(Backend|Steps|Fails|Maker|OnCase|Spec|Traced|TraceFn|_Kernel)"),
    # What these functions return is a context manager and no more; the mutants are the suite's own.
    (r"py:class", r"_Scope|Kill|Mutant"),
    # Parts of returned objects that a program prints and does not take apart.
    (
        r"py:class",
        r"(.*\.)?(Access|Arrow|AtSizeOne|Code|FaultKind|Fate|Frame|GraphDumper|InputClass|Launch|Launcher|SavedGraph)",
    ),
    (
        r"py:class",
        r"(.*\.)?(Level|_PagePart|Note|Operand|Operation|PassOutcome|Location|PreparedRule|Roofline|Runtime|Span|UndeclaredEffects|UserPass)",
    ),
]


def _skip(_app, kind, name, _obj, skip, _options):  # noqa: ANN001, ANN202 - Sphinx's hook
    """A page for each public module and for no other."""
    return name not in public_names.MODULES if kind in {"module", "package"} else skip


def _public_name(app, env, node, content):  # noqa: ANN001, ANN202 - Sphinx's hook
    """Link a class by the module that defines it to the page that shows it under its public name."""
    domain, last = env.get_domain("py"), node.get("reftarget", "").rpartition(".")[2]
    shown = sorted(name for name in domain.objects if name.rpartition(".")[2] == last)
    if node.get("refdomain") != "py" or not shown:
        return None
    return domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], shown[0], node, content)


_SHOWN = {(module, name) for module in public_names.MODULES for name in public_names.offered(module)}
_SHOWN |= {
    (owner, method)
    for owner, name in ((name.rpartition(".")[2], name) for name in _RETURNED)
    for method in generated.methods(name)
    if examples.is_shown(owner, method)
}
"""What has an example: a module and a public name, which must have one, or a class and its method."""


def _lead_to_example(app, _domain, _kind, content):  # noqa: ANN001, ANN202 - Sphinx's hook
    """End the entry of a name with a link to its example."""
    signature = content.parent[0]
    parts = [part for part in (signature.get("module"), signature.get("fullname")) if part]
    owner, _, name = ".".join(parts).rpartition(".")
    module, _, last = owner.rpartition(".")
    shown = next((pair for pair in ((owner, name), (last, name), (name, name)) if pair in _SHOWN), None)
    if shown is None and (module, last) in _SHOWN and examples.uses(module, last, name):
        shown = (module, last)
    if shown and app.builder.format == "html":
        page = app.builder.get_relative_uri(app.env.docname, examples.PAGE)
        place = examples.anchor(*shown)
        word = "示例" if app.config.language == "zh_CN" else "Example"
        content += nodes.paragraph("", "", nodes.reference("", word, internal=True, refuri=f"{page}#{place}"))


def _anchor_examples(app, doctree):  # noqa: ANN001, ANN202 - Sphinx's hook
    """Where those links lead to."""
    if app.env.docname == examples.PAGE:
        examples.add_anchors(doctree, sorted(_SHOWN))


def _without_entry(_app, env):  # noqa: ANN001, ANN202 - Sphinx's hook
    """Warn of each public name that the reference does not describe."""
    described = env.get_domain("py").objects
    for module in public_names.MODULES:
        for name in public_names.offered(module):
            if f"{module}.{name}" not in described and not name.startswith("__"):
                logging.getLogger("sphinx.npugraph_ex").warning(
                    "%s.%s is public and has no entry in the reference", module, name
                )


def setup(app):  # noqa: ANN001, ANN201 - Sphinx's hook
    """Add the hooks."""
    app.add_config_value("npugraph_ex_pages", sorted(languages.pages()), "env", list)
    app.connect("env-get-outdated", languages.outdated)
    app.connect("source-read", languages.read_source)
    app.connect("source-read", generated.index_codes)  # of either language
    app.connect("source-read", generated.name_files)
    app.connect("doctree-read", languages.share_anchors)
    app.connect("doctree-read", _anchor_examples)
    app.connect("doctree-read", search.add_words)  # after the anchors, which both languages share
    app.connect("autoapi-skip-member", _skip)
    app.connect("missing-reference", _public_name)
    app.connect("object-description-transform", _lead_to_example)
    app.connect("env-check-consistency", _without_entry)
