"""What all tests of lifting ask beside their own question."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import fx

    from npugraph_ex.graph.memory.aliases import AliasFacts


@pytest.fixture(autouse=True)
def _facts_are_true(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each lift, the metadata of views and the facts that the pass keeps are those of the graph as it is then."""
    from npugraph_ex.graph.memory.aliases import AliasFacts  # which imports torch, and a device must be there first
    from npugraph_ex.lifting import engine

    update = engine._LiftingAttempt._update_facts

    def updated(self: Any, new: list[fx.Node], relaid: Iterable[fx.Node]) -> None:
        update(self, new, relaid)
        kept, anew = self.facts.aliases, AliasFacts(self.facts.graph)
        assert list(_shown(kept, self.facts.graph)) == list(_shown(anew, self.facts.graph))
        assert not list(_stale_views(self.facts.graph))

    monkeypatch.setattr(engine._LiftingAttempt, "_update_facts", updated)


def _shown(facts: AliasFacts, graph: fx.Graph) -> Iterator[tuple[object, ...]]:
    """Each node's memory, named by the first node in it, and whether it is written; then the writers."""
    names: dict[int, str] = {}
    for node in graph.nodes:
        regions = facts.regions(node)
        named = [(names.setdefault(region.root, node.name), region.start, region.stop) for region in regions]
        yield node.name, named, facts.is_written(node)
    yield tuple(writer.name for writer in facts.writers)


def _stale_views(graph: fx.Graph) -> Iterator[fx.Node]:
    """Views whose metadata has another memory than what they are views of."""
    from npugraph_ex.graph import metadata
    from npugraph_ex.graph.operators import is_view

    mode = metadata.fake_mode_of(graph)
    for node in graph.nodes:
        if metadata.shares_memory(node) and not is_view(node):
            before = node.meta["val"]
            node.meta["val"] = metadata.derive(node, mode)
            if is_view(node):
                yield node
            node.meta["val"] = before
