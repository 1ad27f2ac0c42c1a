"""From a call of `torch.compile` to a compiled graph.

`torch.compile` and AOT compilers call `entry`. `native_streams` turns torch_npu's streams and events into nodes
of the graph. `upstream_repairs` holds one module for each fault of Dynamo or AOT that this library works around.
"""
