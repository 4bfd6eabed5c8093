"""Tiny random models of every family the library is tested with. No weights are downloaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import transformers as tf
from torch import nn

VOCABULARY = 512

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _causal(config_class: str, model_class: str, **changes: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        config = getattr(tf, config_class)(**{**_COMMON, **changes})
        return getattr(tf, model_class)(config)

    return build


def _gemma3_multimodal() -> nn.Module:
    text = {**_COMMON, "head_dim": 16, "sliding_window": 4, "layer_types": _SLIDING}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = tf.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=90, boi_token_index=91
    )
    return tf.Gemma3ForConditionalGeneration(config)


_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
_MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": _causal("LlamaConfig", "LlamaForCausalLM"),
    "mistral": _causal("MistralConfig", "MistralForCausalLM", sliding_window=4),
    "mixtral": _causal("MixtralConfig", "MixtralForCausalLM", num_local_experts=4),
    "qwen2": _causal("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": _causal("Qwen3Config", "Qwen3ForCausalLM", head_dim=16),
    "qwen3_moe": _causal("Qwen3MoeConfig", "Qwen3MoeForCausalLM", head_dim=16, **_MOE),
    "gemma2": _causal("Gemma2Config", "Gemma2ForCausalLM", head_dim=16, sliding_window=4, layer_types=_SLIDING),
    "gemma3_text": _causal(
        "Gemma3TextConfig", "Gemma3ForCausalLM", head_dim=16, sliding_window=4, layer_types=_SLIDING
    ),
    "gemma3": _gemma3_multimodal,
    "phi3": _causal("Phi3Config", "Phi3ForCausalLM"),
    "olmo2": _causal("Olmo2Config", "Olmo2ForCausalLM"),
    "granite": _causal("GraniteConfig", "GraniteForCausalLM", attention_multiplier=0.25),
    "cohere": _causal("CohereConfig", "CohereForCausalLM", use_qk_norm=True),
    "smollm3": _causal("SmolLM3Config", "SmolLM3ForCausalLM", no_rope_layers=[1, 0, 1]),
    "gpt_oss": _causal(
        "GptOssConfig", "GptOssForCausalLM", head_dim=16, sliding_window=4, layer_types=_SLIDING, num_local_experts=4
    ),
    "gpt_neox": _causal("GPTNeoXConfig", "GPTNeoXForCausalLM"),
}


_HYBRID = ["linear_attention", "full_attention", "linear_attention"]

OTHERS: dict[str, Callable[[], nn.Module]] = {
    "hybrid convolution": _causal("Lfm2Config", "Lfm2ForCausalLM", layer_types=["conv", "full_attention", "conv"]),
    "hybrid linear attention": _causal(
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        head_dim=16,
        layer_types=_HYBRID,
        shared_expert_intermediate_size=16,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        **_MOE,
    ),
    "hybrid mamba": _causal("JambaConfig", "JambaForCausalLM", attn_layer_period=2, attn_layer_offset=1, num_experts=2),
    "shared keys": _causal(
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        num_hidden_layers=4,
        head_dim=16,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        sliding_window=4,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        altup_num_inputs=2,
        activation_sparsity_pattern=None,
    ),
    "compressed keys": _causal(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        num_key_value_heads=4,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=3,
    ),
    "norm after rope": _causal("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM", head_dim=16),
    "norm shared by query and key": _causal(
        "Llama4TextConfig", "Llama4ForCausalLM", head_dim=16, num_local_experts=2, intermediate_size_mlp=32
    ),
    "no attention": _causal("MambaConfig", "MambaForCausalLM"),
    "encoder and decoder": _causal(
        "T5Config", "T5ForConditionalGeneration", d_model=32, d_kv=8, num_layers=2, num_heads=4
    ),
}
"""Models that are steerable in part, or not at all."""


def build(name: str) -> nn.Module:
    """A tiny random model of OTHERS."""
    torch.manual_seed(0)
    return OTHERS[name]().float().eval()


@cache
def _built(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = FAMILIES[name]().float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            # Random norms, too: with weights of 1 a norm and its input could be mistaken for each other.
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.3 * noise if key.endswith("norm.weight") else 0.25 * noise)
    model.generation_config.eos_token_id = None  # tests compare fixed numbers of tokens
    model.generation_config.pad_token_id = 0
    return model


def tiny_model(name: str) -> nn.Module:
    """A fresh copy of the tiny model of a family; the same numbers every time."""
    return copy.deepcopy(_built(name))
