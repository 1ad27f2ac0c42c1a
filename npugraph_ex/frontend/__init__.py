"""From a call of `torch.compile` to a compiled graph.

`torch.compile` and AOT compilers call `entry`. `native_streams` turns torch_npu's streams and events into nodes
of the graph. `upstream_repairs` holds one module for each fault of torch or torch_npu that this library works around.
"""
