"""steer(): against an independent oracle, and everything it must refuse."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, StaticCache

from families import tiny_model
from helpers import forward, generate, hook_count, random_batch, random_plan, scaling_plan
from prism_delta import Batch, Plan, find_sites, steer
from prism_delta.errors import BatchError, PlanMismatchError, SteeringError, UnsupportedModelError

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class EditedProjection(nn.Module):
    """An oracle that shares nothing with the kernel: a projection followed by the formula, token by token."""

    def __init__(self, plain: nn.Linear, matrix: torch.Tensor, strengths: torch.Tensor) -> None:
        super().__init__()
        self.plain, self.matrix, self.strengths = plain, matrix, strengths

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = self.plain(hidden)
        heads, dim = self.matrix.shape[:2]
        edited = output.clone()
        for row, token in self.strengths.nonzero().tolist():
            for head in range(heads):
                part = slice(head * dim, (head + 1) * dim)
                x = output[row, token, part]
                edited[row, token, part] = x + self.strengths[row, token] * (x @ self.matrix[head])
        return edited


@pytest.mark.parametrize("channels", [("key",), ("value",), ("key", "value")])
def test_equals_a_model_rebuilt_by_the_formula(channels: tuple[str, ...]) -> None:
    model, oracle = tiny_model("llama"), tiny_model("llama")
    plan = random_plan(model, channels=channels)
    batch = random_batch(rows=2)
    batch.strengths[1] = torch.tensor([0, 0, 0, 0, 3.0, -1, 0, 0.25, 0])
    for layer, block in enumerate(oracle.model.layers):
        for channel in channels:
            name = f"{channel[0]}_proj"
            plain = getattr(block.self_attn, name)
            setattr(block.self_attn, name, EditedProjection(plain, plan.matrix(layer, channel), batch.strengths))
    with steer(model, plan, batch):
        torch.testing.assert_close(forward(model, batch).logits, forward(oracle, batch).logits, **CLOSE)


def test_strength_multiplies_the_strengths_of_the_batch() -> None:
    model = tiny_model("qwen3")
    plan, batch = random_plan(model), random_batch()
    doubled = Batch(batch.input_ids, batch.attention_mask, 2 * batch.strengths)
    with steer(model, plan, batch, strength=2.0):
        left = forward(model, batch).logits
    with steer(model, plan, doubled):
        right = forward(model, doubled).logits
    assert torch.equal(left, right)


def test_static_cache() -> None:
    model = tiny_model("llama")
    plan, batch = random_plan(model), random_batch(rows=2)
    with steer(model, plan, batch):
        expected = generate(model, batch)
        static = generate(model, batch, past_key_values=StaticCache(config=model.config, max_cache_len=32))
    torch.testing.assert_close(static, expected, **CLOSE)


@pytest.mark.parametrize("return_dict", [True, False])
def test_a_decode_loop_written_by_hand(return_dict: bool) -> None:
    model = tiny_model("llama")
    plan, batch = random_plan(model), random_batch()
    with steer(model, plan, batch) as trace, torch.no_grad():
        expected = generate(model, batch, tokens=3)
        output = model(**batch.inputs, use_cache=True, return_dict=return_dict)
        for step in range(3):
            torch.testing.assert_close(output[0][:, -1], expected[step], **CLOSE)
            cache = output[1] if not return_dict else output.past_key_values
            token = output[0][:, -1:].argmax(-1)
            output = model(token, past_key_values=cache, use_cache=True, return_dict=return_dict)
    assert trace.positions == [[2, 3, 6]]


def test_decoding_in_a_second_block_checks_the_cache_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import prism_delta.steering as steering

    model = tiny_model("llama")
    plan, batch = random_plan(model), random_batch()
    with steer(model, plan, batch):
        cache = forward(model, batch, use_cache=True).past_key_values
    checked = []
    plain = steering.check_history
    monkeypatch.setattr(steering, "check_history", lambda *args: (checked.append(1), plain(*args)))
    with steer(model, plan, batch):
        for token in (5, 6, 7):
            model(torch.tensor([[token]]), past_key_values=cache)
    assert checked == [1]


def test_gradients_flow_through_the_edit() -> None:
    model = tiny_model("gemma3_text")
    batch = random_batch()
    with steer(model, random_plan(model), batch):
        model(**batch.inputs).logits.sum().backward()
    weight = model.model.layers[0].self_attn.k_proj.weight
    assert weight.grad is not None
    assert bool(weight.grad.any())


def test_gradient_checkpointing_is_refused() -> None:
    model = tiny_model("llama").train()
    model.gradient_checkpointing_enable()
    batch = random_batch()
    with pytest.raises(SteeringError, match="checkpointing"), steer(model, random_plan(model), batch):
        model(**batch.inputs)


# --- what must not pass silently -------------------------------------------------------------------


def test_a_model_cannot_be_steered_twice_at_once() -> None:
    model = tiny_model("llama")
    plan, batch = random_plan(model), random_batch()
    with steer(model, plan, batch):
        with pytest.raises(SteeringError, match="already being steered"), steer(model, plan, batch):
            pass
        forward(model, batch)  # the outer block is unharmed


def test_another_thread_cannot_run_a_model_that_is_being_steered() -> None:
    model = tiny_model("llama")
    batch = random_batch()
    caught: list[BaseException] = []

    def run() -> None:
        try:
            forward(model, batch)
        except SteeringError as error:
            caught.append(error)

    with steer(model, random_plan(model), batch):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        forward(model, batch)
    assert "another thread" in str(caught[0])


def test_other_tokens_than_those_of_the_batch() -> None:
    model = tiny_model("llama")
    with pytest.raises(SteeringError, match="other tokens"), steer(model, random_plan(model), random_batch()):
        forward(model, random_batch(seed=3))


def test_another_number_of_prompts() -> None:
    model = tiny_model("llama")
    with (
        pytest.raises(SteeringError, match="3 sequences, the batch has 2"),
        steer(model, random_plan(model), random_batch(rows=2)),
    ):
        forward(model, random_batch(rows=3))


@pytest.mark.parametrize("run", [0, 4])
def test_a_highlight_that_never_reaches_the_model(run: int) -> None:
    model = tiny_model("llama")
    batch = random_batch()
    with pytest.raises(SteeringError, match="never passed"), steer(model, random_plan(model), batch):
        if run:
            model(batch.input_ids[:, :run])


def _filled(model: Any, plan: Plan, batch: Batch, strength: float | None) -> DynamicCache:
    cache = DynamicCache()
    prefix = Batch(batch.input_ids[:, :5], batch.attention_mask[:, :5], batch.strengths[:, :5])
    if strength is None:
        forward(model, prefix, past_key_values=cache)
    else:
        with steer(model, plan, prefix, strength=strength):
            forward(model, prefix, past_key_values=cache)
    return cache


@pytest.mark.parametrize("how", ["plain", "other strength", "other plan"])
def test_a_cache_filled_otherwise_is_refused(how: str) -> None:
    model = tiny_model("llama")
    plan, batch = random_plan(model), random_batch()
    used = random_plan(model, size=0.1) if how == "other plan" else plan
    cache = _filled(model, used, batch, None if how == "plain" else 2.0 if how == "other strength" else 1.0)
    with pytest.raises(SteeringError, match="KV cache"), steer(model, plan, batch):
        generate(model, batch, past_key_values=cache)


def test_a_copied_prefix_cache_serves_many_prompts() -> None:
    """One prefix filled once, copied for each of several continuations."""
    model = tiny_model("llama")
    plan = random_plan(model)
    batch = random_batch()
    prefix = _filled(model, plan, batch, 1.0)
    for seed in (3, 4):
        ids = torch.cat([batch.input_ids[:, :5], random_batch(tokens=4, seed=seed).input_ids], dim=1)
        other = Batch.from_ids(ids, batch.strengths)
        with steer(model, plan, other):
            reused = generate(model, other, past_key_values=copy.deepcopy(prefix))
            torch.testing.assert_close(reused, generate(model, other), **CLOSE)


def test_a_site_that_no_longer_runs_is_noticed() -> None:
    model = tiny_model("llama")
    plan, batch = random_plan(model), random_batch()
    find_sites(model)
    attention = model.model.layers[1].self_attn
    plain = attention.k_proj
    attention.k_proj.forward_original = plain.forward
    kept = find_sites(model)
    with pytest.raises(SteeringError, match="did not happen"), steer(model, plan, batch):
        assert find_sites(model) is kept
        attention._modules["k_proj"] = copy.deepcopy(plain)  # exchanged while steering
        forward(model, batch)


@pytest.mark.parametrize("strength", [float("nan"), float("inf")])
def test_strength_must_be_finite(strength: float) -> None:
    model = tiny_model("llama")
    with pytest.raises(BatchError, match="finite"), steer(model, random_plan(model), random_batch(), strength=strength):
        pass


def test_plan_of_another_model_names_both_shapes() -> None:
    plan = scaling_plan(tiny_model("qwen3"), 1.0, "key")
    model = tiny_model("llama")
    before = hook_count(model)
    with pytest.raises(PlanMismatchError, match=r"2 heads x 16.*2 heads x 8"), steer(model, plan, random_batch()):
        pass
    assert hook_count(model) == before


def test_failed_install_leaves_no_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    plan, batch = random_plan(model), random_batch()
    before = hook_count(model)
    sites = find_sites(model)
    monkeypatch.setattr(sites.decoder, "register_forward_hook", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError), steer(model, plan, batch):
        pass
    monkeypatch.undo()
    assert hook_count(model) == before
    with steer(model, plan, batch):
        forward(model, batch)


# --- wrapped models --------------------------------------------------------------------------------


def test_peft_model_is_steered_behind_its_adapter() -> None:
    from peft import LoraConfig, get_peft_model

    model = tiny_model("llama")
    find_sites(model)
    wrapped = get_peft_model(model, LoraConfig(target_modules=["k_proj", "v_proj"], r=2, init_lora_weights=False))
    wrapped.eval()
    site = find_sites(wrapped)[0, "key"]
    assert site.name.endswith("layers.0.self_attn.k_proj")  # the adapted projection, not its base layer
    batch = random_batch()
    plain, steered = DynamicCache(), DynamicCache()
    forward(wrapped, batch, past_key_values=plain)
    with steer(wrapped, scaling_plan(wrapped, 1.0, "value"), batch):
        forward(wrapped, batch, past_key_values=steered)
        generate(wrapped, batch)
    factor = (1 + batch.strengths)[:, None, :, None]
    assert torch.equal(steered.layers[0].values, plain.layers[0].values * factor)


def test_dispatched_and_offloaded_model(tmp_path: Any) -> None:
    from accelerate import dispatch_model

    model = tiny_model("llama")
    plan, batch = random_plan(model), random_batch()
    with steer(model, plan, batch):
        expected = forward(model, batch).logits
    names = ["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.0", "model.layers.2"]
    places: dict[str, Any] = dict.fromkeys(names, "cpu")
    places["model.layers.1"] = "disk"
    offloaded = dispatch_model(model, places, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    assert offloaded.model.layers[1].self_attn.k_proj.weight.device.type == "meta"
    with steer(offloaded, plan, batch):
        torch.testing.assert_close(forward(offloaded, batch).logits, expected, **CLOSE)


class Int8Linear(nn.Module):
    """A weight-only quantised projection, as quantisation libraries build them: a module of another class."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        scale = plain.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("weight", (plain.weight / scale).round().to(torch.int8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ (self.weight * self.scale).T


def test_quantised_projections() -> None:
    model = tiny_model("llama")
    for block in model.model.layers:
        for name in ("k_proj", "v_proj"):
            setattr(block.self_attn, name, Int8Linear(getattr(block.self_attn, name)))
    batch = random_batch()
    plain, steered = DynamicCache(), DynamicCache()
    forward(model, batch, past_key_values=plain)
    with steer(model, scaling_plan(model, 1.0, "value"), batch):
        forward(model, batch, past_key_values=steered)
    factor = (1 + batch.strengths)[:, None, :, None]
    assert torch.equal(steered.layers[0].values, plain.layers[0].values * factor)


def test_compiled_models_are_refused() -> None:
    model = tiny_model("llama")
    plan, batch = random_plan(model), random_batch()
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(UnsupportedModelError, match=r"torch\.compile"), steer(compiled, plan, batch):
        pass
    model.model.layers[0].compile(backend="eager")
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.0"), steer(model, plan, batch):
        pass


def test_compiling_inside_a_block_is_right_or_refused() -> None:
    model = tiny_model("llama")
    plan, batch = random_plan(model), random_batch()
    with steer(model, plan, batch):
        expected = forward(model, batch).logits
    compiled = torch.compile(model, backend="eager")
    forward(compiled, batch)  # a graph without hooks is now in the compiler's cache
    try:
        with steer(model, plan, batch):
            found = forward(compiled, batch).logits
    except (SteeringError, UnsupportedModelError):
        return
    torch.testing.assert_close(found, expected, **CLOSE)
