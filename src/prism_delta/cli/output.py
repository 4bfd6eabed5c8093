"""Results on stdout: tables for people, JSON for programs."""

from __future__ import annotations

import json as jsonlib
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..prompt import Prompt


def console() -> Console:
    """rich on stdout; wide and plain where stdout is not a terminal, so that no cell is squeezed."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 180)


def print_json(value: Any) -> None:
    typer.echo(jsonlib.dumps(_finite(value), ensure_ascii=False, indent=2, default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    """NaN and infinity, which JSON has not, become null."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def emit(facts: Mapping[str, Any], json: bool) -> None:
    """A flat list of facts."""
    if json:
        print_json(dict(facts))
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        text = ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)
        typer.echo(f"{name:<{width}}  {text}")


def print_table(rows: Sequence[Mapping[str, Any]], json: bool, title: str = "") -> None:
    if json:
        print_json(list(rows))
        return
    out = console()
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for name in rows[0]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(value)) for value in row.values()))
    out.print(table)


def marked(prompt: Prompt) -> Text:
    """The prompt with its spans in colour, or in brackets where there is no colour."""
    text = Text(prompt.text)
    for span in prompt.spans:
        text.stylize("bold yellow", span.start, span.end)
    if not console().is_terminal:
        ends = [(span.end, "]") for span in prompt.spans]
        starts = [(span.start, "[") for span in prompt.spans]
        plain = prompt.text
        # From the end of the text; where one span ends and another starts, "][".
        for place, bracket in sorted(starts + ends, key=lambda item: (-item[0], item[1] == "]")):
            plain = plain[:place] + bracket + plain[place:]
        text = Text(plain)
    return text


def print_generation(prompt: Prompt, texts: Mapping[float, str], json: bool, shown: Prompt) -> None:
    """One text, or several by strength side by side, under the prompt as the user wrote it (`shown`)."""
    if json:
        spans = [{"start": span.start, "end": span.end, "strength": span.strength} for span in prompt.spans]
        results = [{"strength": strength, "text": text} for strength, text in texts.items()]
        print_json({"prompt": prompt.text, "spans": spans, "results": results})
    elif len(texts) == 1:
        typer.echo(next(iter(texts.values())))
    else:
        table = Table(show_lines=False, expand=False)
        for strength in texts:
            table.add_column(
                "plain" if strength == 0 else f"highlighted, strength {strength:g}", overflow="fold", ratio=1
            )
        table.add_row(*(Text(text.strip()) for text in texts.values()))
        out = console()
        out.print(marked(shown))
        out.print(table)
