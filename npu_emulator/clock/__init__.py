"""A modelled clock: how long work would take on a named chip, by a roofline; never a measurement."""
