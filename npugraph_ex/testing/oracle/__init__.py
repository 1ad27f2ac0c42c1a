"""Is a program compiled rightly? Runs it in eager mode, optimised, and replayed, and judges what differs.

Read `checking` first: it runs a `case` in three ways. `observation` takes what a caller can see of a call besides values, and
`verdict` judges the values by `judge`, against `reference64`, the graph in float64 on the CPU, and against the `spread` of its runs
with `rounding_noise`. `without_device` does the same with no device, faster.
"""
