"""Records of what happened to a graph, as plain data: passes and fusions, stream findings, compiled graphs, captures."""
