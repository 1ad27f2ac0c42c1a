"""The compiler of one AOT graph: passes, then capture or a plain run; and its product, which can be saved and loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from functorch.compile import make_boxed_func
from torch import fx
from typing_extensions import Self

from npugraph_ex import _torch_private
from npugraph_ex.aclgraph import CompiledGraph, compile_graph, scopes
from npugraph_ex.aclgraph.data_dump import DumpedGraph
from npugraph_ex.aclgraph.first_run import Original
from npugraph_ex.config import CompilerConfig, Options
from npugraph_ex.config.variables import warn_of_unknown
from npugraph_ex.errors import GraphVerificationError, OptionValueError, SavedGraphError
from npugraph_ex.frontend.entry import current_device
from npugraph_ex.frontend.entry.joined_inputs import JoinedInputs
from npugraph_ex.frontend.entry.record import description, nodes_of, record
from npugraph_ex.frontend.entry.undeclared_effects import UndeclaredEffects
from npugraph_ex.frontend.upstream_repairs import (
    nary_products,
    partition,
    returned_views,
    undefined_gradients,
    watched_calls,
)
from npugraph_ex.fusion.engine import check_switches, training_rules
from npugraph_ex.graph import nested_regions
from npugraph_ex.graph.undeclared import RELIES_ON_SCHEMAS, is_foreign, keep_writers
from npugraph_ex.observe.dump import GraphDumper, new_dumper
from npugraph_ex.observe.kernel_times import kernel_times
from npugraph_ex.observe.logger import logger
from npugraph_ex.passes import pipeline
from npugraph_ex.report import captures, graphs
from npugraph_ex.report.builder import ReportBuilder
from npugraph_ex.report.passes import PassReport
from npugraph_ex.saving.artifact import SavedGraph
from npugraph_ex.saving.size_one import AtSizeOne
from npugraph_ex.saving.values import Unsaveable
from npugraph_ex.tracing_repairs import attention_scales

_WARNED_OF = "the stream check warns of its streams, and only where a graph is compiled"


@dataclass
class CompiledFxArtifacts:
    """A saved graph for another process: its text, which a client may write to its own file.

    Attributes:
        version: the version of the text's format, for the client; the text contains it too.
        py_code: the text from `CompiledFxGraph.get_code`.
    """

    version: str = "1"
    py_code: str | None = None


class CompiledFxGraph:
    """A compiled graph: call it with the graph's inputs, get the list of its outputs.

    Args:
        runner: runs a call.
        code: returns the graph to save, or raises `Unsaveable`; None if nothing can be saved.
        wrapped: whether AOT changes inputs or outputs outside the graph, so that the text is not complete.
        unsaved: why it can never be saved; empty if it can.

    Attributes:
        unsaved: the reason why `get_code` returned None.
        changed: called when the graph is compiled again because of an undeclared effect. A text that was saved earlier is then
            refused when it is loaded.
    """

    def __init__(
        self,
        runner: Callable[..., Sequence[Any]],
        code: Callable[[], SavedGraph] | None = None,
        *,
        wrapped: bool = False,
        unsaved: str = "",
    ) -> None:
        self.runner = runner
        self._code = None if unsaved else code
        self.unsaved = unsaved or "nothing of it can be saved"
        self._wrapped = wrapped
        self.changed: Callable[[], object] | None = None
        self._text: str | None = None

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Run the graph."""
        return self.runner(*inputs)

    def boxed(self) -> Callable[[list[Any]], Sequence[Any]]:
        """The same function of one list of inputs, which AOT calls."""
        if isinstance(self.runner, CompiledGraph):
            return self.runner.run
        function: Callable[[list[Any]], Sequence[Any]] = make_boxed_func(watched_calls.unwatched(self.runner))
        return function

    def kept(self) -> tuple[Callable[[list[Any]], Sequence[Any]], str]:
        """The boxed function in a form that AOT can save with its own wrapper, as `aot_compile` does.

        Returns:
            The function, and the reason why it cannot be saved, or an empty text.
        """
        from npugraph_ex._torch_private.kept_output import KeptOutput

        text, reason = "", self.unsaved if self._code is None else ""
        try:
            text = self._code().spelt() if self._code is not None else ""
        except Unsaveable as found:
            reason = str(found)
        return KeptOutput(self.boxed(), text, _boxed_from_text), reason

    @staticmethod
    def serialize() -> NoReturn:
        """Refuse to be part of a saved function of torch's; `get_code` gives the text.

        vLLM looks for this method on torch 2.12 and later, to save a whole model. Where it is missing, vLLM saves a model
        without this graph, and the next process calls None.
        """
        raise SavedGraphError("a compiled graph is saved by itself, as the text of get_code(), and not with its model")

    @property
    def is_whole(self) -> bool:
        """Whether inputs and outputs are exactly those of the function, so that AOT changes none outside the graph."""
        return not self._wrapped

    def never_saved(self, reason: str) -> None:
        """Refuse to be saved: what checks its inputs belongs to this process."""
        self._code, self._text, self.unsaved = None, None, reason

    def compiled_again(self) -> None:
        """Forget the text, and inform the client that saved it."""
        self._text = None
        if self.changed is not None:
            self.changed()

    def _whole(self, *, guarded: bool) -> str:
        """The graph as text, if the text is the complete function."""
        if self._wrapped or self._code is None:
            raise Unsaveable("AOT changes its inputs or outputs outside the graph")
        saved = self._code()
        if not guarded and not saved.right_at_one:
            raise Unsaveable("it may do something else for a size of one, and nobody checks torch's guards")
        if not guarded and not saved.checks_all:
            raise Unsaveable("a number that is no input of it decided a branch, and nobody checks torch's guards")
        return saved.spelt()

    def get_code(self, *, guarded: bool = False) -> str | None:
        """The graph as text for `load_artifacts` in another process; None, with the reason in the log, if it cannot be saved.

        Args:
            guarded: whether the caller checks torch's guards before each call. If not, as vLLM, a graph is saved only if it
                is right for a batch of one, too.
        """
        if self._text is None and self._code is not None:
            try:
                self._text = self._whole(guarded=guarded)
            except Unsaveable as reason:
                logger.info("A compiled graph is not saved: %s. It is compiled in every process", reason)
                self._code, self.unsaved = None, str(reason)
        return self._text

    @classmethod
    def load_artifacts(cls, artifacts: CompiledFxArtifacts) -> Self:
        """Make a saved graph callable.

        Args:
            artifacts: the saved graph, with the text in ``py_code``, from this or another process.

        Raises:
            SavedGraphError: the text is damaged, foreign or of another version, or needs an operator that is missing.
        """
        text = artifacts.py_code
        if not isinstance(text, str):
            raise SavedGraphError(f"py_code takes the text from get_code(), got {text!r}")
        saved = SavedGraph.read(text)
        return cls(saved.load(compile_graph, unguarded=True), lambda: saved)


def _boxed_from_text(text: str) -> Callable[[list[Any]], Sequence[Any]]:
    """A saved graph as a function of one list of inputs, for AOT, which keeps torch's guards with it."""
    return CompiledFxGraph(SavedGraph.read(text).load(compile_graph)).boxed()


@dataclass
class Compilation:
    """The compilation of one graph: what the passes get besides the graph, and what they report.

    ``so_far`` is the report on the joint graph, if AOT split one; ``values`` are the call's values, as far as they are known;
    ``names`` are the user's names of the inputs, in order; ``trained`` says that AOT split the graph from its backward.
    """

    config: CompilerConfig
    options: Options
    dumper: GraphDumper | None
    so_far: ReportBuilder | None = None
    report: PassReport | None = None
    values: Sequence[Any] = ()
    names: Sequence[str] = ()
    trained: bool = False


def optimise(gm: fx.GraphModule, example_inputs: Sequence[Any], compilation: Compilation) -> PassReport:
    """Run every pass over ``gm``, in place."""
    compilation.report = pipeline.run(
        gm,
        example_inputs,
        compilation.options,
        config=compilation.config,
        dumper=compilation.dumper,
        so_far=compilation.so_far,
        vector_cores=scopes.vector_cores() if compilation.options.deadlock_check else None,
        values=compilation.values,
        price=kernel_times() if compilation.options.auto_streams else None,
    )
    return compilation.report


def _list_outputs(gm: fx.GraphModule) -> None:
    """Make a graph with one bare output, as from `make_fx`, return a list, as AOT's graphs do."""
    output = gm.graph.output_node()
    value = output.args[0]
    if isinstance(value, fx.Node):
        output.args = ([value],)
        gm.recompile()
    elif not isinstance(value, (list, tuple)) or any(isinstance(leaf, (list, tuple, dict)) for leaf in value):
        raise GraphVerificationError(
            f"the graph returns {value!r}; this compiler takes graphs that return one flat list of values, as AOT's graphs do"
        )


class NpuFxCompiler:
    """Compiles AOT graphs.

    Args:
        compiler_config: the options; each compilation reads them.
        names: the user's name of each input, by its position in the Dynamo graph.
        dumper: writes the graphs; None makes a new one if TORCH_COMPILE_DEBUG=1.
        effects: what undeclared effects may have done to the Dynamo graph; None if there is no such graph.

    Attributes:
        values: the current call's inputs of the Dynamo graph, as long as they are available.
        at_one: whether the Dynamo graph is right for a batch of one, as long as it is available.
        follows_current_device: whether the Dynamo graph names the current device, which AOT may have resolved.
        frame: what Dynamo compiles the graph from, if the graph is the frame's only one.
        keeps_gradients_undefined: whether the graph is trained, and its backward may get None for a gradient.
        tracing: what holds only until AOT has traced a graph that is trained, or has compiled another one.
    """

    def __init__(
        self,
        compiler_config: CompilerConfig,
        names: Sequence[str] = (),
        dumper: GraphDumper | None = None,
        effects: UndeclaredEffects | None = None,
    ) -> None:
        self.values: Sequence[Any] = ()
        self.at_one: AtSizeOne | None = None
        self.follows_current_device = False
        self.frame: _torch_private.Frame | None = None
        self.keeps_gradients_undefined = False
        self.tracing = ExitStack()
        warn_of_unknown()
        keep_writers()  # before AOT, which removes dead code
        self.config = compiler_config
        self._names = names
        self._dumper = dumper
        self._effects = effects or UndeclaredEffects(fx.GraphModule({}, fx.Graph()), (), require_capture=False)
        self._joint: ReportBuilder | None = None
        self._trained = False

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> CompiledFxGraph:
        """Compile one graph, in place."""
        # A look-up on the class at each call, because vLLM-Ascend replaces the method there while it compiles.
        return self._get_compiled_gm(gm, example_inputs)

    def partition(self, gm: fx.GraphModule, inputs: Sequence[Any], **how: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Apply the rules for training to a joint graph, in place, and split it into forward and backward.

        Args:
            gm: AOT's joint graph of forward and backward.
            inputs: its inputs.
            how: the arguments for AOT's own partitioner, which splits the graph.
        """
        self._trained = True
        self.tracing.close()
        nested_regions.inline(gm)
        nary_products.pair(gm.graph)
        # The CPU lacks some operators' backward, so values are compared on the forward graph only.
        options = replace(self.config.to_options(), check_numerics=False)
        if training_rules():
            self._joint = ReportBuilder()
            pipeline.run(
                gm, inputs, options, config=self.config, passes=pipeline.JOINT_PIPELINE, dumper=self._dumper,
                so_far=self._joint,
            )  # fmt: skip
        forward, backward = partition.split(gm, inputs, **how)
        self.keeps_gradients_undefined = undefined_gradients.can_be_kept(backward.graph)
        return forward, backward

    def _get_compiled_gm(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> CompiledFxGraph:
        from npugraph_ex import npu_fx_compiler

        options = self.config.to_options()
        if options.mode == "max-autotune":
            raise OptionValueError(
                "mode 'max-autotune' takes Dynamo graphs, through get_npu_backend; this is an AOT graph"
            )
        check_switches(options.fusion_rules)
        _list_outputs(gm)
        nested_regions.inline(gm)
        attention_scales.refuse_lost(gm.graph)
        foreign = any(is_foreign(node.target) for node in gm.graph.nodes)
        if foreign or options.dump_tensor_data:  # the graph as it was given takes the inputs as they were
            options = replace(options, join_projections=False)
        compilation = self._compilation(gm, options)
        names: Sequence[str] = compilation.names
        number, before = graphs.next_number(), nodes_of(gm.graph)
        static = _torch_private.static_input_positions(gm.graph)
        nary_products.pair(gm.graph)
        returned_views.restore(gm.graph)
        plain = _torch_private.is_plain_aot_graph(gm.graph)
        elsewhere = current_device.follow(gm, number)
        follows = self.follows_current_device or current_device.decides(gm.graph)
        current = current_device.traced_on(gm.graph) if follows else None
        original = fx.GraphModule(gm, copy.deepcopy(gm.graph)) if options.dump_tensor_data else gm
        as_given = fx.GraphModule(gm, copy.deepcopy(gm.graph)) if foreign else None
        relies = gm.meta[RELIES_ON_SCHEMAS] = self._effects.relies_on_schemas
        at_one = self._at_size_one(gm, as_given)
        latest = gm

        def became(again: fx.GraphModule) -> None:
            nonlocal latest
            latest = again
            compiled.compiled_again()

        # A look-up in the module at each call, because clients wrap the function to see the graph.
        npu_fx_compiler._optimize_fx(gm, example_inputs, compilation)  # noqa: SLF001 - the name that they use
        joined = JoinedInputs(gm)
        static, names, example_inputs = joined.behind(static, names, example_inputs)
        if options.dump_tensor_data:
            dumped = original if options.data_dump_stage == "original" else gm
            runner: Callable[..., Sequence[Any]] = DumpedGraph(dumped, names, options.data_dump_dir, number)
        else:
            runner = compile_graph(
                gm, example_inputs, options, static=static, names=names, number=number, frame=self.frame,
                original=self._original(as_given, example_inputs, compilation, became, static=static, names=names),
            )  # fmt: skip
        self._record(gm, example_inputs, names, compilation, runner, number=number, before=before, static=static)
        runner = joined.around(runner)
        runner = runner if elsewhere is None else elsewhere.around(runner)

        def code() -> SavedGraph:
            return SavedGraph.from_graph(
                latest, example_inputs, options, static=static, names=names, at_one=at_one, current=current,
                relies_on_schemas=relies(),
            )  # fmt: skip

        races = compilation.report is not None and compilation.report.streams.errors
        unsaved = joined.unsaved or (_WARNED_OF if races else "")
        compiled = CompiledFxGraph(runner, code, wrapped=not plain, unsaved=unsaved)
        self._effects.made.append(compiled)
        return compiled

    def _compilation(self, gm: fx.GraphModule, options: Options) -> Compilation:
        """One compilation with what is known of the graph's inputs; the report on the joint graph becomes a part of its own."""
        joint, self._joint = self._joint, None
        placeholders = gm.graph.find_nodes(op="placeholder")
        values = [_torch_private.aot_input_value(node, self.values) for node in placeholders] if self.values else ()
        names = [self._name_of(node) for node in placeholders]
        return Compilation(
            self.config, options, self._dumper or new_dumper(), joint, values=values, names=names, trained=self._trained
        )

    def _at_size_one(self, gm: fx.GraphModule, as_given: fx.GraphModule | None) -> AtSizeOne | None:
        """Whether the graph is right for a batch of one: as the Dynamo graph tells, or where there is none this one."""
        examples = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
        if self.at_one is not None or not any(isinstance(example, torch.SymInt) for example in examples):
            return self.at_one
        return AtSizeOne(as_given or fx.GraphModule(gm, copy.deepcopy(gm.graph)), examples)

    def _original(
        self,
        as_given: fx.GraphModule | None,
        example_inputs: Sequence[Any],
        compilation: Compilation,
        became: Callable[[fx.GraphModule], None],
        *,
        static: Sequence[int],
        names: Sequence[str],
    ) -> Original | None:
        """How to compile a graph again after an operator had an undeclared effect; None if no operator can have one."""
        if as_given is None:
            return None

        def compile_again() -> Callable[..., Sequence[Any]]:
            gm = fx.GraphModule(as_given, copy.deepcopy(as_given.graph))
            gm.meta[RELIES_ON_SCHEMAS] = self._effects.relies_on_schemas
            again = replace(compilation, dumper=new_dumper(), so_far=None, values=())
            number, before = graphs.next_number(), nodes_of(gm.graph)
            optimise(gm, example_inputs, again)
            original = self._original(as_given, example_inputs, compilation, became, static=static, names=names)
            runner = compile_graph(
                gm, example_inputs, again.options, static=static, names=names, number=number, original=original,
                frame=self.frame,
            )  # fmt: skip
            self._record(
                gm, example_inputs, names, again, runner, number=number, before=before, static=static,
                cause="again: an operator had an effect that its schema does not declare",
            )  # fmt: skip
            became(gm)
            return runner

        return Original(as_given, compile_again, self._effects.lost_write)

    def _name_of(self, node: fx.Node) -> str:
        """An input's name for messages: the user's own expression if Dynamo knows it."""
        position = _torch_private.aot_input_position(node)
        known = position is not None and position < len(self._names)
        return self._names[position] if known and position is not None else str(node.target)

    @staticmethod
    def _record(
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        names: Sequence[str],
        compilation: Compilation,
        runner: Callable[..., Any],
        *,
        number: int,
        **facts: Any,
    ) -> None:
        report = compilation.report or PassReport()
        made = record(
            gm, example_inputs, names, compilation.options, runner, number=number, report=report,
            trained=compilation.trained, **facts,
        )  # fmt: skip
        if compilation.dumper is not None:
            compilation.dumper.text(description(made), "captured_graph")
            captures.also_write(number, compilation.dumper.directory / "captures.txt")
