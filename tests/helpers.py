"""Small things the tests of steering share."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from prism_delta import Batch, Plan, find_sites

_DEFAULT = {2: 1.0, 3: 1.0, 6: -0.5}


def random_plan(model: nn.Module, size: float = 0.4, channels: tuple[str, ...] = ("key", "value")) -> Plan:
    """A dense random edit of every layer; large enough to change every logit."""
    generator = torch.Generator().manual_seed(1)
    matrices = {}
    for site in find_sites(model):
        if site.channel in channels:
            heads, dim = site.shape
            matrices[site.layer, site.channel] = size * torch.randn(heads, dim, dim, generator=generator)
    return Plan.from_matrices(matrices, model=model)


def scaling_plan(model: nn.Module, gain: float, channel: str) -> Plan:
    """M = gain * I for every head of a channel."""
    matrices = {
        (site.layer, site.channel): gain * torch.eye(site.shape[1]).repeat(site.shape[0], 1, 1)
        for site in find_sites(model)
        if site.channel == channel
    }
    return Plan.from_matrices(matrices, model=model)


def random_batch(rows: int = 1, tokens: int = 9, highlighted: dict[int, float] | None = None, seed: int = 0) -> Batch:
    """Random token ids (never padding); `highlighted` maps token slots to strengths, in every row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 80, (rows, tokens), generator=generator)
    strengths = torch.zeros(rows, tokens)
    if highlighted is None:
        highlighted = {slot: value for slot, value in _DEFAULT.items() if slot < tokens}
    for slot, strength in highlighted.items():
        strengths[:, slot] = strength
    return Batch.from_ids(ids, strengths)


def pad(batch: Batch, extra: int, side: str) -> Batch:
    """The same prompts with padding on one side."""
    sizes = (extra, 0) if side == "left" else (0, extra)
    parts = (nn.functional.pad(part, sizes) for part in (batch.input_ids, batch.attention_mask, batch.strengths))
    ids, mask, strengths = parts
    return Batch(ids, mask, strengths)


def join(*batches: Batch) -> Batch:
    """Batches of one length as one."""
    parts = zip(*((item.input_ids, item.attention_mask, item.strengths) for item in batches), strict=True)
    ids, mask, strengths = (torch.cat(part) for part in parts)
    return Batch(ids, mask, strengths)


def forward(model: nn.Module, batch: Batch, **options: Any) -> Any:
    """One forward pass with the positions that generate() would give."""
    positions = (batch.attention_mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        return model(**batch.inputs, position_ids=positions, **options)


def generate(model: Any, batch: Batch, tokens: int = 4, **options: Any) -> torch.Tensor:
    """Greedy, with scores as logits [step, row, vocabulary]."""
    with torch.no_grad():
        output = model.generate(
            **batch.inputs,
            max_new_tokens=tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            **options,
        )
    return torch.stack(output.logits)


def hook_count(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def edited_keys(cache: Any, layer: int, channel: str) -> torch.Tensor:
    """Cached keys or values of a layer [batch, head, token, dim]."""
    return cache.layers[layer].keys if channel == "key" else cache.layers[layer].values
