"""Sinkhorn iterations, which turn a matrix for each token into a doubly stochastic one, and their gradient.

Formula (operator documentation of ``torch_npu.npu_mhc_sinkhorn``), for each matrix x [n, n]::

    y = softmax(x) + eps                          over rows
    y = y / (sum over columns' elements + eps)    then, num_iters - 1 times, rows and columns in turns

The gradient is computed from what each normalisation gave and divided by. In which order the device keeps those is told by
op-plugin's tests of the gradient: in pieces of tokens, as cores take them; see ``_pieces``.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from npugraph_ex.operators._precision import unsupported
from npugraph_ex.operators._record import Call, Operator, call

_SOURCE = "operator documentation of torch_npu.npu_mhc_sinkhorn; op-plugin"
_WIDTH = 8  # elements of a block of float32: rows are padded to it
_CORES = 64
_FREE_BYTES = (248 * 1024 - 64 - 512) // 2  # of a core's buffer, which is used as two


def _pieces(tokens: int, n: int) -> list[tuple[int, int]]:
    """(begin, end) of the tokens that lie together in what is kept: a core's, in as many parts as its buffer needs."""

    def taken(count: int) -> int:
        return 4 * (2 * (-(-count * n * n // _WIDTH) * _WIDTH) + 2 * count * n * _WIDTH + 2 * count * _WIDTH)

    share = max(1, -(-tokens // _CORES))
    part = share if taken(share) <= _FREE_BYTES else _FREE_BYTES // taken(1) // _WIDTH * _WIDTH
    cuts = sorted(
        {
            *range(0, tokens, share),
            *(core + at for core in range(0, tokens, share) for at in range(0, share, part)),
            tokens,
        }
    )
    return [*pairwise(cut for cut in cuts if cut <= tokens)]


def _kept(normal: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the device keeps, flat: of normal [2 * iterations, T, n, n]; of the sums, rows and columns [iterations, T, n]."""
    n = normal.shape[-1]
    pad = torch.nn.functional.pad
    normal, columns = pad(normal, (0, _WIDTH - n)), pad(columns, (0, _WIDTH - n))
    rows = pad(rows, (0, _WIDTH - n), value=1.0)
    spans = _pieces(normal.shape[1], n)
    norms = [normal[:, begin:end].transpose(1, 2).flatten() for begin, end in spans]
    sums = [
        torch.cat((rows[:, begin:end].mT.flatten(1), columns[:, begin:end].flatten(1)), 1).flatten()
        for begin, end in spans
    ]
    return torch.cat(norms), torch.cat(sums)


def _taken_back(
    norm: torch.Tensor, sums: torch.Tensor, tokens: int, n: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The arguments of ``_kept`` from its results."""
    iterations = norm.numel() // (2 * tokens * n * _WIDTH)
    spans = _pieces(tokens, n)
    sizes = [end - begin for begin, end in spans]
    normal = [
        part.view(2 * iterations, n, size, _WIDTH)[..., :n].transpose(1, 2)
        for part, size in zip(
            norm.flatten().split([2 * iterations * n * size * _WIDTH for size in sizes]), sizes, strict=True
        )
    ]
    rows, columns = [], []
    for part, size in zip(sums.flatten().split([2 * iterations * size * _WIDTH for size in sizes]), sizes, strict=True):
        row, column = part.view(iterations, 2 * size * _WIDTH).split(size * _WIDTH, 1)
        rows.append(row.view(iterations, _WIDTH, size).mT[..., :n])
        columns.append(column.view(iterations, size, _WIDTH)[..., :n])
    return torch.cat(normal, 1), torch.cat(rows, 1), torch.cat(columns, 1)


@Operator(
    name="npu::npu_mhc_sinkhorn",
    source=_SOURCE,
    dtypes=(torch.float32,),
    examples=(lambda: call(torch.randn(3, 4, 4), num_iters=3, out_flag=1),),
)
def npu_mhc_sinkhorn(
    x: torch.Tensor, *, eps: float = 1e-6, num_iters: int = 20, out_flag: int = 0
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """``(y, norm, sum)``: y like ``x`` [T, n, n] or [B, S, n, n] of float32; the others flat, and None unless ``out_flag`` is 1."""
    if out_flag not in {0, 1}:
        raise unsupported("npu_mhc_sinkhorn", "out_flag", out_flag, "0 and 1")
    soft = torch.softmax(x.reshape(-1, *x.shape[-2:]), -1)
    columns, rows = [(soft + eps).sum(-2) + eps], [torch.ones_like(soft[..., 0])]
    y = (soft + eps) / columns[0].unsqueeze(-2)
    normal = [soft, y]
    for _ in range(num_iters - 1):
        rows.append(y.sum(-1) + eps)
        normal.append(normal[-1] / rows[-1].unsqueeze(-1))
        columns.append(normal[-1].sum(-2) + eps)
        y = normal[-1] / columns[-1].unsqueeze(-2)
        normal.append(y)
    y = y.reshape(x.shape)
    return (y, *_kept(torch.stack(normal), torch.stack(rows), torch.stack(columns))) if out_flag else (y, None, None)


def _of_backward() -> Call:
    y, norm, sums = npu_mhc_sinkhorn(torch.randn(3, 4, 4), num_iters=3, out_flag=1)
    return call(torch.randn_like(y), norm, sums)


@Operator(name="npu::npu_mhc_sinkhorn_backward", source=_SOURCE, dtypes=(torch.float32,), examples=(_of_backward,))
def npu_mhc_sinkhorn_backward(
    grad_y: torch.Tensor,
    norm: torch.Tensor,
    sum: torch.Tensor,  # noqa: A002 - the schema's name
) -> torch.Tensor:
    """The gradient of x, like ``grad_y``; ``norm`` and ``sum`` as ``npu_mhc_sinkhorn`` gives them."""
    n, grad = grad_y.shape[-1], grad_y.reshape(-1, *grad_y.shape[-2:])
    normal, rows, columns = _taken_back(norm, sum, len(grad), n)
    for iteration in range(len(rows) - 1, -1, -1):
        after = normal[2 * iteration + 1]
        grad = (grad - (grad * after).sum(-2, keepdim=True)) / columns[iteration].unsqueeze(-2)
        before = normal[2 * iteration]
        if iteration:
            grad = (grad - (grad * before).sum(-1, keepdim=True)) / rows[iteration].unsqueeze(-1)
        else:
            grad = before * (grad - (grad * before).sum(-1, keepdim=True))
    return grad.reshape(grad_y.shape)
