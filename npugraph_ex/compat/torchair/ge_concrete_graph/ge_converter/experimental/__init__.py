"""A package of TorchAir that scripts import modules from; GE itself is not used."""
