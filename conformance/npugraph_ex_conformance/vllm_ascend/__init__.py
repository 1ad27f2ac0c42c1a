"""Real vLLM with real vLLM-Ascend on the emulated device: `tox -e vllm`, or `python -m npugraph_ex_conformance.vllm_ascend`.

The engine decodes small models eagerly and compiled by this library; transformers judges both in float32. This package needs what
`requirements.txt` lists; nothing else of the suite imports it.
"""
