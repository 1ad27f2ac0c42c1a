"""`Options`, the frozen value that the compiler reads; its fields are the option table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from npugraph_ex.config.ge_settings import GE_SETTINGS, PRIVATE_SETTINGS, reader_of
from npugraph_ex.config.option import (
    CALLABLE,
    MAPPING,
    POOL,
    SWITCH,
    SWITCHES,
    TEXT,
    THREE_VALUED,
    Kind,
    Option,
    at_least,
    choice,
    unknown_option,
)
from npugraph_ex.errors import OptionError, OptionValueError, UnknownOptionError

PRIVATE_PREFIX = "_vllm_"
"""Names that start so are vLLM-Ascend's own; they are kept and not judged."""

UserPass = Callable[..., Any]
"""`fn(gm, example_inputs, config)`: edits the graph in place; what it returns is ignored."""


def _row(
    default: Any,
    kind: Kind,
    meaning: str,
    torchair: str = "",
    *,
    inverted: bool = False,
    honoured: tuple[object, ...] | None = None,
) -> Any:
    """Declare one option as a dataclass field; the name is filled in from the field's when the table is read."""
    row = {"kind": kind, "meaning": meaning, "torchair": torchair, "inverted": inverted, "honoured": honoured}
    return field(default=default, metadata=row)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What one compilation was asked to do. Build it with `Options.from_mapping`, which judges every name and value."""

    mode: str = _row(
        "npugraph_ex",
        choice("npugraph_ex", "reduce-overhead", "max-autotune"),
        "The first two are this backend; 'max-autotune' hands the graph to TorchAir's GE engine, where CANN can run it.",
        "mode",
    )
    force_eager: bool = _row(
        False, SWITCH, "Run the optimised graph op by op: no capture, no replay.", "debug.run_eagerly"
    )
    require_capture: bool = _row(
        False, SWITCH, "Raise where a graph cannot be captured, instead of running it op by op with a warning."
    )
    use_graph_pool: tuple[int, int] | None = _row(
        None, POOL, "Join the caller's memory pool instead of opening one.", "aclgraph_config.use_custom_pool"
    )
    reuse_graph_pool_in_same_fx: bool = _row(
        True,
        SWITCH,
        "The captured graphs of one FX graph share a memory pool, and so do those for other sizes of the function.",
        "debug.aclgraph.disable_mempool_reuse_in_same_fx",
        inverted=True,
    )
    capture_limit: int = _row(
        64,
        at_least(1),
        "How many captured graphs one FX graph keeps before the least recently used goes.",
        "debug.aclgraph.static_capture_size_limit",
    )
    clone_input: bool = _row(
        True,
        SWITCH,
        "Copy inputs into buffers of the captured graph; False: the first caller's tensors are the buffers, and later calls "
        "write their inputs into them, but as True in training.",
        "debug.aclgraph.clone_input",
    )
    clone_output: bool | None = _row(
        None,
        THREE_VALUED,
        "None: a result never changes because of a later call, and costs no copy once earlier results are dropped; "
        "True: always a copy; False: the next call may overwrite it, but as None where a graph saves tensors for its backward.",
        "debug.aclgraph.enable_output_clone",
    )
    poison_results: bool = _row(
        False,
        SWITCH,
        "With clone_output=False: fill the results of a call with NaN (integers with their largest, bools with their opposite) "
        "at the graph's next call, so that a late reader shows.",
    )
    static_kernel_compile: bool = _row(
        False,
        SWITCH,
        "Have CANN's op_compiler make kernels for the very shapes of each captured graph, once, before its capture.",
        "experimental_config.aclgraph._aclnn_static_shape_kernel",
    )
    disable_static_kernel_compile_cache: bool = _row(
        False, SWITCH, "Compile static kernels anew in every process, instead of keeping them for the next."
    )
    static_kernel_time_limit: int = _row(
        1800,
        at_least(1),
        "Seconds that op_compiler may take before it is stopped; the graph then runs without static kernels.",
    )
    frozen_parameter: bool = _row(
        False,
        SWITCH,
        "Parameters never move: while calls have the same sizes, those that are only read are known by the object instead "
        "of by their address. Buffers and written inputs are always compared.",
        "experimental_config.frozen_parameter",
    )
    stable_inputs_in_place: bool = _row(
        True,
        SWITCH,
        "Inputs that come from the same address in 8 calls are read there from then on instead of being copied, by a "
        "graph captured anew.",
    )
    remove_noop_ops: bool = _row(
        True, SWITCH, "Remove operations that change nothing.", "experimental_config.remove_noop_ops"
    )
    remove_cat_ops: bool = _row(
        True, SWITCH, "Write the parts of a concatenation in place.", "debug.aclgraph.remove_cat_ops"
    )
    inplace_pass: bool = _row(
        True,
        SWITCH,
        "Compute intermediate results in place where that changes nothing.",
        "debug.aclgraph.disable_reinplace_inplaceable_ops_pass",
        inverted=True,
    )
    input_inplace_pass: bool = _row(
        True,
        SWITCH,
        "Write a mutated input directly where that changes nothing.",
        "debug.aclgraph.disable_reinplace_input_mutated_ops_pass",
        inverted=True,
    )
    pattern_fusion_pass: bool = _row(
        True,
        SWITCH,
        "Replace operator combinations by fused operators, the default rules and registered ones.",
        "experimental_config.pattern_fusion_pass",
    )
    lift: str = _row(
        "off",
        choice("off", "exact", "judged"),
        "Put fused npu operators in the place of their spellings in ATen operators, in inference: where every bit stays "
        "('exact'), or where the result is no farther from float64 ('judged').",
    )
    join_projections: bool = _row(
        False,
        SWITCH,
        "With lift: compute projections of one input, such as gate and up, or queries, keys and values, in one product, with "
        "their weights in one tensor. It takes the memory of these weights again. Changes of weights are followed, but not those "
        "through parameter.data: call invalidate() after those.",
    )
    every_row_attends: bool = _row(
        False,
        SWITCH,
        "With lift='judged': declare that attention by a plain softmax has no row of scores that are all -inf or all masked, as "
        "a row of padding may be. Eager mode gives NaN there, or the mean of all values; the fused operator may give 0.",
    )
    auto_streams: bool = _row(
        False,
        SWITCH,
        "Put independent kernels on a side stream where the modelled clock says that it wins more than the events cost. Graphs "
        "with streams of their own stay as they are.",
    )
    fusion_rules: dict[str, bool] | None = _row(
        None,
        SWITCHES,
        "Which fusion rules are on, by name: False switches a default or registered rule off, True an extra one on.",
    )
    check_numerics: bool = _row(
        False,
        SWITCH,
        "Run the graph before and after each pass, on the CPU, with the inputs of the call and with random ones, and undo or "
        "refuse a pass that changes values.",
    )
    post_grad_custom_pre_pass: UserPass | None = _row(
        None, CALLABLE, "A pass of the user's before all others.", "post_grad_custom_pre_pass"
    )
    post_grad_custom_post_pass: UserPass | None = _row(
        None, CALLABLE, "A pass of the user's after fusion.", "post_grad_custom_post_pass"
    )
    dump_tensor_data: bool = _row(
        False,
        SWITCH,
        "Write every input and every node's value to files, at every call; the graph then runs uncaptured.",
        "dump_config.enable_dump",
    )
    data_dump_stage: str = _row(
        "optimized",
        choice("optimized", "original"),
        "Which graph `dump_tensor_data` dumps.",
        "dump_config.data_dump_stage",
    )
    data_dump_dir: str = _row("./", TEXT, "Where `dump_tensor_data` writes.", "dump_config.dump_path")
    super_kernel_optimize: bool = _row(
        False,
        SWITCH,
        "Let CANN merge neighbouring kernels.",
        "experimental_config.aclgraph._super_kernel_optimize",
        honoured=(False,),
    )
    super_kernel_optimize_options: dict[str, Any] | None = _row(
        None,
        MAPPING,
        "Options of `super_kernel_optimize`.",
        "experimental_config.aclgraph._super_kernel_optimize_options",
        honoured=(None,),
    )
    super_kernel_debug_options: dict[str, Any] | None = _row(
        None,
        MAPPING,
        "Debug options of `super_kernel_optimize`.",
        "experimental_config.aclgraph._super_kernel_debug_options",
        honoured=(None,),
    )
    stream_check: str = _row(
        "warn",
        choice("warn", "raise", "repair", "off"),
        "What to do where results depend on an order of streams that no event enforces: warn, refuse to compile, or add the event.",
    )
    deadlock_check: bool = _row(
        False,
        SWITCH,
        "Warn of collectives that may run at once and together need more vector cores than there are.",
        "debug.deadlock_check",
    )
    capture_error_mode: str = _row(
        "global",
        choice("global", "thread_local", "relaxed"),
        "Whose unsafe calls end a capture, as in torch.npu.graph.",
    )
    force_recapture: bool = _row(False, SWITCH, "Capture at every call, to look for what a replay does otherwise.")
    private: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def from_mapping(cls, given: Mapping[str, object] | None = None) -> Options:
        """Build the value from `options={...}` as the user wrote it.

        Raises:
            OptionError: A name or a value is wrong, or not possible yet; the message says which and what is allowed.
        """
        if given is not None and not isinstance(given, Mapping):
            raise OptionError(f"options takes a dict of option names to values, got {given!r} ({type(given).__name__})")
        known: dict[str, Any] = {}
        private: dict[str, object] = {}
        for name, value in (given or {}).items():
            if isinstance(name, str) and name.startswith(PRIVATE_PREFIX):
                private[name] = value
                continue
            if name not in OPTION_TABLE:
                raise unknown_flat_name(name)
            OPTION_TABLE[name].check(value)
            known[name] = value
        options = cls(**known, private=MappingProxyType(private))
        options._check_together()
        return options

    def _check_together(self) -> None:
        """Refuse values that are right alone and contradict each other."""
        if self.use_graph_pool is not None and not self.reuse_graph_pool_in_same_fx:
            raise OptionValueError(
                "use_graph_pool puts every captured graph into one pool and reuse_graph_pool_in_same_fx=False each into "
                f"its own; got {self.use_graph_pool!r} and False. Leave one of them out"
            )
        if self.poison_results and self.clone_output is not False:
            raise OptionValueError(
                "poison_results spoils results that clone_output=False gives up; with clone_output="
                f"{self.clone_output!r} no result is given up. Add clone_output=False, or leave poison_results out"
            )
        if self.join_projections and self.lift == "off":
            raise OptionValueError(
                "join_projections joins projections that lift finds; with lift='off' it does nothing. Add lift='exact' or "
                "lift='judged', or leave join_projections out"
            )
        if self.every_row_attends and self.lift != "judged":
            raise OptionValueError(
                f"every_row_attends is for attention that lift='judged' finds; with lift={self.lift!r} it does nothing. Add "
                "lift='judged', or leave every_row_attends out"
            )
        for name in ("force_eager", "dump_tensor_data"):
            if self.require_capture and getattr(self, name):
                raise OptionValueError(
                    f"require_capture=True and {name}=True contradict each other: {name} captures nothing. Leave one out"
                )

    def changed(self) -> dict[str, object]:
        """Return the options that are not at their default, by flat name, private ones included."""
        shown = {name: getattr(self, name) for name, row in OPTION_TABLE.items() if getattr(self, name) != row.default}
        return {**shown, **self.private}


OPTION_TABLE: Mapping[str, Option] = MappingProxyType(
    {row.name: Option(name=row.name, default=row.default, **row.metadata) for row in fields(Options) if row.metadata}
)
"""Every option by its flat name: documentation, validation and both faces come from here."""


def unknown_flat_name(name: object) -> UnknownOptionError:
    """The error for a name that is no option's flat one. A setting of TorchAir, with or without its path, leads to the option."""
    for row in OPTION_TABLE.values():
        if row.torchair and name in {row.torchair, row.torchair.rpartition(".")[2]}:
            meant = f"the opposite of {row.name!r}" if row.inverted else repr(row.name)
            return UnknownOptionError(
                f"no option is named {name!r}; TorchAir's {row.torchair} is {meant} here. A CompilerConfig takes TorchAir's name"
            )
    for path, (private, _, _) in PRIVATE_SETTINGS.items():
        if name in {path, path.rpartition(".")[2]}:
            return UnknownOptionError(f"no option is named {name!r}; TorchAir's {path} is {private!r} here")
    paths = [path for path in GE_SETTINGS if path == name or path.startswith(f"{name}.")]
    paths = paths or [path for path in GE_SETTINGS if path.endswith(f".{name}")]
    if len(paths) == 1 or (paths and paths[0].startswith(f"{name}.")):
        return UnknownOptionError(
            f"no option is named {name!r}; config.{paths[0]} is a setting of {reader_of(paths[0])}, which a CompilerConfig takes: "
            "get_npu_backend(compiler_config=config). This backend does not read it, so it can be left out"
        )
    return unknown_option(name, OPTION_TABLE)
