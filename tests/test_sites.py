"""Where keys and values are found, what is left out, and what is refused."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from families import FAMILIES, build, tiny_model
from helpers import random_plan
from prism_delta import find_sites
from prism_delta.errors import PlanMismatchError, UnsupportedModelError
from prism_delta.families import TESTED_FAMILIES
from prism_delta.matching import match_layout
from prism_delta.sites import ADAPTERS, Layout

LAYOUTS = {
    "llama": ("k_proj", "flat", "v_proj", "flat"),
    "qwen3": ("k_norm", "token_major", "v_proj", "flat"),
    "gemma3_text": ("k_norm", "head_major", "v_proj", "flat"),
    "olmo2": ("k_norm", "flat", "v_proj", "flat"),
    "cohere": ("k_norm", "token_major", "v_proj", "flat"),
    "phi3": ("qkv_proj", "flat", "qkv_proj", "flat"),
    "gpt_neox": ("query_key_value", "flat", "query_key_value", "flat"),
}


def test_the_published_list_of_families_is_the_tested_one() -> None:
    assert set(TESTED_FAMILIES) == set(FAMILIES)


def test_every_layer_of_every_family_has_both_channels(family: str) -> None:
    model = tiny_model(family)
    sites = find_sites(model)
    assert sites.shape("key") == sites.shape("value")
    assert sites.layers == [0, 1, 2]
    assert not sites.skipped


@pytest.mark.parametrize("family", sorted(LAYOUTS))
def test_modules_and_layouts(family: str) -> None:
    sites = find_sites(tiny_model(family))
    key, value = sites[0, "key"], sites[0, "value"]
    found = (key.name.split(".")[-1], key.layout.kind, value.name.split(".")[-1], value.layout.kind)
    assert found == LAYOUTS[family]


def test_fused_projection_is_cut_at_the_right_columns() -> None:
    sites = find_sites(tiny_model("phi3"))  # 4 query heads and 2 KV heads of 8
    assert sites[1, "key"].layout == Layout("flat", 2, 8, start=32, stride=8)
    assert sites[1, "value"].layout == Layout("flat", 2, 8, start=48, stride=8)


def test_interleaved_projection_is_walked_in_strides() -> None:
    sites = find_sites(tiny_model("gpt_neox"))  # per head: query, key, value of 8 each
    assert sites[1, "key"].layout == Layout("flat", 4, 8, start=0, stride=24, inner=8)
    assert sites[1, "value"].layout == Layout("flat", 4, 8, start=0, stride=24, inner=16)


def test_multimodal_sites_lie_in_the_text_part() -> None:
    sites = find_sites(tiny_model("gemma3"))
    assert {site.name.split(".layers")[0] for site in sites} == {"model.language_model"}
    assert sites.decoder_name == "model.language_model"


@pytest.mark.parametrize(
    ("name", "layers", "skipped"),
    [
        ("hybrid convolution", [1], [0, 2]),
        ("hybrid linear attention", [1], [0, 2]),
        ("hybrid mamba", [1], [0, 2]),
        ("shared keys", [0, 1], [2, 3]),
    ],
)
def test_layers_without_keys_of_their_own_are_left_out_and_said_so(
    name: str, layers: list[int], skipped: list[int]
) -> None:
    model = build(name)
    sites = find_sites(model)
    assert sites.layers == layers
    assert [layer for layer, _ in sites.skipped] == skipped
    assert "stores no keys of its own" in sites.describe()
    plan = random_plan(model)
    moved = {(skipped[0], "key"): plan.matrix(layers[0], "key")}
    with pytest.raises(PlanMismatchError, match="no keys of its own"):
        type(plan).from_matrices(moved, model=model)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("compressed keys", "kv_a_proj_with_mqa"),
        ("norm after rope", "key_layernorm"),
        ("norm shared by query and key", "qk_norm"),
        ("no attention", "no layer of this model stored keys"),
        ("encoder and decoder", "causal"),
    ],
)
def test_what_cannot_be_steered_is_refused_with_what_was_looked_for(name: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        find_sites(build(name))


@pytest.mark.parametrize("name", ["compressed keys", "no attention"])
def test_a_refusal_says_how_to_add_a_family(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match="ADAPTERS"):
        find_sites(build(name))


def test_anything_but_a_transformers_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="expected"):
        find_sites(nn.Linear(2, 2))


def test_a_model_that_computes_nan_is_refused() -> None:
    model = tiny_model("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] = float("nan")
    with pytest.raises(UnsupportedModelError, match="layer 1 computes NaN"):
        find_sites(model)


# --- adapters --------------------------------------------------------------------------------------


def _interleaved_adapter(attention: nn.Module) -> dict[str, tuple[str, Layout]]:
    dim = attention.head_dim
    return {
        "key": ("query_key_value", Layout("flat", 4, dim, stride=3 * dim, inner=dim)),
        "value": ("query_key_value", Layout("flat", 4, dim, stride=3 * dim, inner=2 * dim)),
    }


def test_an_adapter_says_where_to_look(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("gpt_neox")
    for layer in model.gpt_neox.layers:
        layer.attention.head_dim = 8
    expected = {(site.layer, site.channel): site.layout for site in find_sites(tiny_model("gpt_neox"))}
    monkeypatch.setitem(ADAPTERS, "GPTNeoXAttention", _interleaved_adapter)
    assert {(site.layer, site.channel): site.layout for site in find_sites(model)} == expected


def test_a_wrong_adapter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: Any = lambda attention: {"key": ("q_proj", Layout("flat", 2, 8, stride=8))}  # noqa: E731
    monkeypatch.setitem(ADAPTERS, "LlamaAttention", wrong)
    with pytest.raises(UnsupportedModelError, match="adapter for LlamaAttention says q_proj"):
        find_sites(tiny_model("llama"))


# --- remembering -----------------------------------------------------------------------------------


def test_sites_are_found_once_and_again_when_modules_are_exchanged() -> None:
    model = tiny_model("llama")
    first = find_sites(model)
    assert find_sites(model) is first
    attention = model.model.layers[0].self_attn
    exchanged = nn.Linear(32, 16, bias=False)
    attention.k_proj = exchanged
    assert find_sites(model)[0, "key"].module is exchanged


@pytest.mark.parametrize("bare", [False, True])
def test_a_model_is_not_kept_alive_by_its_sites(bare: bool) -> None:
    model = tiny_model("llama")
    model = model.model if bare else model
    assert find_sites(model).decoder is (model if bare else model.model)
    assert find_sites(model).decoder is (model if bare else model.model)
    watch = weakref.ref(model)
    del model
    gc.collect()
    assert watch() is None


def test_probing_leaves_no_hooks_and_changes_nothing(family: str) -> None:
    model = tiny_model(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    find_sites(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


# --- layouts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 6])  # 6 is also the number of tokens
@pytest.mark.parametrize("kind", ["token_major", "head_major", "flat", "fused", "interleaved"])
def test_layout_is_settled_by_values(heads: int, kind: str) -> None:
    cached = torch.randn(1, heads, 6, 4)
    tokens = cached.transpose(1, 2)
    flat, noise = tokens.reshape(1, 6, heads * 4), torch.randn(1, 6, 8)
    outputs = {
        "token_major": tokens,
        "head_major": cached,
        "flat": flat,
        "fused": torch.cat([noise, flat, noise], dim=-1),
        "interleaved": torch.cat([torch.randn(1, 6, heads, 4), tokens, torch.randn(1, 6, heads, 8)], -1).flatten(2),
    }
    layout = match_layout(outputs[kind], cached, "value")
    assert layout is not None
    assert torch.equal(layout.view(outputs[kind]), tokens)


def test_writing_to_a_view_writes_to_the_output() -> None:
    output = torch.zeros(1, 2, 12)
    Layout("flat", 2, 2, start=0, stride=6, inner=2).view(output)[0, 1] = 1.0
    assert output[0].tolist() == [[0.0] * 12, [0, 0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0]]
