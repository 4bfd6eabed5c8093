"""A tiny model as a GGUF file, the form packaged models come in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch

from families import tiny_model
from tokenizers_for_tests import byte_level


def write_gguf(path: Path) -> dict[str, torch.Tensor]:
    """The model as a GGUF file, its values in Q4_1; returns the weights that a reader must find."""
    tokenizer = json.loads(byte_level(trim_offsets=False).backend_tokenizer.to_str())["model"]
    words = sorted(tokenizer["vocab"], key=tokenizer["vocab"].__getitem__)
    model: Any = tiny_model("llama")
    model.resize_token_embeddings(len(words))
    config = model.config
    out = gguf.GGUFWriter(path, "llama")
    out.add_block_count(config.num_hidden_layers)
    out.add_context_length(config.max_position_embeddings)
    out.add_embedding_length(config.hidden_size)
    out.add_feed_forward_length(config.intermediate_size)
    out.add_head_count(config.num_attention_heads)
    out.add_head_count_kv(config.num_key_value_heads)
    out.add_layer_norm_rms_eps(config.rms_norm_eps)
    out.add_rope_dimension_count(config.head_dim)
    out.add_tokenizer_model("gpt2")
    out.add_token_list(words)
    out.add_token_types([1] * len(words))
    out.add_token_merges([" ".join(merge) for merge in tokenizer["merges"]])
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    weights = dict(model.state_dict())
    for name, tensor in weights.items():
        data, kind = tensor.numpy(), None
        if "v_proj" in name:
            data, kind = gguf.quantize(data, gguf.GGMLQuantizationType.Q4_1), gguf.GGMLQuantizationType.Q4_1
            weights[name] = torch.from_numpy(gguf.dequantize(data, kind))
        elif "q_proj" in name or "k_proj" in name:  # GGUF keeps the two halves of each head interleaved
            data = data.reshape(-1, 2, config.head_dim // 2, config.hidden_size).swapaxes(1, 2).reshape(data.shape)
        out.add_tensor(names.get_name(name, (".weight",)), data, raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return weights
