"""The package of TorchAir's converters to GE, from which scripts import modules; nothing is converted."""
