"""The kernels of the emulated device: every operator of the dispatcher gets one.

`install` registers them. `generic` serves almost every operator: `metadata` gives the shapes and dtypes of the outputs, and
the operator's own CPU kernel computes them as a task on the stream. `registry` has the kernels of other packages. Each other
module is one group of operators that need more than `generic`: copies, random numbers, collectives, gradients, workspaces.
"""
