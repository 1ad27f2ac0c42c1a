"""Saved graphs: an optimised graph as text, and back, so that another process skips tracing and every pass.

The text is data. It is read as JSON, never executed and never unpickled; the operators that it names are looked up among
those that the reading process has registered. `artifact` is the door, `text` the layout, `nodes` and `values` spell a
graph, `inputs` says which inputs a saved graph takes. What a text cannot say (`Unsaveable`) is not saved, and the reason is given.
"""
