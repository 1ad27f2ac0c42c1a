"""The doors through which graphs come in: `torch.compile`, an AOT compiler, and torch_npu's own names."""
