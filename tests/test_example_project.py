"""The example project that a reader copies: it builds, its tests run, and its files name what this repository has."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml
from printed import bash

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "docs" / "example"


@pytest.mark.slow
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
    (keep,) = [
        step["with"] for step in next(iter(workflow["jobs"].values()))["steps"] if "upload" in step.get("uses", "")
    ]
    assert (keep["path"], "/" in keep["name"]) == ("${{ inputs.artifact }}", False)  # a name with a slash is refused
    assert "inputs.artifact" not in keep["name"]


@pytest.mark.parametrize("given", [".[tests]", ""])
def test_the_workflow_installs_the_project_beside_the_releases_that_are_named(tmp_path: Path, given: str) -> None:
    """With its dependencies, which cannot replace torch and torch_npu; a stand-in for pip shows its arguments."""
    (job,) = yaml.safe_load((ROOT / ".github/workflows/npu-tests.yml").read_text(encoding="utf-8"))["jobs"].values()
    (install,) = [step for step in job["steps"] if "PROJECT" in step.get("env", {})]
    values = {"INDEX": "", "TORCH": "2.13.0", "TORCH_NPU": "2.13.1", "PACKAGE": "library", "PROJECT": given}
    assert set(values) == set(install["env"])
    told = bash(
        f"export RUNNER_TEMP=. {' '.join(f'{name}={value!r}' for name, value in values.items())}\n"
        f"pip() {{ printf '<%s>' \"$@\"; echo; }}\n{install['run']}cat pins.txt",
        tmp_path,
    )
    assert told.stdout.splitlines() == [
        "<install><torch==2.13.0>",
        f"<install><--constraint><./pins.txt><torch_npu><library><pytest>{f'<{given}>' if given else ''}",
        "torch==2.13.0",
        "torch_npu==2.13.1",
    ]


def test_the_hook_validates_each_file_with_the_options_of_a_project(tmp_path: Path) -> None:
    """Also those behind one that fails; a stand-in for the command shows its arguments, as pre-commit splits the entry."""
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    command = shlex.join([*shlex.split(hook["entry"]), "--seed=1", "--dtype=float16", "bad one.py", "good.py"])
    stand_in = 'npugraph-ex() { printf "<%s>" "$@"; echo; [ "${@: -1}" = good.py ]; }\nexport -f npugraph-ex\n'
    told = bash(f"{stand_in}{command}", tmp_path)
    assert told.stdout.splitlines() == [
        f"<validate><--seed=1><--dtype=float16><{module}>" for module in ("bad one.py", "good.py")
    ]
    assert told.returncode == 1


@pytest.mark.parametrize("folder", ["docs", "docs/zh"])
def test_the_page_prints_the_files_of_the_example(folder: str) -> None:
    """The YAML on the page is that of the example; the site includes the other files, from the folder of the English page."""
    page = (ROOT / folder / "how-to/ci-owner.md").read_text(encoding="utf-8")
    files = re.findall(r"^\| `([\w./-]+\.\w+)` \|", page, re.MULTILINE)
    assert len(files) == 5
    for name in files:
        text = (EXAMPLE / name).read_text(encoding="utf-8")
        included = f"```{{literalinclude}} ../example/{name}\n:caption: `{name}`\n```\n"
        assert (f"```yaml\n{text}```" if name.startswith(".") else included) in page, name
