"""Tests of the house itself: imports between packages go one way, lazy imports counted."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path

from npugraph_ex.observe import private_names

_LIBRARY = Path(__file__).parents[2] / "npugraph_ex"

MUTUAL = {
    # vLLM-Ascend replaces a method of a class in `npu_fx_compiler`, so that `frontend` has to look it up there.
    ("frontend", "npu_fx_compiler"),
}


def _imported(module: Path) -> Iterator[str]:
    """The packages of the library that a module imports, inside functions too."""
    for statement in ast.walk(ast.parse(module.read_text())):
        names = []
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            assert not statement.level, f"{module} imports relatively, which this test does not follow"
            names = [f"{statement.module}.{alias.name}" for alias in statement.names]
        for name in names:
            root, _, rest = name.partition(".")
            if root == "npugraph_ex" and rest:
                yield rest.partition(".")[0]


@cache
def _packages() -> dict[str, set[str]]:
    """Every package or top-level module of the library, with those that it imports."""
    graph: dict[str, set[str]] = {}
    for module in _LIBRARY.rglob("*.py"):
        package = module.relative_to(_LIBRARY).parts[0].removesuffix(".py")
        if package != "__init__":  # the façade, which every client's import goes through
            graph.setdefault(package, set()).update(_imported(module))
    return {package: imported & graph.keys() - {package} for package, imported in graph.items()}


def test_packages_import_each_other_in_one_direction() -> None:
    """No two packages import each other, but for the pairs that a client's hook forces."""
    graph = _packages()
    assert len(graph) > 20, "the packages were not found"
    mutual = {(a, b) for a, b in combinations(sorted(graph), 2) if b in graph[a] and a in graph[b]}
    assert mutual == MUTUAL


def test_facts_of_graphs_stand_below_every_other_room() -> None:
    """`graph` imports torch, the operators' records and the two rooms of torch, and nothing else of the library."""
    assert _packages()["graph"] <= {"_torch_private", "errors", "operators", "versions"}


_ASKS_FOR_A_RELEASE = re.compile(
    r"TorchVersion|torch\.(__version__|version\.__version__)\s*(?:[<>=!]|\.)|parse_version|Version\(|\binstalled\(|\.older\b"
)


def test_only_one_room_knows_releases() -> None:
    """What differs between releases of torch stands in `versions`; nothing else compares a release with a number."""
    root = _LIBRARY.parent
    folders = [_LIBRARY, root / "npu_emulator", root / "conformance", root / "benches"]
    modules = [module for folder in folders for module in folder.rglob("*.py") if "tests" not in module.parts[-2:-1]]
    asking = {str(m.relative_to(root)) for m in modules if _ASKS_FOR_A_RELEASE.search(m.read_text(encoding="utf-8"))}
    room = {name for name in asking if name.startswith("npugraph_ex/versions/")}
    assert len(room) > 5, "the room was not found"
    assert asking - room == set()


def test_the_page_on_architecture_names_every_room() -> None:
    """`docs/explanation/architecture.md` has each package of the library in its table of rooms."""
    table = (
        (_LIBRARY.parent / "docs" / "explanation" / "architecture.md")
        .read_text(encoding="utf-8")
        .partition("## The rooms")[2]
    )
    packages = {name for name in _packages() if (_LIBRARY / name).is_dir()}
    assert [name for name in packages if f"`{name}`" not in table] == []


def test_no_two_classes_have_one_name() -> None:
    """A class is found by its name: no other class of the library, the emulator or the suite has it, nor with an underscore."""
    root = _LIBRARY.parent
    folders = [_LIBRARY, root / "npu_emulator", root / "conformance"]
    texts = (module.read_text(encoding="utf-8") for folder in folders for module in folder.rglob("*.py"))
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
