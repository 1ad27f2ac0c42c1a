"""The functions that `torch.compile` and AOT compilers call, and the steps from a traced graph to a compiled one.

Read `backend` first, what Dynamo and AOT call, then `compiler`: the passes, then a capture or a plain run. `explain` and `advice`
ask the same compiler what it did and what it could not do.
"""
