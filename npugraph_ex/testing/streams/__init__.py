"""Graphs of several streams: a builder, random graphs, and programs with a mistake."""
