"""Projection files of the official release -> Plan."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .edit import Edit
from .errors import ArtifactError, StorageError
from .plan import HeadStats, Place, Plan
from .sites import CHANNELS, Channel
from .subspace import softplus_weight

_NAMES: dict[Channel, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "key": (("k_proj", "proj"), ("k_norm_diffs", "norm_diffs")),
    "value": (("v_proj",), ("v_norm_diffs",)),
}


def import_projections(
    path: str | os.PathLike[str],
    *,
    key_gain: float = 1.0,
    value_gain: float = 0.0,
    uniform: bool = False,
    model: str = "",
) -> Plan:
    """Convert a K file (`proj`, `norm_diffs`) or a K+V file (`k_proj`, `v_proj`, ...), never running its code.

    M = gain * softplus(D - min_diff) * P; the weight is 1 where the file has no norm_diffs, or with `uniform`.
    Layers are matched by the ids in `layers`, which the published loader ignores.
    """
    content = _load(Path(path))
    shift = _number(content, path)
    edits: dict[Place, Edit] = {}
    stats: dict[Place, HeadStats] = {}
    shape: dict[Place, tuple[int, int]] = {}
    for channel, gain in zip(CHANNELS, (key_gain, value_gain), strict=True):
        projection = _projection(content, channel, path)
        if projection is None:
            if gain and channel == "value":
                raise ArtifactError(f"{path} holds no value projections (v_proj); set the value gain to 0")
            continue
        ids = _layer_ids(content, len(projection), path)
        scores = _scores(content, channel, projection)
        weights = _weights(scores, shift, uniform, projection)
        for number, layer in enumerate(ids):
            matrix = projection[number]
            on = matrix.abs().amax((1, 2)) > 0
            place: Place = (layer, channel)
            shape[place] = (int(matrix.shape[0]), int(matrix.shape[1]))
            rank = matrix.diagonal(dim1=1, dim2=2).sum(-1).round().long()
            score = scores[number] if scores is not None else torch.full_like(weights[number], torch.nan)
            stats[place] = HeadStats(rank, weights[number] * on, score)
            edits[place] = Edit.from_matrix(gain * weights[number][:, None, None] * matrix)
    if not shape:
        raise ArtifactError(f"{path} holds no projections; expected proj, k_proj or v_proj, found {list(content)}")
    params = {"key_gain": key_gain, "value_gain": value_gain, "uniform": uniform}
    header = {"method": "imported", "params": params, "model": {"name": model}}
    kept = {place: edit for place, edit in edits.items() if not edit.is_zero}
    return Plan(kept, shape, {place: stats[place] for place in kept}, header)


def _load(path: Path) -> Mapping[str, Any]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # damaged files make torch raise nearly anything
        # torch's own message explains how to run the file's code all the same; only what it names is of use here.
        named = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it would run {named[1]}" if named else f"torch cannot read it ({type(error).__name__})"
        raise ArtifactError(
            f"{path} is not a .pt file of plain tensors, and is not loaded otherwise: {reason}"
        ) from error
    if isinstance(content, torch.Tensor):
        return {"proj": content}
    if not isinstance(content, Mapping):
        raise ArtifactError(f"{path} holds a {type(content).__name__}; expected a tensor or a dict of tensors")
    return content


def _projection(content: Mapping[str, Any], channel: Channel, path: Any) -> torch.Tensor | None:
    found = next((content[name] for name in _NAMES[channel][0] if name in content), None)
    if found is None:
        return None
    if (
        not isinstance(found, torch.Tensor)
        or found.ndim not in (2, 3, 4)
        or found.shape[-1] != found.shape[-2]
        or not found.numel()
    ):
        raise ArtifactError(f"{path}: {channel} projections must be [layer, head, dim, dim], found {_describe(found)}")
    tensor = found.double()
    while tensor.ndim < 4:
        tensor = tensor.unsqueeze(0)
    if not bool(torch.isfinite(tensor).all()):
        raise ArtifactError(f"{path}: {channel} projections hold NaN or infinite numbers")
    return tensor


def _scores(content: Mapping[str, Any], channel: Channel, projection: torch.Tensor) -> torch.Tensor | None:
    found = next((content[name] for name in _NAMES[channel][1] if content.get(name) is not None), None)
    if found is None:
        return None
    if not isinstance(found, torch.Tensor) or tuple(found.shape) != tuple(projection.shape[:2]):
        raise ArtifactError(f"{channel} norm_diffs must be {list(projection.shape[:2])}, found {_describe(found)}")
    if not bool(torch.isfinite(found).all()):
        raise ArtifactError(f"{channel} norm_diffs hold NaN or infinite numbers")
    return found.double()


def _weights(scores: torch.Tensor | None, shift: float, uniform: bool, projection: torch.Tensor) -> torch.Tensor:
    if scores is None or uniform:
        return torch.ones(projection.shape[:2], dtype=torch.float64)
    return softplus_weight(scores, shift)


def _number(content: Mapping[str, Any], path: Any) -> float:
    """min_diff, 0 if the file has none."""
    found = content.get("min_diff")
    try:
        number = 0.0 if found is None else float(found)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise ArtifactError(f"{path}: min_diff must be a finite number, found {found!r}")
    return number


def _layer_ids(content: Mapping[str, Any], count: int, path: Any) -> list[int]:
    """The ids in `layers`; 0, 1, ... if the file has none."""
    found = content.get("layers")
    if found is None:
        return list(range(count))
    listed = found.tolist() if isinstance(found, torch.Tensor) else found
    if not isinstance(listed, list | tuple) or not all(type(item) is int and item >= 0 for item in listed):
        raise ArtifactError(f"{path}: layers must be a list of layer ids, found {found!r}")
    if len(listed) != count:
        raise ArtifactError(f"{path}: {count} layers of projections, {len(listed)} layer ids")
    if len(set(listed)) != count:
        raise ArtifactError(f"{path}: layers names a layer twice: {list(listed)}")
    return list(listed)


def _describe(value: Any) -> str:
    return str(list(value.shape)) if isinstance(value, torch.Tensor) else type(value).__name__
