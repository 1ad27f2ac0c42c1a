"""The settings of TorchAir's GE engine and of its export, which this backend accepts and does not read."""

from __future__ import annotations

from collections.abc import Mapping

from npugraph_ex.config.option import Kind, choice

_ANY = Kind("anything", lambda _given: True)
_SWITCH = choice(True, False)  # noqa: FBT003 - the values themselves

GE_SETTINGS: Mapping[str, tuple[object, Kind]] = {
    "aoe_config.aoe_mode": (None, choice(None, "2")),
    "aoe_config.work_path": ("./", _ANY),
    "aoe_config.aoe_config_file": (None, _ANY),
    "debug.data_dump.filter": (None, _ANY),
    "debug.data_dump.type": (None, choice(None, "npy")),
    "debug.data_dump.path": ("./", _ANY),
    "debug.fx_summary.skip_compile": (True, _SWITCH),
    "debug.fx_summary.type": (None, choice(None, "csv")),
    "debug.fx_summary.path": ("./", _ANY),
    "debug.graph_dump.type": (None, choice(None, "txt", "pbtxt", "py")),
    "debug.graph_dump.path": ("./", _ANY),
    "dump_config.dump_config_path": (None, _ANY),
    "dump_config.dump_data": ("tensor", choice("tensor", "stats")),
    "dump_config.dump_layer": ("", _ANY),
    "dump_config.dump_mode": ("all", choice("input", "output", "all")),
    "dump_config.dump_step": ("", _ANY),
    "dump_config.quant_dumpable": (False, _SWITCH),
    "experimental_config.aot_config_enable_joint_graph": (False, _SWITCH),
    "experimental_config.aot_config_output_loss_index": (0, _ANY),
    "experimental_config.cc_parallel_enable": (False, _SWITCH),
    "experimental_config.enable_ref_data": (False, _SWITCH),
    "experimental_config.enable_view_optimize": (True, _SWITCH),
    "experimental_config.jit_compile": ("auto", choice("auto")),
    "experimental_config.keep_inference_input_mutations": (True, _SWITCH),
    "experimental_config.memory_efficiency": (False, _SWITCH),
    "experimental_config.npu_fx_pass": (False, _SWITCH),
    "experimental_config.static_model_ops_lower_limit": (None, _ANY),
    "experimental_config.tiling_schedule_optimize": (False, _SWITCH),
    "experimental_config.topology_sorting_strategy": ("DFS", choice("BFS", "DFS", "RDFS", "StableRDFS")),
    "export.experimental.auto_atc_config_generated": (False, _SWITCH),
    "export.experimental.enable_lite_export": (False, _SWITCH),
    "export.experimental.enable_record_nn_module_stack": (False, _SWITCH),
    "fusion_config.fusion_switch_file": (None, _ANY),
    "ge_config.aicore_num": (None, _ANY),
    "ge_config.dynamic_gears_merge_policy": ("zip", _ANY),
    "ge_config.enable_single_stream": (False, _ANY),
    "ge_config.export_compile_stat": ("2", _ANY),
    "ge_config.fusion_switch_file": (None, _ANY),
    "ge_config.multistream_parallel_mode": (None, _ANY),
    "ge_config.oo_constant_folding": (None, _ANY),
    "ge_config.oo_dead_code_elimination": (None, _ANY),
    "ge_config.oo_level": ("O3", _ANY),
    "ge_config.optimization_switch": (None, _ANY),
    "inference_config.dynamic_gears_merge_policy": ("zip", choice("zip", "product")),
}
"""By TorchAir's path: the default, and which values it takes; anything where a wrong value is not worth refusing."""
