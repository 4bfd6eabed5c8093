"""The control: highlighted keys and values times (1 + gain), no learned direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .base import param
from .prism import Prism, PrismParams


@dataclass(frozen=True)
class ScaleParams(PrismParams):
    """As `prism` with P = I; the gates choose heads by the same D. By default every head, uniformly."""

    projection: Literal["identity"] = param("identity", "the whole space, always")
    gate: Literal["none", "threshold"] | None = param("none", "threshold turns heads with D < delta_min off")
    weighting: Literal["softplus", "uniform"] | None = param("uniform", "w = softplus(D - delta_min), or 1")


class Scale(Prism):
    name = "scale"
    title = "control: plain scaling"
    params_type = ScaleParams
    projection = "identity"
    head_selection = "none, threshold or share"
    order = 8


METHODS = (Scale(),)
