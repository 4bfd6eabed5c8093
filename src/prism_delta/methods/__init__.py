"""The methods, one file each; every module of this folder is found by itself."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from ..errors import UnknownMethodError
from ..suggest import did_you_mean
from .base import Method

__all__ = ["Method", "get_method", "list_methods"]


@cache
def _registry() -> dict[str, Method]:
    found: dict[str, Method] = {}
    for module in pkgutil.iter_modules(__path__):
        for method in getattr(importlib.import_module(f"{__name__}.{module.name}"), "METHODS", ()):
            found[method.name] = method
    return dict(sorted(found.items(), key=lambda item: (item[1].order, item[0])))


def list_methods() -> list[Method]:
    """All methods, the project's own first."""
    return list(_registry().values())


def get_method(name: str) -> Method:
    """The method of that name, or UnknownMethodError with the nearest names."""
    known = _registry()
    if name not in known:
        raise UnknownMethodError(f"no method {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}")
    return known[name]
