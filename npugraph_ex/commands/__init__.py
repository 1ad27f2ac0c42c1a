"""Subcommands of `npugraph-ex` that have more to do than to call one function. Each adds its parser and runs itself."""
