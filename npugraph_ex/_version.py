"""The version, in a module that imports nothing: the build reads it and so does `npugraph-ex env`."""

__version__ = "0.2.0"
