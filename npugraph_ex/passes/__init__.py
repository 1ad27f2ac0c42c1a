"""The pipeline over AOT graphs, and one module a row of it. `pipeline.run` runs it. Nothing here touches a device.

`base` defines a pass, `verify` and `numerics` check the graph after it. Facts of graphs are in `npugraph_ex.graph`. Fusion
and the stream check are packages of their own; a row here calls each.
"""
