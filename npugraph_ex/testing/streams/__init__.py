"""Graphs of several streams: a builder, random ones, and what the emulated device says of their order."""
