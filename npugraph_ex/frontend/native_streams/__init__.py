"""Native `torch.npu` streams and events in traced graphs, turned into scopes and events of the graph."""
