from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import forward, hook_count, random_plan
from models_for_tests import OTHERS, PAIRS, PROMPT, save_tiny, tiny_pair
from prism_delta import Batch, CaptureOptions, Highlighter, Plan, Prompt, Span, capture, encode, get_method, steer
from prism_delta.errors import (
    BatchError,
    ChatTemplateError,
    MarkupError,
    ParameterError,
    PlanMismatchError,
    PromptError,
    PromptTooLongError,
    UnknownMethodError,
    UnknownModelError,
)

PROMPTS = [PROMPT, *OTHERS]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRISM_DELTA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def highlighter() -> Highlighter:
    model, tokenizer = tiny_pair()
    return Highlighter(model, tokenizer, random_plan(model))


class Recorder:
    """A stopping criterion that never stops but remembers the tokens so far, and may wait a little."""

    def __init__(self, wait: float = 0.0) -> None:
        self.wait, self.steps = wait, 0
        self.ids = torch.empty(0)

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        time.sleep(self.wait)
        self.steps, self.ids = self.steps + 1, ids
        return torch.zeros(len(ids), dtype=torch.bool)


def plain(highlighter: Highlighter, batch: Batch, **options: Any) -> torch.Tensor:
    """Token ids of the model without this library."""
    return highlighter.model.generate(**batch.inputs, do_sample=False, pad_token_id=2, **options)


# --- generate -----------------------------------------------------------------------------------------


def test_text_in_text_out(highlighter: Highlighter) -> None:
    batch = encode(PROMPT, highlighter.tokenizer)
    with steer(highlighter.model, highlighter.plan, batch):
        ids = plain(highlighter, batch, max_new_tokens=9)
    expected = highlighter.tokenizer.decode(ids[0, batch.input_ids.shape[1] :], skip_special_tokens=True)
    assert highlighter.generate(PROMPT, max_new_tokens=9) == expected
    assert highlighter.generate(PROMPT, max_new_tokens=9, strength=0.0) != expected


@pytest.mark.parametrize("batch_size", [0, 1, 2, 8])
def test_a_list_is_answered_in_order_and_as_one_by_one(highlighter: Highlighter, batch_size: int) -> None:
    prompts = [*PROMPTS, Prompt("Anna was", [Span(0, 4, 3.0)]), PROMPT]
    one_by_one = [highlighter.generate(prompt, max_new_tokens=9) for prompt in prompts]
    assert highlighter.generate(prompts, max_new_tokens=9, batch_size=batch_size) == one_by_one
    assert len(set(one_by_one)) == 4


def test_a_list_of_one_is_a_list(highlighter: Highlighter) -> None:
    assert highlighter.generate([PROMPT]) == [highlighter.generate(PROMPT)]


def test_strength_0_is_the_plain_model_bit_for_bit(highlighter: Highlighter) -> None:
    recorder, batch = Recorder(), encode(PROMPTS, highlighter.tokenizer)
    by_length = [1, 0, 2]
    highlighter.generate(PROMPTS, strength=0.0, max_new_tokens=12, stopping_criteria=[recorder])
    assert torch.equal(recorder.ids, plain(highlighter, batch, max_new_tokens=12)[by_length])


def test_strength_multiplies_that_of_the_spans(highlighter: Highlighter) -> None:
    text = PROMPT.replace("**", "")
    doubled = Prompt(text, [Span(18, 37, strength=-2.0)])
    assert highlighter.generate(PROMPT, strength=-2.0) == highlighter.generate(doubled)


def test_a_prompt_without_highlights_is_the_plain_model(highlighter: Highlighter) -> None:
    text = PROMPT.replace("**", "")
    assert highlighter.generate(text) == highlighter.generate(PROMPT, strength=0.0)


def test_options_reach_the_model(highlighter: Highlighter) -> None:
    torch.manual_seed(0)
    sampled = highlighter.generate(PROMPT, do_sample=True, temperature=5.0)
    torch.manual_seed(0)
    assert highlighter.generate(PROMPT, do_sample=True, temperature=5.0) == sampled
    assert highlighter.generate(PROMPT) != sampled
    tags = PROMPT.replace("**", "<hl>", 1).replace("**", "</hl>")
    assert highlighter.generate(tags, markup="tags") == highlighter.generate(PROMPT)


def test_sampling_defaults_of_a_checkpoint_do_not_disturb_greedy_decoding(highlighter: Highlighter) -> None:
    expected = highlighter.generate(PROMPT)
    highlighter.model.generation_config.update(do_sample=True, temperature=9.0, top_k=3, top_p=0.5)
    assert highlighter.generate(PROMPT) == expected


@pytest.mark.parametrize(
    ("prompts", "options", "error", "reason"),
    [
        ([], {}, PromptError, "no prompts given"),
        ("", {}, PromptError, "the prompt is empty"),
        ([PROMPT, 3], {}, PromptError, "a prompt is text, found int"),
        ("a **b", {}, MarkupError, "never closed"),
        (PROMPT, {"markup": "star"}, ParameterError, "unknown markup 'star'"),
        (PROMPT, {"strength": float("nan")}, BatchError, "strength must be finite"),
        (PROMPT, {"num_return_sequences": 2, "num_beams": 2}, ParameterError, "num_return_sequences"),
        (PROMPT, {"max_new_tokens": 250}, PromptTooLongError, "has 13 tokens and 250 more .* room for 256"),
        ("Anna " * 300, {}, PromptTooLongError, "has 300 tokens and 64 more .* room for 256"),
        (["Anna", "Anna " * 300], {}, PromptTooLongError, "has 300 tokens"),
    ],
    ids=["no prompts", "empty", "no text", "unbalanced", "markup", "strength", "copies", "room", "long", "one is long"],
)
def test_what_cannot_be_generated_is_refused(
    highlighter: Highlighter, prompts: Any, options: dict[str, Any], error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        highlighter.generate(prompts, **options)
    assert hook_count(highlighter.model) == 0


def test_a_prompt_that_just_fits_is_generated(highlighter: Highlighter) -> None:
    recorder = Recorder()
    highlighter.generate("**Anna** " + "was " * 249, max_new_tokens=6, stopping_criteria=[recorder])
    assert recorder.ids.shape == (1, 256)


# --- chat ---------------------------------------------------------------------------------------------


def test_chat_is_generate_on_the_rendered_messages(highlighter: Highlighter) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    prompt = highlighter.chat_prompt(messages)
    assert prompt == Prompt(f"<s>{PROMPT.replace('**', '')}</s>", [Span(21, 40)], special_tokens=False)
    assert highlighter.chat(messages, max_new_tokens=9) == highlighter.generate(prompt, max_new_tokens=9)
    assert highlighter.chat(messages, strength=0.0) != highlighter.chat(messages)


def test_chat_takes_template_options(highlighter: Highlighter) -> None:
    messages = [{"role": "user", "content": "**Anna**"}]
    options = {"add_generation_prompt": False}
    prompt = Prompt("<s>Anna", [Span(3, 7)], special_tokens=False)
    assert highlighter.chat_prompt(messages, **options) == prompt
    assert highlighter.chat(messages, template_options=options) == highlighter.generate(prompt)


def test_chat_without_a_template_is_refused() -> None:
    model, tokenizer = tiny_pair(template=None)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        Highlighter(model, tokenizer, random_plan(model)).chat([{"role": "user", "content": "hi"}])


# --- stream -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_streamed_pieces_make_the_generated_text(highlighter: Highlighter, strength: float) -> None:
    pieces = list(highlighter.stream(PROMPT, strength=strength, max_new_tokens=20))
    assert "".join(pieces) == highlighter.generate(PROMPT, strength=strength, max_new_tokens=20)
    assert len(pieces) > 5
    assert all(pieces)


def test_closing_a_stream_stops_the_generation(highlighter: Highlighter) -> None:
    recorder = Recorder(wait=0.01)
    threads = threading.active_count()
    stream = highlighter.stream(PROMPT, max_new_tokens=200, stopping_criteria=[recorder])
    next(stream)
    assert hook_count(highlighter.model) > 0
    stream.close()
    assert recorder.steps < 100
    assert hook_count(highlighter.model) == 0
    assert threading.active_count() == threads
    assert highlighter._lock.acquire(blocking=False)
    highlighter._lock.release()


def test_an_error_inside_is_raised_in_the_reader(highlighter: Highlighter) -> None:
    def fail(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if ids.shape[1] > 18:
            raise RuntimeError("the fan stopped")
        return torch.zeros(len(ids), dtype=torch.bool)

    found = []
    with pytest.raises(RuntimeError, match="the fan stopped"):
        found.extend(highlighter.stream(PROMPT, max_new_tokens=20, stopping_criteria=[fail]))
    assert hook_count(highlighter.model) == 0
    assert highlighter.generate(PROMPT).startswith("".join(found))


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        ("a **b", {}, MarkupError),
        ("Anna " * 300, {}, PromptTooLongError),
        (PROMPT, {"strength": float("inf")}, BatchError),
        (PROMPT, {"num_beams": 2}, ValueError),  # transformers itself cannot stream beams
    ],
    ids=["unbalanced", "long", "strength", "beams"],
)
def test_what_cannot_be_streamed_is_refused(
    highlighter: Highlighter, prompt: str, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        list(highlighter.stream(prompt, **options))
    assert highlighter.generate(PROMPT)


def test_a_stream_that_is_never_read_costs_nothing(highlighter: Highlighter) -> None:
    threads = threading.active_count()
    stream = highlighter.stream(PROMPT)
    assert threading.active_count() == threads
    assert hook_count(highlighter.model) == 0
    del stream


def test_generate_while_a_stream_is_open(highlighter: Highlighter) -> None:
    expected = highlighter.generate(PROMPTS, max_new_tokens=20)
    stream = highlighter.stream(PROMPT, max_new_tokens=20)
    first = next(stream)
    assert highlighter.generate(PROMPTS, max_new_tokens=20) == expected
    assert first + "".join(stream) == expected[0]


# --- scores -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [0.0, 1.0, -0.5])
def test_logits_are_those_of_one_forward_pass(highlighter: Highlighter, strength: float) -> None:
    batch = encode(PROMPTS, highlighter.tokenizer)
    with steer(highlighter.model, highlighter.plan, batch, strength=strength):
        expected = forward(highlighter.model, batch, use_cache=False, logits_to_keep=1).logits[:, -1]
    assert torch.equal(highlighter.next_token_logits(PROMPTS, strength=strength), expected)


def test_the_probabilities_of_all_words_sum_to_1(highlighter: Highlighter) -> None:
    words = list(highlighter.tokenizer.get_vocab())
    found = highlighter.probabilities(PROMPT, words)
    assert list(found) == words
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-6)


def test_probabilities_are_the_softmax_of_the_logits(highlighter: Highlighter) -> None:
    logits = highlighter.next_token_logits([PROMPT], strength=2.0)
    words = highlighter.tokenizer.convert_tokens_to_ids(["pilot", "nurse"])
    expected = logits.softmax(-1)[0, words].tolist()
    # Of several tokens the first counts.
    assert highlighter.probabilities(PROMPT, ["pilot", "nurse"], strength=2.0) == {
        "pilot": expected[0],
        "nurse": expected[1],
    }
    assert highlighter.probabilities(PROMPT, ["pilot nurse"], strength=2.0) == {"pilot nurse": expected[0]}
    assert highlighter.probabilities(PROMPT, ["pilot"], strength=0.0) != {"pilot": expected[0]}


def test_a_candidate_without_tokens_is_refused(highlighter: Highlighter) -> None:
    with pytest.raises(PromptError, match="the candidate '' has no tokens"):
        highlighter.probabilities(PROMPT, ["nurse", ""])


# --- threads ------------------------------------------------------------------------------------------


def test_threads_may_share_one(highlighter: Highlighter) -> None:
    expected = [highlighter.generate(prompt) for prompt in PROMPTS]
    found: dict[tuple[int, int], str] = {}
    start = threading.Barrier(len(PROMPTS))

    def work(number: int) -> None:
        start.wait()
        for turn in range(3):
            found[number, turn] = highlighter.generate(PROMPTS[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {(number, turn): expected[number] for number in range(len(PROMPTS)) for turn in range(3)}
    assert hook_count(highlighter.model) == 0


# --- making one ---------------------------------------------------------------------------------------


def test_load_of_a_folder_is_capture_and_plan(tmp_path: Path, cache: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    loaded = Highlighter.load(str(folder), method="prism-v", pairs=PAIRS, progress=False, key_gain=2.0)
    moments = capture(loaded.model, loaded.tokenizer, PAIRS)
    assert loaded.plan.fingerprint == get_method("prism-v").plan(moments, key_gain=2.0).fingerprint
    assert len(list((cache / "moments").iterdir())) == 1


def test_load_of_ones_own_model() -> None:
    model, tokenizer = tiny_pair()
    options = CaptureOptions(convention="reference")
    loaded = Highlighter.load(model, tokenizer, pairs=PAIRS, options=options, keep=1.0)
    moments = capture(model, tokenizer, PAIRS, options=options)
    assert loaded.model is model
    assert loaded.plan.header == get_method("prism").plan(moments, keep=1.0).header


def test_load_with_a_plan_captures_nothing(cache: Path) -> None:
    model, tokenizer = tiny_pair()
    plan = random_plan(model)
    assert Highlighter.load(model, tokenizer, plan=plan).plan is plan
    assert not cache.exists()


@pytest.mark.parametrize(
    ("given", "options", "error", "reason"),
    [
        ("model", {}, ParameterError, "give the tokenizer together with the model"),
        ("both", {"method": "prisn"}, UnknownMethodError, "did you mean 'prism'"),
        ("both", {"gama": 0.9}, ParameterError, "did you mean 'gamma'"),
        ("both", {"gamma": 2}, ParameterError, r"gamma must lie in \(0, 1\]"),
        ("name", {}, UnknownModelError, "did you mean 'smollm2-135m'"),
    ],
)
def test_what_cannot_be_made_is_refused(
    given: str, options: dict[str, Any], error: type[Exception], reason: str
) -> None:
    model, tokenizer = tiny_pair()
    arguments = {"model": (model,), "both": (model, tokenizer), "name": ("smolm2-135m",)}[given]
    with pytest.raises(error, match=reason):
        Highlighter.load(*arguments, pairs=PAIRS, **options)


def test_a_plan_for_another_model_is_refused() -> None:
    (model, tokenizer), (other, _) = tiny_pair(), tiny_pair("qwen3")
    made: Plan = get_method("scale").plan(capture(other, tokenizer, PAIRS))
    with pytest.raises(PlanMismatchError, match=r"3 layers of 2 heads x 16 .* has 3 layers of 2 heads x 8"):
        Highlighter(model, tokenizer, made)


def test_a_mistyped_method_is_told_before_a_model_is_loaded() -> None:
    with pytest.raises(UnknownMethodError, match="did you mean 'prism'"):
        Highlighter.load("no-such-model", method="prisn")
    with pytest.raises(ParameterError, match="did you mean 'key_gain'"):
        Highlighter.load("no-such-model", key_gian=1)


def test_precision_of_a_model_loaded_by_name(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    highlighter = Highlighter.load(str(folder), pairs=PAIRS, dtype=torch.bfloat16, device="cpu")
    assert highlighter.model.dtype == torch.bfloat16
    assert isinstance(highlighter.generate(PROMPT, max_new_tokens=2), str)
