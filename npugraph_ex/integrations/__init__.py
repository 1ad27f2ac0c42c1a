"""What other systems need of this library beyond `torch.compile`, one system a module."""
