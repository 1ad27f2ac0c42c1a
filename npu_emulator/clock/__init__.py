"""A modelled clock: how long work would take on a named chip. Nothing here is a measurement.

`roofline` computes the time of a kernel, `timeline` applies these times to the runtime's log, `summary` gives the figures of
a timeline, `picture` and `trace` write it as an HTML page and as a Chrome trace.
"""
