"""Moments made from random rows, with the rows kept for comparison with the formulas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from prism_delta.moments import HeadMoments, Moments
from prism_delta.sites import CHANNELS, Channel

Rows: TypeAlias = dict[tuple[int, Channel], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def random_rows(
    count: int = 40,
    heads: int = 2,
    dim: int = 6,
    layers: Sequence[int] = (0, 1, 2),
    channels: Sequence[Channel] = CHANNELS,
    seed: int = 0,
) -> Rows:
    """(h, h+, h-) [row, head, dim] per place; heads differ in how far h+ and h- lie apart."""
    generator = torch.Generator().manual_seed(seed)
    rows: Rows = {}
    for number, place in enumerate((layer, channel) for layer in layers for channel in channels):
        neutral, positive, noise = (
            torch.randn(count, heads, dim, generator=generator, dtype=torch.float64) for _ in range(3)
        )
        distance = 0.1 + 0.3 * torch.arange(heads) + 0.2 * number
        rows[place] = neutral, positive, positive + distance[:, None] * noise
    return rows


def moments_of(rows: Rows, header: Mapping[str, Any] | None = None) -> Moments:
    count = len(next(iter(rows.values()))[0])
    heads = {}
    for place, triple in rows.items():
        heads[place] = HeadMoments.zeros(*triple[0].shape[1:])
        heads[place].add_rows(*triple)
    return Moments(count, heads, dict(header or {}))
