"""The first run of a graph that is not captured: checks foreign operators and undoes their undeclared effects.

A capture is checked before anything is computed, but here the operators do run. So this module keeps a copy of all memory
outside the graph that they can access, until each has run and done only what it declares.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from npugraph_ex import _torch_private
from npugraph_ex.aclgraph.operator_contracts import ContractInterpreter, UndeclaredEffectError
from npugraph_ex.aclgraph.scopes import GraphFunction
from npugraph_ex.errors import BrokenPromiseError
from npugraph_ex.graph.memory.aliases import AliasFacts
from npugraph_ex.graph.undeclared import is_foreign


class LostWriteError(BrokenPromiseError):
    """AOT's graph lacks a write, because an operator shares memory undeclared. Nothing was computed."""


@dataclass(frozen=True)
class Original:
    """A graph before the passes, from which it can be compiled again.

    Attributes:
        gm: the graph from AOT, to be run operator by operator.
        compile: compiles it again, with the operators' effects that are known by then.
        lost_write: which write of the program the graph lacks for these effects, in words; empty where it lacks none.
    """

    gm: fx.GraphModule
    compile: Callable[[], Callable[..., Sequence[Any]]]
    lost_write: Callable[[], str] = str

    def check(self) -> None:
        """Nothing must have been computed.

        Raises:
            LostWriteError: the graph lacks a write, so it is no use to compile or run it.
        """
        lost = self.lost_write()
        if lost:
            raise LostWriteError(lost)


class Contents:
    """The contents of a call's inputs and the state of the random generator, to restore both."""

    def __init__(self, positions: Sequence[int], inputs: Sequence[Any]) -> None:
        given = [inputs[position] for position in positions]
        storages = {_torch_private.storage_key(tensor): tensor.untyped_storage() for tensor in given}
        self._storages = [(storage, storage.clone()) for storage in storages.values()]
        self._generator = torch.npu.get_rng_state()

    def put_back(self) -> None:
        """Restore them."""
        for storage, before in self._storages:
            storage.copy_(before)
        torch.npu.set_rng_state(self._generator)


def _reached_by_foreign(graph: fx.Graph) -> tuple[int, ...]:
    """The positions of the tensor inputs that the graph writes or that a foreign operator takes."""
    facts = AliasFacts(graph)
    reached = {
        root
        for node in graph.nodes
        if is_foreign(node.target)
        for argument in node.all_input_nodes
        for root in facts.roots(argument)
    }
    return tuple(
        position
        for position, node in enumerate(graph.find_nodes(op="placeholder"))
        if isinstance(node.meta.get("val"), torch.Tensor)
        and (facts.is_written(node) or not reached.isdisjoint(facts.roots(node)))
    )


def first_run_checked(gm: fx.GraphModule, original: Original | None = None) -> GraphFunction:
    """The graph's forward; if the graph has foreign operators, its first call checks them.

    Args:
        gm: the graph after the passes.
        original: the graph before the passes. It computes the results if an operator has an undeclared effect. If `original`
            is None (a saved graph), and inside a capture of the caller, which cannot be undone, an effect that matters is an
            error.
    """
    if not any(is_foreign(node.target) for node in gm.graph.nodes):
        return gm.forward
    function: GraphFunction | None = None

    def run(*inputs: Any) -> Sequence[Any]:
        nonlocal function
        if function is not None:
            return function(*inputs)
        if original is None or torch.npu.is_current_stream_capturing():
            interpreter = ContractInterpreter(gm, stays=True)
            results: Sequence[Any] = interpreter.run(*inputs, enable_io_processing=False)
            for effect in interpreter.found:
                effect.remember()
            function = gm.forward
            return results
        contents = Contents(_reached_by_foreign(gm.graph), inputs)
        try:
            results = ContractInterpreter(gm).run(*inputs, enable_io_processing=False)
            function = gm.forward
        except UndeclaredEffectError as effect:
            effect.remember()
            contents.put_back()
            original.check()
            again = ContractInterpreter(original.gm, is_original=True)
            results = again.run(*inputs, enable_io_processing=False)
            for other in again.found:
                other.remember()
            try:
                original.check()
            except LostWriteError:
                contents.put_back()
                raise
            function = original.compile()
        return results

    return run
