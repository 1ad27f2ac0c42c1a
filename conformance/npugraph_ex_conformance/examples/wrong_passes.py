"""Examples of passes that rewrite a graph by chance: what the pipeline must refuse under `check_numerics`, and what it must keep.

The graph is that of a random program of integers, or of floating-point numbers with casts to a narrow dtype. The pass makes an
edit as a person makes mistakes: another operator, another operand, a number more, a write that is gone, a result that is another
value or lies in another memory. It is a user's pass, or one of the library, which may be undone or must not.

Unless the pipeline raises, its graph computes, shares and writes what the first graph did. An edit that changes nothing but
roundings stays. A pass that raises is undone, or the error names it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from npugraph_ex.config import Options
from npugraph_ex.errors import GraphVerificationError
from npugraph_ex.fusion.registry import register_replacement
from npugraph_ex.graph.memory.aliases import output_values
from npugraph_ex.graph.metadata import alike
from npugraph_ex.passes import pipeline
from npugraph_ex.passes.base import Pass
from npugraph_ex.testing.generator.choices import Choices, Sampled
from npugraph_ex.testing.generator.inputs import Input, make_inputs
from npugraph_ex.testing.generator.program import Program, Ref, Step
from npugraph_ex.testing.generator.strategies import exact_programs
from npugraph_ex.testing.oracle import tracing
from npugraph_ex.testing.oracle.host import HostGraph
from npugraph_ex.testing.oracle.observation import observe, visible_difference

_ATEN = torch.ops.aten
_KINDS, _BY_USER = ("recoverable", "recoverable", "required", "user's"), "post_grad_custom_post_pass"
_ROUNDING, _KNOWN, _COMPARED = 40, 75, 75
"""Chances in percent: of a program with casts; that the check knows the values of the call, and not only random ones; that values
are compared at all."""
_OTHERS: Mapping[object, Sequence[OpOverload]] = {
    _ATEN.add.Tensor: (_ATEN.sub.Tensor, _ATEN.eq.Tensor), _ATEN.sub.Tensor: (_ATEN.add.Tensor, _ATEN.lt.Tensor),
    _ATEN.mul.Tensor: (_ATEN.add.Tensor,), _ATEN.bitwise_xor.Tensor: (_ATEN.bitwise_and.Tensor, _ATEN.ne.Tensor),
    _ATEN.bitwise_not.default: (_ATEN.neg.default, _ATEN.logical_not.default), _ATEN.neg.default: (_ATEN.abs.default,),
    _ATEN.add_.Tensor: (_ATEN.sub_.Tensor, _ATEN.add.Tensor), _ATEN.relu.default: (_ATEN.neg.default,),
    _ATEN.sigmoid.default: (_ATEN.tanh.default,), _ATEN.clone.default: (_ATEN.alias.default,),
}  # fmt: skip
"""Some of them have results of another dtype."""
_A_LITTLE = 1.003
"""Less than roundings of a narrow dtype make, more than those of float64."""
_CAST = _ATEN._to_copy.default
_CLEARLY = 0.02
"""A distance between floating-point results, relative to the largest element, that no rounding makes."""
_MANY = 1 / 4
"""The share of a result's elements that no pass changes without a word."""
_COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")
_FORMS: tuple[Callable[[Ref], tuple[str, tuple[Any, ...]]], ...] = (
    lambda x: ("aten.relu.default", (x,)), lambda x: ("aten.mul.Tensor", (x, Ref("x1"))),
    lambda x: ("aten.sigmoid.default", (x,)), lambda x: ("aten.gelu.default", (x,)),
    lambda x: ("aten.add.Tensor", (x, Ref("x1"))), lambda x: ("aten._softmax.default", (x, 1, False)),
    lambda x: ("aten.index_select.default", (x, 0, Ref("x2"))),
)  # fmt: skip


@dataclass
class _WrongPass:
    """A pass that makes one edit.

    Attributes:
        edit: changes a graph; True if it must stay, because it changes nothing but roundings, False if it must not.
        choices: where in the graph.
        stays: what the edit said; None where the results decide.
        changed: whether the graph reads differently.
        config: what it was given as a user's pass.
        raised: what it raised, and the arguments of that.
    """

    edit: Callable[[fx.Graph, Choices], bool | None]
    choices: Choices
    stays: bool | None = field(default=None, init=False)
    changed: bool = field(default=False, init=False)
    config: object = field(default=None, init=False)
    raised: tuple[Exception, tuple[Any, ...]] | None = field(default=None, init=False)

    def __call__(self, gm: fx.GraphModule, _: object, config: object = None) -> None:
        """Make the edit."""
        before, self.config = str(gm.graph), config
        try:
            self.stays = self.edit(gm.graph, self.choices)
        except Exception as error:
            self.raised = error, error.args
            raise
        self.changed = str(gm.graph) != before


def wrong_pass_example(seed: int) -> str:
    """What is wrong with one example; empty when nothing is. Of ten, one is about a rule and one about a rounding that decides."""
    choices = Choices(Sampled(f"wrong pass {seed}"))
    if seed % 10 in _SPECIAL:
        return _SPECIAL[seed % 10](choices)
    program = _rounding_program(choices) if choices.chance(_ROUNDING) else exact_programs()(choices)
    sizes, kind = program.sizes[0], choices.pick(_KINDS)
    known, compared = choices.chance(_KNOWN), choices.chance(_COMPARED)
    by_user = kind == "user's"
    made = _WrongPass(choices.pick(_OF_USERS if by_user else _EDITS), choices)
    compared = compared and made.edit is not _a_result_of_another_kind  # which metadata alone must tell
    traced = tracing.trace(
        program.function(), program.inputs, sizes, dynamic=program.dynamic, functional=program.functional
    )
    gm, given = tracing.copy_of(traced), partial(make_inputs, program.inputs, sizes=sizes, device="cpu")
    options = {"check_numerics": compared, **({_BY_USER: made} if by_user else {})}
    own = Pass("edit", made, recoverable=kind == "recoverable")
    place = choices.number(0, len(pipeline.PIPELINE))
    passes = pipeline.PIPELINE if by_user else (*pipeline.PIPELINE[:place], own, *pipeline.PIPELINE[place:])
    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    name = _BY_USER if by_user else own.name
    try:
        report = pipeline.run(gm, fakes, Options.from_mapping(options), passes=passes, values=given() if known else ())
    except Exception as error:  # noqa: BLE001 - whatever the pipeline raises is judged
        wrong = "" if kind != "recoverable" and made.stays is not True else "the pipeline raised it"
        wrong = wrong or _wrong_error(error, name, made)
        return f"{kind} pass {made.edit.__name__}: {type(error).__name__}: {error}: {wrong}" if wrong else ""
    done = next(one for one in report.passes if one.name == name)
    undone = [one for one in report.passes if one.outcome == "rolled back"]
    wanted = "rolled back" if made.raised else "changed" if made.changed else "unchanged"
    touched = by_user or made.edit is not _nothing  # arguments that are given anew, or by position, count as a change
    # Without a comparison, or on random values, nobody need see which values an edit changes.
    values = bool(undone) or made.stays is True or (known and compared)
    if [one for one in undone if one is not done or made.stays] or (
        done.outcome not in (wanted, "rolled back", *["changed"] * touched)
    ):
        wrong = f"{undone}, where the pass should be {wanted}"
    elif by_user and not isinstance(made.config, Options):
        wrong = f"it was given {made.config!r} as its configuration"
    elif made.edit is _not_computed and made.changed:
        wrong = "which leaves nothing to compute, and was kept"
    elif made.stays is False and compared and not undone:
        wrong = "which changes values, and was kept"
    else:
        wrong = _seen_difference(traced, gm, given, values=values)
        if program.dynamic:  # sizes that are equal in the first call may differ in the second
            later = partial(make_inputs, program.inputs, sizes=program.sizes[1], call=1, device="cpu")
            wrong = wrong or _seen_difference(traced, gm, later, values=False)
    return f"{kind} pass {made.edit.__name__}, {done.outcome} {done.message}: {wrong}" if wrong else ""


def _rule_example(choices: Choices) -> str:
    """A user's rule, which is right or wrong: the wrong one is undone wherever it matches, and the right one stays."""
    program, right = _rounding_program(choices), choices.chance(50)

    def search(x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x)

    def other(x: torch.Tensor) -> torch.Tensor:
        return torch.reciprocal(1 + torch.exp(-x)) if right else torch.tanh(x)

    traced = tracing.trace(program.function(), program.inputs, {}, dynamic=False, functional=True)
    gm, given = tracing.copy_of(traced), partial(make_inputs, program.inputs, device="cpu")
    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    with register_replacement(search, other, [torch.empty(3, 8)]) as rule:
        report = pipeline.run(gm, fakes, Options.from_mapping({"check_numerics": True}), values=given())
    of_rule = [one for one in report.rules if one.name == rule.name]
    fused, wanted = (
        sum(len(one.fusions) for one in of_rule),
        right * len(traced.graph.find_nodes(op="call_function", target=_ATEN.sigmoid.default)),
    )
    if fused != wanted or any(one.outcome == "rolled back" for one in report.passes):
        return f"a {'right' if right else 'wrong'} rule: {fused} fusions instead of {wanted}; {report.passes}"
    return _seen_difference(traced, gm, given, values=True)


def _decided_example(choices: Choices) -> str:
    """A comparison that only a rounding decides, and another one in its place: where many elements flip, somebody says so."""
    steps, last = [], "x0"
    for number in range(choices.number(0, 3)):
        operator, args = choices.pick(_FORMS)(Ref(last))
        steps.append(Step(operator, args, results=(last := f"v{number}",)))
    for name, of, dtype in (("n", last, choices.pick((torch.float16, torch.bfloat16))), ("w", "n", torch.float32)):
        steps.append(Step("aten._to_copy.default", (Ref(of),), (("dtype", dtype),), (name,)))
    comparison, other = choices.pick(_COMPARISONS), choices.pick(_COMPARISONS)
    steps.append(Step(f"aten.{comparison}.Tensor", (Ref("w"), Ref(last)), results=("mask",)))
    program = Program(_inputs(), tuple(steps), ("mask",))
    traced = tracing.trace(program.function(), program.inputs, {}, dynamic=False, functional=True)
    gm, given = tracing.copy_of(traced), partial(make_inputs, program.inputs, device="cpu")

    def compare_otherwise(graph: fx.GraphModule, _: object) -> None:
        for node in graph.graph.find_nodes(op="call_function", target=getattr(_ATEN, comparison).Tensor):
            node.target = getattr(_ATEN, other).Tensor

    fakes = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    own = Pass("edit", compare_otherwise)
    report = pipeline.run(gm, fakes, Options(check_numerics=True), passes=(own,), values=given())
    (old,), (new,) = (HostGraph(one).run(given()) for one in (traced, gm))
    flipped = float((old != new).double().mean())
    said = any("the inputs of the call" in reason for reason in report.uncompared)
    return f"{other} for {comparison}: {flipped:.0%} flipped, and {report.notes()}" if (flipped > _MANY) != said else ""


_SPECIAL: Mapping[int, Callable[[Choices], str]] = {8: _decided_example, 9: _rule_example}


def _wrong_error(error: Exception, name: str, made: _WrongPass) -> str:
    """What is wrong with an exception that the pipeline may raise."""
    if made.raised is None or made.edit is _a_value_asked:
        return (
            "" if isinstance(error, GraphVerificationError) and name in str(error) else "not what a verification says"
        )
    own, args = made.raised
    said = " ".join((*map(str, error.args), *getattr(error, "__notes__", ())))
    whole = error is own and all(str(arg) in said for arg in args)
    named = name in said or (isinstance(error, KeyError) and sys.version_info < (3, 11))  # of which the log tells
    return "" if whole and named else f"{own!r} of {args} became {said!r}"


def _seen_difference(
    traced: fx.GraphModule, edited: fx.GraphModule, given: Callable[[], list[Any]], *, values: bool
) -> str:
    """What a caller clearly sees of the difference between two graphs, perhaps apart from ``values``; empty for nothing."""
    old = observe(inputs := given(), HostGraph(traced).run(inputs))
    try:
        new = observe(inputs := given(), HostGraph(edited).run(inputs))
    except Exception as error:  # noqa: BLE001 - whatever an operator refuses
        return f"the graph raises {error!r}" if values else ""
    other = visible_difference(old, new, strides=False, kept_as=False)
    if other or not values:
        return other or ""
    pairs = zip((*old.outputs, *old.inputs), (*new.outputs, *new.inputs), strict=True)
    return next((f"value {place} differs" for place, pair in enumerate(pairs) if _differs(*pair)), "")


def _differs(old: Any, new: Any) -> bool:
    if not isinstance(old, torch.Tensor) or not old.is_floating_point():
        return not torch.equal(old, new) if isinstance(old, torch.Tensor) else bool(old != new)
    distance = (old.double() - new.double()).abs() / (old.double().abs().max() + 1e-9)
    return bool(distance.max() > _CLEARLY)


def _rounding_program(choices: Choices) -> Program:
    """A chain of operators in float32 or less, with casts to a narrow dtype and back again between them."""
    narrow = choices.pick((torch.float16, torch.bfloat16))
    steps, last = [], "x0"
    for number in range(choices.number(1, 5)):
        operator, args = choices.pick(_FORMS)(Ref(last))
        casts = (narrow, torch.float32) if choices.chance(50) else ()
        steps.append(Step(operator, args, results=(f"v{number}",)))
        last = f"v{number}"
        for dtype in casts:
            steps.append(Step("aten._to_copy.default", (Ref(last),), (("dtype", dtype),), (f"{last}c",)))
            last = f"{last}c"
    if choices.chance(40):
        steps.append(Step("aten.copy_.default", (Ref("x1"), Ref(last))))
    return Program(_inputs(), tuple(steps), (last,))


def _inputs() -> tuple[Input, ...]:
    return (*(Input((3, 8), "float32", seed=seed) for seed in (1, 2)), Input((3,), "int64", below=3, seed=3))


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function"]


def _picked(choices: Choices, nodes: list[fx.Node]) -> list[fx.Node]:
    """One of the nodes, if there are any."""
    return [choices.pick(nodes)] if nodes else []


def _another_operator(graph: fx.Graph, choices: Choices) -> None:
    for node in _picked(choices, [node for node in _calls(graph) if node.target in _OTHERS]):
        node.target = choices.pick(_OTHERS[node.target])


def _another_operand(graph: fx.Graph, choices: Choices) -> None:
    """One that perhaps looks alike, and may come later."""
    for node in _picked(choices, [node for node in graph.nodes if node.all_input_nodes]):
        old, any_ = choices.pick(node.all_input_nodes), choices.chance(30)
        fitting = [
            new for new in graph.nodes if new not in (node, old) and new.op != "output" and (any_ or alike(old, new))
        ]
        for new in _picked(choices, fitting):
            node.replace_input_with(old, new)


def _a_result_of_another_kind(graph: fx.Graph, choices: Choices) -> None:
    """Of another dtype by its operator, or of another shape or dtype by an operand."""
    results = [node for node in graph.output_node().all_input_nodes if node.target in _OTHERS and node.all_input_nodes]
    for node in _picked(choices, results):
        others = [other for other in graph.nodes if other < node and not alike(other, node)]
        if choices.chance(50):
            node.target = _OTHERS[node.target][-1]
        else:
            for other in _picked(choices, others):
                node.replace_input_with(choices.pick(node.all_input_nodes), other)


def _operands_swapped(graph: fx.Graph, choices: Choices) -> bool | None:
    """Of a sum or a product they may be."""
    for node in _picked(choices, [node for node in _calls(graph) if len(node.args) > 1]):
        first, second, *rest = node.args
        node.args = (second, first, *rest)
        symmetric = node.target in (_ATEN.add.Tensor, _ATEN.mul.Tensor) and not node.kwargs
        both = isinstance(first, fx.Node) and isinstance(second, fx.Node) and alike(first, second)
        return True if symmetric and both else None
    return True


def _a_number_more(graph: fx.Graph, choices: Choices) -> None:
    for node in _picked(choices, [node for node in _calls(graph) if any(type(arg) is int for arg in node.args)]):
        at = choices.pick([at for at, arg in enumerate(node.args) if type(arg) is int])
        node.update_arg(at, int(str(node.args[at])) + 1)


def _a_number_as_a_tensor(graph: fx.Graph, choices: Choices) -> bool:
    """Which is the same, where the operator is a sum of integers."""
    sums = [node for node in graph.find_nodes(op="call_function", target=_ATEN.add.Tensor) if type(node.args[1]) is int]
    for node in _picked(choices, sums):
        value = node.meta["val"]
        with graph.inserting_before(node):
            made = graph.call_function(
                _ATEN.full.default, ([], node.args[1]), {"dtype": value.dtype, "device": value.device}
            )
        node.update_arg(1, made)
    return True


def _a_number_as_a_constant(graph: fx.Graph, choices: Choices) -> bool:
    """A tensor that was made before the graph, and which the graph's module holds."""
    sums = [node for node in graph.find_nodes(op="call_function", target=_ATEN.add.Tensor) if type(node.args[1]) is int]
    for node in _picked(choices, sums):
        _module(graph).register_buffer("constant", torch.tensor(node.args[1], dtype=node.meta["val"].dtype))
        with graph.inserting_before(node):
            node.update_arg(1, graph.get_attr("constant"))
    return True


def _not_computed(graph: fx.Graph, choices: Choices) -> None:
    """A number that is the symbol of a size, or an operand that is a constant, made among fake tensors."""
    values = [node.meta["val"] for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    symbols = [size for value in values for size in value.shape if isinstance(size, torch.SymInt)]
    numbers = [(node, at) for node in _calls(graph) for at, arg in enumerate(node.args) if type(arg) is int]
    if symbols and numbers:
        node, at = choices.pick(numbers)
        node.update_arg(at, choices.pick(symbols))
        return
    for node in _picked(choices, [node for node in _calls(graph) if node.all_input_nodes]):
        operand = choices.pick(node.all_input_nodes)
        if not isinstance(operand.meta["val"], torch.Tensor):
            continue
        _module(graph).register_buffer("constant", operand.meta["val"])
        with graph.inserting_before(node):
            constant = graph.get_attr("constant")
        constant.meta["val"] = operand.meta["val"]
        node.replace_input_with(operand, constant)


def _module(graph: fx.Graph) -> fx.GraphModule:
    assert graph.owning_module is not None
    return graph.owning_module


def _by_keyword(graph: fx.Graph, choices: Choices) -> bool:
    """Arguments by their names; those that are what they are by default may be left out."""
    for node in _calls(graph):
        if not isinstance(node.target, OpOverload) or not choices.chance(30):
            continue
        arguments, first = node.target._schema.arguments, choices.number(0, len(node.args))
        named = dict(zip((argument.name for argument in arguments[first:]), node.args[first:], strict=False))
        defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
        dropped = {
            name for name, value in named.items() if name in defaults and value is defaults[name] and choices.chance(50)
        }
        node.args = node.args[:first]
        node.kwargs = {**node.kwargs, **{name: value for name, value in named.items() if name not in dropped}}
    return True


def _a_call_less(graph: fx.Graph, choices: Choices) -> None:
    """Its first operand instead."""
    for node in _picked(choices, [node for node in _calls(graph) if node.all_input_nodes]):
        node.replace_all_uses_with(node.all_input_nodes[0])
        graph.erase_node(node)


def _a_write_more(graph: fx.Graph, choices: Choices) -> None:
    for node in _picked(choices, [node for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]):
        with graph.inserting_before(graph.output_node()):
            graph.call_function(
                _ATEN.bitwise_not_.default if not node.meta["val"].is_floating_point() else _ATEN.neg_.default, (node,)
            )


def _results_changed(graph: fx.Graph, choices: Choices) -> None:
    """In another order, fewer, one twice, or one that is an argument."""
    output, values = graph.output_node(), output_values(graph)
    changed: list[Any] = choices.pick(
        (
            values[::-1],
            values[1:],
            [*values, values[0]],
            [values[0], *values[:-1]],
            [*graph.find_nodes(op="placeholder")],
        )
    )
    output.args = (type(output.args[0])(changed),) if isinstance(output.args[0], (list, tuple)) else (changed[0],)


def _a_result_copied(graph: fx.Graph, choices: Choices) -> None:
    """Which is wrong of a view; other results stay."""
    output = graph.output_node()
    for node in _picked(choices, output.all_input_nodes):
        with graph.inserting_before(output):
            copy = graph.call_function(_ATEN.clone.default, (node,))
        output.replace_input_with(node, copy)


def _a_little_more(graph: fx.Graph, choices: Choices) -> bool | None:
    """A factor that only a comparison in float64 can tell from a rounding."""
    output = graph.output_node()
    floating = [node for node in output.all_input_nodes if node.meta["val"].is_floating_point()]
    for node in _picked(choices, floating):
        with graph.inserting_before(output):
            other = graph.call_function(_ATEN.mul.Tensor, (node, _A_LITTLE))
        output.replace_input_with(node, other)
        return False
    return None


def _moved(graph: fx.Graph, choices: Choices) -> None:
    """To the end, or before all others."""
    calls = _calls(graph)
    for node in _picked(choices, calls):
        (graph.output_node() if choices.chance(50) else calls[0]).prepend(node)


def _an_argument_more(graph: fx.Graph, choices: Choices) -> None:
    del choices
    first = next(iter(graph.nodes))
    with graph.inserting_before(first):
        graph.placeholder("another").meta["val"] = first.meta.get("val")


def _roundings_dropped(graph: fx.Graph, choices: Choices) -> bool:
    """A cast of what was cast reads what was there before, as a fused operator does that computes in float32."""
    del choices
    for node in graph.find_nodes(op="call_function", target=_CAST):
        (given,) = node.all_input_nodes
        if given.target is _CAST and node.kwargs.get("dtype") is torch.float32:
            node.replace_input_with(given, given.all_input_nodes[0])
    return True


def _nothing_used(graph: fx.Graph, choices: Choices) -> bool:
    """A value that nobody reads."""
    for node in _picked(choices, graph.find_nodes(op="call_function", target=_ATEN.add.Tensor)):
        with graph.inserting_after(node):
            graph.call_function(_ATEN.neg.default, (node,))
    return True


def _nothing(graph: fx.Graph, choices: Choices) -> bool:
    del graph, choices
    return True


def _an_exception(graph: fx.Graph, choices: Choices) -> None:
    """After half an edit."""
    _another_operator(graph, choices)
    raise choices.pick((KeyError("gone"), ValueError("wrong", 3), RuntimeError(), ZeroDivisionError("zero")))


def _a_value_asked(graph: fx.Graph, choices: Choices) -> None:
    """Of a tensor that has none while a pass runs."""
    del choices
    values = (node.meta.get("val") for node in graph.nodes)
    float(next(value for value in values if isinstance(value, torch.Tensor)).sum())


_EDITS = (
    _another_operator, _another_operator, _another_operand, _another_operand, _operands_swapped, _a_number_more,
    _a_number_as_a_tensor, _a_call_less, _a_write_more, _results_changed, _a_result_copied, _a_result_copied, _a_little_more,
    _a_little_more, _a_result_of_another_kind, _moved, _an_argument_more, _roundings_dropped, _roundings_dropped, _nothing_used,
    _nothing, _an_exception,
)  # fmt: skip
_OF_USERS = (
    *_EDITS, _by_keyword, _by_keyword, _by_keyword, _by_keyword, _an_exception, _a_number_as_a_constant, _not_computed,
    _not_computed, _a_value_asked,
)  # fmt: skip
