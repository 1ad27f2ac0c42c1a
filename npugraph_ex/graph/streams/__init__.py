"""Streams in graphs: the one representation that every pass reads.

`ops` has the operators that write scopes and events into a graph, `labels` what scopes may say, `events` the
representation, `order` what it proves. Nothing here touches a device; `npugraph_ex.aclgraph.scopes` does.
"""
