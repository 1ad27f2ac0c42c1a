"""Small random models, one an architecture, as their authors spelled them: of `transformers`, and two that make images."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import nn

from npugraph_ex_conformance.models.diffusion import CHANNELS, SIZE, DiT, UNet

Inputs = tuple[torch.Tensor, ...]

TOKENS, VOCABULARY, PAST = 8, 128, 5
_SPREAD = 0.1
"""Of the weights of a norm, which are all one number when a model is made."""
_TEXT = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": VOCABULARY,
    "max_position_embeddings": 64, "pad_token_id": 0, "initializer_range": 0.08,
}  # fmt: skip
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 16}
_EXPERTS = {**_GROUPED, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    **_TEXT, "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 8, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
}  # fmt: skip
_IMAGE = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128, "image_size": 32,
    "patch_size": 8, "initializer_range": 0.08,
}  # fmt: skip
_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY}
_DISTILLED = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "vocab_size": VOCABULARY}
_SWIN = {
    "embed_dim": 32, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 4, "image_size": 32,
}  # fmt: skip
_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
_WHISPER = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": VOCABULARY, "max_source_positions": 16,
    "num_mel_bins": 16, "pad_token_id": 0, "decoder_start_token_id": 1,
}  # fmt: skip

_LLAMA3_ROTARY = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
"""Llama 3.1's scaled angles, with a context as short as the model is small."""


class First(nn.Module):
    """A model whose first result is the one that counts.

    Args:
        model: of `transformers`.
        names: of its arguments, in the order in which they come.
        fixed: arguments that every call gets.
    """

    def __init__(self, model: nn.Module, names: tuple[str, ...], **fixed: Any) -> None:
        super().__init__()
        self.model, self.names, self.fixed = model, names, fixed

    def prepare(self) -> None:
        """Nothing."""

    def written(self) -> list[torch.Tensor]:
        """Nothing."""
        return []

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Logits or last hidden states of the model."""
        result: torch.Tensor = self.model(**dict(zip(self.names, inputs, strict=True)), **self.fixed)[0]
        return result


class DecodeStep(nn.Module):
    """One token of a decoder with a cache of fixed length, which the step writes in place.

    Args:
        model: a decoder of `transformers`.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.cache: Any = None
        # Earlier releases read on the host how many rows of the cache are not zero, unless the caller says where the token goes.
        self.asked = "cache_position" in inspect.signature(model.forward).parameters

    def prepare(self) -> None:
        """Fill the cache anew."""
        device = next(self.model.parameters()).device
        self.cache = transformers.StaticCache(config=self.model.config, max_cache_len=4 * TOKENS)
        self.model(input_ids=_ids(PAST).to(device), past_key_values=self.cache, use_cache=True)

    def written(self) -> list[torch.Tensor]:
        """The keys and values of each layer."""
        return [value for layer in self.cache.layers for value in (layer.keys, layer.values)]

    def forward(self, token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """``token`` and ``position``, int64 [1, 1] -> logits [1, 1, vocabulary]."""
        place = {"cache_position": position[0]} if self.asked else {}
        result: torch.Tensor = self.model(
            input_ids=token, position_ids=position, past_key_values=self.cache, use_cache=True, **place
        ).logits
        return result


Made = tuple[First | DecodeStep, Inputs]


def _ids(count: int = TOKENS) -> torch.Tensor:
    return torch.arange(1, count + 1).remainder(VOCABULARY - 1).unsqueeze(0) + 1


def _text(config: str, model: str, common: dict[str, Any] = _GROUPED, **extra: Any) -> Callable[[], Made]:
    def make() -> Made:
        made = getattr(transformers, model)(getattr(transformers, config)(**{**common, **extra}))
        return First(
            made, ("input_ids",), **({"use_cache": False} if "CausalLM" in model or "LMHead" in model else {})
        ), (_ids(),)

    return make


def _image(config: str, model: str, common: dict[str, Any] = _IMAGE, **extra: Any) -> Callable[[], Made]:
    def make() -> Made:
        made = getattr(transformers, model)(getattr(transformers, config)(**{**common, **extra}))
        return First(made, ("pixel_values",)), (torch.randn(1, 3, 32, 32),)

    return make


def _whisper() -> Made:
    model = transformers.WhisperModel(transformers.WhisperConfig(**_WHISPER))
    return First(model, ("input_features", "decoder_input_ids"), use_cache=False), (torch.randn(1, 16, 32), _ids())


def _t5() -> Made:
    model = transformers.T5Model(transformers.T5Config(**_T5))
    return First(model, ("input_ids", "decoder_input_ids"), use_cache=False), (_ids(), _ids())


def _denoiser(model: Callable[[], nn.Module]) -> Callable[[], Made]:
    def make() -> Made:
        return First(model(), ("image", "step")), (torch.randn(1, CHANNELS, SIZE, SIZE), torch.tensor([0.25]))

    return make


def _step(config: str, model: str, common: dict[str, Any] = _GROUPED, **extra: Any) -> Callable[[], Made]:
    def make() -> Made:
        made = getattr(transformers, model)(getattr(transformers, config)(**{**common, **extra}))
        return DecodeStep(made), (torch.tensor([[7]]), torch.tensor([[PAST]]))

    return make


ARCHITECTURES: dict[str, Callable[[], Made]] = {
    "Llama, decode step": _step("LlamaConfig", "LlamaForCausalLM"),
    "Qwen2, decode step": _step("Qwen2Config", "Qwen2ForCausalLM"),
    "Qwen3, decode step": _step("Qwen3Config", "Qwen3ForCausalLM"),
    "Qwen3-MoE, decode step": _step("Qwen3MoeConfig", "Qwen3MoeForCausalLM", _EXPERTS, num_experts=4),
    "Mixtral, decode step": _step("MixtralConfig", "MixtralForCausalLM", _EXPERTS, num_local_experts=4),
    "Phi-3, decode step": _step("Phi3Config", "Phi3ForCausalLM"),
    "OLMo 2, decode step": _step("Olmo2Config", "Olmo2ForCausalLM"),
    "DeepSeek-V3, decode step": _step("DeepseekV3Config", "DeepseekV3ForCausalLM", _LATENT),
    "Llama": _text("LlamaConfig", "LlamaForCausalLM"),
    "Llama 3": _text("LlamaConfig", "LlamaForCausalLM", rope_theta=5e5, rope_scaling=_LLAMA3_ROTARY),
    "Mistral": _text("MistralConfig", "MistralForCausalLM"),
    "Qwen2": _text("Qwen2Config", "Qwen2ForCausalLM"),
    "Qwen3": _text("Qwen3Config", "Qwen3ForCausalLM"),
    "Qwen3-MoE": _text("Qwen3MoeConfig", "Qwen3MoeForCausalLM", _EXPERTS, num_experts=4),
    "Mixtral": _text("MixtralConfig", "MixtralForCausalLM", _EXPERTS, num_local_experts=4),
    "DeepSeek-V3": _text("DeepseekV3Config", "DeepseekV3ForCausalLM", _LATENT),
    "Phi-3": _text("Phi3Config", "Phi3ForCausalLM"),
    "OLMo 2": _text("Olmo2Config", "Olmo2ForCausalLM"),
    "Gemma 2": _text("Gemma2Config", "Gemma2ForCausalLM"),
    "Gemma 3": _text("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "Granite": _text("GraniteConfig", "GraniteForCausalLM"),
    "SmolLM3": _text("SmolLM3Config", "SmolLM3ForCausalLM"),
    "GLM-4": _text("Glm4Config", "Glm4ForCausalLM"),
    "GPT-2": _text("GPT2Config", "GPT2LMHeadModel", _GPT),
    "GPT-NeoX": _text("GPTNeoXConfig", "GPTNeoXForCausalLM", _TEXT),
    "BLOOM": _text("BloomConfig", "BloomForCausalLM", {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY}),
    "Mamba 2": _text("Mamba2Config", "Mamba2ForCausalLM", _TEXT, num_heads=8, head_dim=16, state_size=16, n_groups=1, chunk_size=8),
    "BERT": _text("BertConfig", "BertModel", _TEXT),
    "ViT": _image("ViTConfig", "ViTModel"),
    "CLIP": _image("CLIPVisionConfig", "CLIPVisionModel"),
    "DINOv2": _image("Dinov2Config", "Dinov2Model"),
    "Gemma": _text("GemmaConfig", "GemmaForCausalLM"),
    "Phi": _text("PhiConfig", "PhiForCausalLM"),
    "OLMo": _text("OlmoConfig", "OlmoForCausalLM"),
    "OLMoE": _text("OlmoeConfig", "OlmoeForCausalLM", _EXPERTS, num_experts=4),
    "StarCoder2": _text("Starcoder2Config", "Starcoder2ForCausalLM"),
    "StableLM": _text("StableLmConfig", "StableLmForCausalLM"),
    "Cohere": _text("CohereConfig", "CohereForCausalLM"),
    "Nemotron": _text("NemotronConfig", "NemotronForCausalLM"),
    "Falcon": _text("FalconConfig", "FalconForCausalLM", _TEXT),
    "GPT-J": _text("GPTJConfig", "GPTJForCausalLM", _GPT, rotary_dim=8),
    "OPT": _text("OPTConfig", "OPTForCausalLM", _TEXT, ffn_dim=128, word_embed_proj_dim=64),
    "Mamba": _text("MambaConfig", "MambaForCausalLM", _TEXT, state_size=8),
    "RoBERTa": _text("RobertaConfig", "RobertaModel", _TEXT),
    "ELECTRA": _text("ElectraConfig", "ElectraModel", _TEXT, embedding_size=32),
    "ALBERT": _text("AlbertConfig", "AlbertModel", _TEXT, embedding_size=32),
    "DistilBERT": _text("DistilBertConfig", "DistilBertModel", _DISTILLED),
    "DeBERTa-v2": _text("DebertaV2Config", "DebertaV2Model", _TEXT, relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "ModernBERT": _text("ModernBertConfig", "ModernBertModel", _TEXT, reference_compile=False, attn_implementation="sdpa"),
    "SigLIP": _image("SiglipVisionConfig", "SiglipVisionModel"),
    "BEiT": _image("BeitConfig", "BeitModel"),
    "Swin": _image("SwinConfig", "SwinModel", _SWIN),
    "ConvNeXt": _image("ConvNextConfig", "ConvNextModel", hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, patch_size=4),
    "ResNet": _image("ResNetConfig", "ResNetModel", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic"),
    "UNet": _denoiser(UNet),
    "DiT": _denoiser(DiT),
    "Whisper": _whisper,
    "T5": _t5,
}  # fmt: skip


def _default_experts_take(dtype: torch.dtype) -> bool:
    """Whether the default product of experts can be traced: torch's own only in bfloat16, and early releases have no other."""
    moe = getattr(transformers.integrations, "moe", None)
    return dtype == torch.bfloat16 or (dtype != torch.float64 and hasattr(moe, "_grouped_mm_fallback"))


def make(name: str, dtype: torch.dtype, device: str) -> Made:
    """The model and inputs, the same for each call; weights and inputs are rounded to float16, whatever the dtype."""
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    model, inputs = ARCHITECTURES[name]()
    if hasattr(model.model, "config") and not _default_experts_take(dtype):
        model.model.config._experts_implementation = "batched_mm"
    cast = [value.half().to(dtype) if value.is_floating_point() else value for value in inputs]
    return model.eval().half().to(dtype).to(device), tuple(value.to(device) for value in cast)


def drawn(inputs: Inputs, seed: int) -> list[torch.Tensor]:
    """Other inputs of the same kind, on the CPU; a position stays."""
    generator = torch.Generator().manual_seed(seed)
    others = []
    for value in inputs:
        if value.is_floating_point():
            others.append(torch.randn(value.shape, generator=generator).half())
        elif others and value.numel() == 1:
            others.append(value.cpu())
        else:
            others.append(torch.randint(1, VOCABULARY - 1, value.shape, generator=generator))
    return others


def redraw(models: Sequence[nn.Module], seed: int) -> None:
    """Give twins the same new weights, rounded to float16: matrices as large as before, and vectors of one number around it."""
    generator = torch.Generator().manual_seed(seed)
    for twins in zip(*(model.parameters() for model in models), strict=True):
        old = twins[0].detach().cpu().double()
        noise = torch.randn(old.shape, generator=generator, dtype=torch.float64)
        if old.dim() > 1:
            new = old.std() * noise
        elif bool((old == old[0]).all()):
            new = old[0] + _SPREAD * noise
        else:
            continue
        for twin in twins:
            twin.data.copy_(new.half())
