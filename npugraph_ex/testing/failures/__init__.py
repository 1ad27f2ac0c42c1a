"""Failures: the search for one, its smallest program, the guilty pass and match, and a script that reproduces it."""
