"""The pipeline over AOT graphs, and one module a row of it. `pipeline.run` is the door. Nothing here touches a device.

`base` says what a pass is, `verify` and `numerics` what must be true of a graph after it. Facts of graphs are in
`npugraph_ex.graph`; fusion and the stream check have rooms of their own, and a row here that calls them.
"""
