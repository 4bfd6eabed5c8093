"""A Plan: for each layer and channel, the linear edit of every head, with where it comes from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .artifact import read_artifact, write_artifact
from .edit import Edit
from .errors import ArtifactError, PlanMismatchError
from .sites import CHANNELS, Channel, Sites, find_sites

KIND, VERSION = "plan", 1
_PARTIAL = ("matrices", "imported")  # plans that may know only some layers of their model
_STATS = ("rank", "weight", "score")

Place = tuple[int, Channel]


@dataclass(frozen=True)
class HeadStats:
    """Why each head is edited as it is: kept rank, weight (gain not included) and discriminability, [head]."""

    rank: torch.Tensor
    weight: torch.Tensor
    score: torch.Tensor


@dataclass(frozen=True)
class Plan:
    """The edit `x' = x + s * (x @ M)` of a model: M per (layer, channel) and head, gains included.

    Layers and channels without an edit are absent. `shape` is that of the whole model the plan was made
    for, (heads, dim) by (layer, channel); a model of another shape is refused.
    """

    edits: Mapping[Place, Edit]
    shape: Mapping[Place, tuple[int, int]]
    stats: Mapping[Place, HeadStats] = field(default_factory=dict)
    header: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        kept = {place: edit for place, edit in sorted(self.edits.items()) if not edit.is_zero}
        object.__setattr__(self, "edits", kept)

    @classmethod
    def from_matrices(
        cls, matrices: Mapping[tuple[int, Channel], torch.Tensor], model: nn.Module | None = None
    ) -> Plan:
        """A hand-made plan from M [head, dim, dim] per (layer, channel), checked against `model` if given."""
        for place in matrices:
            if place[1] not in CHANNELS:
                raise PlanMismatchError(f"channel must be 'key' or 'value', found {place[1]!r}")
        edits = {place: Edit.from_matrix(matrix) for place, matrix in matrices.items()}
        shape = {place: edit.shape for place, edit in edits.items()}
        if model is not None:
            sites = find_sites(model)
            plan = cls(edits, shape, header={"method": "matrices", "params": {}})
            plan._check_places(sites)
            shape = {(site.layer, site.channel): site.shape for site in sites}
        return cls(edits, shape, header={"method": "matrices", "params": {}})

    def matrix(self, layer: int, channel: Channel) -> torch.Tensor | None:
        """The edit M [head, dim, dim] with gains included; None where there is none."""
        edit = self.edits.get((layer, channel))
        return None if edit is None else edit.matrix()

    @property
    def nbytes(self) -> int:
        return sum(edit.nbytes for edit in self.edits.values())

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what the plan does to a model; equal for plans that edit equally."""
        digest = hashlib.sha256()
        for (layer, channel), edit in self.edits.items():
            for name, tensor in edit.tensors().items():
                digest.update(f"{layer}{channel}{name}{list(tensor.shape)}".encode())
                digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    @cached_property
    def _moved(self) -> dict[tuple[Place, torch.device, torch.dtype], Edit]:
        return {}

    def edit_on(self, place: Place, device: torch.device, dtype: torch.dtype) -> Edit:
        """The edit on a device, moved there once; `dtype` is that of the arithmetic."""
        key = (place, device, dtype)
        if key not in self._moved:
            self._moved[key] = self.edits[place].to(device, dtype)
        return self._moved[key]

    def check(self, model: nn.Module | Sites) -> Sites:
        """The model's sites, or PlanMismatchError naming both shapes."""
        sites = model if isinstance(model, Sites) else find_sites(model)
        channels = {channel for _, channel in self.edits}
        for channel in CHANNELS:
            mine = {layer: shape for (layer, kind), shape in self.shape.items() if kind == channel}
            if channel in channels and self.header.get("method") not in _PARTIAL and mine != sites.shape(channel):
                raise PlanMismatchError(
                    f"this plan was made for a model with {_text(mine)} of {channel}s"
                    f"{self._origin()}, the model to steer has {_text(sites.shape(channel))}"
                )
        self._check_places(sites)
        return sites

    def _check_places(self, sites: Sites) -> None:
        for (layer, channel), edit in self.edits.items():
            if (layer, channel) not in sites:
                reason = sites.skipped.get((layer, channel)) or sites.skipped.get((layer, "attention"))
                raise PlanMismatchError(
                    f"the plan edits the {channel}s of layer {layer}; the model has {channel}s to edit in layers "
                    f"{sorted(sites.shape(channel))}" + (f" (layer {layer} {reason})" if reason else "")
                )
            if sites[layer, channel].shape != edit.shape:
                raise PlanMismatchError(
                    f"layer {layer}, {channel}: the plan has {_text({layer: edit.shape})}, the model "
                    f"{_text({layer: sites[layer, channel].shape})}"
                )

    def _origin(self) -> str:
        name = dict(self.header.get("model") or {}).get("name")
        return f" ({name})" if name else ""

    def describe(self) -> dict[str, Any]:
        """What the plan does, in numbers for people and programs."""
        channels = {}
        for channel in CHANNELS:
            edits = {layer: edit for (layer, kind), edit in self.edits.items() if kind == channel}
            if not edits:
                continue
            stats = [self.stats[layer, channel] for layer in edits if (layer, channel) in self.stats]
            on = [(item.weight != 0) & (item.rank != 0) for item in stats]
            all_heads = sum(heads for (_, kind), (heads, _) in self.shape.items() if kind == channel)
            channels[channel] = {
                "layers": len(edits),
                "heads": sum(int(mask.sum()) for mask in on) if on else sum(e.heads for e in edits.values()),
                "of_heads": all_heads,
                "mean_rank": _mean([item.rank[mask] for item, mask in zip(stats, on, strict=True)]),
                "mean_weight": _mean([item.weight[mask] for item, mask in zip(stats, on, strict=True)]),
                "forms": sorted({edit.form for edit in edits.values()}),
            }
        return {
            "method": self.header.get("method"),
            "params": dict(self.header.get("params") or {}),
            "model": dict(self.header.get("model") or {}),
            "channels": channels,
            "bytes": self.nbytes,
            "fingerprint": self.fingerprint,
        }

    def save(self, path: str | os.PathLike[str]) -> Path:
        tensors: dict[str, torch.Tensor] = {}
        for (layer, channel), edit in self.edits.items():
            for name, tensor in edit.tensors().items():
                tensors[f"{layer}.{channel}.edit.{name}"] = tensor
        for (layer, channel), stats in self.stats.items():
            for name in _STATS:
                tensors[f"{layer}.{channel}.stats.{name}"] = getattr(stats, name)
        shape = [[layer, channel, *size] for (layer, channel), size in self.shape.items()]
        header = {"source": dict(self.header), "shape": shape, "fingerprint": self.fingerprint}
        return write_artifact(path, KIND, VERSION, header, tensors)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        header, tensors = read_artifact(path, KIND, VERSION)
        grouped: dict[tuple[Place, str], dict[str, torch.Tensor]] = {}
        try:
            for name, tensor in tensors.items():
                layer, channel, group, part = name.split(".")
                kind = CHANNELS[CHANNELS.index(channel)]
                grouped.setdefault(((int(layer), kind), group), {})[part] = tensor
            shape: dict[Place, tuple[int, int]] = {
                (layer, channel): (heads, dim) for layer, channel, heads, dim in header["shape"]
            }
            edits = {
                place: Edit(dim=shape[place][1], **parts)
                for (place, group), parts in grouped.items()
                if group == "edit"
            }
            stats = {place: HeadStats(**parts) for (place, group), parts in grouped.items() if group == "stats"}
            plan = cls(edits, shape, dict(sorted(stats.items())), header["source"])
        except (KeyError, ValueError, TypeError) as error:
            raise ArtifactError(f"{path} is not a complete plan file: {error!r}") from error
        if plan.fingerprint != header.get("fingerprint"):
            raise ArtifactError(f"{path} is damaged: its numbers do not match its fingerprint")
        return plan


def _text(shape: Mapping[int, tuple[int, int]]) -> str:
    """ "30 layers of 3 heads x 64"."""
    sizes = sorted(set(shape.values()))
    parts = [
        f"{sum(size == other for other in shape.values())} layers of {size[0]} heads x {size[1]}" for size in sizes
    ]
    return " and ".join(parts) or "no layers"


def _mean(parts: list[torch.Tensor]) -> float | None:
    joined = torch.cat([part.double() for part in parts]) if parts else torch.empty(0)
    return round(float(joined.mean()), 4) if joined.numel() else None
