"""capture(): against one prompt at a time, in shards, and what it must refuse."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from families import tiny_model
from helpers import hook_count
from prism_delta import CaptureOptions, Moments, Triplet, capture, find_sites
from prism_delta.capturing import _without_rounding
from prism_delta.errors import CaptureError, MomentsError, PairsError, ParameterError
from prism_delta.examples import make_examples
from prism_delta.moments import HeadMoments
from tokenizers_for_tests import byte_level

TRIPLETS = [
    Triplet("Mara keeps bees in the old mill.", "bees", "What does Mara keep?", "Who sings?"),
    Triplet("The ferry to Lund leaves at nine.", "at nine", "When does the ferry leave?", "What does Mara keep?"),
    Triplet("Ole sold the boat. He bought a red cart instead.", "a red cart", "What did Ole buy?", "When?"),
]


@pytest.fixture
def tokenizer() -> Any:
    return byte_level(trim_offsets=True)


def _keep(site: Any, seen: dict[Any, torch.Tensor]) -> Any:
    def hook(module: Any, args: Any, output: torch.Tensor) -> None:
        seen[site.layer, site.channel] = site.layout.view(output).clone()

    return hook


def one_at_a_time(model: Any, tokenizer: Any, options: CaptureOptions) -> dict[Any, HeadMoments]:
    """The definition: every prompt alone, rows gathered by hand, sums at the end."""
    sites = find_sites(model)
    examples, _ = make_examples(TRIPLETS, tokenizer, options)
    rows: dict[Any, list[list[torch.Tensor]]] = {(s.layer, s.channel): [[], [], []] for s in sites}
    for example in examples:
        for condition in range(3):
            seen: dict[Any, torch.Tensor] = {}
            handles = [site.module.register_forward_hook(_keep(site, seen)) for site in sites]
            with torch.no_grad():
                model(torch.tensor([example.ids[condition]]))
            for handle in handles:
                handle.remove()
            for place, view in seen.items():
                rows[place][condition].append(view[0, example.rows[condition]])
    found = {}
    for site in sites:
        place = (site.layer, site.channel)
        h, plus, minus = (torch.cat(part) for part in rows[place])
        found[place] = HeadMoments.zeros(*site.shape)
        found[place].add_rows(h, plus, _without_rounding(plus, minus, torch.float32))
    return found


@pytest.mark.parametrize("batch_tokens", [1, 60, 4096])
def test_batched_pass_equals_one_prompt_at_a_time(family: str, tokenizer: Any, batch_tokens: int) -> None:
    model = tiny_model(family)
    before = hook_count(model)
    moments = capture(model, tokenizer, TRIPLETS, batch_tokens=batch_tokens)
    assert hook_count(model) == before
    for place, expected in one_at_a_time(model, tokenizer, CaptureOptions()).items():
        for name, tensor in expected.tensors().items():
            torch.testing.assert_close(moments[place].tensors()[name], tensor, rtol=2e-4, atol=2e-4)


def test_keys_of_layer_0_have_no_contrast(family: str, tokenizer: Any) -> None:
    moments = capture(tiny_model(family), tokenizer, TRIPLETS)
    assert not moments[0, "key"].contrast_square.any()
    assert torch.equal(moments[0, "key"].positive, moments[0, "key"].negative)
    if family != "mistral":  # its window of 4 tokens does not reach the question
        assert bool((moments[2, "key"].contrast_square > 0).all())


def test_shards_merge_to_the_whole(tokenizer: Any) -> None:
    model = tiny_model("llama")
    whole = capture(model, tokenizer, TRIPLETS)
    shards = [capture(model, tokenizer, TRIPLETS[:1]), capture(model, tokenizer, TRIPLETS[1:])]
    merged = shards[0].merge(shards[1])
    assert merged.count == whole.count
    for place in whole:
        for name, tensor in whole[place].tensors().items():
            torch.testing.assert_close(merged[place].tensors()[name], tensor, rtol=1e-4, atol=1e-5)


def test_shards_of_different_models_do_not_merge(tokenizer: Any) -> None:
    left = capture(tiny_model("llama"), tokenizer, TRIPLETS)
    right = capture(tiny_model("qwen3"), tokenizer, TRIPLETS)
    with pytest.raises(MomentsError, match="different models"):
        left.merge(right)
    other = capture(tiny_model("llama"), tokenizer, TRIPLETS, convention="reference")
    with pytest.raises(MomentsError, match="different options"):
        left.merge(other)


def test_memory_does_not_grow_with_the_data(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows hold a fixed number of examples; many more of them give the same files, not larger ones."""
    import prism_delta.capturing as capturing

    sizes = []
    plain = capturing._Window

    class Watched(plain):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            sizes.append(self.rows)

    monkeypatch.setattr(capturing, "_Window", Watched)
    moments = capture(tiny_model("llama"), tokenizer, TRIPLETS * 50)
    assert len(sizes) == 3  # 150 triplets in windows of 64
    assert max(sizes) <= 64 * max(len(e.rows[0]) for e in make_examples(TRIPLETS, tokenizer, CaptureOptions())[0])
    assert sum(sizes) == moments.count
    few = capture(tiny_model("llama"), tokenizer, TRIPLETS)
    assert {p: m.shape for p, m in moments.heads.items()} == {p: m.shape for p, m in few.heads.items()}


def test_half_precision_models_are_captured_in_their_own_numbers(tokenizer: Any) -> None:
    model = tiny_model("llama")
    exact = capture(model, tokenizer, TRIPLETS)
    rough = capture(model.to(torch.bfloat16), tokenizer, TRIPLETS)
    assert rough.header["dtype"] == "bfloat16"
    assert not rough[0, "key"].contrast_square.any()
    left, right = rough[2, "key"].neutral, exact[2, "key"].neutral
    assert float((left - right).norm() / right.norm()) < 0.05


def test_header_says_where_the_moments_come_from(tokenizer: Any, tmp_path: Any) -> None:
    moments = capture(tiny_model("llama"), tokenizer, TRIPLETS)
    assert set(moments.header) >= {"model", "tokenizer", "pairs", "options", "triplets", "skipped", "dtype"}
    loaded = Moments.load(moments.save(tmp_path / "m.safetensors"))
    assert loaded.header == moments.header
    assert loaded.count == moments.count


def test_triplets_left_out_are_counted_and_told(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_model("llama")
    model.config.max_position_embeddings = 60
    long = Triplet("word " * 80 + "bees", "bees", "What?", "Who?")
    with caplog.at_level(logging.WARNING):
        moments = capture(model, tokenizer, [*TRIPLETS[:1], long])
    assert (moments.header["triplets"], moments.header["skipped"]) == (1, 1)
    assert "longer than the model's 60 tokens" in caplog.text
    with pytest.raises(CaptureError, match="none of 1 triplets"):
        capture(model, tokenizer, [long])


def test_numbers_that_are_not_finite_are_refused(tokenizer: Any) -> None:
    """A value that only some token makes infinite, as float16 does in some models."""
    model = tiny_model("llama")
    find_sites(model)
    with torch.no_grad():
        model.model.embed_tokens.weight[tokenizer("bees")["input_ids"][0]] = float("inf")
    with pytest.raises(MomentsError, match=r"NaN.*float32"):
        capture(model, tokenizer, TRIPLETS)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"convention": "papr"}, ParameterError),
        ({"position": "assistant"}, ParameterError),
        ({"answer_tokens": "most"}, ParameterError),
        ({"nonsense": 1}, ParameterError),
        ({"options": CaptureOptions(), "convention": "paper"}, ParameterError),
        ({"batch_tokens": 0}, ParameterError),
    ],
)
def test_bad_options(tokenizer: Any, options: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        capture(tiny_model("llama"), tokenizer, TRIPLETS, **options)


def test_no_pairs(tokenizer: Any) -> None:
    with pytest.raises(PairsError, match="no pairs"):
        capture(tiny_model("llama"), tokenizer, [])
