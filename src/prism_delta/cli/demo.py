"""`prism demo`: the shortest way to see it work."""

from __future__ import annotations

from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from ..highlighter import Highlighter
from ..prompt import Prompt
from .output import console, marked, print_json

PROMPTS = (
    ("Anna was a nurse. **She is now a pilot.** Anna works as a", " pilot", " nurse"),
    (
        "The meeting was planned for Monday. **It was moved to Friday.** The meeting takes place on",
        " Friday",
        " Monday",
    ),
    ("Tom's bike was red. **He painted it blue.** Today the colour of Tom's bike is", " blue", " red"),
)


def run_demo(loaded: tuple[Any, Any], name: str, json: bool) -> None:
    highlighter = Highlighter.load(loaded[0], loaded[1])
    results = [_try(highlighter, *item) for item in PROMPTS]
    if json:
        print_json({"model": name, "plan": highlighter.plan.describe(), "results": results})
        return
    out = console()
    for (text, right, wrong), result in zip(PROMPTS, results, strict=True):
        out.print(marked(Prompt.parse(text)))
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2))
        for column in ("", f"p({right.strip()})", f"p({wrong.strip()})", "the model goes on"):
            table.add_column(column)
        for row in ("plain", "highlighted"):
            found = result[row]
            values = [f"{found['probabilities'][word]:.2f}" for word in (right, wrong)]
            table.add_row(row, *values, Text(found["text"].strip().split("\n")[0]))
        out.print(table)
        out.print()
    edited = highlighter.plan.describe()["channels"].get("key", {})
    heads = f"{edited.get('heads')} of {edited.get('of_heads')}"
    out.print(f"{name}: keys of {heads} heads edited, for the highlighted tokens only.")
    out.print("Try next:")
    for command in (
        'prism generate "Anna was a nurse. **She is now a pilot.** Anna works as a" --compare -n 12',
        'prism generate "..." -s keep=1 -s key_gain=4   # every head: too much, the text breaks',
        "prism ls methods",
        "prism doctor",
    ):
        typer.echo(f"  {command}")


def _try(highlighter: Highlighter, text: str, right: str, wrong: str) -> dict[str, Any]:
    result: dict[str, Any] = {"prompt": text}
    for name, strength in (("plain", 0.0), ("highlighted", 1.0)):
        probabilities = highlighter.probabilities(text, [right, wrong], strength=strength)
        continued = highlighter.generate(text, strength=strength, max_new_tokens=10)
        result[name] = {"probabilities": probabilities, "text": continued}
    return result
