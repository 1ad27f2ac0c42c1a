"""Gated delta rule and causal convolutions: by hand, against torch's own functions in float64, and their caches."""

from __future__ import annotations

import pytest
import torch

from npugraph_ex.operators import OPERATORS, UnsupportedArgumentError

recurrent = OPERATORS["npu::npu_recurrent_gated_delta_rule"].formula
functional = OPERATORS["npu::npu_recurrent_gated_delta_rule_functional"].formula
chunked = OPERATORS["npu::npu_chunk_gated_delta_rule"].formula
masked = OPERATORS["npu::npu_masked_causal_conv1d"].formula
masked_backward = OPERATORS["npu::npu_masked_causal_conv1d_backward"].formula
fused = OPERATORS["npu::npu_fused_causal_conv1d"].formula
fused_in_place = OPERATORS["npu::npu_fused_causal_conv1d_v2"].formula


def ints(*values: int) -> torch.Tensor:
    """A vector of int32."""
    return torch.tensor(values, dtype=torch.int32)


def doubles(*shape: int) -> torch.Tensor:
    """Random numbers in float64."""
    return torch.randn(shape, dtype=torch.float64)


def test_delta_rule_by_hand() -> None:
    """One element: a state of 8 halves to 4; v is 10, half of what is missing is added, 4 + 3; the output is 7 times q."""
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    state = torch.full((2, 1, 1, 1), 8.0, dtype=torch.float64)
    half = torch.full((1, 1), 0.5, dtype=torch.float64)
    lengths = {"actual_seq_lengths": ints(1), "ssm_state_indices": ints(1)}
    out = recurrent(3 * one, one, 10 * one, state, beta=half, scale=1.0, g=half.log(), **lengths)
    assert (out.item(), state.flatten().tolist()) == (21.0, [8.0, 7.0])


def test_chunks_are_the_recurrence_written_out() -> None:
    """Two sequences against S (I - beta k k^T) and beta v k^T as matrices, for each of four heads that share two of the keys."""
    query, key, value = doubles(5, 2, 3), doubles(5, 2, 3), doubles(5, 4, 2)
    beta, g, state = torch.rand(5, 4, dtype=torch.float64), -torch.rand(5, 4, dtype=torch.float64), doubles(2, 4, 2, 3)
    out, final = chunked(
        query, key, value, beta=beta, initial_state=state, actual_seq_lengths=ints(2, 3), scale=0.5, g=g
    )
    for head in range(4):
        for sequence, tokens in enumerate(((0, 1), (2, 3, 4))):
            current = state[sequence, head]
            for token in tokens:
                k, b = key[token, head // 2], beta[token, head]
                reduced = torch.eye(3, dtype=torch.float64) - b * torch.outer(k, k)
                current = g[token, head].exp() * current @ reduced + b * torch.outer(value[token, head], k)
                torch.testing.assert_close(out[token, head], current @ query[token, head // 2] * 0.5)
            torch.testing.assert_close(final[sequence, head], current)


def test_recurrence_is_the_chunks_of_short_sequences() -> None:
    """With states in slots of a pool, and each sequence begun by the slot of its last accepted token."""
    query, key, value, beta = (
        doubles(4, 1, 3),
        doubles(4, 1, 3),
        doubles(4, 2, 2),
        torch.rand(4, 2, dtype=torch.float64),
    )
    pool = doubles(6, 2, 2, 3)
    slots = {"actual_seq_lengths": ints(3, 1), "ssm_state_indices": ints(5, 0, 2, 1)}
    out, after = functional(query, key, value, pool, beta=beta, num_accepted_tokens=ints(2, 1), **slots)
    expected, final = chunked(
        query,
        key,
        value,
        beta=beta,
        initial_state=pool[[0, 1]],
        actual_seq_lengths=slots["actual_seq_lengths"],
        scale=3**-0.5,
    )
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(after[[2, 1]], final)
    assert torch.equal(after[[3, 4]], pool[[3, 4]])
    written = pool.clone()
    assert torch.equal(recurrent(query, key, value, written, beta=beta, num_accepted_tokens=ints(2, 1), **slots), out)
    assert torch.equal(written, after)


def test_decay_of_each_key_channel() -> None:
    """``gk`` equal in all channels is ``g``."""
    query, key, value, g = doubles(2, 1, 3), doubles(2, 1, 3), doubles(2, 1, 2), -torch.rand(2, 1, dtype=torch.float64)
    given = {"actual_seq_lengths": ints(2), "ssm_state_indices": ints(0, 1)}
    results = [
        functional(query, key, value, torch.ones(2, 1, 2, 3, dtype=torch.float64), **given, **decay)[0]
        for decay in ({"g": g}, {"gk": g.unsqueeze(-1).expand(2, 1, 3)}, {})
    ]
    torch.testing.assert_close(results[0], results[1])
    assert not torch.allclose(results[0], results[2])


def test_what_the_delta_rule_needs_is_named() -> None:
    """A tensor that the schema calls optional and the device needs."""
    x = torch.ones(1, 1, 1)
    with pytest.raises(UnsupportedArgumentError, match="ssm_state_indices=None"):
        recurrent(x, x, x, x.unsqueeze(0), actual_seq_lengths=ints(1))
    with pytest.raises(UnsupportedArgumentError, match="initial_state=None"):
        chunked(x, x, x, beta=x[0])


def convolved(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Torch's own convolution of each channel: rows [L + K - 1, D], weight [K, D] -> [L, D]."""
    return torch.nn.functional.conv1d(rows.mT.unsqueeze(0), weight.mT.unsqueeze(1), groups=rows.shape[1])[0].mT


def test_masked_convolution_and_its_gradients() -> None:
    """Against torch's convolution and its autograd."""
    x, weight, mask = doubles(5, 2, 4).requires_grad_(), doubles(3, 4).requires_grad_(), torch.rand(2, 5) > 0.3
    padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 2, 0))
    expected = torch.stack([convolved(rows, weight) for rows in padded.unbind(1)], 1) * mask.mT.unsqueeze(-1)
    torch.testing.assert_close(masked(x, weight, mask=mask), expected)
    grad = doubles(5, 2, 4)
    expected.backward(grad)
    to_x, to_weight = masked_backward(grad, x.detach(), weight.detach(), mask=mask)
    torch.testing.assert_close(to_x, x.grad)
    torch.testing.assert_close(to_weight, weight.grad)


def test_cached_convolution_goes_on_where_the_last_one_ended() -> None:
    """Five inputs in two calls give what one convolution of all gives; the first one, with nothing computed, begins with zeros."""
    x, weight, states = doubles(5, 4), doubles(3, 4), doubles(3, 2, 4)
    common = {"cache_indices": ints(1), "residual_connection": 1}
    first = fused(
        x[:3], weight, states, query_start_loc=ints(0, 3), num_computed_tokens=ints(0), conv_mode="default", **common
    )
    second = fused(x[3:].unsqueeze(0), weight, states, num_computed_tokens=ints(3), **common)
    expected = convolved(torch.nn.functional.pad(x, (0, 0, 2, 0)), weight) + x
    torch.testing.assert_close(torch.cat((first, second[0])), expected)
    assert torch.equal(states[1], x[3:])


def test_accepted_tokens_tell_where_in_the_cache_to_begin() -> None:
    """With two accepted, the cache's rows 1 and 2 come before the new ones; with pangu and one computed, one result is 0."""
    x, weight, states = doubles(1, 2, 4), doubles(3, 4), doubles(1, 4, 4)
    before = states.clone()
    out = x.clone()
    fused_in_place(out, weight, states, num_accepted_tokens=ints(2), num_computed_tokens=ints(1), conv_mode="pangu")
    expected = convolved(torch.cat((before[0, 1:3], x[0])), weight)
    torch.testing.assert_close(out[0, 1], expected[1])
    assert out[0, 0].eq(0).all()
    assert torch.equal(states[0], torch.cat((before[0, 1:3], x[0])))


def test_full_blocks_keep_their_last_inputs() -> None:
    """Seven tokens in blocks of three: the first two blocks keep inputs 1, 2 and 4, 5; the last the last ones."""
    x, weight, states = doubles(7, 4), doubles(3, 4), torch.zeros(4, 2, 4, dtype=torch.float64)
    fused(
        x,
        weight,
        states,
        query_start_loc=ints(0, 7),
        cache_indices=ints(3, 0, 2).unsqueeze(0),
        num_computed_tokens=ints(0),
        block_idx_first_scheduled_token=ints(0),
        block_idx_last_scheduled_token=ints(2),
        initial_state_idx=ints(0),
        block_size=3,
    )
    for line, rows in ((3, x[1:3]), (0, x[4:6]), (2, x[5:7])):
        assert torch.equal(states[line], rows)


def test_a_sequence_that_only_pads_is_left_out() -> None:
    """Its cache line, -1, names none."""
    x, states = torch.ones(2, 1, 4), torch.zeros(2, 2, 4)
    out = fused(x, torch.ones(3, 4), states, cache_indices=ints(-1, 0))
    assert (out[1].tolist(), states[1].eq(0).all().item()) == ([[1.0] * 4], True)
