"""Saved graphs: an optimised graph as text, and back, so that another process skips tracing and every pass.

The text is data. It is read as JSON, never executed and never unpickled; its operators are looked up among the registered
operators of the reading process. Begin with `artifact`. `text` has the layout, `nodes` and `values` encode a graph, `inputs`
describes the inputs of a saved graph. A graph that cannot be written as text (`Unsaveable`) is not saved, and the error says
why.
"""
