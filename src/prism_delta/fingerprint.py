"""Short hashes that say which model and tokenizer an artifact was made with."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SAMPLES = 64


def model_identity(model: nn.Module) -> dict[str, str]:
    """Name, revision (if from the Hub) and a fingerprint of the weights; never a path of this machine."""
    config = getattr(model, "config", None)
    alias = getattr(config, "prism_delta_alias", None)
    name = alias or getattr(config, "_name_or_path", "") or type(model).__name__
    name = name.rstrip("/").replace("\\", "/")
    # A Hub id has exactly one slash; of a path only the folder's own name is kept.
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or ":" in name:
        name = name.rsplit("/", 1)[-1]
    return {
        "name": name,
        "revision": str(getattr(config, "_commit_hash", None) or ""),
        "weights": weights_hash(model),
    }


def weights_hash(model: nn.Module) -> str:
    """A hash of every parameter's name and shape and of numbers spread over it.

    It reads a few thousand numbers, not gigabytes; weights of another checkpoint differ in nearly all.
    """
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if not isinstance(tensor, torch.Tensor):
            continue
        digest.update(f"{name}{list(tensor.shape)}{tensor.dtype}".encode())
        if tensor.device.type == "meta" or tensor.numel() == 0:
            continue
        flat = tensor.detach().reshape(-1)
        picked = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES]
        digest.update(picked.to("cpu", torch.float32).numpy().tobytes())
    return digest.hexdigest()[:16]


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the vocabulary, the rules that make tokens of text, the special tokens and the chat template."""
    known: Any = [sorted(tokenizer.get_vocab().items()), tokenizer.all_special_ids, tokenizer.chat_template]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        known += [rules.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor", "added_tokens")]
        known.append(rules.get("model", {}).get("merges"))
    return hashlib.sha256(json.dumps(known, ensure_ascii=False, default=str).encode()).hexdigest()[:16]
