"""Static kernels: CANN's compiler makes kernels for exactly the shapes of a graph's run.

The rest of the library calls `prepare`. `calls` finds the operators of a graph, `describe` makes CANN describe them,
`programs` runs CANN's compiler and its packages, `packages` keeps the built packages for other processes, `install` installs
them, and `lease` removes everything after the process, even a killed one.
"""

from npugraph_ex.aclgraph.static_kernels.prepare import StaticKernels as StaticKernels

__all__ = ["StaticKernels"]
