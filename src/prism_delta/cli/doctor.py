"""`prism doctor`: what is here, and what a model supports."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import torch

from .. import __version__
from ..cache import ENVIRONMENT, cache_dir
from ..sites import find_sites
from .output import emit, print_json

_PACKAGES = {
    "torch": "the arithmetic",
    "transformers": "the models",
    "safetensors": "the files",
    "gguf": "packaged models (extra: embedded)",
    "accelerate": "packaged models, several devices (extra: embedded)",
    "peft": "adapters, if you use them",
}


def report(model: Any, json: bool) -> None:
    facts: dict[str, Any] = {"prism-delta": __version__, "python": platform.python_version()}
    for name, what in _PACKAGES.items():
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = f"not installed: {what}"
    facts["devices"] = ", ".join(_devices())
    facts["cache"] = f"{cache_dir()} (set by {ENVIRONMENT})"
    if model is None:
        emit(facts, json)
        return
    sites = find_sites(model)
    facts["model"] = f"{type(model).__name__} ({model.config.model_type})"
    facts["decoder"] = sites.decoder_name or "(the model itself)"
    if json:
        found = [
            {"layer": s.layer, "channel": s.channel, "module": s.name, "heads": s.layout.heads, "dim": s.layout.dim,
             "layout": s.layout.kind}
            for s in sites
        ]  # fmt: skip
        left_out = [{"layer": layer, "what": what, "why": why} for (layer, what), why in sites.skipped.items()]
        print_json({**facts, "sites": found, "left_out": left_out})
        return
    for channel in ("key", "value"):
        example = next((site for site in sites if site.channel == channel), None)
        if example is not None:
            facts[f"{channel}s"] = f"{example.name} and alike, {example.layout.kind}"
    emit(facts, False)
    emit({"steerable": sites.describe().replace("\n", "; ")}, False)


def _devices() -> list[str]:
    found = ["cpu"]
    if torch.cuda.is_available():
        found += [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        found.append("mps")
    return found
