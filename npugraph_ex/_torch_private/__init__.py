"""The private parts of torch that this library uses, one thin named function each; one module an idea.

Nothing else in the library reaches behind an underscore of torch: when torch moves, this is the package to mend. Callers
ask the package, `_torch_private.schema(...)`, so that they need not know which module has a function.
"""

from __future__ import annotations

from npugraph_ex._torch_private.aot import (
    aot_input_position,
    boxed,
    dynamo_input_names,
    hand_out_as_they_are,
    inputs_written_afterwards,
    is_of_backward,
    is_plain_aot_graph,
    is_synthetic_base,
    outputs_in_inputs,
    replay_no_views_of_bases,
    saves_intermediates,
    static_input_positions,
    written_inputs,
)
from npugraph_ex._torch_private.graphs import (
    codegen_of,
    debug_directory,
    is_erased,
    lazy_graph_module,
    provenance_fields,
)
from npugraph_ex._torch_private.modes import (
    UNKNOWN_TO_FAKE_TENSORS,
    active_fake_mode,
    fake_execution,
    fake_of_meta,
    fresh_fake,
    in_one_fake_mode,
    on_meta_tensors,
    real_execution,
    run_meta_kernel,
    unobserved_execution,
)
from npugraph_ex._torch_private.operators import (
    auto_functionalized_operators,
    call_unwrapped,
    has_device_kernel,
    operator_name,
    schema,
    scoped_library,
)
from npugraph_ex._torch_private.sizes import guard_names, input_guards, new_symbols, size_functions, symbolic_size
from npugraph_ex._torch_private.streams import (
    CURRENT_STREAM,
    fetches_traced_object,
    set_current_stream,
    trace_as_constant_call,
    traced_object,
    was_made_while_tracing,
)
from npugraph_ex._torch_private.tensors import (
    autograd_base,
    functional_value,
    negative_view,
    owners_of_storage,
    replace_functional_value,
    storage_handle,
    storage_key,
)

__all__ = [
    "CURRENT_STREAM",
    "UNKNOWN_TO_FAKE_TENSORS",
    "active_fake_mode",
    "aot_input_position",
    "auto_functionalized_operators",
    "autograd_base",
    "boxed",
    "call_unwrapped",
    "codegen_of",
    "debug_directory",
    "dynamo_input_names",
    "fake_execution",
    "fake_of_meta",
    "fetches_traced_object",
    "fresh_fake",
    "functional_value",
    "guard_names",
    "hand_out_as_they_are",
    "has_device_kernel",
    "in_one_fake_mode",
    "input_guards",
    "inputs_written_afterwards",
    "is_erased",
    "is_of_backward",
    "is_plain_aot_graph",
    "is_synthetic_base",
    "lazy_graph_module",
    "negative_view",
    "new_symbols",
    "on_meta_tensors",
    "operator_name",
    "outputs_in_inputs",
    "owners_of_storage",
    "provenance_fields",
    "real_execution",
    "replace_functional_value",
    "replay_no_views_of_bases",
    "run_meta_kernel",
    "saves_intermediates",
    "schema",
    "scoped_library",
    "set_current_stream",
    "size_functions",
    "static_input_positions",
    "storage_handle",
    "storage_key",
    "symbolic_size",
    "trace_as_constant_call",
    "traced_object",
    "unobserved_execution",
    "was_made_while_tracing",
    "written_inputs",
]
