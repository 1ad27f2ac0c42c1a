"""The examples of wrong passes ask of every way in which a pass may end, and are right about the library as it is."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from npugraph_ex.passes import pipeline
from npugraph_ex_conformance.examples import wrong_passes

_EXAMPLES = 60


@pytest.mark.slow
def test_some_edits_are_refused_some_undone_and_some_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each example is right; a graph is refused, undone, changed or left alone often enough to say something of each."""
    ends: Counter[str] = Counter()
    run = pipeline.run

    def noted(*args: Any, **kwargs: Any) -> Any:
        try:
            report = run(*args, **kwargs)
        except Exception:
            ends["refused"] += 1
            raise
        own = [one.outcome for one in report.passes if one.name in ("edit", "post_grad_custom_post_pass")]
        ends["rolled back" if "rolled back" in own else "changed" if "changed" in own else "unchanged"] += 1
        return report

    monkeypatch.setattr(pipeline, "run", noted)
    assert [wrong for seed in range(_EXAMPLES) if (wrong := wrong_passes.wrong_pass_example(seed))] == []
    assert sum(ends.values()) == _EXAMPLES
    assert all(ends[end] >= 4 for end in ("refused", "rolled back", "changed", "unchanged")), ends
