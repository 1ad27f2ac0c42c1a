"""Static kernels: CANN's compiler makes kernels for exactly the shapes that a graph is run with.

`prepare` is what the rest of the library calls. `calls` finds the operators of a graph, `describe` has CANN describe them,
`programs` runs CANN's compiler and its packages, `packages` keeps what was built for other processes, `install` puts it
in place, and `lease` sees to it that nothing outlives the process, however that ends.
"""

from npugraph_ex.aclgraph.static_kernels.prepare import StaticKernels as StaticKernels

__all__ = ["StaticKernels"]
