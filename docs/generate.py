"""Fill the generated blocks of README.md and docs/*.md from the code and the committed results.

A block stands between `<!-- begin: NAME -->` and `<!-- end -->`. `--check` writes nothing and fails if a
block is not what it should be. `--consoles` also runs the commands of console blocks and writes what they
print (they need the model; tests/test_readme.py runs them and compares).
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
BLOCK = re.compile(r"(<!-- begin: (?P<name>[\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


CONSOLE = re.compile(r"(```console\n\$ (?P<command>[^\n]+)\n)(?P<output>.*?)(```)", re.DOTALL)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of mappings with the same keys."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([str(v).replace("|", "\\|") for v in r.values()] for r in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def methods() -> str:
    from prism_delta.cli.listing import method_rows

    return table([{**row, "method": f"`{row['method']}`"} for row in method_rows()])


def parameters() -> str:
    from prism_delta.cli.listing import parameter_rows
    from prism_delta.methods import get_method

    return table(
        [{**row, "parameter": f"`{row['parameter']}`"} for row in parameter_rows(get_method("prism").params_type)]
    )


def families() -> str:
    from prism_delta.families import NOT_STEERABLE, TESTED_FAMILIES

    rows = [{"family": f"`{name}`", "steerable": "yes", "what": text} for name, text in TESTED_FAMILIES.items()]
    rows += [{"family": name, "steerable": "no", "what": text} for name, text in NOT_STEERABLE.items()]
    return table(rows)


def models() -> str:
    from prism_delta.models import PACKAGED

    return table([{"alias": f"`{m.alias}`", "what": m.note, "licence": m.licence} for m in PACKAGED.values()])


def presets() -> str:
    from prism_delta.presets import PRESETS

    return table(
        [
            {"preset": f"`{p.name}`", "settings": ", ".join(f"{k}={v}" for k, v in p.params.items()), "from": p.source}
            for p in PRESETS.values()
        ]
    )


def errors() -> str:
    from prism_delta import errors as module

    classes = [item for _, item in inspect.getmembers(module, inspect.isclass) if issubclass(item, module.PrismError)]
    return table(
        [
            {"error": f"`{c.__name__}`", "exit code": c.exit_code, "when": " ".join((c.__doc__ or "").split())}
            for c in sorted(classes, key=lambda c: c.exit_code)
        ]
    )


def cli() -> str:
    """Every command's own help."""
    from typer.main import get_command
    from typer.testing import CliRunner

    from prism_delta.cli import app

    command: Any = get_command(app)
    parts = []
    for words in ([], *([name] for name in command.commands)):
        result = CliRunner().invoke(app, [*words, "--help"], prog_name="prism", env={"COLUMNS": "100", "TERM": "dumb"})
        title = " ".join(["prism", *words])
        parts.append(f"## {title}\n\n```text\n{result.output.strip()}\n```")
    return "\n\n".join(parts)


def bench(name: str) -> Callable[[], str]:
    """The tables a benchmark wrote beside its numbers."""

    def block() -> str:
        path = RESULTS / f"{name}.md"
        if not path.is_file():
            return "Not measured yet."
        lines = [line for line in path.read_text(encoding="utf-8").strip().splitlines() if not line.startswith("## ")]
        return "\n".join(f"**{line[4:]}**" if line.startswith("### ") else line for line in lines).strip()

    return block


def defaults() -> str:
    """Validation scores of every setting, both models side by side."""
    scores: dict[str, dict[str, str]] = {}
    paths = sorted(RESULTS.glob("defaults-*.jsonl"))
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            item = json.loads(line)
            name = path.stem.removeprefix("defaults-")
            setting = "plain" if item["method"] == "none" else item["setting"].removeprefix("method=")
            row = scores.setdefault(setting, {})
            row[f"{name}: efficacy [95 %], n={item['n']}"] = (
                f"{item['efficacy']:.3f} [{item['low']:.3f}, {item['high']:.3f}]"
            )
            row[f"{name}: p(new)"] = f"{item['probability_new']:.3f}"
    if not scores:
        return "Not measured yet."
    columns = list(dict.fromkeys(key for row in scores.values() for key in row))
    return table(
        [{"setting": f"`{setting}`", **{key: row.get(key, "") for key in columns}} for setting, row in scores.items()]
    )


def overhead_summary() -> str:
    """One line a case: the ratios to the plain model, with their bootstrap intervals."""
    path = RESULTS / "overhead.json"
    if not path.is_file():
        return "Not measured yet."
    rows = []
    for item in json.loads(path.read_text(encoding="utf-8"))["cases"]:
        case, found = item["case"], item["comparison"]
        prompt = f"{case['batch']} x {case['prompt']} tokens, {case['highlighted']} highlighted"
        row = {"": f"{case['kind']}: {prompt}" + (f", {case['new_tokens']} new" if case["new_tokens"] else "")}
        for variant in found["rows"]:
            if variant["name"] != found["baseline"]:
                ratio = variant["ratio"]
                row[variant["name"]] = f"{ratio['median']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
        rows.append({**row, "rounds": str(found["n"])})
    return table(rows)


BLOCKS: dict[str, Callable[[], str]] = {
    "methods": methods,
    "parameters": parameters,
    "families": families,
    "models": models,
    "presets": presets,
    "errors": errors,
    "cli": cli,
    "defaults": defaults,
    "overhead-summary": overhead_summary,
}


def fill(text: str) -> str:
    def block(match: re.Match[str]) -> str:
        name = match["name"]
        make = bench(name.removeprefix("bench.")) if name.startswith("bench.") else BLOCKS[name]
        return f"{match[1]}{make()}\n{match[3]}"

    return BLOCK.sub(block, text)


def run_console(command: str) -> str:
    """What a `prism ...` command prints."""
    words = shlex.split(command, comments=True)
    if words[0] != "prism":
        raise SystemExit(f"not a prism command: {command}")
    done = subprocess.run(
        [sys.executable, "-m", "prism_delta", *words[1:]], capture_output=True, text=True, check=True, timeout=600
    )
    return "\n".join(line.rstrip() for line in done.stdout.strip("\n").split("\n"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--consoles", action="store_true")
    args = parser.parse_args()
    check = args.check
    stale = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        old = path.read_text(encoding="utf-8")
        new = fill(old)
        if args.consoles:
            new = CONSOLE.sub(lambda match: f"{match[1]}{run_console(match['command'])}\n{match[4]}", new)
        if old != new:
            stale.append(path.name)
            if not check:
                path.write_text(new, encoding="utf-8")
    if stale:
        verb = "are not up to date (run docs/generate.py)" if check else "were filled"
        sys.stdout.write(f"{', '.join(stale)} {verb}\n")
    return 1 if stale and check else 0


if __name__ == "__main__":
    sys.exit(main())
