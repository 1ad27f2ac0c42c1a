"""Campaigns: very many examples on many machines, kept as they come. `npugraph-ex campaign`; docs/campaigns.md.

An item is a kind and a number, and the same example everywhere. `kinds` makes examples of numbers, `child` is the process that
runs them, `warm` watches it, `driver` hands batches to Ray, `ledger` keeps what came of each, and `summary` says it.
"""
