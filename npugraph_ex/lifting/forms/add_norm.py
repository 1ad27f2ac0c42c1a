"""A sum, then a norm of it => one operator, which hands out the sum too: `npu_add_rms_norm` and `npu_add_layer_norm`.

The published kernel of the RMS norm normalises the sum as it is rounded for the second result (CANN operator documentation,
aclnnAddRmsNorm; ops-nn, norm/add_rms_norm), so nothing is rounded otherwise. That of the layer norm normalises the sum before it
is rounded (CANN operator documentation, aclnnAddLayerNorm), so the judge decides.

Between the two the sum may be reshaped, so that its rows stay, or cast: added in float32 it is rounded once, as one of 16 bits is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem

import torch
from torch import fx
from torch._ops import OpOverload

from npugraph_ex.lifting import terms
from npugraph_ex.lifting.forms.rms_norm import can_be_reshaped, reshaped
from npugraph_ex.lifting.proposal import Build, Emit, Proposal, Unlike

_aten = torch.ops.aten


@dataclass(frozen=True)
class _NormCall:
    """A norm: the vectors of its last dimension, and the operator that adds before it."""

    vectors: tuple[fx.Node, ...]
    build: Build


def _rms_norm(node: fx.Node) -> _NormCall | Unlike:
    given = terms.arguments(node)
    epsilon = given.get("epsilon", 1e-6)

    def build(emit: Emit, *operands: fx.Node) -> tuple[fx.Node, ...]:
        fused = emit(torch.ops.npu.npu_add_rms_norm.default, *operands, epsilon)
        return emit(getitem, fused, 2), emit(getitem, fused, 0)

    return _NormCall((given["gamma"],), build)


def _layer_norm(node: fx.Node) -> _NormCall | Unlike:
    given = terms.arguments(node)
    total, epsilon = given["input"], given["eps"]
    vectors = (given["weight"], given["bias"])
    if None in vectors:
        lines = "norm = torch.nn.LayerNorm(size)   # a weight of ones and a bias of zeros change no value"
        return Unlike(node, "the norm has no weight or no bias; the operator takes both", lines=lines)
    values = [value for value in map(terms.tensor, (total, *vectors)) if value is not None]
    if any(value.dtype != values[0].dtype for value in values):
        return Unlike(
            node, f"what is normalised, weight and bias are {', '.join(str(value.dtype) for value in values)}"
        )
    if len(given["normalized_shape"]) != 1:
        return Unlike(node, f"the norm is over the last {len(given['normalized_shape'])} dimensions")

    def build(emit: Emit, *operands: fx.Node) -> tuple[fx.Node, ...]:
        fused = emit(torch.ops.npu.npu_add_layer_norm.default, *operands, epsilon, True)  # noqa: FBT003 - the schema's
        return emit(getitem, fused, 3), emit(getitem, fused, 0)

    return _NormCall(vectors, build)


@dataclass(frozen=True)
class _Total:
    """A sum, and ``node``, which is it or casts it to the dtype that is normalised."""

    sum: fx.Node
    node: fx.Node


def _total_behind(x: fx.Node) -> _Total | None:
    """The sum that ``x`` is, or that a reshape of it is, or a cast to fewer bits; None where it is none."""
    node, dtype = x, x.meta["val"].dtype
    for one in terms.same_rows(x):
        given = one.meta["val"].dtype
        node = one if given == dtype else node
        if terms.calls(one, _aten.add.Tensor):
            return _Total(one, node) if given.itemsize >= dtype.itemsize else None
    return None


@dataclass(frozen=True)
class _AddNorm:
    """A form: a sum before the norm that ``ends_with`` names."""

    name: str
    norm: Callable[[], OpOverload]
    read_norm: Callable[[fx.Node], _NormCall | Unlike]
    rounds_alike: bool

    @property
    def ends_with(self) -> frozenset[OpOverload]:
        """The norm; looked up late, because torch_npu defines one of them."""
        return frozenset({self.norm()})

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The sum and the norm that ``node`` is."""
        found, total = self.read_norm(node), _total_behind(terms.arguments(node)["input"])
        if isinstance(found, Unlike) or total is None:
            return found if isinstance(found, Unlike) and total is not None else None
        results = [user for user in node.users if user.target is getitem and user.users]
        if [user.args[1] for user in results] != [0]:
            return Unlike(node, "the norm's second result is used, or its first is not")
        operands = [one for one in total.sum.args if isinstance(one, fx.Node) and terms.tensor(one) is not None]
        if len(operands) != 2 or total.sum.kwargs.get("alpha", 1) != 1:
            return Unlike(node, "what is normalised is no sum of two tensors")
        dtype = total.node.meta["val"].dtype
        narrow = [terms.of_dtype(one, dtype) for one in operands]
        if None in narrow:
            return Unlike(node, "what is added has several dtypes")
        outputs = (total.node, results[0])
        shapes = [one.meta["val"].shape for one in outputs]
        if not all(can_be_reshaped(total.sum, shape) for shape in shapes):
            return Unlike(node, f"the sum is reshaped to {list(shapes[-1])}, which has more than one symbol")

        def build(emit: Emit, *inputs: fx.Node) -> tuple[fx.Node, ...]:
            made = found.build(emit, *inputs)
            return tuple(reshaped(emit, one, shape) for one, shape in zip(made, shapes, strict=True))

        inputs: tuple[fx.Node, ...] = (*narrow, *found.vectors)  # type: ignore[arg-type]
        alike = self.rounds_alike
        return Proposal(inputs, outputs, (build,), rounds_alike=alike, sums_rows=not alike)


RMS_NORM = _AddNorm("lift_add_rms_norm", lambda: torch.ops.npu.npu_rms_norm.default, _rms_norm, rounds_alike=True)
LAYER_NORM = _AddNorm("lift_add_layer_norm", lambda: _aten.native_layer_norm.default, _layer_norm, rounds_alike=False)
