"""Systematic mutation: small faults made by rule all over the library and the emulator, and whether the suite notices each.

`sites` finds where a fault can be made and makes it, in the running program; `oracle` says which examples look for it first.
"""
