"""A modelled clock: how long work would take on a named chip. Nothing here is a measurement.

`roofline` prices a kernel, `timeline` follows the runtime's log with those prices, `summary` gives the numbers of a
timeline, `picture` and `trace` write it as an HTML page and as a Chrome trace.
"""
