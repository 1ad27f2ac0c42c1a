"""Subcommands of `npugraph-ex`, one module a subcommand, which adds its parser and runs itself.

`npugraph_ex.cli` lists them. `suites` runs a folder of tests with pytest, for `conformance` and `bench`. `interrupts` and
`numbers` are what several subcommands share.
"""
