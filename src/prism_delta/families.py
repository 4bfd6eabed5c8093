"""The model families the tests run every law on. Others are found by structure as well; `prism doctor` tells."""

from __future__ import annotations

TESTED_FAMILIES: dict[str, str] = {
    "llama": "Llama 2 and 3, SmolLM2, and the many models built like them",
    "mistral": "Mistral; sliding window",
    "mixtral": "Mixtral; mixture of experts",
    "qwen2": "Qwen2, Qwen2.5; biases",
    "qwen3": "Qwen3; keys after k_norm",
    "qwen3_moe": "Qwen3 mixture of experts",
    "gemma2": "Gemma 2; soft-capping, sliding window",
    "gemma3_text": "Gemma 3 text; k_norm with heads first, sliding window",
    "gemma3": "Gemma 3 multimodal; its text part",
    "phi3": "Phi-3, Phi-4; fused query, key and value",
    "olmo2": "OLMo 2; k_norm over all heads at once",
    "granite": "Granite",
    "cohere": "Command R; k_norm per head",
    "smollm3": "SmolLM3; layers without RoPE",
    "gpt_oss": "gpt-oss; attention sinks, YaRN",
    "gpt_neox": "GPT-NeoX, Pythia; query, key and value interleaved per head",
}

NOT_STEERABLE: dict[str, str] = {
    "deepseek_v2, deepseek_v3": "compressed (MLA) keys: no module puts out a key per head",
    "hunyuan, llama4": "keys are normalised after RoPE",
    "mamba, rwkv": "no attention",
}
