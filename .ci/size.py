"""Prints how many lines each package has, beside its budget in size.toml; exits 1 where one is larger.

Growth is a decision: whoever needs more room raises the budget in the same change, and says why in the commit's message.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KINDS = {".py": "Python", ".pyi": "Python", ".cpp": "C++", ".h": "C++", ".md": "pages"}
SPLIT = {"npugraph_ex", "npu_emulator"}
"""Folders whose parts are packages of their own."""


def package_of(path: Path) -> str:
    """The package that a file counts for: the folder that it is in, at most two deep; "." for the top level."""
    folders = path.parts[:-1]
    return "/".join(folders[: 2 if folders and folders[0] in SPLIT else 1]) or "."


def count(root: Path) -> dict[str, Counter[str]]:
    """The lines of every package, by kind, of what git keeps."""
    listed = subprocess.run(["git", "-C", root, "ls-files"], capture_output=True, text=True, check=True)
    sizes: dict[str, Counter[str]] = {}
    for name in listed.stdout.splitlines():
        path = Path(name)
        if path.suffix in KINDS and (root / path).is_file():
            lines = len((root / path).read_text(encoding="utf-8").splitlines())
            sizes.setdefault(package_of(path), Counter())[KINDS[path.suffix]] += lines
    return sizes


def complaints(sizes: dict[str, Counter[str]], budget: dict[str, int]) -> Iterator[str]:
    """What is wrong, one sentence each."""
    for package, lines in sizes.items():
        allowed = budget.get(package)
        if allowed is None:
            yield f"{package} has no budget; give it one in .ci/size.toml."
        elif lines.total() > allowed:
            yield (
                f"{package} has {lines.total()} lines; its budget is {allowed}. Delete something, or raise the budget in "
                ".ci/size.toml and say why in the commit's message."
            )
    for package in budget.keys() - sizes.keys():
        yield f"{package} has a budget and no files; delete its line in .ci/size.toml."


def main(root: Path) -> int:
    """Print the table of the repository at ``root``.

    Returns:
        0, or 1 where a package is larger than its budget.
    """
    budget = tomllib.loads((root / ".ci" / "size.toml").read_text(encoding="utf-8"))["lines"]
    sizes, kinds = count(root), sorted(set(KINDS.values()), reverse=True)
    print(f"{'lines':<28}", *(f"{kind:>8}" for kind in (*kinds, "all", "budget")))
    rows = [*sorted(sizes.items()), ("all", sum(sizes.values(), Counter()))]
    for package, lines in rows:
        allowed = sum(budget.values()) if package == "all" else budget.get(package, "none")
        print(f"{package:<28}", *(f"{lines[kind]:>8}" for kind in kinds), f"{lines.total():>8} {allowed:>8}")
    wrong = list(complaints(sizes, budget))
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).parents[1]))
