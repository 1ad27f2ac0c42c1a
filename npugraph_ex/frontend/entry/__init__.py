"""The entry: what `torch.compile` and AOT compilers call, and the way from a traced graph to a compiled one."""
