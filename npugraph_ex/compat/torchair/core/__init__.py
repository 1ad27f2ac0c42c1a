"""TorchAir's path to its logger."""
