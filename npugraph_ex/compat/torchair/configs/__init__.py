"""TorchAir's path to its configuration."""
