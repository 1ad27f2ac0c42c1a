"""Saved compilations on disk: what a key covers (`key`), how files are kept (`store`). `store` imports no torch."""
