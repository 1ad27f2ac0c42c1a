"""Repairs of torch and torch_npu that hold while a program is traced, each a context: AOT enters them, and so do traces of rules.

A module has one repair, as in `frontend.upstream_repairs`, which holds those that edit graphs. `as_aot` enters all of them.
"""
