"""`prism show`: a file's heads as a table and a heat map."""

from __future__ import annotations

from pathlib import Path

import torch
from rich.text import Text

from ..artifact import artifact_kind
from ..errors import ArtifactError, ParameterError
from ..moments import Moments
from ..plan import Plan
from ..sites import CHANNELS
from ..subspace import discriminability
from .output import console, emit, print_json, print_table

_SHADES = " ░▒▓█"


def show_file(file: Path, by: str, json: bool) -> None:
    kind = artifact_kind(file)
    if kind == "plan":
        _show_plan(Plan.load(file), by, json)
    elif kind == "moments":
        _show_moments(Moments.load(file), json)
    else:
        raise ArtifactError(f"{file} holds {kind!r}; expected a plan or moments")


def _show_plan(plan: Plan, by: str, json: bool) -> None:
    if by not in ("weight", "rank", "score"):
        raise ParameterError(f"--by must be weight, rank or score, found {by!r}")
    facts = plan.describe()
    if json:
        heads = {
            f"{layer}.{channel}": {name: getattr(stats, name).tolist() for name in ("rank", "weight", "score")}
            for (layer, channel), stats in plan.stats.items()
        }
        print_json({**facts, "heads": heads})
        return
    emit({key: value for key, value in facts.items() if key != "channels"}, False)
    if facts["channels"]:
        print_table([{"channel": name, **row} for name, row in facts["channels"].items()], False)
    for channel in CHANNELS:
        places = [place for place in plan.stats if place[1] == channel]
        rows = {layer: getattr(plan.stats[layer, channel], by).double() for layer, _ in places}
        if rows:
            _heat_map(f"{channel} {by} by layer (down) and head (across)", rows)


def _show_moments(moments: Moments, json: bool) -> None:
    scores = {
        channel: {
            layer: discriminability(
                moments.count,
                moments[layer, channel].contrast_norm,
                moments[layer, channel].contrast_square,
                "frobenius",
            )
            for layer in moments.layers(channel)
        }
        for channel in CHANNELS
    }
    if json:
        heads = {f"{layer}.{channel}": d.tolist() for channel, rows in scores.items() for layer, d in rows.items()}
        print_json({"rows": moments.count, **moments.header, "discriminability": heads})
        return
    emit({"rows": moments.count, **moments.header}, False)
    for channel, rows in scores.items():
        if rows:
            mean = float(torch.cat(list(rows.values())).mean())
            _heat_map(f"{channel} discriminability (Frobenius / N), mean {mean:.4f}", rows)


def _heat_map(title: str, rows: dict[int, torch.Tensor]) -> None:
    """Two columns a head, darker is more; NaN and 0 are blank."""
    out = console()
    top = max(float(torch.nan_to_num(row).max()) for row in rows.values()) or 1.0
    out.print(f"\n{title}; █ = {top:.3g}", style="bold")
    for layer, row in rows.items():
        shares = (torch.nan_to_num(row) / top).clamp(0, 1)
        cells = "".join(2 * _SHADES[0 if share == 0 else 1 + min(3, int(share * 4))] for share in shares.tolist())
        numbers = (
            " ".join(f"{value:.3g}" for value in row.tolist()) if len(row) <= 8 else f"mean {float(row.mean()):.3g}"
        )
        out.print(Text(f"{layer:>4} |{cells}| {numbers}"))
