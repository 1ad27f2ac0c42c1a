"""Scopes, streams and events in graphs.

`ops` has the operators, `labels` what scopes may say, `scopes` the way from enclosing nodes to labels and back, `events`
the representation that every pass reads. Nothing here touches a device; `npugraph_ex.aclgraph.scopes` does.
"""
