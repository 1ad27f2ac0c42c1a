"""Saved compilations on disk.

`key` makes the key of a compilation: two compilations have one key exactly if one may replace the other. `fingerprint`
is the part of a user's function in it, `dependencies` the part of all that the function uses by global names. `store` keeps
the files; it imports no torch.
"""
