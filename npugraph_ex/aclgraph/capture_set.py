"""`CaptureSet`: the captures of one graph key. It selects one for a call, so that no live result changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from npugraph_ex.aclgraph.captured_graph import CapturedGraph
from npugraph_ex.aclgraph.capturer import Capturer
from npugraph_ex.aclgraph.inputs import InputPlan
from npugraph_ex.aclgraph.result_banks import ResultBank
from npugraph_ex.config.options import Options

_ALIVE = "results of an earlier call being still alive, in a variable until it is assigned anew, or between two graphs"
"""The reason for a further capture. Which frame has them nobody can ask: reading its variables would hold them, too."""


_BITS = (torch.bits8, torch.bits16, torch.bits1x8, torch.bits2x4, torch.bits4x2, torch.float4_e2m1fn_x2)
"""The dtypes that the device holds and cannot fill."""


@dataclass(eq=False)
class _BankCapture:
    """A bank, and the key's capture whose results lie there."""

    bank: ResultBank
    graph: CapturedGraph | None = None


class CaptureSet:
    """A capture for each bank, whose results alias the bank's memory, and one whose results are copied.

    Args:
        capturer: makes the captures.
        options: it reads `clone_output` and `poison_results`.
        numbers: the sizes and scalars of the key.
        returned: the last call's results, with whichever key it was, which the next call poisons.
        plan: what happens to each input.
        reason: the reason for the first capture.
    """

    def __init__(
        self,
        capturer: Capturer,
        options: Options,
        numbers: tuple[Any, ...],
        returned: list[torch.Tensor],
        plan: InputPlan,
        reason: str,
    ) -> None:
        self._capturer = capturer
        self._clone_output = options.clone_output
        self._poison = options.poison_results
        self._numbers = numbers
        self._plan = plan
        self._reason = reason
        self._returned = returned
        self._in_banks: list[_BankCapture] = []
        self._copying: CapturedGraph | None = None
        capturer.memory.join(self)

    def run(self, inputs: list[Any]) -> list[Any]:
        """Replay with ``inputs``. Live results of earlier calls do not change."""
        if self._poison:
            return self._run_poisoning(inputs)
        if self._clone_output is not True:
            if not self._in_banks:
                self._in_banks = list(map(_BankCapture, self._capturer.banks(self._plan)))
            unused: _BankCapture | None = None
            for one in self._in_banks:
                graph, bank = one.graph, one.bank
                if graph is not None and graph.outputs.have_moved():
                    # Otherwise a caller who resizes results would cause a capture at each call.
                    self._clone_output, self._reason = True, "a caller having resized a result"
                    return self._run_copying(inputs)
                if self._clone_output is False or bank.is_free():
                    if graph is not None:
                        graph.replay(inputs)
                        bank.last = graph.outputs
                        return graph.outputs.alias_results(inputs)
                    unused = unused or one
            if unused is not None:
                graph = self._capture_in_bank(inputs, unused.bank)
                if graph.results_are_apart:
                    unused.graph = graph
                    return self.run(inputs)
                self._clone_output, self._reason = True, "an operator having returned other memory than its schema says"
        return self._run_copying(inputs)

    def release(self) -> None:
        """Free the captures and their memory, except live results. No capture may still run."""
        self._in_banks = []
        self._copying = None
        self._capturer.memory.leave(self)
        self._returned.clear()

    def _run_copying(self, inputs: Sequence[Any]) -> list[Any]:
        if self._copying is None:
            self._copying = self._capture(inputs, None)
        self._copying.replay(inputs)
        return self._copying.outputs.copy_results(inputs)

    def _run_poisoning(self, inputs: Sequence[Any]) -> list[Any]:
        """Overwrite the last call's results, which `clone_output=False` allows, and return copies.

        A result that is an input of this call is read first, and perhaps written: the call after this one overwrites it.
        """
        given = {value.untyped_storage().data_ptr() for value in inputs if isinstance(value, torch.Tensor)}
        results = self._run_copying(inputs)
        kept = [result for result in self._returned if result.untyped_storage().data_ptr() in given]
        _spoil([result for result in self._returned if result.untyped_storage().data_ptr() not in given])
        own = self._copying.outputs.fresh_positions if self._copying is not None else []
        # `.data`: results of AOT's autograd function refuse writes, even through a detached tensor.
        self._returned[:] = kept + [results[position].data for position in own]
        return results

    def _capture_in_bank(self, inputs: Sequence[Any], bank: ResultBank) -> CapturedGraph:
        try:
            return self._capture(inputs, bank)
        except BaseException:
            if all(one.graph is None for one in self._in_banks):
                # Captures of other keys may come first now, and would write where this one has its results.
                self._in_banks = []
            raise

    def _capture(self, inputs: Sequence[Any], bank: ResultBank | None) -> CapturedGraph:
        reason, self._reason = self._reason, _ALIVE
        return self._capturer.capture(self._plan, inputs, self._numbers, reason, bank)


def _spoil(results: Sequence[torch.Tensor]) -> None:
    """Fill results with NaN, or with their dtype's largest value; change bools to their opposite, as any one may be right."""
    negated = set[int]()
    for result in results:
        storage = result.untyped_storage()
        if result.dtype == torch.bool and storage.data_ptr() not in negated:
            negated.add(storage.data_ptr())
            # The whole storage, once: results may overlap, each other or, after `expand`, themselves.
            torch.empty(0, dtype=torch.bool, device=result.device).set_(storage).logical_not_()
    for result in results:
        if result.untyped_storage().data_ptr() not in negated:
            bits = torch.uint8 if result.dtype.itemsize == 1 else torch.uint16
            filled = result.view(bits) if result.dtype in _BITS else result
            has_nan = filled.dtype.is_floating_point or filled.dtype.is_complex
            filled.fill_(torch.nan if has_nan else torch.iinfo(filled.dtype).max)
