"""`SavedGraph`: one optimised graph with everything to run it, as text and back.

`text` has the layout; `nodes` and `inputs` encode nodes and inputs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from npugraph_ex import _torch_private
from npugraph_ex._version import __version__
from npugraph_ex.config.options import Options
from npugraph_ex.errors import SavedGraphError
from npugraph_ex.graph import metadata
from npugraph_ex.graph.memory.aliases import AliasFacts, mutated_inputs
from npugraph_ex.graph.operators import learn
from npugraph_ex.graph.undeclared import RELIES_ON_SCHEMAS, found_in
from npugraph_ex.observe.dump import graph_source
from npugraph_ex.report.graphs import note_loaded
from npugraph_ex.saving import text
from npugraph_ex.saving.devices import OnEachDevice
from npugraph_ex.saving.inputs import InputCheck, encode_inputs, fake_inputs, hints_of
from npugraph_ex.saving.nodes import decode_graph, encode_graph
from npugraph_ex.saving.size_one import AtSizeOne
from npugraph_ex.saving.sizes import Condition, SymbolicSizes, excludes_one
from npugraph_ex.saving.values import Json, Unsaveable

_NOT_KEPT = frozenset({"post_grad_custom_pre_pass", "post_grad_custom_post_pass", "use_graph_pool"})
"""Options that are no longer needed, or that name an object of the compiling process."""


@dataclass(frozen=True)
class SavedGraph:
    """An optimised graph as data.

    Attributes:
        data: everything, as JSON values.
        source: the graph as Python, for people.
    """

    data: dict[str, Json]
    source: str

    @classmethod
    def from_graph(  # noqa: PLR0913 - the parts of one compilation
        cls,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        options: Options,
        *,
        static: Sequence[int],
        names: Sequence[str],
        at_one: AtSizeOne | None,
        current: int | None = None,
        relies_on_schemas: Collection[str] = (),
    ) -> SavedGraph:
        """Encode a graph after all passes.

        Args:
            gm: the graph.
            example_inputs: its inputs, fake or real.
            options: the options it was compiled with.
            static: positions of inputs whose address does not change from call to call.
            names: the input names for messages.
            at_one: whether the traced graph is right where a symbolic size is one, too; None for no.
            current: the current device at the compilation; None if no result depends on it.
            relies_on_schemas: the undeclared effects with which it would lack a write of the program.

        Raises:
            Unsaveable: the graph cannot run in another process; the message says why.
        """
        if options.dump_tensor_data:
            raise Unsaveable("dump_tensor_data writes files of this process")
        values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
        mode = metadata.fake_mode_of(gm.graph)
        if mode is None:
            raise Unsaveable("the graph takes no tensor")
        if _writes_shared_memory(gm, values):
            raise Unsaveable("its inputs share memory and one is written")
        if not options.force_eager and any("unbacked_bindings" in node.meta for node in gm.graph.nodes):
            raise Unsaveable("sizes in the graph are known only when it runs")
        places = {value.device for value in values if isinstance(value, torch.Tensor) and value.device.type == "npu"}
        if len(places) > 1:
            raise Unsaveable("its inputs lie on several devices")
        home = next(iter(places), None)
        if current is not None and home is not None and home.index != current:
            raise Unsaveable(f"it makes tensors on the current device {current}, and its inputs lie on {home}")
        kept = {name: value for name, value in options.changed().items() if name not in _NOT_KEPT}
        parameters = [p for p, value in enumerate(example_inputs) if isinstance(value, torch.nn.Parameter)]
        condition, is_whole = _torch_private.input_guards(values, mode)
        try:
            Condition(condition)
        except ValueError as error:
            raise Unsaveable(f"of a condition on its sizes, {condition}, no file can tell: {error}") from error
        data: dict[str, Json] = {
            "npugraph_ex": __version__,
            "torch": torch.__version__,
            "options": _plain(kept),
            "inputs": encode_inputs(values, names),
            "hints": hints_of(values),
            "condition": condition,
            "condition_is_whole": is_whole,
            "right_at_one": not excludes_one(condition) or (at_one is not None and at_one.is_right),
            "static": sorted({*static, *parameters}),
            "follows_current_device": current is not None,
            "undeclared": found_in(gm.graph),
            "relies_on_schemas": sorted(relies_on_schemas),
            "nodes": encode_graph(gm, home),
        }
        return cls(data, graph_source(gm, "A graph that npugraph_ex saved"))

    @property
    def right_at_one(self) -> bool:
        """Whether it is right where a symbolic size is one, too; if not, only callers who check torch's guards may use it."""
        return bool(self.data["right_at_one"])

    @property
    def checks_all(self) -> bool:
        """Whether its own condition is all that torch guards; if not, only callers who check torch's guards may use it."""
        return bool(self.data["condition_is_whole"])

    def spelt(self) -> str:
        """The graph as text."""
        return text.write(self.data, self.source)

    @classmethod
    def read(cls, spelt: str) -> SavedGraph:
        """Undo `spelt`.

        Raises:
            SavedGraphError: the text is cut off, changed, of another format, or written by another torch or library.
        """
        saved = cls(*text.parse(spelt))
        for name, here in (("npugraph_ex", __version__), ("torch", torch.__version__)):
            if saved.data[name] != here:
                raise SavedGraphError(
                    f"the graph was saved by {name} {saved.data[name]}; this is {here}. Compile it anew"
                )
        return saved

    def load(
        self,
        compile_graph: Callable[..., Callable[..., Sequence[Any]]],
        *,
        elsewhere: Callable[..., Sequence[Any]] | None = None,
        unguarded: bool = False,
    ) -> Callable[..., Sequence[Any]]:
        """Make the graph callable in this process: on the current device now, and on other devices at the first call there.

        Args:
            compile_graph: `npugraph_ex.aclgraph.compile_graph`, or a replacement.
            elsewhere: runs a call whose inputs are not on the current device, if the graph makes tensors on the current
                device. No saved graph can do that. None to refuse such calls.
            unguarded: whether the caller drops torch's guards, as vLLM does. Then sizes of one are accepted if the graph is
                right there.

        Returns:
            A function of the graph's inputs; it refuses inputs that the graph was not compiled for.

        Raises:
            SavedGraphError: an operator of the graph is not registered here.
        """
        condition = Condition(self.data["condition"], from_one=unguarded and self.right_at_one)
        check = InputCheck(self.data["inputs"], condition)
        here = int(torch.npu.current_device())
        note_loaded()
        return OnEachDevice(
            check,
            {here: self._load_on(torch.device("npu", here), compile_graph)},
            lambda index: self._load_on(torch.device("npu", index), compile_graph),
            follows=self.data["follows_current_device"],
            elsewhere=elsewhere,
        )

    def _load_on(self, home: torch.device, compile_graph: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
        """Make the graph callable with inputs of one device."""
        data = self.data
        options = Options.from_mapping(data["options"])
        try:
            gm = decode_graph(data["nodes"], home)
        except LookupError as error:
            raise SavedGraphError(
                f"the saved graph calls {error}, which is not registered in this process; import what registers it"
            ) from error
        with _torch_private.real_execution():
            inputs = fake_inputs(data["inputs"], SymbolicSizes(data["hints"]), home)
        for node in gm.graph.nodes:
            if str(node.target) in data["undeclared"]:
                learn(node.target, frozenset(data["undeclared"][str(node.target)]))
        placeholders = gm.graph.find_nodes(op="placeholder")
        for node, value in zip(placeholders, inputs, strict=True):
            node.meta["val"] = value
        if not options.force_eager:  # a capture needs the metadata of each node; a run operator by operator does not
            _derive_metadata(gm, next(value.fake_mode for value in inputs if isinstance(value, FakeTensor)))
        names = [entry["name"] for entry in data["inputs"]]
        gm.meta[RELIES_ON_SCHEMAS] = partial(frozenset, data["relies_on_schemas"])
        return compile_graph(gm, inputs, options, static=data["static"], names=names)


def _writes_shared_memory(gm: fx.GraphModule, values: Sequence[Any]) -> bool:
    """Whether an input is written in whose memory another one lies. The text says nothing of where inputs lie."""
    keys = [_torch_private.storage_key(value) if isinstance(value, torch.Tensor) else None for value in values]
    written = mutated_inputs(gm.graph, AliasFacts(gm.graph))
    return any(keys.count(keys[position]) > 1 for position in written)


def _derive_metadata(gm: fx.GraphModule, mode: FakeTensorMode) -> None:
    """Derive the metadata of each node from the inputs."""
    metadata.derive_constants(gm.graph, mode)
    metadata.derive_all(gm.graph, mode)


def _plain(options: dict[str, object]) -> dict[str, Json]:
    """The options as JSON values.

    Raises:
        Unsaveable: a value cannot be written as JSON.
    """
    for name, value in options.items():
        try:
            json.dumps(value)
        except TypeError:
            raise Unsaveable(f"the option {name}={value!r} cannot be written down") from None
    return dict(options)
