from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from moments_for_tests import Rows, moments_of, random_rows
from prism_delta import __version__
from prism_delta.errors import MomentsError, ParameterError, UnknownMethodError
from prism_delta.methods import get_method, list_methods
from prism_delta.methods.base import parse_settings
from prism_delta.methods.prism import select_layers
from prism_delta.moments import HeadMoments, Moments
from prism_delta.plan import Plan

KEY, VALUE = "key", "value"
PRISM_FAMILY = ["prism", "prism-v", "prism-value", "prism-independent", "scale"]

# What each convention stands for.
PAPER = {"energy": "sigma2", "score": "mean_norm", "gate": "none", "keep": None, "weighting": "softplus"}
REFERENCE = {"energy": "sigma", "score": "frobenius", "gate": "threshold", "keep": None, "weighting": "softplus"}
LIBRARY = {"energy": "sigma", "score": "frobenius", "gate": "none", "keep": 0.1, "weighting": "uniform"}


def by_formula(rows: Rows, channel: str, gain: float, **settings: Any) -> dict[int, torch.Tensor]:
    """M [head, dim, dim] per layer, written down again from the formulas, head by head."""
    s = {"projection": "differential", "gamma": 0.998, "delta_min": 0.08, **LIBRARY, **settings}
    layers = [layer for layer, kind in rows if kind == channel]
    scores: dict[tuple[int, int], float] = {}
    for layer in layers:
        _, positive, negative = rows[layer, channel]  # type: ignore[index]
        for head, norms in enumerate((positive - negative).norm(dim=-1).T):
            squares = math.sqrt(float(norms.square().sum())) / len(norms)
            scores[layer, head] = float(norms.mean()) if s["score"] == "mean_norm" else squares
    if s["keep"] is not None:
        ranked = sorted(scores, key=lambda place: -scores[place])[: max(1, round(s["keep"] * len(scores)))]
        chosen = {place for place in ranked if scores[place] > 0}
    elif s["gate"] == "threshold":
        chosen = {place for place, score in scores.items() if score >= s["delta_min"]}
    else:
        chosen = set(scores)
    result = {}
    for layer in layers:
        heads, dim = rows[layer, channel][0].shape[1:]  # type: ignore[index]
        result[layer] = torch.zeros(heads, dim, dim, dtype=torch.float64)
        for head in range(heads):
            h, plus, minus = (part[:, head] for part in rows[layer, channel])  # type: ignore[index]
            u, sigma, _ = torch.linalg.svd(h.T @ (plus if s["projection"] == "independent" else plus - minus))
            amounts = sigma if s["energy"] == "sigma" else sigma**2
            rank = 1 + int((amounts.cumsum(0) / amounts.sum() < s["gamma"]).sum())
            kept = torch.eye(dim).double() if s["projection"] == "identity" else u[:, :rank]
            weight = math.log1p(math.exp(scores[layer, head] - s["delta_min"])) if s["weighting"] == "softplus" else 1
            if (layer, head) in chosen:
                result[layer][head] = gain * weight * kept @ kept.T
    return result


def assert_plan(plan: Plan, expected: dict[int, torch.Tensor], channel: Any) -> None:
    for layer, matrix in expected.items():
        found = plan.matrix(layer, channel)
        if not matrix.any():
            assert found is None
        else:
            assert found is not None
            torch.testing.assert_close(found.double(), matrix, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {**LIBRARY},
        {**LIBRARY, "keep": 0.34},
        {**LIBRARY, "keep": 1.0, "gamma": 0.7},
        {**LIBRARY, "keep": None},
        {**PAPER},
        {**PAPER, "gamma": 0.5, "delta_min": 0.5},
        {**PAPER, "keep": 0.25},
        {**PAPER, "projection": "independent"},
        {**PAPER, "projection": "identity"},
        {**REFERENCE},
        {**REFERENCE, "delta_min": 0.25, "gamma": 0.9},
        {**REFERENCE, "delta_min": 0.0},
        {**REFERENCE, "weighting": "uniform"},
        {**REFERENCE, "energy": "sigma2"},
        {**REFERENCE, "score": "mean_norm", "delta_min": 1.0},
        {**REFERENCE, "projection": "independent", "gamma": 0.8},
        {**REFERENCE, "projection": "identity", "delta_min": 0.3},
    ],
    ids=str,
)
def test_prism_is_its_formula(settings: dict[str, Any]) -> None:
    rows = random_rows(count=30, heads=3, dim=7)
    plan = get_method("prism").plan(moments_of(rows), key_gain=1.5, value_gain=-0.4, **settings)
    assert_plan(plan, by_formula(rows, KEY, 1.5, **settings), KEY)
    assert_plan(plan, by_formula(rows, VALUE, -0.4, **settings), VALUE)
    assert len(plan.edits) >= 2


@pytest.mark.parametrize(
    ("name", "key_gain", "value_gain", "settings"),
    [
        ("prism", 0.5, 0.0, LIBRARY),
        ("prism-v", 0.5, 0.1, LIBRARY),
        ("prism-value", 0.0, 0.1, LIBRARY),
        ("prism-independent", 0.5, 0.0, {**LIBRARY, "projection": "independent"}),
        ("scale", 0.5, 0.0, {**LIBRARY, "projection": "identity", "keep": None}),
    ],
)
def test_the_defaults_of_every_method(name: str, key_gain: float, value_gain: float, settings: Any) -> None:
    rows = random_rows(heads=3)
    plan = get_method(name).plan(moments_of(rows))
    assert_plan(plan, by_formula(rows, KEY, key_gain, **settings), KEY)
    assert_plan(plan, by_formula(rows, VALUE, value_gain, **settings), VALUE)
    assert (key_gain != 0) == any(channel == KEY for _, channel in plan.edits)
    assert (value_gain != 0) == any(channel == VALUE for _, channel in plan.edits)


CHOICES = ("energy", "score", "gate", "keep", "weighting")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, LIBRARY),
        ({"convention": "library"}, LIBRARY),
        ({"convention": "paper"}, PAPER),
        ({"convention": "reference"}, REFERENCE),
        ({"convention": "paper", "energy": "sigma"}, {**PAPER, "energy": "sigma"}),
        ({"convention": "reference", "score": "mean_norm"}, {**REFERENCE, "score": "mean_norm"}),
        ({"convention": "reference", "weighting": "uniform"}, {**REFERENCE, "weighting": "uniform"}),
        ({"weighting": "softplus"}, {**LIBRARY, "weighting": "softplus"}),
        # One way to choose heads takes the place of the other.
        ({"gate": "threshold"}, {**LIBRARY, "gate": "threshold", "keep": None}),
        ({"gate": "none"}, {**LIBRARY, "keep": None}),
        ({"keep": 0.2}, {**LIBRARY, "keep": 0.2}),
        ({"gate": "none", "keep": 0.2}, {**LIBRARY, "keep": 0.2}),
        ({"convention": "paper", "keep": 0.2}, {**PAPER, "keep": 0.2}),
        ({"convention": "paper", "gate": "threshold"}, {**PAPER, "gate": "threshold"}),
        ({"convention": "reference", "keep": 0.2}, {**REFERENCE, "gate": "none", "keep": 0.2}),
        ({"convention": "reference", "gate": "none"}, {**REFERENCE, "gate": "none"}),
    ],
)
def test_a_convention_sets_what_is_not_given(given: dict[str, Any], expected: dict[str, Any]) -> None:
    params = get_method("prism").params(**given)
    assert {name: getattr(params, name) for name in CHOICES} == expected


@pytest.mark.parametrize("convention", ["library", "paper", "reference"])
@pytest.mark.parametrize("name", PRISM_FAMILY)
def test_parameters_written_out_mean_the_same(name: str, convention: str) -> None:
    params = get_method(name).params(convention=convention)
    assert get_method(name).params(**dataclasses.asdict(params)) == params


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("gamma", "0.95", 0.95),
        ("gamma", "1", 1.0),
        ("gamma", 1, 1.0),
        ("delta_min", "1e-2", 0.01),
        ("key_gain", "-0.3", -0.3),
        ("keep", "0.25", 0.25),
        ("keep", "none", None),
        ("energy", "sigma", "sigma"),
        ("energy", "none", "sigma2"),
        ("gate", "none", "none"),
        ("gate", "threshold", "threshold"),
        ("weighting", "uniform", "uniform"),
        ("projection", "independent", "independent"),
        ("layers", "3,5", "3,5"),
    ],
)
def test_parameters_may_come_as_text(name: str, text: Any, value: Any) -> None:
    found = getattr(get_method("prism").params(convention="paper", **{name: text}), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"gamma": "much"}, "gamma must be a finite number, found 'much'"),
        ({"gamma": None}, "gamma must be a finite number, found None"),
        ({"gamma": "nan"}, "gamma must be a finite number, found 'nan'"),
        ({"key_gain": math.inf}, "key_gain must be a finite number, found inf"),
        ({"key_gain": True}, "key_gain must be a finite number, found True"),
        ({"key_gain": 10**400}, "key_gain must be a finite number"),
        ({"gamma": 0}, r"gamma must lie in \(0, 1\], found 0.0"),
        ({"gamma": 1.01}, r"gamma must lie in \(0, 1\], found 1.01"),
        ({"keep": 0}, r"keep must lie in \(0, 1\], found 0.0"),
        ({"keep": "1.5"}, r"keep must lie in \(0, 1\], found 1.5"),
        ({"keep": "half"}, "keep must be a finite number, found 'half'"),
        ({"energy": "Sigma"}, "energy must be one of sigma, sigma2, found 'Sigma'"),
        ({"gate": "hard"}, "gate must be one of none, threshold, found 'hard'"),
        ({"convention": "official"}, "convention must be one of library, paper, reference, found 'official'"),
        ({"convention": None}, "convention must be one of"),
        ({"layers": 3}, "layers must be text, found 3"),
        ({"gate": "threshold", "keep": 0.5}, "gate=threshold and keep are two ways to choose heads; give one"),
        ({"gama": 0.9}, r"prism has no parameter 'gama', did you mean 'gamma'\?; it has convention, projection"),
        ({"keygain": 1}, r"no parameter 'keygain', did you mean 'key_gain'\?"),
        ({"zzz": 1}, "prism has no parameter 'zzz'; it has convention"),
    ],
)
def test_parameters_are_checked(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ParameterError, match=reason):
        get_method("prism").params(**given)


def test_scale_takes_no_projection() -> None:
    with pytest.raises(ParameterError, match="projection must be one of identity, found 'differential'"):
        get_method("scale").params(projection="differential")


def test_a_method_without_parameters_says_so() -> None:
    with pytest.raises(ParameterError, match="none has no parameter 'gamma'; it has none"):
        get_method("none").params(gamma=1)


def test_every_parameter_is_explained() -> None:
    for method in list_methods():
        for field in dataclasses.fields(method.params_type):
            assert field.metadata["help"], (method.name, field.name)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {}),
        (["gamma=0.9", "key-gain=2"], {"gamma": "0.9", "key_gain": "2"}),
        ([" layers = 1,2 ", "x=a=b"], {"layers": "1,2", "x": "a=b"}),
        (["keep="], {"keep": ""}),
    ],
)
def test_settings_of_a_command_line(words: list[str], expected: dict[str, str]) -> None:
    assert parse_settings(words) == expected


@pytest.mark.parametrize("word", ["gamma", "=3", ""])
def test_a_setting_is_a_name_and_a_value(word: str) -> None:
    with pytest.raises(ParameterError, match=f"expected key=value, found '{word}'"):
        parse_settings([word])


def test_methods_are_found_by_their_names() -> None:
    methods = list_methods()
    names = [method.name for method in methods]
    assert len(set(names)) == len(names)
    assert names[:4] == ["prism", "prism-v", "prism-value", "prism-independent"]
    assert {"scale", "none"} < set(names)
    assert [get_method(name) for name in names] == methods
    assert all(method.title for method in methods)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("prsim", r"no method 'prsim', did you mean 'prism'\?; known: prism, prism-v"),
        ("prismv", r"did you mean 'prism-v'\?"),
        ("skale", r"did you mean 'scale'\?"),
        ("xyzzy", "no method 'xyzzy'; known: prism, prism-v"),
        ("", "no method ''; known: prism, prism-v"),
    ],
)
def test_an_unknown_method_names_the_nearest(name: str, reason: str) -> None:
    with pytest.raises(UnknownMethodError, match=reason):
        get_method(name)


def test_a_plan_says_how_it_was_made() -> None:
    header = {"model": {"name": "tiny"}, "tokenizer": "t", "pairs": "p", "options": {}, "dtype": "float32"}
    method = get_method("prism")
    plan = method.plan(moments_of(random_rows(count=40), header), gamma="0.9")
    assert plan.header == {
        "method": "prism",
        "params": dataclasses.asdict(method.params(gamma=0.9)),
        "model": {"name": "tiny"},
        "tokenizer": "t",
        "pairs": "p",
        "options": {},
        "rows": 40,
        "version": __version__,
    }
    assert plan.shape == dict.fromkeys(random_rows(), (2, 6))


def test_stats_tell_rank_weight_and_score_without_the_gain() -> None:
    rows = random_rows(count=30, heads=3, dim=7)
    plans = [
        get_method("prism").plan(moments_of(rows), key_gain=gain, convention="reference", delta_min=0.12, gamma=0.9)
        for gain in (1.0, 5.0)
    ]
    for layer in (0, 1, 2):
        _, positive, negative = rows[layer, KEY]
        score = torch.linalg.matrix_norm((positive - negative).transpose(0, 1)) / 30
        on = score >= 0.12
        for gain, plan in zip((1.0, 5.0), plans, strict=True):
            stats = plan.stats[layer, KEY]
            torch.testing.assert_close(stats.score, score)
            torch.testing.assert_close(stats.weight, on * torch.log1p(torch.exp(score - 0.12)))
            trace = plan.matrix(layer, KEY).diagonal(dim1=1, dim2=2).sum(-1).double()
            torch.testing.assert_close(trace, gain * stats.weight * stats.rank, rtol=1e-5, atol=1e-5)
            assert torch.equal(stats.rank > 0, on)
    assert not plans[0].stats[0, KEY].weight.all()


def selected_heads(plan: Plan, channel: Any = KEY) -> set[tuple[int, int]]:
    return {
        (layer, head)
        for layer, kind in plan.edits
        if kind == channel
        for head, matrix in enumerate(plan.matrix(layer, kind))
        if matrix.any()
    }


def moments_with_scores(scores: dict[int, list[float]]) -> Moments:
    """Keys whose D, under either formula, is the given number: the sums are set by hand."""
    heads = {}
    for layer, values in scores.items():
        item = HeadMoments.zeros(len(values), 4)
        item.neutral.add_(torch.eye(4))
        item.positive.add_(torch.eye(4))
        item.contrast_norm.add_(torch.tensor(values))
        item.contrast_square.add_(torch.tensor(values).square())
        heads[layer, KEY] = item
    return Moments(1, heads)  # type: ignore[arg-type]


SCORES = {0: [0.0, 0.0], 4: [0.5, 0.125], 9: [0.25, 0.5]}


@pytest.mark.parametrize("method", ["prism", "scale"])
@pytest.mark.parametrize(
    ("settings", "heads"),
    [
        ({"keep": 1 / 6}, {(4, 0)}),
        ({"keep": 1 / 3}, {(4, 0), (9, 1)}),
        ({"keep": 0.5}, {(4, 0), (9, 0), (9, 1)}),
        ({"keep": 0.01}, {(4, 0)}),
        # Heads with D = 0 are no choice at any share.
        ({"keep": 1.0}, {(4, 0), (4, 1), (9, 0), (9, 1)}),
        # The share is one of the chosen layers.
        ({"keep": 0.5, "layers": "4"}, {(4, 0)}),
        ({"keep": 0.5, "layers": "0,9"}, {(9, 0), (9, 1)}),
        ({"gate": "threshold", "delta_min": 0.25}, {(4, 0), (9, 0), (9, 1)}),
        ({"gate": "threshold", "delta_min": 0.26}, {(4, 0), (9, 1)}),
        ({"gate": "threshold", "delta_min": 0.2, "layers": "first2"}, {(4, 0)}),
    ],
)
def test_which_heads_are_edited(method: str, settings: dict[str, Any], heads: set[tuple[int, int]]) -> None:
    plan = get_method(method).plan(moments_with_scores(SCORES), **settings)
    assert selected_heads(plan) == heads


def test_a_share_is_taken_of_each_channel() -> None:
    rows = random_rows(heads=2, layers=[0, 1])
    plan = get_method("prism-v").plan(moments_of(rows), keep=0.5)
    assert [len(selected_heads(plan, channel)) for channel in (KEY, VALUE)] == [2, 2]


@pytest.mark.parametrize("name", PRISM_FAMILY)
def test_gains_scale_the_edit_and_zero_removes_it(name: str) -> None:
    moments = moments_of(random_rows())
    one, minus = (get_method(name).plan(moments, key_gain=gain, value_gain=gain) for gain in (1, -2))
    assert one.edits.keys() == minus.edits.keys()
    for place in one.edits:
        torch.testing.assert_close(minus.matrix(*place), -2 * one.matrix(*place), rtol=0, atol=1e-5)
    nothing = get_method(name).plan(moments, key_gain=0, value_gain=0)
    assert nothing.edits == {}
    assert nothing.shape == one.shape


def test_identity_edits_all_of_a_head_and_differential_a_part() -> None:
    moments = moments_of(random_rows(heads=3))
    settings = {"convention": "reference", "gamma": 0.5, "delta_min": 0.1, "key_gain": 1}
    part = get_method("prism").plan(moments, **settings)
    whole = get_method("prism").plan(moments, projection="identity", **settings)
    control = get_method("scale").plan(moments, gate="threshold", weighting="softplus", **settings)
    assert selected_heads(part) == selected_heads(whole) == selected_heads(control)
    assert whole.fingerprint == control.fingerprint
    assert {edit.form for edit in whole.edits.values()} == {"scalar"}
    for place in part.edits:
        weight = whole.stats[place].weight
        torch.testing.assert_close(part.stats[place].weight, weight)
        assert torch.equal(whole.matrix(*place), (weight[:, None, None] * torch.eye(6)).float())
        assert (part.stats[place].rank < 6).all()


def test_scale_multiplies_every_head_unless_told() -> None:
    plan = get_method("scale").plan(moments_with_scores(SCORES), key_gain=0.25)
    assert list(plan.edits) == [(0, KEY), (4, KEY), (9, KEY)]
    for layer in SCORES:
        assert torch.equal(plan.matrix(layer, KEY), 0.25 * torch.eye(4).expand(2, 4, 4))


def test_none_edits_nothing() -> None:
    moments = moments_of(random_rows())
    plan = get_method("none").plan(moments)
    assert plan.edits == {}
    assert plan.header["method"] == "none"


def test_independent_ignores_the_irrelevant_condition() -> None:
    rows = random_rows()
    other = {place: (h, plus, minus + 10 * h) for place, (h, plus, minus) in rows.items()}
    plans = [
        get_method(name).plan(moments_of(some), gate="none", weighting="uniform", gamma=0.6)
        for name in ("prism-independent", "prism")
        for some in (rows, other)
    ]
    assert plans[0].fingerprint == plans[1].fingerprint
    assert plans[2].fingerprint != plans[3].fingerprint


def without_contrast(layer: int = 0) -> Moments:
    """Rows whose relevant and irrelevant condition agree in one layer, as the keys of a first layer do."""
    rows = random_rows()
    for channel in (KEY, VALUE):
        neutral, positive, _ = rows[layer, channel]  # type: ignore[index]
        rows[layer, channel] = neutral, positive, positive  # type: ignore[index]
    return moments_of(rows)


@pytest.mark.parametrize(
    "settings",
    [{}, {"keep": 1.0}, {"gate": "none"}, {"convention": "paper"}, {"convention": "reference", "delta_min": 0.0}],
    ids=str,
)
def test_a_layer_without_contrast_is_not_edited(settings: dict[str, Any]) -> None:
    plan = get_method("prism-v").plan(without_contrast(), **settings)
    assert all(layer != 0 for layer, _ in plan.edits)
    assert plan.edits
    assert plan.stats[0, KEY].rank.tolist() == [0, 0]
    assert plan.stats[0, KEY].score.tolist() == [0, 0]


def test_a_head_without_contrast_is_not_counted_as_edited() -> None:
    rows = random_rows(layers=[1], channels=["key"], heads=3)
    rows[1, "key"][2][:, 1] = rows[1, "key"][1][:, 1]
    plan = get_method("prism").plan(moments_of(rows), convention="reference", delta_min=0.0)
    assert selected_heads(plan) == {(1, 0), (1, 2)}
    assert plan.describe()["channels"]["key"]["heads"] == 2


@pytest.mark.parametrize("name", PRISM_FAMILY)
def test_moments_of_zeros_have_no_direction(name: str) -> None:
    moments = Moments(5, {(0, "key"): HeadMoments.zeros(2, 4), (0, "value"): HeadMoments.zeros(2, 4)})
    if name == "scale":  # the control needs none
        assert torch.equal(get_method(name).plan(moments, key_gain=1).matrix(0, KEY), torch.eye(4).expand(2, 4, 4))
    else:
        with pytest.raises(ParameterError, match="head is left to edit"):
            get_method(name).plan(moments, gate="none")


@pytest.mark.parametrize("name", ["prism", "scale"])
def test_a_threshold_above_every_head_is_told(name: str) -> None:
    with pytest.raises(ParameterError, match=r"delta_min 0.9 switches every key head off.*0\.5"):
        get_method(name).plan(moments_with_scores(SCORES), gate="threshold", delta_min=0.9)


@pytest.mark.parametrize("energy", ["sigma", "sigma2"])
def test_gamma_one_keeps_all_that_the_data_span(energy: str) -> None:
    plan = get_method("prism").plan(moments_of(random_rows()), gamma=1, gate="none", energy=energy, key_gain=1)
    for layer in (0, 1, 2):
        assert plan.stats[layer, KEY].rank.tolist() == [6, 6]
        assert torch.equal(plan.matrix(layer, KEY), torch.eye(6).expand(2, 6, 6))


@pytest.mark.parametrize("name", ["prism", "prism-independent"])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_fewer_rows_than_dimensions_give_no_more_directions_than_rows(count: int, name: str) -> None:
    rows = random_rows(count=count, dim=6)
    plan = get_method(name).plan(moments_of(rows), gamma=1, gate="none", key_gain=1)
    for layer in (0, 1, 2):
        assert plan.stats[layer, KEY].rank.tolist() == [count, count]
        span = rows[layer, KEY][0].transpose(0, 1)  # [head, row, dim]
        edited = span @ plan.matrix(layer, KEY).double()
        torch.testing.assert_close(edited, span, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    ("name", "settings", "field"),
    [
        ("prism", {}, "positive"),
        ("prism", {}, "negative"),
        ("prism", {}, "contrast_square"),
        ("prism", {"convention": "paper"}, "contrast_norm"),
        ("prism-v", {"convention": "reference"}, "contrast_square"),
        ("prism-independent", {}, "positive"),
        ("scale", {"keep": 0.5}, "contrast_square"),
        ("scale", {"gate": "threshold"}, "contrast_square"),
        ("scale", {"weighting": "softplus"}, "contrast_square"),
    ],
)
def test_numbers_that_are_not_finite_are_refused(name: str, settings: Any, field: str, bad: float) -> None:
    moments = moments_of(random_rows())
    getattr(moments[1, "key"], field).view(-1)[1] = bad
    with pytest.raises(MomentsError, match="NaN or infinite"):
        get_method(name).plan(moments, **settings)


@pytest.mark.parametrize(
    ("spec", "layers"),
    [
        ("all", [0, 2, 3, 7, 9]),
        (" all ", [0, 2, 3, 7, 9]),
        ("last2", [7, 9]),
        ("last5", [0, 2, 3, 7, 9]),
        ("last99", [0, 2, 3, 7, 9]),
        ("first3", [0, 2, 3]),
        ("first1", [0]),
        ("3", [3]),
        ("9,0", [0, 9]),
        (" 3 , 7 ", [3, 7]),
        ("2-3", [2, 3]),
        ("2-3,9", [2, 3, 9]),
        ("3,2-3,3", [2, 3]),
    ],
)
def test_select_layers(spec: str, layers: list[int]) -> None:
    assert select_layers(spec, [0, 2, 3, 7, 9]) == layers


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("", "layers must be all, lastN, firstN or ids such as 3,5,8-11, found ''"),
        ("most", "found 'most'"),
        ("last", "found 'last'"),
        ("last0", "found 'last0'"),
        ("last-1", "found 'last-1'"),
        ("first1.5", "found 'first1.5'"),
        ("last²", "found 'last²'"),
        ("3,,7", "found '3,,7'"),
        ("-3", "found '-3'"),
        ("1-2-3", "found '1-2-3'"),
        ("1", r"no such layers: \[1\]; the moments have \[0, 2, 3, 7, 9\]"),
        ("0-3", r"no such layers: \[1\]"),
        ("9,10,11", r"no such layers: \[10, 11\]"),
        ("7-3", "layers"),
        ("0,7-3", "layers"),
    ],
)
def test_select_layers_refuses(spec: str, reason: str) -> None:
    with pytest.raises(ParameterError, match=reason):
        select_layers(spec, [0, 2, 3, 7, 9])


def test_layers_are_matched_by_id() -> None:
    rows = random_rows(layers=[3, 8, 12])
    moments = moments_of(rows)
    every = get_method("prism-v").plan(moments, gate="none")
    some = get_method("prism-v").plan(moments, gate="none", layers="last2")
    assert list(some.edits) == [(8, KEY), (8, VALUE), (12, KEY), (12, VALUE)]
    assert all(torch.equal(some.matrix(*place), every.matrix(*place)) for place in some.edits)
    assert some.shape == every.shape
