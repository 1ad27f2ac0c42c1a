"""Campaigns: very many examples on many machines, kept as they come. `npugraph-ex campaign`; docs/how-to/campaigns.md.

An item is a kind and a number, and the same example everywhere. `kinds` has all kinds, those of other rooms too, `child` is the
process that runs items, `warm` watches it, `driver` hands batches to Ray, `ledger` keeps what came of each, `summary` says it.
"""
