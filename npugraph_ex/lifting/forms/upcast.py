"""An operator in float32 between a cast there and a cast back => the operator itself, which computes in float32 anyway.

::

    y = layer_norm(x.float(), w.float(), b.float()).to(x.dtype)      as OLMo has it; group norms of diffusion models likewise
    y = softmax(x, dim=-1, dtype=torch.float32).to(x.dtype)          as attention has it that is spelled out
    y = gelu(x.float()).to(x.dtype)

Each operator of `_IN_FLOAT32` takes 16 bits, computes in float32 and rounds its result once, as the casts around it do. The judge
asks that of its values.
"""

from __future__ import annotations

from operator import getitem

import torch
from torch import fx

from npugraph_ex.lifting import terms
from npugraph_ex.lifting.proposal import Build, Emit, Proposal, Unlike

_aten = torch.ops.aten
_OF_ROWS = frozenset(
    {
        _aten.native_layer_norm.default,
        _aten.native_group_norm.default,
        _aten._softmax.default,  # noqa: SLF001 - the operator's name
        _aten._log_softmax.default,  # noqa: SLF001 - the operator's name
    }
)
_IN_FLOAT32 = _OF_ROWS | {_aten.gelu.default, _aten.silu.default}
_TAKEN = (torch.float16, torch.bfloat16)


def _build(call: fx.Node, operands: tuple[fx.Node, ...], *, first: bool) -> Build:
    """``call`` on what its ``operands`` were cast from; ``first`` where it has several results."""

    def build(emit: Emit, *inputs: fx.Node) -> tuple[fx.Node, ...]:
        given = dict(zip(operands, inputs, strict=True))
        args, kwargs = fx.map_arg((call.args, call.kwargs), given.__getitem__)
        made = emit(call.target, *args, **kwargs)
        return (emit(getitem, made, 0) if first else made,)

    return build


def _narrow(operand: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    """What an operand was before it was cast; a size is what it is."""
    return operand if terms.tensor(operand) is None else terms.of_dtype(operand, dtype)


class _Upcast:
    """The form."""

    name = "lift_upcast"
    ends_with = frozenset({_aten._to_copy.default})  # noqa: SLF001 - its name

    def read(self, node: fx.Node) -> Proposal | Unlike | None:
        """The operator whose result ``node`` casts back."""
        value, result = terms.tensor(node), terms.before_a_cast_back(node)
        first = result.target is getitem and result.args[1:] == (0,)
        call = result.args[0] if first else result
        if value is None or value.dtype not in _TAKEN or not terms.calls(call, *_IN_FLOAT32):
            return None
        operands = tuple(call.all_input_nodes)
        narrow = [_narrow(one, value.dtype) for one in operands]
        if narrow[operands.index(call.args[0])] is None:
            return None
        if None in narrow:
            wide = ", ".join(str(one.meta["val"].dtype) for one, cast in zip(operands, narrow, strict=True) if not cast)
            return Unlike(
                call,
                f"what is normalised was {value.dtype} before it was cast, and weight and bias are {wide}",
                lines="weight = weight.to(x.dtype)   # once, when the model is made",
            )
        build = _build(call, operands, first=first)
        sums_rows = call.target in _OF_ROWS
        # No document says where the device rounds inside its operator on 16 bits.
        return Proposal(tuple(narrow), (node,), (build,), sums_rows=sums_rows, rounds_elsewhere=not sums_rows)  # type: ignore[arg-type]


FORM = _Upcast()
