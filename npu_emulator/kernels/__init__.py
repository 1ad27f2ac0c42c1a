"""The kernels of the emulated device: how every operator of the dispatcher gets one.

`install` registers them. `generic` serves almost every operator: `metadata` says what the outputs look like, and the
operator's own CPU kernel computes them as a task on the stream. `registry` has the kernels that other packages bring.
Each other module is one group of operators that need more than `generic`: copies, random numbers, collectives,
gradients, workspaces.
"""
