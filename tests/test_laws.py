"""The laws of the design, over every family."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from families import tiny_model
from helpers import (
    edited_keys,
    forward,
    generate,
    hook_count,
    join,
    pad,
    random_batch,
    random_plan,
    scaling_plan,
)
from prism_delta import Batch, find_sites, steer

CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def full_cache() -> DynamicCache:
    """A cache that keeps every token, also in sliding-window layers."""
    return DynamicCache()


@pytest.mark.parametrize("way", ["strength", "gain", "span"])
def test_nothing_asked_for_is_the_plain_model_bit_for_bit(family: str, way: str) -> None:
    model = tiny_model(family)
    plan = random_plan(model, size=0.0 if way == "gain" else 0.4)
    batch = random_batch(rows=2, highlighted={} if way == "span" else {2: 1.0, 4: 2.0})
    plain = forward(model, batch).logits
    with steer(model, plan, batch, strength=0.0 if way == "strength" else 1.0) as trace:
        steered = forward(model, batch).logits
    assert torch.equal(plain, steered)
    assert trace.positions == [[], []]


@pytest.mark.parametrize("channel", ["key", "value"])
def test_scaling_is_exact_and_touches_only_highlighted_tokens(family: str, channel: str) -> None:
    model = tiny_model(family)
    batch = random_batch(rows=2, tokens=7, highlighted={0: 1.0, 3: 1.0, 4: 2.0})
    factor = 1 + 0.5 * batch.strengths  # 0.5 * x and 1.0 * x are exact, so is their sum with x up to one rounding
    plain, steered = full_cache(), full_cache()
    forward(model, batch, past_key_values=plain)
    with steer(model, scaling_plan(model, 0.5, channel), batch) as trace:
        forward(model, batch, past_key_values=steered)
    before, after = edited_keys(plain, 0, channel), edited_keys(steered, 0, channel)
    on = batch.strengths[0] != 0
    assert torch.equal(after[:, :, ~on], before[:, :, ~on])
    expected = (before * factor[:, None, :, None])[:, :, on]
    torch.testing.assert_close(after[:, :, on], expected, rtol=2e-6, atol=1e-6)
    other = "value" if channel == "key" else "key"
    assert torch.equal(edited_keys(plain, 0, other), edited_keys(steered, 0, other))
    assert trace.positions == [[0, 3, 4]] * 2
    assert trace.layers == find_sites(model).layers
    assert trace.channels == [channel]


def test_doubling_values_is_exact_to_the_bit(family: str) -> None:
    model = tiny_model(family)
    batch = random_batch(tokens=6, highlighted={1: 1.0, 5: 1.0})
    plain, steered = full_cache(), full_cache()
    forward(model, batch, past_key_values=plain)
    with steer(model, scaling_plan(model, 1.0, "value"), batch):
        forward(model, batch, past_key_values=steered)
    factor = (1 + batch.strengths)[:, None, :, None]
    assert torch.equal(edited_keys(steered, 0, "value"), edited_keys(plain, 0, "value") * factor)


@pytest.mark.parametrize("side", ["left", "right"])
def test_one_prompt_alone_equals_it_in_a_padded_batch(family: str, side: str) -> None:
    model = tiny_model(family)
    plan = random_plan(model)
    short = random_batch(tokens=6, highlighted={1: 1.0, 2: -1.0})
    long = random_batch(tokens=10, highlighted={7: 2.0, 8: 1.0}, seed=5)
    both = join(pad(short, 4, side), long)
    with steer(model, plan, short):
        alone = forward(model, short).logits[0]
    with steer(model, plan, both) as trace:
        together = forward(model, both).logits[0]
    kept = slice(4, None) if side == "left" else slice(0, 6)
    torch.testing.assert_close(together[kept], alone, **CLOSE)
    shift = 4 if side == "left" else 0
    assert trace.positions == [[1 + shift, 2 + shift], [7, 8]]
    assert not torch.allclose(alone, forward(model, short).logits[0], **CLOSE)


def test_cached_generation_equals_uncached(family: str) -> None:
    model = tiny_model(family)
    batch = random_batch(rows=2)
    with steer(model, random_plan(model), batch):
        cached = generate(model, batch, use_cache=True)
        uncached = generate(model, batch, use_cache=False)
    torch.testing.assert_close(cached, uncached, **CLOSE)


@pytest.mark.parametrize("chunks", [(4, 5), (1, 8), (3, 3, 3), (8, 1)])
def test_chunked_prefill_equals_whole(family: str, chunks: tuple[int, ...]) -> None:
    model = tiny_model(family)
    batch = random_batch(tokens=9)
    with steer(model, random_plan(model), batch):
        whole = forward(model, batch).logits
        cache, parts, start = full_cache(), [], 0
        for size in chunks:
            piece = slice(start, start + size)
            with torch.no_grad():
                parts.append(model(input_ids=batch.input_ids[:, piece], past_key_values=cache, use_cache=True).logits)
            start += size
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, **CLOSE)


def test_generate_in_chunks_equals_whole(family: str) -> None:
    model = tiny_model(family)
    batch = random_batch(rows=2, tokens=9)
    with steer(model, random_plan(model), batch):
        whole = generate(model, batch)
        chunked = generate(model, batch, prefill_chunk_size=4)
    torch.testing.assert_close(chunked, whole, **CLOSE)


def test_decode_steps_write_unedited_tokens(family: str) -> None:
    """A generated token gets the key the plain model would give it after an edited prompt."""
    model = tiny_model(family)
    batch = random_batch(tokens=5)
    plan = random_plan(model)
    steered = full_cache()
    with steer(model, plan, batch):
        forward(model, batch, past_key_values=steered)
        inside = model(torch.tensor([[7]]), past_key_values=steered).logits
    again = full_cache()
    with steer(model, plan, batch):
        forward(model, batch, past_key_values=again)
    outside = model(torch.tensor([[7]]), past_key_values=again).logits
    assert torch.equal(inside, outside)


def test_reused_prefix_equals_whole(family: str) -> None:
    """A prefix cached under the same edits, then the rest of the prompt."""
    model = tiny_model(family)
    plan = random_plan(model)
    batch = random_batch(tokens=9, highlighted={1: 1.0, 7: 0.5})
    prefix = Batch(batch.input_ids[:, :4], batch.attention_mask[:, :4], batch.strengths[:, :4])
    cache = full_cache()
    with steer(model, plan, prefix):
        forward(model, prefix, past_key_values=cache)
    with steer(model, plan, batch):
        resumed = generate(model, batch, past_key_values=cache)
    with steer(model, plan, batch):
        whole = generate(model, batch)
    torch.testing.assert_close(resumed, whole, **CLOSE)


def test_second_turn_keeps_the_first_turns_highlights(family: str) -> None:
    """Turn two continues the cache of turn one, highlights in both turns, the reply between them plain."""
    model = tiny_model(family)
    plan = random_plan(model)
    first = random_batch(tokens=5, highlighted={1: 1.0})
    cache = full_cache()
    with steer(model, plan, first), torch.no_grad():
        replied = model.generate(**first.inputs, max_new_tokens=3, do_sample=False, past_key_values=cache)
    new = random_batch(tokens=4, highlighted={2: 1.0}, seed=9)
    ids = torch.cat([replied, new.input_ids], dim=1)
    strengths = torch.cat([first.strengths, torch.zeros(1, 3), new.strengths], dim=1)
    second = Batch.from_ids(ids, strengths)
    with steer(model, plan, second) as trace:
        resumed = generate(model, second, past_key_values=cache)
    with steer(model, plan, second):
        whole = generate(model, second)
    torch.testing.assert_close(resumed, whole, **CLOSE)
    assert trace.positions == [[10]]


def test_beams_edit_every_beam(family: str) -> None:
    """With as many beams as returned sequences, the best beam scores as it does in a plain forward of its text."""
    model = tiny_model(family)
    plan = random_plan(model)
    batch = random_batch(rows=2, tokens=6)
    with steer(model, plan, batch), torch.no_grad():
        output = model.generate(
            **batch.inputs, max_new_tokens=3, do_sample=False, num_beams=3, num_return_sequences=3,
            return_dict_in_generate=True, output_scores=True, length_penalty=0.0,
        )  # fmt: skip
    texts = output.sequences.reshape(2, 3, -1)[:, 0]
    full = Batch(texts, torch.ones_like(texts), torch.cat([batch.strengths, torch.zeros(2, 3)], dim=1))
    with steer(model, plan, full):
        logits = forward(model, full).logits[:, 5:8].log_softmax(-1)
    total = logits.gather(-1, texts[:, 6:, None]).sum((1, 2))
    torch.testing.assert_close(output.sequences_scores.reshape(2, 3)[:, 0], total, rtol=1e-3, atol=1e-4)


def test_returned_sequences_are_all_edited(family: str) -> None:
    model = tiny_model(family)
    batch = random_batch(rows=2, tokens=6)
    with steer(model, random_plan(model), batch) as trace, torch.no_grad():
        output = model.generate(
            **batch.inputs, max_new_tokens=1, do_sample=True, top_k=0, num_return_sequences=2,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        single = forward(model, batch).logits[:, -1]
    torch.testing.assert_close(output.logits[0], single.repeat_interleave(2, dim=0), **CLOSE)
    assert trace.positions == [[2, 3]] * 2


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def test_short_prompts_of_as_many_tokens_as_heads(family: str, tokens: int) -> None:
    """The layout was settled at install; a length equal to a head count cannot confuse it."""
    model = tiny_model(family)
    batch = random_batch(tokens=tokens, highlighted={tokens - 1: 1.0})
    plain, steered = full_cache(), full_cache()
    forward(model, batch, past_key_values=plain)
    with steer(model, scaling_plan(model, 1.0, "key"), batch):
        forward(model, batch, past_key_values=steered)
    before, after = edited_keys(plain, 0, "key"), edited_keys(steered, 0, "key")
    assert torch.equal(after[:, :, : tokens - 1], before[:, :, : tokens - 1])
    torch.testing.assert_close(after[:, :, -1], 2 * before[:, :, -1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_other_precisions(family: str, dtype: torch.dtype) -> None:
    model = tiny_model(family).to(dtype)
    batch = random_batch(tokens=6, highlighted={1: 1.0})
    plain, steered = full_cache(), full_cache()
    forward(model, batch, past_key_values=plain)
    with steer(model, scaling_plan(model, 1.0, "value"), batch):
        forward(model, batch, past_key_values=steered)
    factor = (1 + batch.strengths).to(dtype)[:, None, :, None]
    assert torch.equal(edited_keys(steered, 0, "value"), edited_keys(plain, 0, "value") * factor)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_backends_agree(family: str, attention: str) -> None:
    model = tiny_model(family)
    if attention == "sdpa" and not model._supports_sdpa:
        pytest.skip("transformers has no SDPA for this family (attention sinks or soft-capping)")
    batch = random_batch(rows=2)
    plan = random_plan(model)
    with steer(model, plan, batch):
        expected = forward(model, batch).logits
    model.set_attn_implementation(attention)
    with steer(model, plan, batch):
        torch.testing.assert_close(forward(model, batch).logits, expected, **CLOSE)


def test_hooks_are_gone_after_the_block_and_after_an_error(family: str) -> None:
    model = tiny_model(family)
    plan, batch = random_plan(model), random_batch()
    before = hook_count(model)
    with steer(model, plan, batch):
        forward(model, batch)
        assert hook_count(model) == before + 3  # two on the decoder, one on the embedding: none at the sites
    assert hook_count(model) == before
    with pytest.raises(ZeroDivisionError), steer(model, plan, batch):
        forward(model, batch)
        1 / 0  # noqa: B018
    assert hook_count(model) == before


def test_hooks_are_gone_after_an_error_inside_a_pass(family: str) -> None:
    model = tiny_model(family)
    plan, batch = random_plan(model), random_batch()
    before = hook_count(model)
    last = list(find_sites(model))[-1].module
    handle = last.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), steer(model, plan, batch):
        forward(model, batch)
    handle.remove()
    assert hook_count(model) == before
    with steer(model, plan, batch):  # and the model can be steered again
        forward(model, batch)
