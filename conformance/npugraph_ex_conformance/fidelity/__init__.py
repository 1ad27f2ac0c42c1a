"""The rules that the emulated device obeys, as data, each with a probe that asks a device: `npugraph-ex fidelity`.

A rule is an identifier, a sentence, a source, the device's answer and a probe of a few lines. The probes use torch and torch_npu
alone, so that they run on a real NPU as they are.
"""
