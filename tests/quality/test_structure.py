"""Tests of the house itself: imports between packages go one way, lazy imports counted."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations
from pathlib import Path

from npugraph_ex.observe import private_names

_ROOT = Path(__file__).parents[2]
_LIBRARY = _ROOT / "npugraph_ex"
_PACKAGES = (_LIBRARY, _ROOT / "npu_emulator", _ROOT / "conformance" / "npugraph_ex_conformance")

MUTUAL = {
    # vLLM-Ascend replaces a method of a class in `npu_fx_compiler`, so that `frontend` has to look it up there.
    ("frontend", "npu_fx_compiler")
}

MUTUAL_FOLDERS = {
    # The suite stands on the toolkit; the toolkit's public names include the suite's mutants and known bugs, so that the test of
    # a client, and the script of a failure, find a mutant without knowing the suite.
    ("npugraph_ex.testing", "npugraph_ex_conformance.corpus"),
    ("npugraph_ex.testing", "npugraph_ex_conformance.mutants"),
}

_A_MODULE = re.compile(rf"(({'|'.join(package.name for package in _PACKAGES)})(\.\w+)*)(:[\w.]+)?")
"""A string that names a module, or an attribute of one: who writes it imports the module sooner or later."""


def _named(source: Path) -> Iterator[str]:
    """What a file imports, inside functions too; and the modules that its strings name."""
    for part in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(part, ast.Import):
            yield from (alias.name for alias in part.names)
        elif isinstance(part, ast.ImportFrom):
            assert not part.level, f"{source} imports relatively, which this test does not follow"
            yield from (f"{part.module}.{alias.name}" for alias in part.names)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            module = _A_MODULE.fullmatch(part.value)
            if module:
                yield module[1]


@cache
def _imports() -> dict[str, set[str]]:
    """Every module of the three packages, with the modules that it imports; a stub counts as its module."""
    sources: dict[str, list[Path]] = {}
    for package in _PACKAGES:
        for source in (*package.rglob("*.py"), *package.rglob("*.pyi")):
            name = ".".join(source.relative_to(package.parent).with_suffix("").parts)
            sources.setdefault(name.removesuffix(".__init__"), []).append(source)

    def module(name: str) -> str:
        while name and name not in sources:
            name = name.rpartition(".")[0]
        return name

    return {
        name: {found for source in files for imported in _named(source) if (found := module(imported))} - {name}
        for name, files in sources.items()
    }


def _grouped(group_of: Callable[[str], str]) -> dict[str, set[str]]:
    """The groups of modules, with the groups that each imports; a module of no group is left out."""
    graph: dict[str, set[str]] = {}
    for module, imported in _imports().items():
        if group := group_of(module):
            graph.setdefault(group, set()).update({group_of(other) for other in imported} - {group, ""})
    return graph


def _mutual(graph: dict[str, set[str]]) -> set[tuple[str, str]]:
    """The pairs of groups that import each other."""
    return {(a, b) for a, b in combinations(sorted(graph), 2) if b in graph[a] and a in graph[b]}


@cache
def _packages() -> dict[str, set[str]]:
    """Every package or top-level module of the library, without the façade, which every client's import goes through."""
    return _grouped(lambda module: module.split(".")[1] if module.startswith("npugraph_ex.") else "")


@cache
def _folders() -> dict[str, set[str]]:
    """Every folder of the three packages."""
    packages = {
        ".".join(source.relative_to(package.parent).parts[:-1])
        for package in _PACKAGES
        for source in package.rglob("*.py")
    }
    return _grouped(lambda module: module if module in packages else module.rpartition(".")[0])


def test_packages_import_each_other_in_one_direction() -> None:
    """No two packages import each other, but for the pairs that a client's hook forces."""
    assert len(_packages()) > 20, "the packages were not found"
    assert _mutual(_packages()) == MUTUAL


def test_folders_import_each_other_in_one_direction() -> None:
    """Of the three packages, all folders; but one that lies in the other may, and so may the pairs with a reason."""
    assert len(_folders()) > 60, "the folders were not found"
    apart = {(a, b) for a, b in _mutual(_folders()) if not b.startswith(f"{a}.")}
    assert apart == MUTUAL_FOLDERS


def test_facts_of_graphs_stand_below_every_other_room() -> None:
    """`graph` imports torch, the operators' records and the two rooms of torch, and nothing else of the library."""
    assert _packages()["graph"] <= {"_torch_private", "errors", "operators", "versions"}


_ASKS_FOR_A_RELEASE = re.compile(
    r"TorchVersion|torch\.(__version__|version\.__version__)\s*(?:[<>=!]|\.)|parse_version|Version\(|\binstalled\(|\.older\b"
)


def test_only_one_room_knows_releases() -> None:
    """What differs between releases of torch stands in `versions`; nothing else compares a release with a number."""
    modules = [
        module
        for folder in (*_PACKAGES, _ROOT / "benches")
        for module in folder.rglob("*.py")
        if "tests" not in module.parts[-2:-1]
    ]
    asking = {str(m.relative_to(_ROOT)) for m in modules if _ASKS_FOR_A_RELEASE.search(m.read_text(encoding="utf-8"))}
    room = {name for name in asking if name.startswith("npugraph_ex/versions/")}
    assert len(room) > 5, "the room was not found"
    assert asking - room == set()


def test_the_page_on_architecture_names_every_room() -> None:
    """`docs/explanation/architecture.md` has each package of the library in its table of rooms."""
    page = _ROOT / "docs" / "explanation" / "architecture.md"
    table = page.read_text(encoding="utf-8").partition("## The rooms")[2]
    packages = {name for name in _packages() if (_LIBRARY / name).is_dir()}
    assert [name for name in packages if f"`{name}`" not in table] == []


def test_no_two_classes_have_one_name() -> None:
    """A class is found by its name: no other class of the library, the emulator or the suite has it, nor with an underscore."""
    texts = (module.read_text(encoding="utf-8") for folder in _PACKAGES for module in folder.rglob("*.py"))
    nodes = (node for text in texts if "class " in text for node in ast.walk(ast.parse(text)))  # no tree is kept
    names = Counter(node.name.lstrip("_") for node in nodes if isinstance(node, ast.ClassDef))
    assert len(names) > 200, "the classes were not found"
    assert [name for name, count in names.items() if count > 1] == []


PRIVATE_ROOMS = ("npugraph_ex/_torch_private/", "npugraph_ex/versions/", "npugraph_ex/aclgraph/_npu_private.py")
"""Where the library uses private names of torch and torch_npu."""

WITHOUT_PUBLIC_NAME = (
    "torch._ops",
    "torch._subclasses",
    "torch._inductor.pattern_matcher",
    "torch.utils._pytree",
    "torch.utils._python_dispatch",
)
"""Modules that any compiler on torch needs and that have no public name. `torch.ops._x` and the like are operators' names."""

OTHER_PRIVATE_USES = {
    # The emulator takes the place of torch_npu's kernels in torch's dispatcher, below everything that torch makes public.
    "npu_emulator/activation.py": {"torch.npu._lazy_call", "torch_npu._C"},
    "npu_emulator/clock/products.py": {"torch._C"},
    "npu_emulator/extensions.py": {"torch._C"},
    "npu_emulator/frames.py": {"torch.nn.Module._call_impl"},
    "npu_emulator/host_state.py": {"torch._C"},
    "npu_emulator/kernels/composites.py": {"torch._C", "torch._decomp"},
    "npu_emulator/rendezvous.py": {"torch.distributed.Backend._plugins"},
    "npu_emulator/kernels/device_forms.py": {"torch._is_functional_tensor"},
    "npu_emulator/kernels/fallback.py": {"torch._C"},
    "npu_emulator/kernels/formats.py": {"torch._C", "torch._utils", "torch_npu.utils.dlpack._npu_to_dlpack"},
    "npu_emulator/kernels/generic.py": {"torch._C"},
    "npu_emulator/kernels/install.py": {"torch._C"},
    "npu_emulator/kernels/origins.py": {"torch._C"},
    "npu_emulator/kernels/recovery.py": {"torch_npu._C", "torch_npu.utils._error_code"},
    "npu_emulator/launch.py": {"torch_npu._C", "torch_npu.utils._npu_trace"},
    "npu_emulator/memory/views.py": {"torch._C", "torch._neg_view"},
    "npu_emulator/memory/allocator.py": {"torch_npu._C", "torch_npu.utils._npu_trace"},
    # A symbol needs a source, and torch's sources are Dynamo's.
    "npugraph_ex/testing/streams/builder.py": {"torch._dynamo"},
}


BENCHES = "npugraph_ex/_benches/"
"""Where a wheel carries the benches, which no user's program imports."""


def test_private_names_of_torch_stay_in_their_rooms() -> None:
    """A new torch is met in `_torch_private` and `_npu_private`; every use elsewhere is listed above."""
    uses: dict[str, set[str]] = {}
    for name, files in private_names.used().items():
        private = re.match(r"\w+(?:\.[a-zA-Z]\w*)*?\._\w+", name)
        if private and not name.startswith(("torch.ops.", *WITHOUT_PUBLIC_NAME)):
            for file in files:
                if not file.startswith(BENCHES):
                    uses.setdefault(file, set()).add(private[0])
    rooms = {file for file in uses if file.startswith(PRIVATE_ROOMS)}
    assert len(rooms) > 5, "the private names were not found"
    assert {file: found for file, found in uses.items() if file not in rooms} == OTHER_PRIVATE_USES
