"""What one capture pass leaves behind: the statistics every Key/Value method is made from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from .artifact import read_artifact, write_artifact
from .errors import ArtifactError, MomentsError
from .sites import CHANNELS, Channel
from .subspace import check_finite

KIND, VERSION = "moments", 1


@dataclass(frozen=True)
class HeadMoments:
    """Sums over N answer rows for one channel of one layer, in float64.

    h, h+ and h- are the representations of the same answer token after no question, the relevant and an
    irrelevant one.
    """

    neutral: torch.Tensor
    """H'H [head, dim, dim]"""
    positive: torch.Tensor
    """H'H+ [head, dim, dim]"""
    negative: torch.Tensor
    """H'H- [head, dim, dim]"""
    contrast_norm: torch.Tensor
    """sum of ||h+ - h-|| [head]"""
    contrast_square: torch.Tensor
    """sum of ||h+ - h-||^2 [head]"""
    neutral_square: torch.Tensor
    """sum of ||h+ - h||^2 [head]"""

    @classmethod
    def zeros(cls, heads: int, dim: int) -> HeadMoments:
        matrix, vector = (heads, dim, dim), (heads,)
        shapes = (matrix, matrix, matrix, vector, vector, vector)
        return cls(*(torch.zeros(shape, dtype=torch.float64) for shape in shapes))

    @property
    def shape(self) -> tuple[int, int]:
        """(heads, dim)."""
        return int(self.neutral.shape[0]), int(self.neutral.shape[1])

    def tensors(self) -> dict[str, torch.Tensor]:
        return {item.name: getattr(self, item.name) for item in fields(self)}

    def add_rows(self, neutral: torch.Tensor, positive: torch.Tensor, negative: torch.Tensor) -> None:
        """Add rows [row, head, dim] in place."""
        h, plus, minus = (rows.double().transpose(0, 1) for rows in (neutral, positive, negative))
        left = h.transpose(1, 2)
        self.neutral.add_(left @ h)
        self.positive.add_(left @ plus)
        self.negative.add_(left @ minus)
        contrast = (plus - minus).square().sum(-1)
        self.contrast_norm.add_(contrast.sqrt().sum(-1))
        self.contrast_square.add_(contrast.sum(-1))
        self.neutral_square.add_((plus - h).square().sum((-1, -2)))


@dataclass(frozen=True)
class Moments:
    """Moments of every (layer, channel), the row count N, and where they come from."""

    count: int
    heads: Mapping[tuple[int, Channel], HeadMoments]
    header: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise MomentsError(f"moments need at least one row, found {self.count}")
        if not self.heads:
            raise MomentsError("moments without any layer")

    def __getitem__(self, place: tuple[int, Channel]) -> HeadMoments:
        return self.heads[place]

    def __iter__(self) -> Iterator[tuple[int, Channel]]:
        return iter(self.heads)

    def layers(self, channel: Channel) -> list[int]:
        return sorted(layer for layer, kind in self.heads if kind == channel)

    def shape(self, channel: Channel) -> dict[int, tuple[int, int]]:
        return {layer: self.heads[layer, channel].shape for layer in self.layers(channel)}

    def check_finite(self) -> None:
        for (layer, channel), item in self.heads.items():
            for tensor in item.tensors().values():
                check_finite(tensor, f"the {channel} moments of layer {layer}")

    def merge(self, *others: Moments) -> Moments:
        """The moments of all the rows together, as if captured in one pass. Shards of one model only."""
        return reduce(_merge_two, others, self)

    def save(self, path: str | os.PathLike[str]) -> Path:
        tensors = {
            f"{layer}.{channel}.{name}": tensor
            for (layer, channel), item in self.heads.items()
            for name, tensor in item.tensors().items()
        }
        return write_artifact(path, KIND, VERSION, {"count": self.count, "source": dict(self.header)}, tensors)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Moments:
        header, tensors = read_artifact(path, KIND, VERSION)
        names = [item.name for item in fields(HeadMoments)]
        try:
            places = sorted({name.rsplit(".", 1)[0] for name in tensors})
            heads: dict[tuple[int, Channel], HeadMoments] = {}
            for place in places:
                layer, _, channel = place.partition(".")
                kind = CHANNELS[CHANNELS.index(channel)]
                heads[int(layer), kind] = HeadMoments(*(tensors[f"{place}.{name}"] for name in names))
            moments = cls(int(header["count"]), dict(sorted(heads.items())), header["source"])
        except (KeyError, ValueError, TypeError) as error:
            raise ArtifactError(f"{path} is not a complete moments file: {error!r}") from error
        moments.check_finite()
        return moments


def _merge_two(left: Moments, right: Moments) -> Moments:
    for channel in CHANNELS:
        if left.shape(channel) != right.shape(channel):
            raise MomentsError(
                f"cannot merge moments of different models: {channel} (heads, dim) by layer is "
                f"{left.shape(channel)} and {right.shape(channel)}"
            )
    for key in ("model", "options", "tokenizer"):
        if left.header.get(key) != right.header.get(key):
            raise MomentsError(
                f"cannot merge moments with different {key}: {left.header.get(key)!r} and {right.header.get(key)!r}"
            )
    heads = {
        place: HeadMoments(*(a + b for a, b in zip(item.tensors().values(), other.values(), strict=True)))
        for place, item in left.heads.items()
        if (other := right.heads[place].tensors()) is not None
    }
    sources = {
        "pairs": "+".join(str(item.header.get("pairs", "?")) for item in (left, right)),
        "triplets": int(left.header.get("triplets", 0)) + int(right.header.get("triplets", 0)),
        "skipped": int(left.header.get("skipped", 0)) + int(right.header.get("skipped", 0)),
    }
    return Moments(left.count + right.count, heads, {**left.header, **sources})
