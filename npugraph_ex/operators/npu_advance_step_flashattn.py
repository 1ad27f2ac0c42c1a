"""The inputs of the next decoding step, computed in place from the tokens just sampled, with and without speculation.

Formula (operator documentation of ``torch_npu.npu_advance_step_flashattn``; vLLM, advance_step_flashattn), for each query i::

    input_tokens[i] = sampled_token_ids[i]      input_positions[i] = seq_lens[i]      seq_lens[i] += 1
    slot_mapping[i] = block_tables[i, input_positions[i] // block_size] * block_size + input_positions[i] % block_size

The sequences behind the last query are padding: their token and position become 0, their slot -1. With speculation each sequence
has
``1 + spec_num`` tokens: its last sampled one (that before the first -1) and ``spec_token``; every position rises by 1 and by the
sequence's ``accepted_num``, and ``seq_lens`` is the position and 1.
"""

from __future__ import annotations

import torch

from npugraph_ex.operators._record import Call, Operator, call


def _example() -> Call:
    tables, lengths = torch.tensor([[3, 0], [1, 5], [2, 4]]), torch.tensor([3, 4, 1])
    return call(torch.arange(3), torch.tensor([[7], [8]]), lengths - 1, lengths, torch.zeros(3).long(), tables, 3, 2, 4)


def _speculative_example() -> Call:
    numbers = {"spec_token": torch.tensor([[9], [6]]), "accepted_num": torch.tensor([1, 0])}
    sampled, positions = torch.tensor([[7, 8], [5, -1]]), torch.tensor([1, 2, 4, 5])
    tables = torch.tensor([[3, 0], [1, 5]])
    return call(
        torch.zeros(4).long(), sampled, positions, positions + 1, torch.zeros(4).long(), tables, 2, 2, 4, **numbers
    )


@Operator(
    name="npu::npu_advance_step_flashattn",
    source="operator documentation of torch_npu.npu_advance_step_flashattn",
    dtypes=(torch.int64,),
    examples=(_example, _speculative_example),
)
def npu_advance_step_flashattn(
    input_tokens: torch.Tensor,
    sampled_token_ids: torch.Tensor,
    input_positions: torch.Tensor,
    seq_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_tables: torch.Tensor,
    num_seqs: int,
    num_queries: int,
    block_size: int,
    *,
    spec_token: torch.Tensor | None = None,
    accepted_num: torch.Tensor | None = None,
) -> None:
    """int64 throughout; without speculation the first four but ``sampled_token_ids`` [num_queries, 1] are [num_seqs]."""
    if spec_token is None or accepted_num is None:
        rows = torch.arange(num_queries)
        input_tokens[:num_queries] = sampled_token_ids.reshape(-1)[:num_queries]
        input_positions[:num_queries] = seq_lens[:num_queries]
        seq_lens[:num_queries] += 1
        for padded, value in ((input_tokens, 0), (input_positions, 0), (slot_mapping, -1)):
            padded[num_queries:num_seqs] = value
    else:
        each = 1 + spec_token.shape[1]
        rows = torch.arange(num_seqs).repeat_interleave(each)
        ended = torch.nn.functional.pad(sampled_token_ids, (0, 1), value=-1)
        last = sampled_token_ids.gather(1, ended.argmin(1, keepdim=True) - 1)
        input_tokens.view(-1, each)[:num_seqs] = torch.cat((last, spec_token), 1)
        input_positions += accepted_num.repeat_interleave(each) + 1
        seq_lens.copy_(input_positions + 1)
    positions = input_positions[: len(rows)]
    block = block_tables[rows, positions // block_size]
    slot_mapping[: len(rows)] = block * block_size + positions % block_size
