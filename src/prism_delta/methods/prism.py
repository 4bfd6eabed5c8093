"""PRISM-delta: differential subspaces, weighted heads, keys and values; its ablations are parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch

from ..edit import Edit
from ..errors import ParameterError
from ..moments import HeadMoments, Moments
from ..plan import HeadStats, Place, Plan
from ..sites import CHANNELS, Channel
from ..subspace import discriminability, leading_subspace, softplus_weight, top_share
from .base import Method, MethodParams, param

CONVENTIONS: dict[str, dict[str, Any]] = {
    "library": {"energy": "sigma", "score": "frobenius", "gate": "none", "keep": 0.1, "weighting": "uniform"},
    "paper": {"energy": "sigma2", "score": "mean_norm", "gate": "none", "keep": None, "weighting": "softplus"},
    "reference": {"energy": "sigma", "score": "frobenius", "gate": "threshold", "keep": None, "weighting": "softplus"},
}


@dataclass(frozen=True)
class PrismParams(MethodParams):
    """Parameters of `prism` and its relatives. What is left None is set by the convention."""

    convention: Literal["library", "paper", "reference"] = param(
        "library", "sets energy, score, gate, keep and weighting together; an explicit value wins"
    )
    projection: Literal["differential", "independent", "identity"] = param(
        "differential", "subspace of H'(H+ - H-), of H'H+ alone, or the whole space"
    )
    gamma: float = param(0.998, "share of the energy that the kept directions hold, in (0, 1]")
    energy: Literal["sigma", "sigma2"] | None = param(None, "energy is the singular values or their squares")
    score: Literal["mean_norm", "frobenius"] | None = param(
        None, "discriminability D: mean of ||h+ - h-||, or Frobenius norm / N"
    )
    gate: Literal["none", "threshold"] | None = param(None, "threshold turns heads with D < delta_min off")
    delta_min: float = param(0.08, "the shift: subtracted from D in softplus, and the threshold of the gate")
    keep: float | None = param(None, "edit only this share of the heads, those of highest D; in (0, 1]")
    weighting: Literal["softplus", "uniform"] | None = param(None, "w = softplus(D - delta_min), or 1")
    key_gain: float = param(0.5, "g_K, multiplies every key edit")
    value_gain: float = param(0.0, "g_V, multiplies every value edit")
    layers: str = param("all", "all, lastN, firstN, or ids such as 3,5,8-11")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gate == "threshold" and self.keep is not None:
            raise ParameterError("gate=threshold and keep are two ways to choose heads; give one")
        # A convention's way to choose heads gives way to the other way, if that was asked for.
        replaced = {"gate": self.keep is not None, "keep": self.gate is not None}
        for name, value in CONVENTIONS[self.convention].items():
            if getattr(self, name) is None and not replaced.get(name):
                object.__setattr__(self, name, value)
        if self.gate is None:
            object.__setattr__(self, "gate", "none")
        if not 0 < self.gamma <= 1:
            raise ParameterError(f"gamma must lie in (0, 1], found {self.gamma}")
        if self.keep is not None and not 0 < self.keep <= 1:
            raise ParameterError(f"keep must lie in (0, 1], found {self.keep}")

    def gain(self, channel: Channel) -> float:
        return self.key_gain if channel == "key" else self.value_gain


class Prism(Method):
    name = "prism"
    title = "PRISM-Δ"
    params_type: ClassVar[type[PrismParams]] = PrismParams
    projection = "differential SVD"
    head_selection = "softplus, threshold or share"
    order = 1

    def make_plan(self, moments: Moments, params: PrismParams) -> Plan:
        edits: dict[Place, Edit] = {}
        stats: dict[Place, HeadStats] = {}
        for channel in CHANNELS:
            if params.gain(channel) == 0:
                continue
            found = _channel_edits(moments, channel, params)
            if all(edit.is_zero for edit, _ in found.values()):
                raise ParameterError(_nothing_left(channel, params, [stat.score for _, stat in found.values()]))
            for layer, (edit, stat) in found.items():
                edits[layer, channel], stats[layer, channel] = edit, stat
        return Plan(edits, {place: moments[place].shape for place in moments}, stats)


def _channel_edits(moments: Moments, channel: Channel, params: PrismParams) -> dict[int, tuple[Edit, HeadStats]]:
    layers = select_layers(params.layers, moments.layers(channel))
    scores = {layer: _score(moments, moments[layer, channel], params) for layer in layers}
    gates = _gates(scores, params)
    result = {}
    for layer in layers:
        weight = gates[layer].double()
        if params.weighting == "softplus":
            weight = weight * softplus_weight(scores[layer], params.delta_min)
        edit, rank = _edit(moments[layer, channel], moments.count, weight, params, params.gain(channel))
        result[layer] = edit, HeadStats(torch.where(weight == 0, 0, rank), weight, scores[layer])
    return result


def _nothing_left(channel: Channel, params: PrismParams, scores: list[torch.Tensor]) -> str:
    largest = float(torch.cat(scores).max()) if scores else 0.0
    if params.gate == "threshold" and largest > 0:
        return (
            f"delta_min {params.delta_min} switches every {channel} head off: the largest discriminability is "
            f"{largest:.4g}. It depends on the model and on the number of rows; lower it, or choose heads with keep"
        )
    return (
        f"no {channel} head is left to edit: the largest discriminability in layers {params.layers!r} is {largest:.4g}"
    )


def _score(moments: Moments, item: HeadMoments, params: PrismParams) -> torch.Tensor:
    return discriminability(moments.count, item.contrast_norm, item.contrast_square, params.score or "frobenius")


def _gates(scores: dict[int, torch.Tensor], params: PrismParams) -> dict[int, torch.Tensor]:
    """Per layer, which heads are edited."""
    if params.keep is not None and scores:
        sizes = [len(item) for item in scores.values()]
        mask = top_share(torch.cat(list(scores.values())), params.keep)
        return dict(zip(scores, torch.split(mask, sizes), strict=True))
    if params.gate == "threshold":
        return {layer: item >= params.delta_min for layer, item in scores.items()}
    return {layer: torch.ones_like(item, dtype=torch.bool) for layer, item in scores.items()}


def _edit(
    item: HeadMoments, count: int, weight: torch.Tensor, params: PrismParams, gain: float
) -> tuple[Edit, torch.Tensor]:
    heads, dim = item.shape
    if params.projection == "identity":
        return Edit((gain * weight).float(), dim=dim), torch.full((heads,), dim)
    covariance = item.positive if params.projection == "independent" else item.positive - item.negative
    subspace = leading_subspace(covariance / count, params.gamma, params.energy or "sigma")
    return Edit.from_subspace(subspace.vectors, subspace.rank, gain * weight), subspace.rank


def select_layers(spec: str, known: list[int]) -> list[int]:
    """Layer ids named by `all`, `lastN`, `firstN` or a list such as 3,5,8-11."""
    text = spec.strip()
    if text == "all":
        return known
    for word, pick in (("last", slice(-1, None, -1)), ("first", slice(None))):
        if text.startswith(word) and text[len(word) :].isdecimal() and int(text[len(word) :]):
            return sorted(known[pick][: int(text[len(word) :])])
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ParameterError(f"layers must be all, lastN, firstN or ids such as 3,5,8-11, found {spec!r}")
        chosen.update(range(first, last + 1))
    unknown = sorted(chosen - set(known))
    if unknown:
        raise ParameterError(f"no such layers: {unknown}; the moments have {known}")
    return sorted(chosen)


@dataclass(frozen=True)
class PrismVParams(PrismParams):
    """As `prism`, with values on."""

    value_gain: float = param(0.1, "g_V, multiplies every value edit")


@dataclass(frozen=True)
class PrismValueParams(PrismVParams):
    """As `prism-v`, with keys off."""

    key_gain: float = param(0.0, "g_K, multiplies every key edit")


@dataclass(frozen=True)
class IndependentParams(PrismParams):
    """As `prism`, from the relevant condition alone."""

    projection: Literal["differential", "independent", "identity"] = param(
        "independent", "subspace of H'(H+ - H-), of H'H+ alone, or the whole space"
    )


class PrismV(Prism):
    name = "prism-v"
    title = "PRISM-ΔV"
    params_type = PrismVParams
    steers = "keys and values"
    order = 2


class PrismValue(Prism):
    name = "prism-value"
    title = "PRISM-ΔV, values only"
    params_type = PrismValueParams
    steers = "values"
    order = 3


class PrismIndependent(Prism):
    name = "prism-independent"
    title = "ablation: PRISM without differential"
    params_type = IndependentParams
    projection = "independent SVD"
    order = 4


METHODS = (Prism(), PrismV(), PrismValue(), PrismIndependent())
