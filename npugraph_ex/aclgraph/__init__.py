"""Capture and replay: an optimised FX graph becomes ACLGraphs, one for each combination of sizes and addresses.

This package touches the device and knows no pattern. The other packages call `compile_graph`.
"""

from npugraph_ex.aclgraph.compiled_graph import CompiledGraph as CompiledGraph
from npugraph_ex.aclgraph.compiling import compile_graph as compile_graph

__all__ = ["CompiledGraph", "compile_graph"]
