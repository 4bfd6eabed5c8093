"""The one forward pass that `sites` learns a model's layout from."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from .errors import UnsupportedModelError
from .matching import HOW_TO, Call, LayerRecord, match_layer
from .sites import Adapter, Channel, Site, Sites

_TOKENS = 6


def probe_sites(model: nn.Module, adapters: Mapping[str, Adapter]) -> Sites:
    """Run the probe and match what it saw."""
    layers, callers = _record(model)
    if not any(layer.cached for layer in layers):
        seen = ", ".join(sorted({type(layer.module).__name__ for layer in layers})) or "none"
        raise UnsupportedModelError(
            "no layer of this model stored keys and values in a KV cache during a short forward pass "
            f"(modules with a layer_idx: {seen}); looked for a causal decoder. {HOW_TO}"
        )
    by_place: dict[tuple[int, Channel], Site] = {}
    skipped: dict[tuple[int, str], str] = {}
    for layer in layers:
        if not layer.cached:
            skipped[layer.index, "attention"] = "stores no keys of its own (shared or linear)"
            continue
        match_layer(layer, adapters, by_place, skipped)
    decoder_name, decoder = _common_caller(callers, [site.name for site in by_place.values()])
    return Sites(dict(sorted(by_place.items())), skipped, decoder, decoder_name, _embedding(model))


# --- recording -------------------------------------------------------------------------------------


def _record(model: nn.Module) -> tuple[list[LayerRecord], dict[str, nn.Module]]:
    """The attention layers with all they did, and the modules that were called with token inputs."""
    layers = _attention_layers(model)
    callers: dict[str, nn.Module] = {}
    ids = torch.arange(1, _TOKENS + 1, device=_input_device(model)).unsqueeze(0) % _vocabulary(model)
    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(_evaluating(model))
        for layer in layers:
            stack.enter_context(_watch_layer(layer))
        for name, module in model.named_modules():
            if name and _takes_tokens(module):
                stack.enter_context(_watch_caller(name, module, callers))
        cache = _recording_cache(model, {layer.index: layer for layer in layers})
        try:
            model(input_ids=ids, attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=True)
        except Exception as error:
            raise UnsupportedModelError(
                f"a forward pass of {_TOKENS} tokens with a KV cache failed ({type(error).__name__}: {error}); "
                "expected a transformers causal language model"
            ) from error
    callers[""] = model
    return layers, callers


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """No dropout, and no gradient checkpointing, which would refuse the cache; every module's mode comes back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _attention_layers(model: nn.Module) -> list[LayerRecord]:
    found = []
    for name, module in model.named_modules():
        index = getattr(module, "layer_idx", None)
        children = any(True for _ in module.children())
        if isinstance(index, int) and children and not _holds_indexed(module):
            found.append(LayerRecord(index, name, module))
    return found


def _holds_indexed(module: nn.Module) -> bool:
    """A decoder layer may carry layer_idx too; the attention is the innermost one that does."""
    return any(
        isinstance(getattr(child, "layer_idx", None), int) and any(True for _ in child.children())
        for child in module.modules()
        if child is not module
    )


@contextmanager
def _watch_layer(layer: LayerRecord) -> Iterator[None]:
    handles = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        layer.entered = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]

    def watch(name: str) -> Any:
        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, torch.Tensor):
                given = args[0] if args and isinstance(args[0], torch.Tensor) else None
                layer.calls.append(Call(f"{layer.name}.{name}", module, given, output))

        return after

    handles.append(layer.module.register_forward_pre_hook(enter, with_kwargs=True))
    for name, module in layer.module.named_modules():
        if name:
            handles.append(module.register_forward_hook(watch(name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _takes_tokens(module: nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters
    return "input_ids" in parameters or "inputs_embeds" in parameters


@contextmanager
def _watch_caller(name: str, module: nn.Module, callers: dict[str, nn.Module]) -> Iterator[None]:
    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        callers[name] = module

    handle = module.register_forward_pre_hook(enter)
    try:
        yield
    finally:
        handle.remove()


def _recording_cache(model: nn.Module, layers: Mapping[int, LayerRecord]) -> Any:
    """A KV cache that also notes what each layer stored."""
    from transformers import DynamicCache, PreTrainedConfig

    config = getattr(model, "config", None)
    if not isinstance(config, PreTrainedConfig):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no transformers config; expected a transformers causal language model"
        )
    cache: Any = DynamicCache(config=config.get_text_config(decoder=True))
    plain_update = cache.update

    def update(keys: torch.Tensor, values: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if layer_idx in layers:
            layers[layer_idx].cached = {"key": keys.detach().clone(), "value": values.detach().clone()}
        return plain_update(keys, values, layer_idx, *args, **kwargs)

    cache.update = update
    return cache


def _embedding(model: nn.Module) -> nn.Module:
    getter: Any = getattr(model, "get_input_embeddings", None)
    embedding = getter() if getter is not None else None
    if not isinstance(embedding, nn.Module):
        raise UnsupportedModelError(f"{type(model).__name__} has no input embeddings; expected a language model")
    return embedding


def _vocabulary(model: nn.Module) -> int:
    return int(getattr(_embedding(model), "num_embeddings", 0)) or 32


def _input_device(model: nn.Module) -> torch.device:
    weight = getattr(_embedding(model), "weight", None)
    device = weight.device if isinstance(weight, torch.Tensor) else torch.device("cpu")
    # Offloaded weights sit on "meta" between calls; accelerate moves the inputs itself.
    return torch.device("cpu") if device.type == "meta" else device


def _common_caller(callers: Mapping[str, nn.Module], names: list[str]) -> tuple[str, nn.Module]:
    """The innermost module that was called with tokens and holds every site."""
    holders = [name for name in callers if all(not name or site.startswith(f"{name}.") for site in names)]
    best = max(holders, key=len)
    return best, callers[best]
