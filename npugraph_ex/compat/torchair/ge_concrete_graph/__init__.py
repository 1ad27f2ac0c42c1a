"""The package of TorchAir's GE graphs, from which scripts import modules; GE itself is not used."""
