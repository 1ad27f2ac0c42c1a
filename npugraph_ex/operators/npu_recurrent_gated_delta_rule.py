"""Gated delta rule, a linear attention, step by step over a pool of states, as decoding with speculation needs it.

Formula (operator documentation of ``torch_npu.npu_recurrent_gated_delta_rule``), for each step t of a sequence and each head of
``value``, with S the state [Dv, Dk]::

    S = exp(g_t) * S * exp(gk_t)                 exp(gk_t) scales the columns
    S = S + beta_t * (v_t - S k_t) k_t^T
    o_t = S (scale * q_t)

A sequence begins with the state of its last accepted token of the step before (of its first token where ``num_accepted_tokens`` is
left out). The state after token t is written to ``state[ssm_state_indices[t]]``. Heads of ``query`` and ``key`` serve as many heads
of ``value`` each. The state stays in float32 from step to step and is rounded where it is written.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._alike import Alike
from npugraph_ex.operators._precision import compute_dtype, unsupported
from npugraph_ex.operators._record import Call, Operator, call

_SOURCE = "operator documentation of torch_npu.npu_recurrent_gated_delta_rule"


class Steps:
    """The operands of every step, widened: q, k [T, Nv, Dk], v [T, Nv, Dv], and what scales the state."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        beta: torch.Tensor | None,
        scale: float,
        g: torch.Tensor | None,
        gk: torch.Tensor | None = None,
    ) -> None:
        tokens, heads, _ = value.shape
        if heads % key.shape[1]:
            raise ValueError(f"the {heads} heads of value must be a multiple of the {key.shape[1]} heads of key.")
        self.dtype = compute_dtype(query, key, value)
        shared = heads // key.shape[1]
        self.q = query.to(self.dtype).repeat_interleave(shared, 1) * scale
        self.k = key.to(self.dtype).repeat_interleave(shared, 1)
        self.v = value.to(self.dtype)
        ones = self.v.new_ones(tokens, heads)
        self.beta = ones if beta is None else beta.to(self.dtype)
        self.decay = (ones if g is None else g.to(self.dtype).exp())[:, :, None, None]
        if gk is not None:
            self.decay = self.decay * gk.to(self.dtype).exp()[:, :, None, :]

    def step(self, state: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The state [Nv, Dv, Dk] after ``token``, and the token's output [Nv, Dv]."""
        k = self.k[token].unsqueeze(-1)
        state = state * self.decay[token]
        missing = (self.v[token].unsqueeze(-1) - state @ k) * self.beta[token][:, None, None]
        state = state + missing @ k.mT
        return state, (state @ self.q[token].unsqueeze(-1)).squeeze(-1)

    def rounded(self, out: torch.Tensor) -> torch.Tensor:
        """The output as the operators give it: bfloat16; float64 for float64."""
        return out.contiguous() if self.dtype == torch.float64 else out.to(torch.bfloat16).contiguous()


def _example() -> Call:
    query, key, value = (
        torch.randn(4, 2, 8),
        torch.nn.functional.normalize(torch.randn(4, 2, 8), dim=-1),
        torch.randn(4, 4, 6),
    )
    return call(
        *(operand.bfloat16() for operand in (query, key, value, torch.randn(5, 4, 6, 8))),
        beta=torch.rand(4, 4).bfloat16(),
        scale=0.5,
        actual_seq_lengths=torch.tensor([3, 1], dtype=torch.int32),
        ssm_state_indices=torch.tensor([4, 0, 2, 1], dtype=torch.int32),
        num_accepted_tokens=torch.tensor([2, 1], dtype=torch.int32),
        g=-torch.rand(4, 4),
        gk=-torch.rand(4, 4, 8),
    )


@Operator(
    name="npu::npu_recurrent_gated_delta_rule",
    source=_SOURCE,
    dtypes=(torch.bfloat16,),
    writes_by_index=True,
    alike=Alike(dtype=("query", "key", "value", "state", "beta")),
    examples=(_example,),
)
def npu_recurrent_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor,
    *,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    actual_seq_lengths: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
) -> torch.Tensor:
    """O [T, Nv, Dv], bfloat16 (float64 for float64); ``state`` [blocks, Nv, Dv, Dk] is written.

    query, key [T, Nk, Dk]; value [T, Nv, Dv]; beta, g [T, Nv]; gk [T, Nv, Dk]; ``scale`` is 1 / sqrt(Dk) where it is left out.
    """
    if actual_seq_lengths is None or ssm_state_indices is None:
        missing = "actual_seq_lengths" if actual_seq_lengths is None else "ssm_state_indices"
        raise unsupported("npu_recurrent_gated_delta_rule", missing, None, "a tensor of int32")
    if scale is None:
        scale = key.shape[-1] ** -0.5
    steps = Steps(query, key, value, beta=beta, scale=scale, g=g, gk=gk)
    out = torch.zeros_like(steps.v)
    slots = ssm_state_indices.tolist()
    accepted = [1] * len(actual_seq_lengths) if num_accepted_tokens is None else num_accepted_tokens.tolist()
    begin = 0
    for length, taken in zip(actual_seq_lengths.tolist(), accepted, strict=True):
        current = state[slots[begin + taken - 1]].to(steps.dtype)
        for token in range(begin, begin + length):
            current, out[token] = steps.step(current, token)
            state[slots[token]] = current.to(state.dtype)
        begin += length
    return steps.rounded(out)


@Operator(
    name="npu::npu_recurrent_gated_delta_rule_functional",
    source=_SOURCE,
    dtypes=(torch.bfloat16,),
    alike=Alike(dtype=("query", "key", "value", "state", "beta")),
    examples=(_example,),
)
def npu_recurrent_gated_delta_rule_functional(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    state: torch.Tensor,
    *,
    beta: torch.Tensor | None = None,
    scale: float | None = None,
    actual_seq_lengths: torch.Tensor | None = None,
    ssm_state_indices: torch.Tensor | None = None,
    num_accepted_tokens: torch.Tensor | None = None,
    g: torch.Tensor | None = None,
    gk: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``(o, state)``, the state a changed copy; arguments as in ``npu_recurrent_gated_delta_rule``."""
    changed = state.clone(memory_format=torch.contiguous_format)
    out = npu_recurrent_gated_delta_rule(
        query,
        key,
        value,
        changed,
        beta=beta,
        scale=scale,
        actual_seq_lengths=actual_seq_lengths,
        ssm_state_indices=ssm_state_indices,
        num_accepted_tokens=num_accepted_tokens,
        g=g,
        gk=gk,
    )
    return out, changed
