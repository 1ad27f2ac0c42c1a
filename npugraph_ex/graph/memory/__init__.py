"""Memory of a graph: storages, byte ranges in them, and the accesses to them in their order. Begin with `aliases`."""
