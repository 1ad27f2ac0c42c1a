"""What differs between the supported releases of torch and torch_npu: one module a difference; `pairs` lists the tested releases.

No other code asks for a release (`tests/quality/test_structure.py`). A module imports torch only in its functions, because
`npugraph-ex env` reads `pairs` where torch cannot be imported. To support another release, run `npugraph-ex env --canary`
with it, and add a module for each name that is gone.
"""
