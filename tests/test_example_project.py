"""The example project that a reader copies: it builds, its tests run, and its files name what this repository has."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import yaml
from printed import bash

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "docs" / "example"


def test_it_builds_and_its_tests_run(tmp_path: Path) -> None:
    """From its wheel: the settings in pyproject.toml choose the device, and one test wants more devices than there are."""
    project = shutil.copytree(EXAMPLE, tmp_path / "project")
    built = bash("python -m pip wheel -q --no-deps --no-build-isolation --no-index -w dist .", project)
    assert built.returncode == 0, built.stdout
    shutil.rmtree(project / "src")
    done = bash("PYTHONPATH=$(ls dist/*.whl) python -m pytest -q --npu-races -p no:cacheprovider", project)
    assert "2 passed, 1 skipped" in done.stdout, done.stdout


def test_the_workflow_and_the_hook_that_it_names_are_there() -> None:
    """The example gives the reusable workflow only inputs that it has, and the hook has the name that the example uses."""
    (called,) = yaml.safe_load((EXAMPLE / ".github/workflows/tests.yml").read_text(encoding="utf-8"))["jobs"].values()
    file = re.fullmatch(r"OWNER/npugraph_ex/(.+)@v[\d.]+", called["uses"])[1]
    workflow = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))
    inputs = workflow[True]["workflow_call"]["inputs"]  # YAML reads the word `on` as true
    assert set(called["with"]) <= set(inputs)
    used = set(re.findall(r"inputs\.([\w-]+)", (ROOT / file).read_text(encoding="utf-8")))
    assert used == set(inputs)
    hooks = {hook["id"] for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))}
    (repo,) = yaml.safe_load((EXAMPLE / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert {hook["id"] for hook in repo["hooks"]} <= hooks


def test_the_page_prints_the_files_of_the_example() -> None:
    """The YAML on the page is that of the example."""
    page = (ROOT / "docs/how-to/ci-owner.md").read_text(encoding="utf-8")
    for name in (".github/workflows/tests.yml", ".pre-commit-config.yaml"):
        assert f"```yaml\n{(EXAMPLE / name).read_text(encoding='utf-8')}```" in page, name
