"""The tests of others on the emulated device: a checkout of op-plugin or torch_npu, file by file. Nothing of them is kept here.

`checkout` finds the files and the chips that they name. `process` runs one file in a process of its own, in which `worker`, a
plugin of pytest, writes down each test as it ends. `outcome` says what a test came to, and the cause where it failed;
`known` holds the differences that have an explanation; `tables` prints. `documents` reads what the operator documents of a
checkout list, and `asked` gives that to the formulas.
"""
