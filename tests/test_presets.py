"""The presets: the paper's tables, and what was measured on small models."""

from __future__ import annotations

from typing import Any

import pytest

from prism_delta.errors import UnknownMethodError
from prism_delta.methods import get_method
from prism_delta.presets import PRESETS, get_preset, recommended

REFERENCE = {"energy": "sigma", "score": "frobenius", "gate": "threshold", "keep": None, "weighting": "softplus"}
CHOICES = tuple(REFERENCE)

MODELS = ("qwen3-4b", "qwen3-8b", "qwen3-14b", "gemma3-4b", "gemma3-12b")
# The paper's hyper-parameters: gamma, delta_min, g_K and, for prism-v, g_V; one row a model.
PUBLISHED = {
    "prism/biasbios": """
        .998 .08 .40
        .998 .08 .40
        .998 .08 .40
        .850 .08 .50
        .980 .00 .40""",
    "prism/counterfact": """
        .998 .13 1.90
        .960 .12 2.70
        .870 .08 3.00
        .990 .12 6.00
        .990 .50 1.10""",
    "prism/pronoun": """
        .880 .15 .15
        .900 .15 .05
        .880 .15 .05
        .800 .15 .30
        .700 .30 -.30""",
    "prism-v/biasbios": """
        .998 .08 .40 .10
        .998 .08 .40 .10
        .998 .08 .40 .10
        .800 .12 .30 .10
        .994 .00 .40 .10""",
    "prism-v/counterfact": """
        .998 .13 1.90 .02
        .960 .12 2.70 .05
        .870 .08 3.00 .05
        .990 .12 6.00 .10
        .990 .40 3.00 .50""",
    "prism-v/pronoun": """
        .880 .15 .15 .05
        .900 .15 .05 .02
        .880 .15 .05 .02
        .800 .15 .30 .10
        .700 .30 .05 .02""",
}
PUBLISHED_ROWS = [
    (method, model, benchmark, [float(number) for number in row.split()])
    for (method, benchmark), table in ((tuple(name.split("/")), table) for name, table in PUBLISHED.items())
    for model, row in zip(MODELS, table.strip().splitlines(), strict=True)
]


@pytest.mark.parametrize(("method", "model", "benchmark", "row"), PUBLISHED_ROWS)
def test_every_published_setting_is_a_preset(method: str, model: str, benchmark: str, row: list[float]) -> None:
    preset = get_preset(f"{method}/{model}/{benchmark}")
    assert (preset.name, preset.method) == (f"{method}/{model}/{benchmark}", method)
    params = get_method(method).params(**preset.params)
    gamma, delta_min, key_gain, value_gain = row if len(row) == 4 else [*row, 0.0]
    assert (params.gamma, params.delta_min) == (gamma, delta_min)
    assert (params.key_gain, params.value_gain) == (key_gain, value_gain)
    assert {name: getattr(params, name) for name in CHOICES} == REFERENCE
    assert (params.projection, params.layers) == ("differential", "all")


def test_there_are_no_other_published_presets() -> None:
    published = {name for name, preset in PRESETS.items() if preset.source.startswith("the paper")}
    assert published == {f"{method}/{model}/{benchmark}" for method, model, benchmark, _ in PUBLISHED_ROWS}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_and_found_by_its_name(name: str) -> None:
    preset = get_preset(name)
    assert preset.name == name
    assert get_method(preset.method).params(**preset.params)
    assert preset.source


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("prism/qwen3-4b/biasbois", r"no preset '.*', did you mean 'prism/qwen3-4b/biasbios'\?; `prism ls presets`"),
        ("prism/smollm2-135", r"did you mean 'prism/smollm2-135m'\?"),
        ("####", f"no preset '####'; `prism ls presets` shows all {len(PRESETS)}"),
    ],
)
def test_an_unknown_preset_names_the_nearest(name: str, reason: str) -> None:
    with pytest.raises(UnknownMethodError, match=reason):
        get_preset(name)


@pytest.mark.parametrize(
    ("model", "method", "expected"),
    [
        ("smollm2-135m", "prism", {"keep": 0.1, "key_gain": 4.0}),
        ("gemma3-270m", "prism", {"keep": 0.33, "key_gain": 1.0}),
        ("gemma3-270m", "none", {}),
        ("unheard-of", "prism", {}),
    ],
)
def test_recommended_settings(model: str, method: str, expected: dict[str, Any]) -> None:
    found = recommended(model, method)
    assert found == expected
    found["key_gain"] = 99.0
    assert recommended(model, method) == expected
