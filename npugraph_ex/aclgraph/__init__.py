"""Capture and replay: an optimised FX graph becomes ACLGraphs, one for each combination of sizes and addresses.

This package touches the device and knows no pattern. The other packages call `compile_graph`.

Read `compiling` first, which chooses between capture and a run operator by operator, then `compiled_graph`, the owner of a call.
It finds a graph key's captures in `capture_cache`; a `capture_set` selects one of them, so that no live result changes; `capturer`
makes one, a `captured_graph`, into a `frame_memory`, which has a `capture_pool` and `result_banks`. `inputs` and `outputs` say what
happens to each tensor of a call. The other modules hold one matter each, as their first lines say.
"""

from npugraph_ex.aclgraph.compiled_graph import CompiledGraph as CompiledGraph
from npugraph_ex.aclgraph.compiling import compile_graph as compile_graph

__all__ = ["CompiledGraph", "compile_graph"]
