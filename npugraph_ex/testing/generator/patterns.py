"""The registered fusion rules as patterns to plant: their arguments, and their search functions as program steps."""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from npugraph_ex import _torch_private
from npugraph_ex._torch_private import storage_key
from npugraph_ex.fusion import dispatch_tracer
from npugraph_ex.fusion.registry import USER_RULES
from npugraph_ex.fusion.rule import FusionRule
from npugraph_ex.fusion.rules import RULE_NAMES, prepared_rules
from npugraph_ex.testing.arguments import checked
from npugraph_ex.testing.generator.program import Ref, Step

ArgumentStyle = Literal["as traced", "omitted", "written", "keyword"]
ARGUMENT_STYLES: tuple[ArgumentStyle, ...] = ("as traced", "omitted", "written", "keyword")


@dataclass(frozen=True)
class Argument:
    """One tensor argument of a search function.

    Attributes:
        name: as in the function's signature.
        dims: for each dimension the number of its class. Sizes that are equal in the rule's example inputs are one class.
        dtype: in the example inputs.
        gradient: whether the example requires a gradient, as those of rules for training do.
    """

    name: str
    dims: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool = False


@dataclass(frozen=True)
class Traced:
    """A search function as steps.

    Attributes:
        steps: their arguments are ``Ref``s to the search function's argument names, and to results.
        outputs: names of what the function returns, in order.
        vanishing: names of tensors between, which a fused operator does not produce.
        views: names of results that lie in an argument, with that argument: they stay, and anyone may use them. Empty
            where the function returns nothing else.
        metas: shape and dtype of every result.
    """

    steps: tuple[Step, ...]
    outputs: tuple[str, ...]
    vanishing: tuple[str, ...]
    views: Mapping[str, str]
    metas: Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Pattern:
    """A registered rule as a pattern to plant into a program.

    Attributes:
        name: the rule's.
        arguments: the tensor arguments of its search function.
        scalars: the names of its numeric arguments.
        rule: the declaration.
    """

    name: str
    arguments: tuple[Argument, ...]
    scalars: tuple[str, ...]
    rule: FusionRule
    _traces: dict[object, Traced] = field(default_factory=dict, repr=False, compare=False)

    @property
    def leading(self) -> int | None:
        """The class of dimension that is always the first one; its size may be a symbol."""
        first = {argument.dims[0] for argument in self.arguments if len(argument.dims) > 1}
        elsewhere = {dim for argument in self.arguments for dim in argument.dims[1:]}
        alone = {argument.dims[0] for argument in self.arguments if len(argument.dims) == 1}
        return next(iter(first)) if len(first) == 1 and not first & (elsewhere | alone) else None

    @property
    def rows(self) -> bool:
        """Whether the arguments are rows and vectors, so that several dimensions may stand for the leading one."""
        return self.leading is not None and all(len(argument.dims) <= 2 for argument in self.arguments)

    def trace(
        self, shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, torch.dtype], scalars: Mapping[str, float]
    ) -> Traced:
        """The search function on arguments of these shapes and dtypes, as steps."""
        signature = tuple((a.name, tuple(shapes[a.name]), dtypes[a.name]) for a in self.arguments)
        key = (signature, tuple(sorted((name, str(number)) for name, number in scalars.items())))  # 2 is no 2.0
        if key not in self._traces:
            self._traces[key] = _traced(self.rule, signature, scalars)
        return self._traces[key]


@checked
def registered_patterns(name: str | None = None) -> tuple[Pattern, ...]:
    """Every rule that the fusion pass would use now, or those of one name, extra rules included; user rules first."""
    prepared_ones = (
        *USER_RULES.snapshot(),
        *prepared_rules(name=name),
        *(prepared_rules(extra=True, name=name) if name else ()),
    )
    rules = [prepared.rule for prepared in prepared_ones if not prepared.inactive]
    found = tuple(pattern_of(rule) for rule in rules if name in (None, rule.name))
    if not found:
        raise _unknown(name)
    return found


def check_name(name: str) -> None:
    """Raise ValueError where no rule has this name; nothing is traced."""
    if name not in _names():
        raise _unknown(name)


def _names() -> set[str]:
    return {*RULE_NAMES, *(prepared.rule.name for prepared in USER_RULES.snapshot())}


def _unknown(name: str | None) -> ValueError:
    return ValueError(f"there is no registered fusion rule called {name!r}; there are {', '.join(sorted(_names()))}.")


_known: dict[FusionRule, Pattern] = {}


def pattern_of(rule: FusionRule) -> Pattern:
    """The pattern of a rule; made once, so that its traces are kept."""
    if rule not in _known:
        _known[rule] = _new_pattern(rule)
    return _known[rule]


def _new_pattern(rule: FusionRule) -> Pattern:
    names = [name for name in inspect.signature(rule.search).parameters if name not in rule.scalars]
    with FakeTensorMode(allow_non_fake_inputs=True):
        examples = list(rule.example_inputs())
    arguments = []
    for name, example in zip(names, examples, strict=True):
        if not isinstance(example, torch.Tensor):
            raise TypeError(
                f"rule {rule.name}: only tensors and scalars can be planted; {name} is {type(example).__name__}."
            )
        shape = tuple(int(size) for size in example.shape)
        arguments.append(Argument(name, shape, example.dtype, example.requires_grad))
    return Pattern(rule.name, tuple(arguments), tuple(rule.scalars), rule)


def _traced(
    rule: FusionRule, signature: Sequence[tuple[str, tuple[int, ...], torch.dtype]], scalars: Mapping[str, float]
) -> Traced:
    names = [name for name, _, _ in signature]

    def of_tensors(*tensors: torch.Tensor) -> Any:
        return rule.search(**dict(zip(names, tensors, strict=True)), **scalars)

    with _tracing_mode():
        examples = [torch.empty(shape, dtype=dtype, device="npu") for _, shape, dtype in signature]
        return _steps_of(dispatch_tracer.forward(of_tensors, examples).graph, names)


@cache
def _tracing_mode() -> FakeTensorMode:
    """One mode for all traces, which remembers what operators return."""
    return FakeTensorMode()


def _steps_of(graph: fx.Graph, arguments: Sequence[str]) -> Traced:
    names: dict[fx.Node, str] = dict(zip(graph.find_nodes(op="placeholder"), arguments, strict=True))
    steps: list[Step] = []
    metas: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    outputs: tuple[str, ...] = ()
    results: dict[fx.Node, tuple[str, ...]] = {}
    storages = {storage_key(node.meta["val"]): name for node, name in names.items()}
    views: dict[str, str] = {}
    for node in graph.nodes:
        if node.op == "output":
            outputs = tuple(names[leaf] for leaf in pytree.tree_leaves(node.args[0]) if isinstance(leaf, fx.Node))
        elif node.target is operator.getitem:
            names[node] = results[node.args[0]][node.args[1]]
        elif node.op == "call_function":
            values = node.meta["val"]
            several = isinstance(values, (tuple, list))
            leaves = list(values) if several else [values]
            results[node] = tuple(f"{node.name}_{position}" for position in range(len(leaves)))
            for name, leaf in zip(results[node], leaves, strict=True):
                metas[name] = (tuple(int(size) for size in leaf.shape), leaf.dtype)
                if storage_key(leaf) in storages:
                    views[name] = storages[storage_key(leaf)]
            if not several:
                names[node] = results[node][0]
            kwargs = tuple((name, _with_refs(value, names)) for name, value in node.kwargs.items())
            steps.append(Step(_name_of(node.target), _with_refs(node.args, names), kwargs, results[node]))
    vanishing = tuple(name for name in metas if name not in outputs)
    return Traced(tuple(steps), outputs, vanishing, {} if set(outputs) <= views.keys() else views, metas)


def _with_refs(value: Any, names: Mapping[fx.Node, str]) -> Any:
    if isinstance(value, fx.Node):
        return Ref(names[value])
    return tuple(_with_refs(item, names) for item in value) if isinstance(value, (list, tuple)) else value


def _name_of(target: torch._ops.OpOverload) -> str:
    return f"{target.namespace}.{_torch_private.schema(target).name.split('::')[1]}.{target._overloadname}"


def schema_of(step: Step) -> torch.FunctionSchema:
    """The schema of the operator that a step calls."""
    value: Any = torch.ops
    for part in step.operator.split("."):
        value = getattr(value, part)
    return _torch_private.schema(value)


def respelt(step: Step, traced: Traced) -> Step:
    """The same call with its dimensions counted from the end, in the other order where there are two, and a size left open."""
    (result, *_) = step.results
    shape, _ = traced.metas[result]
    match step.operator, step.args:
        case "aten.transpose.int", (value, first, second):
            return dataclasses.replace(step, args=(value, second - len(shape), first - len(shape)))
        case "aten.permute.default", (value, dims):
            return dataclasses.replace(step, args=(value, tuple(dim - len(shape) for dim in dims)))
        case "aten.view.default", (value, sizes) if all(sizes):
            return dataclasses.replace(step, args=(value, (-1, *sizes[1:])))
    return step


def with_style(step: Step, style: ArgumentStyle) -> Step:
    """The same call, with its default arguments left out, written out, or given by keyword."""
    if style == "as traced":
        return step
    schema = schema_of(step).arguments
    given = {schema[i].name: value for i, value in enumerate(step.args)} | dict(step.kwargs)
    required = [a for a in schema if not a.has_default_value()]
    default = {a.name: _with_refs(a.default_value, {}) for a in schema if a.has_default_value()}
    args = tuple(given[a.name] for a in required if not a.kwarg_only)
    if style == "written":
        kwargs = {name: given.get(name, value) for name, value in default.items()}
    else:
        kwargs = {
            name: given[name]
            for name, value in default.items()
            if name in given and (style == "keyword" or given[name] != value)
        }
    kwargs |= {a.name: given[a.name] for a in required if a.kwarg_only}
    return Step(step.operator, args, tuple(kwargs.items()), step.results)
