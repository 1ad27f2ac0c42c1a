"""One decoder layer of a model as large as it is sold, in bfloat16: weights and cache are addresses, and kernels do nothing.

Nothing writes to the emulated device's memory, so its pages are never made, and tens of gigabytes cost the machine nothing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from device_calls import one_call
from host_calls import BACKEND, SETTLED
from measure import side_by_side
from torch import nn

import npu_emulator

CACHED = 1024
"""Tokens in the cache of each sequence; the step attends to all of them."""
_EACH = {"num_hidden_layers": 1, "vocab_size": 16, "max_position_embeddings": 4096, "pad_token_id": 0}
REAL: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-8B": ("Qwen3", {
        "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    }),
    "Qwen3-30B-A3B": ("Qwen3Moe", {
        "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    }),
    "DeepSeek-V3": ("DeepseekV3", {
        "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "moe_intermediate_size": 2048,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "first_k_dense_replace": 0,
    }),
}  # fmt: skip
"""Of each model the class of `transformers` and the figures of its published configuration; of DeepSeek-V3 a layer with experts."""


def _grouped_experts(experts: Any, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Experts by the device's operators: the default of `transformers` looks at the routing on the host, which no graph can."""
    npu, count = torch.ops.npu, experts.num_experts
    rows, places, sizes, _ = npu.npu_moe_init_routing_v2(
        tokens, chosen.int(), active_num=chosen.numel(), expert_num=count, expert_tokens_num_type=1,
        expert_tokens_num_flag=True, active_expert_range=[0, count],
    )  # fmt: skip

    def each(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = npu.npu_grouped_matmul(
            [rows], [weight.transpose(1, 2)], group_list=sizes, split_item=3, group_type=0, group_list_type=1
        )[0]
        return product

    worked = each(npu.npu_swiglu(each(rows, experts.gate_up_proj)), experts.down_proj)
    added: torch.Tensor = npu.npu_moe_finalize_routing(
        worked, None, None, None, weights.to(worked.dtype), places, None, drop_pad_mode=2
    )
    return added


class LayerStep(nn.Module):
    """One token of each sequence through a layer, with angles, mask and last norm, without embedding and head.

    Args:
        name: a model of `REAL`.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        import transformers
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

        transformers.logging.set_verbosity_error()
        ALL_EXPERTS_FUNCTIONS.register("npu", _grouped_experts)
        family, sizes = REAL[name]
        config = getattr(transformers, f"{family}Config")(**_EACH, **sizes)
        config._experts_implementation = "npu"
        with torch.device("meta"):
            model = getattr(transformers, f"{family}Model")(config)
        self.model = model.eval().to(torch.bfloat16).to_empty(device="npu")
        self.cache = transformers.StaticCache(config=config, max_cache_len=CACHED)

    def forward(self, hidden: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """``hidden`` (batch, 1, hidden), ``position`` (batch, 1) int64 -> (batch, 1, hidden)."""
        result: torch.Tensor = self.model(
            inputs_embeds=hidden, position_ids=position, past_key_values=self.cache, use_cache=True
        )[0]
        return result


@contextmanager
def _captures_timed() -> Iterator[list[float]]:
    """Seconds of processor time of each capture within the block, whichever backend makes it."""
    took: list[float] = []
    graph = torch.npu.NPUGraph
    begin, end = graph.capture_begin, graph.capture_end

    def beginning(self: torch.npu.NPUGraph, *arguments: Any, **options: Any) -> None:
        took.append(-time.thread_time())
        begin(self, *arguments, **options)

    def ending(self: torch.npu.NPUGraph) -> None:
        end(self)
        took[-1] += time.thread_time()

    graph.capture_begin, graph.capture_end = beginning, ending
    try:
        yield took
    finally:
        graph.capture_begin, graph.capture_end = begin, end


def real_layer(name: str, batch: int, lift: str = "") -> dict[str, float]:
    """What a call of a layer does on the device and costs the host, eager and compiled; of captures, time and memory.

    Without the figures of the compiled function where the backend raises an error.

    Args:
        name: a model of `REAL`.
        batch: how many sequences.
        lift: the option, for this library.
    """
    torch.compiler.reset()
    gc.collect()
    with npu_emulator.null_kernels(), npu_emulator.timeline() as times:
        step = LayerStep(name)
        hidden = torch.empty(batch, 1, step.model.config.hidden_size, dtype=torch.bfloat16, device="npu")
        inputs = (hidden, torch.empty(batch, 1, dtype=torch.int64, device="npu"))
        step(*inputs)
        answer = {f"eager {key}": value for key, value in one_call(times, step, inputs).items()}
    with (
        npu_emulator.null_kernels()
    ):  # without the clock, which would cost the host; before a graph's memory is beside eager's
        answer |= side_by_side({"eager us": lambda: step(*inputs)}, rounds=3, calls=10)
    with npu_emulator.null_kernels(), npu_emulator.timeline() as times:
        compiled = torch.compile(step, backend=BACKEND, dynamic=False, options={"lift": lift} if lift else None)
        torch.npu.empty_cache()
        held = torch.npu.memory_reserved()
        try:
            with _captures_timed() as captures:
                for _ in range(SETTLED):
                    compiled(*inputs)
            launched = npu_emulator.launch_count()
            answer |= one_call(times, compiled, inputs)
        except Exception as error:  # noqa: BLE001 - whatever a backend fails with, eager mode's figures are of use
            return answer | {"failed": str(error)}  # type: ignore[dict-item]  # a word for the table
        launched = npu_emulator.launch_count() - launched
        torch.npu.empty_cache()
        answer |= {
            "pool bytes": torch.npu.memory_reserved() - held,
            "launched": launched,
            "capture ms": 1e3 * sum(captures),
        }
    one = torch.ones(8, device="npu")
    with npu_emulator.null_kernels():
        calls = {"us": lambda: compiled(*inputs), "us of an operator": lambda: one.add_(1)}
        return answer | side_by_side(calls, rounds=5, calls=20)
