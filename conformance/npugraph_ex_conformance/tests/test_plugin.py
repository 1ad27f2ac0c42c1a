"""The pytest plugin makes of random test projects what a model of them says."""

from __future__ import annotations

import pytest

from npugraph_ex_conformance.examples.pytest_projects import pytest_project_example
from npugraph_ex_conformance.session import Run


def test_pytest_projects(run: Run) -> None:
    """Every phase of every test: fixtures, markers, options and lines of the configuration, races and late errors."""
    if run.target.kind != "emulated":
        pytest.skip("the projects race and fail as only the emulated device tells")
    run.check_examples(
        pytest_project_example, run.profile.streams // 4, what="(plugin) test projects", kind="pytest project"
    )
