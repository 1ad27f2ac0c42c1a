"""TorchAir's settings that are no options here: those of its GE engine and of its export, which this backend does not read."""

from __future__ import annotations

import re
from collections.abc import Mapping

from npugraph_ex.config.option import SWITCH, TEXT, THREE_VALUED, Kind, at_least, choice

_ANY = Kind("anything", lambda _given: True)
_STEPS = Kind(
    "numbers of steps and ranges of them, such as '0|2-5'",
    lambda given: isinstance(given, str) and re.fullmatch(r"(\d+(-\d+)?(\|\d+(-\d+)?)*)?", given) is not None,
)
_LAYERS = Kind(
    "names of operators with spaces between them, such as 'Mul_1 Add1'",
    lambda given: isinstance(given, str) and re.fullmatch(r'[\w "/\\.]*', given, re.ASCII) is not None,
)
_LOWER_LIMIT = Kind("None or an int >= -1", lambda given: given is None or at_least(-1).accepts(given))
_NUMBERS = Kind(
    "None or a list of ints",
    lambda given: given is None or (isinstance(given, list | tuple) and all(type(one) is int for one in given)),
)
_TEXT_OR_NONE = Kind("None or a str", lambda given: given is None or TEXT.accepts(given))

GE_SETTINGS: Mapping[str, tuple[object, Kind]] = {
    "aoe_config.aoe_mode": (None, choice(None, "2")),
    "aoe_config.work_path": ("./", _ANY),
    "aoe_config.aoe_config_file": (None, _ANY),
    "debug.data_dump.filter": (None, _ANY),
    "debug.data_dump.type": (None, choice(None, "npy")),
    "debug.data_dump.path": ("./", _ANY),
    "debug.data_dump._path": (None, _ANY),
    "debug.fx_summary.skip_compile": (True, SWITCH),
    "debug.fx_summary.type": (None, choice(None, "csv")),
    "debug.fx_summary.path": ("./", _ANY),
    "debug.fx_summary._path": (None, _ANY),
    "debug.graph_dump.type": (None, choice(None, "txt", "pbtxt", "py")),
    "debug.graph_dump.path": ("./", _ANY),
    "debug.graph_dump._path": (None, _ANY),
    "dump_config.dump_config_path": (None, _ANY),
    "dump_config.dump_data": ("tensor", choice("tensor", "stats")),
    "dump_config.dump_layer": ("", _LAYERS),
    "dump_config.dump_mode": ("all", choice("input", "output", "all")),
    "dump_config.dump_step": ("", _STEPS),
    "dump_config.quant_dumpable": (False, SWITCH),
    "experimental_config.aclgraph._aclnn_static_shape_kernel_build_dir": (None, _TEXT_OR_NONE),
    "experimental_config.aot_config_enable_joint_graph": (False, SWITCH),
    "experimental_config.aot_config_output_loss_index": (0, _ANY),
    "experimental_config.cc_parallel_enable": (False, SWITCH),
    "experimental_config.enable_ref_data": (False, SWITCH),
    "experimental_config.enable_view_optimize": (True, SWITCH),
    "experimental_config.jit_compile": ("auto", choice("auto")),
    "experimental_config.keep_inference_input_mutations": (True, SWITCH),
    "experimental_config.memory_efficiency": (False, SWITCH),
    "experimental_config.npu_fx_pass": (False, SWITCH),
    "experimental_config.static_model_ops_lower_limit": (None, _LOWER_LIMIT),
    "experimental_config.tiling_schedule_optimize": (False, SWITCH),
    "experimental_config.topology_sorting_strategy": ("DFS", choice("BFS", "DFS", "RDFS", "StableRDFS")),
    "export.experimental.auto_atc_config_generated": (False, SWITCH),
    "export.experimental.enable_lite_export": (False, SWITCH),
    "export.experimental.enable_record_nn_module_stack": (False, SWITCH),
    "export.export_mode": (False, SWITCH),
    "export.export_name": (None, _ANY),
    "export.export_path_dir": ("./", _ANY),
    "export.inputs_name": (None, _ANY),
    "export.weight_name": (None, _ANY),
    "fusion_config.fusion_switch_file": (None, _ANY),
    "ge_config.aicore_num": (None, _ANY),
    "ge_config.dynamic_gears_merge_policy": ("zip", choice("zip", "product")),
    "ge_config.enable_single_stream": (False, SWITCH),
    "ge_config.export_compile_stat": ("2", choice("0", "1", "2")),
    "ge_config.fusion_switch_file": (None, _ANY),
    "ge_config.multistream_parallel_mode": (None, _ANY),
    "ge_config.oo_constant_folding": (None, THREE_VALUED),
    "ge_config.oo_dead_code_elimination": (None, THREE_VALUED),
    "ge_config.oo_level": ("O3", choice("O1", "O3")),
    "ge_config.optimization_switch": (None, _ANY),
    "inference_config.dynamic_gears_merge_policy": ("zip", choice("zip", "product")),
}
"""By TorchAir's path: the default, and which values it takes; anything where a wrong value is not worth refusing."""

PRIVATE_SETTINGS: Mapping[str, tuple[str, object, Kind]] = {
    "experimental_config.aclgraph._aclnn_static_shape_kernel_sym_index": (
        "_vllm_aclnn_static_kernel_sym_index", 0, at_least(0)
    ),
    "experimental_config.aclgraph._aclnn_static_shape_kernel_sym_value_range": (
        "_vllm_aclnn_static_kernel_sym_range", None, _NUMBERS
    ),
}  # fmt: skip
"""By TorchAir's path: the flat name, which is vLLM-Ascend's, the default, and which values it takes."""


def reader_of(path: str) -> str:
    """What of TorchAir reads a setting of `GE_SETTINGS`, for a message."""
    if path.startswith("export."):
        return "torchair.dynamo_export"
    if path.startswith("experimental_config.aclgraph."):
        return "TorchAir's own compilation of static kernels"
    return "mode 'max-autotune' (GE)"
