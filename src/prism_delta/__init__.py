"""Prompt highlighting for language models: mark a span, and the model prioritises it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PLACES = {
    "Batch": "batch",
    "CaptureOptions": "examples",
    "Highlighter": "highlighter",
    "Moments": "moments",
    "Plan": "plan",
    "PrismError": "errors",
    "Prompt": "prompt",
    "Span": "prompt",
    "Trace": "steering",
    "Triplet": "pairs",
    "capture": "capturing",
    "encode": "batch",
    "find_sites": "sites",
    "get_method": "methods",
    "get_preset": "presets",
    "list_methods": "methods",
    "load_model": "models",
    "steer": "steering",
}

__all__ = [
    "Batch",
    "CaptureOptions",
    "Highlighter",
    "Moments",
    "Plan",
    "PrismError",
    "Prompt",
    "Span",
    "Trace",
    "Triplet",
    "__version__",
    "capture",
    "encode",
    "find_sites",
    "get_method",
    "get_preset",
    "list_methods",
    "load_model",
    "steer",
]

if TYPE_CHECKING:
    from .batch import Batch, encode
    from .capturing import capture
    from .errors import PrismError
    from .examples import CaptureOptions
    from .highlighter import Highlighter
    from .methods import get_method, list_methods
    from .models import load_model
    from .moments import Moments
    from .pairs import Triplet
    from .plan import Plan
    from .presets import get_preset
    from .prompt import Prompt, Span
    from .sites import find_sites
    from .steering import Trace, steer


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that `import prism_delta` costs nothing."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{_PLACES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
