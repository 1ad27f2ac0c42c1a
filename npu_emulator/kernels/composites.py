"""Operators that torch composes of others and torch_npu replaces by fused ones. The emulator composes them again.

torch_npu takes recurrent layers at its autograd key and calls fused operators with their own gradients (`npu_lstm`,
`npu_gru`, ...), and a few others (`slogdet`, `conv_tbc_backward`, ...) directly on CANN. As compositions of plain operators they
are captured, replayed and differentiated like every other operator.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from npu_emulator.kernels.packed_sequences import over_sequences, packed_backward

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch._ops import OpOverload

__all__ = ["composite_kernels"]


def composite_kernels() -> dict[str, Callable[..., Any]]:
    """Return the compositions by operator name; they are registered at the autograd key too."""
    aten = torch.ops.aten
    plain = (
        aten.slogdet.default,
        aten.fill_diagonal_.default,
        aten.affine_grid_generator_backward.default,
        aten.conv_tbc_backward.default,
        aten.__ior__.Scalar,
        aten.__ior__.Tensor,
    )
    return {
        **{str(op.name()): _composed(op) for op in plain},
        **{
            f"aten::{layer}.{form}": _decomposed(getattr(getattr(aten, layer), form))
            for layer in ("lstm", "gru", "rnn_tanh", "rnn_relu")
            for form in ("input", "data")
        },
        "aten::_pack_padded_sequence_backward": packed_backward,
        "aten::lstm_cell": _lstm_cell,
        # The called operator has the gradient.
        "npu::npu_ciou": lambda *args, **kwargs: torch.ops.npu._npu_ciou(*args, **kwargs)[0],  # noqa: SLF001 - its name
        "aten::gru_cell": _gru_cell,
    }


def _composed(op: OpOverload) -> Callable[..., Any]:
    """Return torch's own composition of an operator."""
    return partial(op._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)  # noqa: SLF001 - no public way to one kernel of an operator


def _decomposed(op: OpOverload) -> Callable[..., Any]:
    """Return torch's own decomposition of a recurrent layer, looked up at its first call."""
    parameters = [argument.name for argument in op._schema.arguments].index("params")
    is_packed = op._overloadname == "data"

    def run(*args: Any, **kwargs: Any) -> Any:
        import torch._decomp.decompositions

        # torch_npu casts the parameters to the dtype of the values.
        args = (*args[:parameters], [weight.to(args[0].dtype) for weight in args[parameters]], *args[parameters + 1 :])
        layer = op.py_kernels[torch._C.DispatchKey.CompositeImplicitAutograd]  # noqa: SLF001 - as above
        return over_sequences(layer, *args) if is_packed else layer(*args, **kwargs)

    return run


def _gates(
    given: torch.Tensor,
    hidden: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None,
    b_hh: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The parts of a cell's gates; torch_npu casts the parameters to the dtype of the values."""
    parameters = (None if each is None else each.to(given.dtype) for each in (w_ih, w_hh, b_ih, b_hh))
    w_ih, w_hh, b_ih, b_hh = parameters  # type: ignore[assignment]
    return torch.nn.functional.linear(given, w_ih, b_ih), torch.nn.functional.linear(hidden.to(given.dtype), w_hh, b_hh)


def _lstm_cell(
    given: torch.Tensor,
    hx: Sequence[torch.Tensor],
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of torch.nn.LSTMCell, by the formula of its documentation; given [B, I], hidden and cell state [B, H]."""
    left, right = _gates(given, hx[0], w_ih, w_hh, b_ih, b_hh)
    into, forget, new, out = (left + right).chunk(4, -1)
    cell = torch.sigmoid(forget) * hx[1] + torch.sigmoid(into) * torch.tanh(new)
    return torch.sigmoid(out) * torch.tanh(cell), cell


def _gru_cell(
    given: torch.Tensor,
    hx: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> torch.Tensor:
    """One step of torch.nn.GRUCell, by the formula of its documentation; given [B, I], hidden state [B, H]."""
    left, right = (part.chunk(3, -1) for part in _gates(given, hx, w_ih, w_hh, b_ih, b_hh))
    reset, update = torch.sigmoid(left[0] + right[0]), torch.sigmoid(left[1] + right[1])
    new = torch.tanh(left[2] + reset * right[2])
    return new + update * (hx - new)
