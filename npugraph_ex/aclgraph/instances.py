"""The captures of one graph key, and which of them serves a call so that no result that somebody holds changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from npugraph_ex.aclgraph.captured import CapturedGraph
from npugraph_ex.config.options import Options

_MOST_LENT = 2
"""How many instances of one graph may have results out at once before results are copied.

Two, because `out = model(out)` holds one result while the next is computed.
"""


class Instances:
    """All captures for one graph key: up to `_MOST_LENT` that lend their results, and one that copies."""

    def __init__(self, capture: Callable[[Sequence[Any], str], CapturedGraph], reason: str, options: Options) -> None:
        self._capture = capture
        self._reason = reason
        self._clone_output = options.clone_output
        self._poison = options.poison_results
        self._handed_out: list[torch.Tensor] = []
        self._lending: list[CapturedGraph] = []
        self._copying: CapturedGraph | None = None

    def run(self, inputs: list[Any]) -> list[Any]:
        """Replay with ``inputs`` such that no earlier result changes that somebody still holds."""
        if self._poison:
            return self._run_poisoning(inputs)
        if self._clone_output is not True:
            for graph in self._lending:
                if self._clone_output is False or not graph.outputs.held():
                    graph.replay(inputs)
                    return graph.outputs.lend(inputs)
            if len(self._lending) < _MOST_LENT and self._copying is None:
                graph = self._capture_another(inputs)
                if self._clone_output is False or not graph.footprint.is_overwritten():
                    self._lending.append(graph)
                    graph.replay(inputs)
                    return graph.outputs.lend(inputs)
                self._copying = graph
        if self._copying is None:
            self._copying = self._capture_another(inputs)
        self._copying.replay(inputs)
        return self._copying.outputs.copy(inputs)

    def release(self) -> list[torch.npu.NPUGraph]:
        """Give up the captures and their memory, but for results that callers hold; none of them may still run.

        Returns:
            The graphs themselves. A memory pool is gone with its last graph, so keep them until another has joined it.
        """
        captured = [*self._lending, *([] if self._copying is None else [self._copying])]
        for graph in captured:
            graph.footprint.retire()
        self._lending.clear()
        self._copying = None
        self._handed_out.clear()
        return [graph.graph for graph in captured]

    def _run_poisoning(self, inputs: Sequence[Any]) -> list[Any]:
        """Spoil the results of the call before, which `clone_output=False` gives up, and hand out copies."""
        for result in self._handed_out:
            no_number = result.dtype.is_floating_point or result.dtype.is_complex
            result.fill_(torch.nan if no_number else torch.iinfo(result.dtype).max)
        if self._copying is None:
            self._copying = self._capture_another(inputs)
        self._copying.replay(inputs)
        results = self._copying.outputs.copy(inputs)
        mine = self._copying.outputs.fresh_positions
        # `.data`, because what AOT makes results of its autograd function may not be written, even behind a detach.
        self._handed_out = [results[position].data for position in mine if results[position].dtype != torch.bool]
        return results

    def _capture_another(self, inputs: Sequence[Any]) -> CapturedGraph:
        reason, self._reason = self._reason, "results of earlier calls being still held"
        return self._capture(inputs, reason)
