"""The README and the guides are true: their Python runs, and their commands print what they say."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
NUMBER = re.compile(r"\b\d\.\d\d\b")
pytestmark = [pytest.mark.weights, pytest.mark.xdist_group("weights")]


def _generator() -> Any:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATE = _generator()
CONSOLES = [
    (match["command"], match["output"].rstrip("\n"))
    for match in GENERATE.CONSOLE.finditer((ROOT / "README.md").read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("page", ["README.md", "docs/python.md", "docs/index.md", "docs/adding-a-family.md"])
def test_python_of_a_page_runs_from_top_to_bottom(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from prism_delta.sites import ADAPTERS

    monkeypatch.chdir(tmp_path)
    known = dict(ADAPTERS)
    blocks = PYTHON.findall((ROOT / page).read_text(encoding="utf-8"))
    assert blocks
    namespace: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)
    ADAPTERS.clear()
    ADAPTERS.update(known)


@pytest.mark.parametrize(("command", "printed"), CONSOLES, ids=[command for command, _ in CONSOLES])
def test_a_command_prints_what_the_readme_shows(command: str, printed: str) -> None:
    """Letter by letter; probabilities may differ in the last digit between processors."""
    found = GENERATE.run_console(command)
    assert NUMBER.sub("#", found) == NUMBER.sub("#", printed)
    for left, right in zip(NUMBER.findall(found), NUMBER.findall(printed), strict=True):
        assert float(left) == pytest.approx(float(right), abs=0.02)


def test_the_readme_shows_commands() -> None:
    assert len(CONSOLES) >= 3
