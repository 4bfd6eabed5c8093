from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from moments_for_tests import moments_of, random_rows
from prism_delta.artifact import read_artifact, write_artifact
from prism_delta.edit import Edit
from prism_delta.errors import ArtifactError, PlanMismatchError, TruncatedArtifactError
from prism_delta.methods import get_method
from prism_delta.moments import Moments
from prism_delta.plan import HeadStats, Plan
from prism_delta.sites import Layout, Site, Sites

MODEL = {"name": "tiny", "revision": "", "weights": "abc"}
MOMENTS = moments_of(random_rows(heads=2, dim=6), {"model": MODEL, "pairs": "p1"})


def sites_of(shapes: dict[Any, tuple[int, int]], skipped: dict[Any, str] | None = None) -> Sites:
    module = nn.Identity()
    found = {
        (layer, channel): Site(layer, channel, f"layers.{layer}", module, Layout("token_major", *shape))
        for (layer, channel), shape in shapes.items()
    }
    return Sites(found, skipped or {}, module, "decoder", module)


def normal(heads: int, dim: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(heads, dim, dim, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    """Two layers of 2 KV heads x 8."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))


def assert_same(left: Plan, right: Plan) -> None:
    assert left.header == right.header
    assert left.shape == right.shape
    assert list(left.edits) == list(right.edits)
    assert left.fingerprint == right.fingerprint
    for place, edit in left.edits.items():
        other = right.edits[place]
        assert (edit.form, edit.shape) == (other.form, other.shape)
        for name, tensor in edit.tensors().items():
            assert torch.equal(tensor, other.tensors()[name])
    assert left.stats.keys() == right.stats.keys()
    for place, stats in left.stats.items():
        for field in dataclasses.fields(HeadStats):
            mine, theirs = getattr(stats, field.name), getattr(right.stats[place], field.name)
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)


PLANS: dict[str, Any] = {
    "prism": lambda: get_method("prism").plan(MOMENTS, gate="none"),
    "keys and values, low rank": lambda: get_method("prism-v").plan(MOMENTS, gamma=0.3, gate="none"),
    "nearly full rank": lambda: get_method("prism").plan(MOMENTS, gamma=0.95, gate="none"),
    "some heads": lambda: get_method("prism-v").plan(MOMENTS, convention="reference", gamma=0.5),
    "some layers": lambda: get_method("prism").plan(MOMENTS, layers="1", gate="none"),
    "scale": lambda: get_method("scale").plan(MOMENTS, key_gain=-0.5),
    "none": lambda: get_method("none").plan(MOMENTS),
    "gain 0": lambda: get_method("prism").plan(MOMENTS, key_gain=0),
    "by hand": lambda: Plan.from_matrices({(11, "value"): normal(2, 3), (2, "key"): torch.eye(4)[None]}),
}


@pytest.mark.parametrize("name", PLANS)
def test_saved_and_loaded_is_the_same(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]()
    path = plan.save(tmp_path / "x.plan.safetensors")
    loaded = Plan.load(path)
    assert_same(loaded, plan)
    assert loaded.describe() == plan.describe()
    assert loaded.save(tmp_path / "y").read_bytes() == path.read_bytes()


places = st.tuples(st.integers(0, 40), st.sampled_from(["key", "value"]))


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(places, st.tuples(st.integers(1, 3), st.integers(1, 5), st.sampled_from([0.0, 1.0, -3.5]))))
def test_any_matrices_survive_a_file(tmp_path_factory: pytest.TempPathFactory, sizes: dict[Any, Any]) -> None:
    matrices = {place: factor * normal(heads, dim) for place, (heads, dim, factor) in sizes.items()}
    plan = Plan.from_matrices(matrices)
    loaded = Plan.load(plan.save(tmp_path_factory.mktemp("plans") / "x"))
    assert_same(loaded, plan)
    for place, matrix in matrices.items():
        found = loaded.matrix(*place)
        assert found is None if not matrix.any() else torch.equal(found, matrix)


def test_edits_of_nothing_are_dropped_and_the_rest_is_in_order() -> None:
    plan = Plan.from_matrices(
        {
            (10, "key"): normal(1, 2),
            (2, "value"): normal(1, 2),
            (3, "key"): torch.zeros(1, 2, 2),
            (2, "key"): normal(1, 2),
        }
    )
    assert list(plan.edits) == [(2, "key"), (2, "value"), (10, "key")]
    assert plan.matrix(3, "key") is None
    assert plan.matrix(99, "key") is None
    assert (3, "key") in plan.shape


def test_a_hand_made_plan_knows_the_whole_model(llama: LlamaForCausalLM) -> None:
    matrix = normal(2, 8)
    plan = Plan.from_matrices({(1, "key"): matrix}, model=llama)
    assert torch.equal(plan.matrix(1, "key"), matrix)
    assert plan.shape == {(layer, channel): (2, 8) for layer in (0, 1) for channel in ("key", "value")}
    assert plan.header == {"method": "matrices", "params": {}}
    assert plan.check(llama).layers == [0, 1]


@pytest.mark.parametrize(
    ("matrices", "reason"),
    [
        ({(0, "query"): normal(2, 8)}, "channel must be 'key' or 'value', found 'query'"),
        ({(0, "key"): normal(3, 8)}, "layer 0, key: the plan has .* 3 heads x 8, the model .* 2 heads x 8"),
        ({(1, "value"): normal(2, 4)}, "layer 1, value: the plan has .* 2 heads x 4, the model .* 2 heads x 8"),
        ({(2, "key"): normal(2, 8)}, r"edits the keys of layer 2; the model has keys to edit in layers \[0, 1\]"),
        ({(0, "key"): torch.eye(8)}, r"an edit matrix is \[head, dim, dim\], found \[8, 8\]"),
        ({(0, "key"): math.nan * normal(2, 8)}, "holds NaN or infinite numbers"),
    ],
)  # fmt: skip
def test_matrices_that_do_not_fit_are_refused(matrices: Any, reason: str, llama: LlamaForCausalLM) -> None:
    with pytest.raises(PlanMismatchError, match=reason):
        Plan.from_matrices(matrices, model=llama)


BOTH = {(layer, channel): (2, 6) for layer in (0, 1, 2) for channel in ("key", "value")}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({(3, "key"): (2, 6)}, "4 layers of 2 heads x 6"),
        ({(0, "key"): (2, 8), (1, "key"): (2, 8), (2, "key"): (2, 8)}, "3 layers of 2 heads x 8"),
        ({(1, "key"): (4, 6)}, "2 layers of 2 heads x 6 and 1 layers of 4 heads x 6"),
    ],
)
def test_a_plan_for_another_model_is_refused_with_both_shapes(changes: Any, found: str) -> None:
    plan = PLANS["prism"]()
    with pytest.raises(PlanMismatchError) as caught:
        plan.check(sites_of({**BOTH, **changes}))
    assert str(caught.value) == (
        f"this plan was made for a model with 3 layers of 2 heads x 6 of keys (tiny), the model to steer has {found}"
    )


@pytest.mark.parametrize("name", ["prism", "keys and values, low rank", "scale", "none"])
def test_a_plan_fits_the_model_it_was_made_for(name: str) -> None:
    sites = sites_of(BOTH)
    assert PLANS[name]().check(sites) is sites


def test_only_the_channels_that_are_edited_have_to_fit() -> None:
    other_values = {place: (2, 6) if place[1] == "key" else (1, 3) for place in BOTH}
    PLANS["prism"]().check(sites_of(other_values))
    with pytest.raises(PlanMismatchError, match="of values"):
        PLANS["keys and values, low rank"]().check(sites_of(other_values))


@pytest.mark.parametrize(
    ("skipped", "ending"),
    [
        ({}, r"layers \[0\]"),
        ({(1, "key"): "has no keys of its own"}, r"layers \[0\] \(layer 1 has no keys of its own\)"),
        ({(1, "attention"): "is recurrent"}, r"layers \[0\] \(layer 1 is recurrent\)"),
    ],
)
def test_a_layer_without_a_site_is_refused_with_the_reason(skipped: Any, ending: str) -> None:
    plan = Plan.from_matrices({(1, "key"): normal(2, 6)})
    with pytest.raises(PlanMismatchError, match=f"edits the keys of layer 1; the model has keys to edit in {ending}$"):
        plan.check(sites_of({(0, "key"): (2, 6)}, skipped))


def test_the_fingerprint_is_that_of_the_edits() -> None:
    matrix = normal(2, 4)
    base = Plan.from_matrices({(1, "key"): matrix})
    equal = [
        Plan.from_matrices({(1, "key"): matrix.clone()}),
        Plan.from_matrices({(1, "key"): matrix, (0, "key"): torch.zeros(2, 4, 4)}),
        dataclasses.replace(base, header={"method": "other"}),
    ]
    different = [
        Plan.from_matrices({(2, "key"): matrix}),
        Plan.from_matrices({(1, "value"): matrix}),
        Plan.from_matrices({(1, "key"): -matrix}),
        Plan.from_matrices({(1, "key"): matrix.transpose(1, 2)}),
        Plan.from_matrices({(1, "key"): matrix[:1]}),
        Plan.from_matrices({(1, "key"): matrix, (1, "value"): matrix}),
        Plan.from_matrices({}),
    ]
    assert {plan.fingerprint for plan in equal} == {base.fingerprint}
    assert len({plan.fingerprint for plan in [base, *different]}) == 1 + len(different)


def test_an_edit_is_moved_once() -> None:
    plan = PLANS["prism"]()
    cpu = torch.device("cpu")
    moved = plan.edit_on((0, "key"), cpu, torch.float64)
    assert moved is plan.edit_on((0, "key"), cpu, torch.float64)
    assert moved.scale.dtype == torch.float64
    assert plan.edit_on((0, "key"), cpu, torch.float32).scale.dtype == torch.float32


def test_describe() -> None:
    heads = [torch.tensor([True, False]), torch.tensor([True, True])]
    stats = {
        (layer, "key"): HeadStats(rank=on * torch.tensor([2, 5]), weight=on * torch.tensor([0.5, 1.0]), score=on * 1.0)
        for layer, on in enumerate(heads)
    }
    edits = {(0, "key"): Edit(torch.tensor([0.5, 0.0]), dim=6), (1, "key"): Edit.from_matrix(normal(2, 6))}
    header = {"method": "m", "params": {"gain": 1.0}, "model": MODEL}
    plan = Plan(edits, dict.fromkeys(BOTH, (2, 6)), stats, header)
    assert plan.describe() == {
        "method": "m",
        "params": {"gain": 1.0},
        "model": MODEL,
        "channels": {
            "key": {
                "layers": 2,
                "heads": 3,
                "of_heads": 6,
                "mean_rank": 3.0,
                "mean_weight": 0.6667,
                "forms": ["dense", "scalar"],
            }
        },
        "bytes": 4 * (2 + 2 + 2 * 36),
        "fingerprint": plan.fingerprint,
    }


def test_describe_a_plan_without_stats() -> None:
    described = Plan.from_matrices({(0, "value"): normal(3, 4)}).describe()
    assert described["channels"] == {
        "value": {"layers": 1, "heads": 3, "of_heads": 3, "mean_rank": None, "mean_weight": None, "forms": ["dense"]}
    }
    assert described["model"] == {}
    assert Plan.from_matrices({}).describe()["channels"] == {}


def rewrite(path: Path, header: dict[str, Any] | None = None, tensors: dict[str, Any] | None = None) -> None:
    """Change a saved plan; a None removes the entry."""
    old_header, old_tensors = read_artifact(path, "plan", 1)
    new_header = {name: value for name, value in {**old_header, **(header or {})}.items() if value is not None}
    new_tensors = {name: value for name, value in {**old_tensors, **(tensors or {})}.items() if value is not None}
    write_artifact(path, "plan", 1, new_header, new_tensors)


@pytest.mark.parametrize(
    ("header", "tensors", "reason"),
    [
        ({"shape": None}, {}, "is not a complete plan file: KeyError"),
        ({"source": None}, {}, "is not a complete plan file: KeyError"),
        ({"shape": []}, {}, "is not a complete plan file: KeyError"),
        ({"shape": [[0, "key", 2]]}, {}, "is not a complete plan file: ValueError"),
        ({}, {"0.key.edit.scale": None}, "is not a complete plan file: TypeError"),
        ({}, {"0.key.edit.bias": torch.ones(1)}, "is not a complete plan file: TypeError"),
        ({}, {"0.query.edit.scale": torch.ones(1)}, "is not a complete plan file: ValueError"),
        ({}, {"key.edit.scale": torch.ones(1)}, "is not a complete plan file: ValueError"),
        ({}, {"0.key.stats.rank": None}, "is not a complete plan file: TypeError"),
        ({"fingerprint": None}, {}, "is damaged: its numbers do not match its fingerprint"),
        ({"fingerprint": "0" * 16}, {}, "is damaged"),
        ({}, {"1.key.edit.scale": torch.tensor([0.0, 7.0])}, "is damaged"),
        ({}, {f"2.key.edit.{part}": None for part in ("scale", "left", "right")}, "is damaged"),
    ],
)  # fmt: skip
def test_a_changed_file_is_refused(header: Any, tensors: Any, reason: str, tmp_path: Path) -> None:
    path = get_method("prism").plan(MOMENTS, gamma=0.3, gate="none").save(tmp_path / "x")
    rewrite(path)
    assert_same(Plan.load(path), get_method("prism").plan(MOMENTS, gamma=0.3, gate="none"))
    rewrite(path, header, tensors)
    with pytest.raises(ArtifactError, match=reason) as caught:
        Plan.load(path)
    assert str(path) in str(caught.value)


def test_moments_are_no_plan_and_a_cut_plan_is_none(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="holds 'moments', expected 'plan'"):
        Plan.load(MOMENTS.save(tmp_path / "m"))
    with pytest.raises(ArtifactError, match="holds 'plan', expected 'moments'"):
        Moments.load(PLANS["prism"]().save(tmp_path / "p"))
    (tmp_path / "p").write_bytes((tmp_path / "p").read_bytes()[:-1])
    with pytest.raises(TruncatedArtifactError):
        Plan.load(tmp_path / "p")


def test_the_header_of_a_file_says_where_it_comes_from(tmp_path: Path) -> None:
    path = get_method("prism").plan(MOMENTS, gamma=0.5, gate="none").save(tmp_path / "x")
    with safe_open(path, framework="pt") as file:
        assert "abc" in file.metadata()["prism_delta"]
    source = read_artifact(path, "plan", 1)[0]["source"]
    assert (source["method"], source["params"]["gamma"], source["model"], source["pairs"]) == (
        "prism",
        0.5,
        MODEL,
        "p1",
    )
