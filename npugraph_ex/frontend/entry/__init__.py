"""The functions that `torch.compile` and AOT compilers call, and the steps from a traced graph to a compiled one."""
