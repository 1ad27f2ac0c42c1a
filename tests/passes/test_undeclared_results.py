"""Operators whose results may lie in an argument although their schemas do not say so: the tensors do, fake ones too.

Most of them are made of others, and AOT takes them apart; a user's pass may call them by name all the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from device_helpers import compiled, random
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from npugraph_ex.errors import GraphVerificationError
from npugraph_ex.graph.memory.aliases import AliasFacts
from npugraph_ex.graph.metadata import derive

_aten, _prims = torch.ops.aten, torch.ops.prims
_SAMPLES = 2
CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "unsafe view": (_aten._unsafe_view.default, ([4, 3],)),
    "dropout": (_aten.dropout.default, (0.5, False)),
    "feature dropout": (_aten.feature_dropout.default, (0.5, False)),
    "alpha dropout": (_aten.alpha_dropout.default, (0.5, False)),
    "sum to size": (_aten.sum_to_size.default, ([4, 3],)),
    "at least 1-d": (_aten.atleast_1d.default, ()),
    "conjugate": (_aten.conj_physical.default, ()),
    "lift": (_aten.lift.default, ()),
    "dense": (_aten.to_dense.default, ()),
    "put on the device": (_prims.device_put.default, (torch.device("npu:0"),)),
}
"""Calls that return their argument, or a view of it."""


def _copied_and_doubled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = x + 1
    return y, y.neg() * 2


@pytest.mark.parametrize("name", CALLS)
def test_what_is_called_by_name_is_not_written(name: str) -> None:
    """A user's pass puts the call between a value that is returned and what is computed of it: nothing is computed over it."""
    target, rest = CALLS[name]

    def in_place_of_neg(gm: fx.GraphModule, example_inputs: object, config: object) -> None:
        del example_inputs, config
        for node in gm.graph.find_nodes(op="call_function", target=_aten.neg.default):
            with gm.graph.inserting_before(node):
                copy = gm.graph.call_function(_aten.clone.default, node.args)
                node.replace_all_uses_with(gm.graph.call_function(target, (copy, *rest)))

    fast, x = compiled(_copied_and_doubled, post_grad_custom_pre_pass=in_place_of_neg), random(4, 3)
    with torch.no_grad():
        value, doubled = fast(x)
    torch.testing.assert_close(value.cpu(), (x + 1).cpu(), rtol=0, atol=0)
    torch.testing.assert_close(doubled.cpu(), ((x + 1) * 2).cpu(), rtol=0, atol=0)


def _sum_with_a_part(x: torch.Tensor) -> torch.Tensor:
    put: torch.Tensor = _prims.device_put.default((x * 3)[1:], torch.device("npu"))
    return put + 2


def _counted_from_the_storage(x: torch.Tensor) -> torch.Tensor:
    part = _prims.device_put.default((x + 1)[1:], torch.device("npu"))
    first, _ = _aten.unsafe_split_with_sizes.default(part, [2, 1], 0)
    product = first * 2
    product[1].add_(x[0])
    return torch.as_strided(product, (3,), (1,), 0)


def _counted_after_two_steps(x: torch.Tensor) -> torch.Tensor:
    first, _ = _aten.unsafe_split_with_sizes.default((x + 1)[1:], [2, 1], 0)
    product = (first * 2).neg()
    product[1].add_(x[0])
    return torch.as_strided(product, (3,), (1,), 0)


@pytest.mark.parametrize("program", [_sum_with_a_part, _counted_from_the_storage, _counted_after_two_steps])
def test_nothing_that_begins_a_storage_is_computed_in_a_part(program: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Neither in a part that `device_put` returned as it is, nor in one in which an earlier operator computes."""
    x = random(4, 3)
    with torch.no_grad():
        got, wanted = compiled(program, force_eager=True)(x), program(x)
    assert torch.equal(got.cpu(), wanted.cpu())
    assert got._is_view() == wanted._is_view()
    assert got.untyped_storage().nbytes() == wanted.untyped_storage().nbytes()


def _storages(values: object) -> set[int]:
    """The addresses of the storages of the tensors that have elements."""
    leaves = [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    dense = [leaf for leaf in leaves if leaf.layout == torch.strided and leaf.numel()]
    return {leaf.untyped_storage().data_ptr() for leaf in dense}


def _facts_know_it(target: OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether in a graph with this call alone its result and an argument share memory."""
    graph, mode = fx.Graph(), FakeTensorMode(shape_env=ShapeEnv())

    def given(tensor: torch.Tensor) -> fx.Node:
        node = graph.placeholder("x")
        node.meta["val"] = mode.from_tensor(tensor)
        return node

    node = graph.call_function(target, *pytree.tree_map_only(torch.Tensor, given, (args, kwargs)))
    try:
        node.meta["val"] = derive(node, mode)
    except GraphVerificationError:
        return True  # without a fake function no graph has such a call
    facts = AliasFacts(graph)
    return any(facts.share_storage(node, argument) for argument in node.all_input_nodes)


class _Watch(SchemaCheckMode):
    """Sees every call whose result lies in an argument although the schema does not say so, and asks the facts of it.

    Args:
        key: None for operators that are not made of others; that of the dispatcher's first step for all that are called.
    """

    def __init__(self, key: torch._C.DispatchKey | None) -> None:
        TorchDispatchMode.__init__(self, key)
        self.found: dict[OpOverload, bool] = {}

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        declared = any(result.alias_info is not None for result in func._schema.returns)
        if not declared and _storages(results) & _storages((args, kwargs)):
            self.found[func] = self.found.get(func, True) and _facts_know_it(func, args, kwargs or {})
        return results


def _calls() -> Iterator[Callable[[], Any]]:
    """The first samples of every operator in torch's database that runs on the CPU."""
    for operator in op_db:
        dtypes = operator.supported_dtypes("cpu")
        if not dtypes or operator.name.startswith("jiterator"):
            continue
        dtype = torch.float32 if torch.float32 in dtypes else min(dtypes, key=str)
        for sample in itertools.islice(operator.sample_inputs_func(operator, "cpu", dtype, False), _SAMPLES):
            yield partial(operator.op, sample.input, *sample.args, **sample.kwargs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("key", "known"),
    [
        (None, {_aten._unsafe_view.default, _aten.unsafe_split.Tensor}),
        (torch._C.DispatchKey.PreDispatch, {_aten.atleast_2d.default, _aten.meshgrid.indexing, _aten.conj_physical.default}),
    ],
    ids=["whole", "called"],
)  # fmt: skip
def test_the_facts_know_where_results_lie(key: torch._C.DispatchKey | None, known: set[OpOverload]) -> None:
    """Of all operators in torch's database: where eager mode returns an argument's memory, so do the facts of a graph."""
    torch.manual_seed(0)
    watch = _Watch(key)
    for call in _calls():
        with torch.no_grad(), enable_python_dispatcher() if key else nullcontext(), watch:
            call()
    assert known <= watch.found.keys()
    assert [str(operator) for operator, right in watch.found.items() if not right] == []
