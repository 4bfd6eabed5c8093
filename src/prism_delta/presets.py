"""Named settings: the paper's two tables of hyper-parameters, and what was measured best on small models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .errors import UnknownMethodError
from .suggest import did_you_mean

_MODELS = ("qwen3-4b", "qwen3-8b", "qwen3-14b", "gemma3-4b", "gemma3-12b")

# gamma, delta_min, g_K[, g_V] in the order of _MODELS; published with the reference code.
_PAPER: dict[tuple[str, str], tuple[tuple[float, ...], ...]] = {
    ("prism", "biasbios"): (
        (0.998, 0.08, 0.40),
        (0.998, 0.08, 0.40),
        (0.998, 0.08, 0.40),
        (0.850, 0.08, 0.50),
        (0.980, 0.00, 0.40),
    ),
    ("prism", "counterfact"): (
        (0.998, 0.13, 1.90),
        (0.960, 0.12, 2.70),
        (0.870, 0.08, 3.00),
        (0.990, 0.12, 6.00),
        (0.990, 0.50, 1.10),
    ),
    ("prism", "pronoun"): (
        (0.880, 0.15, 0.15),
        (0.900, 0.15, 0.05),
        (0.880, 0.15, 0.05),
        (0.800, 0.15, 0.30),
        (0.700, 0.30, -0.30),
    ),
    ("prism-v", "biasbios"): (
        (0.998, 0.08, 0.40, 0.10),
        (0.998, 0.08, 0.40, 0.10),
        (0.998, 0.08, 0.40, 0.10),
        (0.800, 0.12, 0.30, 0.10),
        (0.994, 0.00, 0.40, 0.10),
    ),
    ("prism-v", "counterfact"): (
        (0.998, 0.13, 1.90, 0.02),
        (0.960, 0.12, 2.70, 0.05),
        (0.870, 0.08, 3.00, 0.05),
        (0.990, 0.12, 6.00, 0.10),
        (0.990, 0.40, 3.00, 0.50),
    ),
    ("prism-v", "pronoun"): (
        (0.880, 0.15, 0.15, 0.05),
        (0.900, 0.15, 0.05, 0.02),
        (0.880, 0.15, 0.05, 0.02),
        (0.800, 0.15, 0.30, 0.10),
        (0.700, 0.30, 0.05, 0.02),
    ),
}


@dataclass(frozen=True)
class Preset:
    """A method with parameters, and where they come from."""

    name: str
    method: str
    params: dict[str, Any]
    source: str


def _paper_presets() -> list[Preset]:
    presets = []
    for (method, benchmark), rows in _PAPER.items():
        for model, row in zip(_MODELS, rows, strict=True):
            params: dict[str, Any] = {"convention": "reference"}
            params |= dict(zip(("gamma", "delta_min", "key_gain", "value_gain"), row, strict=False))
            presets.append(Preset(f"{method}/{model}/{benchmark}", method, params, "the paper, reference convention"))
    return presets


# Chosen on CounterFact validation records by bench/choose_defaults.py; see docs/defaults.md.
_MEASURED: dict[str, dict[str, dict[str, Any]]] = {
    "smollm2-135m": {"prism": {"keep": 0.1, "key_gain": 4.0}, "scale": {"keep": 0.1, "key_gain": 4.0}},
    "gemma3-270m": {"prism": {"keep": 0.33, "key_gain": 1.0}, "scale": {"keep": 0.33, "key_gain": 1.0}},
}

PRESETS: dict[str, Preset] = {preset.name: preset for preset in _paper_presets()}
PRESETS |= {
    f"{method}/{model}": Preset(f"{method}/{model}", method, params, "measured on validation records")
    for model, methods in _MEASURED.items()
    for method, params in methods.items()
}


def get_preset(name: str) -> Preset:
    """The preset METHOD/MODEL[/BENCHMARK], or UnknownMethodError with the nearest name."""
    if name not in PRESETS:
        raise UnknownMethodError(
            f"no preset {name!r}{did_you_mean(name, PRESETS)}; `prism ls presets` shows all {len(PRESETS)}"
        )
    return PRESETS[name]


def recommended(model: str, method: str) -> dict[str, Any]:
    """The settings measured best for a model, or none: then the method's defaults hold."""
    preset = PRESETS.get(f"{method}/{model}")
    return dict(preset.params) if preset else {}
