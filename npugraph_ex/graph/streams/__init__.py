"""Streams in graphs: the one representation that every pass reads.

`ops` has the operators for scopes and events in a graph, `labels` the keys and values of scopes, `events` the representation,
and `order` the execution order. Nothing here touches a device; `npugraph_ex.aclgraph.scopes` does.
"""
