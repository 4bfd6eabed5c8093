"""`prism ls`: methods, models, families, presets."""

from __future__ import annotations

import dataclasses
from typing import Any

import typer

from ..errors import ParameterError
from .output import print_json, print_table


def print_list(what: str, json: bool) -> None:
    listings = {"methods": _methods, "models": _models, "families": _families, "presets": _presets}
    if what not in listings:
        from ..suggest import did_you_mean

        raise ParameterError(f"no list {what!r}{did_you_mean(what, listings)}; there are {', '.join(listings)}")
    listings[what](json)


def method_rows() -> list[dict[str, str]]:
    """The columns of the paper's Table 1, from the methods themselves."""
    from ..methods import list_methods

    return [
        {
            "method": method.name,
            "title": method.title,
            "steers": method.steers,
            "projection": method.projection,
            "head selection": method.head_selection,
            "needs": method.needs,
            "FlashAttn": "yes" if method.fused_attention else "no",
        }
        for method in list_methods()
    ]


def parameter_rows(params_type: type[Any]) -> list[dict[str, str]]:
    """Name, default and meaning of each parameter."""
    return [
        {"parameter": field.name, "default": str(field.default), "meaning": str(field.metadata.get("help", ""))}
        for field in dataclasses.fields(params_type)
    ]


def _methods(json: bool) -> None:
    from ..methods import get_method, list_methods

    rows = method_rows()
    if json:
        print_json([{**row, "parameters": parameter_rows(get_method(row["method"]).params_type)} for row in rows])
        return
    print_table(rows, False)
    typer.echo("\nParameters (--set key=value); all methods but none share them, with the defaults of prism:")
    print_table(parameter_rows(list_methods()[0].params_type), False)


def _models(json: bool) -> None:
    from ..models import PACKAGED, packaged_path

    rows = [
        {
            "alias": model.alias,
            "what": model.note,
            "licence": model.licence,
            "here": "yes" if (packaged_path(model) / "config.json").is_file() else "downloaded on first use",
        }
        for model in PACKAGED.values()
    ]
    print_table(rows, json)
    if not json:
        typer.echo("\nAny transformers causal language model works too: a folder, or a Hub id.")


def _families(json: bool) -> None:
    from ..families import NOT_STEERABLE, TESTED_FAMILIES

    rows = [{"family": name, "steerable": "tested", "what": text} for name, text in TESTED_FAMILIES.items()]
    rows += [{"family": name, "steerable": "no", "what": text} for name, text in NOT_STEERABLE.items()]
    print_table(rows, json)
    if not json:
        typer.echo("\nOther families are found by structure; `prism doctor MODEL` tells about yours.")


def _presets(json: bool) -> None:
    from ..presets import PRESETS

    rows = [
        {
            "preset": preset.name,
            "settings": ", ".join(f"{key}={value}" for key, value in preset.params.items()),
            "from": preset.source,
        }
        for preset in PRESETS.values()
    ]
    print_table(rows, json)
