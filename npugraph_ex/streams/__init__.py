"""Scopes: which part of a program runs where and how. `ops` has the operators, `scopes` what they mean in a graph.

Nothing here touches a device; `npugraph_ex.aclgraph.scopes` does.
"""
