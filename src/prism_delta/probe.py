"""The one forward pass that `sites` learns a model's layout from."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .errors import UnsupportedModelError
from .sites import CHANNELS, Adapter, Channel, Layout, Site, Sites

_TOKENS = 6
_HOW_TO = (
    "If this family does have such a place, add an entry to prism_delta.sites.ADAPTERS (docs: 'Adding a model family')."
)


@dataclass
class _Call:
    """One call of a submodule of an attention layer."""

    name: str
    module: nn.Module
    given: torch.Tensor | None
    output: torch.Tensor


@dataclass
class _Layer:
    """What one attention layer did in the probe."""

    index: int
    name: str
    module: nn.Module
    calls: list[_Call] = field(default_factory=list)
    entered: list[torch.Tensor] = field(default_factory=list)
    cached: dict[Channel, torch.Tensor] = field(default_factory=dict)  # [batch, head, token, dim]


def probe_sites(model: nn.Module, adapters: Mapping[str, Adapter]) -> Sites:
    """Run the probe and match what it saw."""
    layers, callers = _record(model)
    if not any(layer.cached for layer in layers):
        seen = ", ".join(sorted({type(layer.module).__name__ for layer in layers})) or "none"
        raise UnsupportedModelError(
            "no layer of this model stored keys and values in a KV cache during a short forward pass "
            f"(modules with a layer_idx: {seen}); looked for a causal decoder. {_HOW_TO}"
        )
    by_place: dict[tuple[int, Channel], Site] = {}
    skipped: dict[tuple[int, str], str] = {}
    for layer in layers:
        if not layer.cached:
            skipped[layer.index, "attention"] = "stores no keys of its own (shared or linear)"
            continue
        _match_layer(layer, adapters, by_place, skipped)
    decoder_name, decoder = _common_caller(callers, [site.name for site in by_place.values()])
    return Sites(dict(sorted(by_place.items())), skipped, decoder, decoder_name, _embedding(model))


# --- recording -------------------------------------------------------------------------------------


def _record(model: nn.Module) -> tuple[list[_Layer], dict[str, nn.Module]]:
    """The attention layers with all they did, and the modules that were called with token inputs."""
    layers = _attention_layers(model)
    callers: dict[str, nn.Module] = {}
    ids = torch.arange(1, _TOKENS + 1, device=_input_device(model)).unsqueeze(0) % _vocabulary(model)
    with ExitStack() as stack, torch.no_grad():
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


def _attention_layers(model: nn.Module) -> list[_Layer]:
    found = []
    for name, module in model.named_modules():
        index = getattr(module, "layer_idx", None)
        children = any(True for _ in module.children())
        if isinstance(index, int) and children and not _holds_indexed(module):
            found.append(_Layer(index, name, module))
    return found


def _holds_indexed(module: nn.Module) -> bool:
    """A decoder layer may carry layer_idx too; the attention is the innermost one that does."""
    return any(
        isinstance(getattr(child, "layer_idx", None), int) and any(True for _ in child.children())
        for child in module.modules()
        if child is not module
    )


@contextmanager
def _watch_layer(layer: _Layer) -> Iterator[None]:
    handles = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        layer.entered = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]

    def watch(name: str) -> Any:
        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, torch.Tensor):
                given = args[0] if args and isinstance(args[0], torch.Tensor) else None
                layer.calls.append(_Call(f"{layer.name}.{name}", module, given, output))

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


def _recording_cache(model: nn.Module, layers: Mapping[int, _Layer]) -> Any:
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


# --- matching --------------------------------------------------------------------------------------


def _match_layer(
    layer: _Layer,
    adapters: Mapping[str, Adapter],
    by_place: dict[tuple[int, Channel], Site],
    skipped: dict[tuple[int, str], str],
) -> None:
    if not all(bool(torch.isfinite(tensor).all()) for tensor in layer.cached.values()):
        raise UnsupportedModelError(
            f"layer {layer.index} computes NaN or infinite keys or values; the weights are damaged, or overflow in "
            "this precision: load the model in float32 or bfloat16"
        )
    adapter = adapters.get(type(layer.module).__name__)
    matches: dict[Channel, tuple[_Call, Layout]] = {}
    for channel in CHANNELS:
        found = _by_adapter(layer, channel, adapter) if adapter else _by_structure(layer, channel)
        if found is not None:
            matches[channel] = found
    if "key" not in matches:
        tried = ", ".join(f"{call.name.rsplit('.', 1)[-1]} {list(call.output.shape)}" for call in layer.calls)
        raise UnsupportedModelError(
            f"layer {layer.index} ({type(layer.module).__name__}): no submodule puts out the pre-RoPE keys; looked for "
            f"the cached key of position 0, {list(layer.cached['key'].shape)}, in: {tried or 'no submodules'}. "
            f"Compressed (MLA) keys, and keys normalised after RoPE, cannot be edited this way. {_HOW_TO}"
        )
    if "value" in matches and _feeds_key(matches["value"], matches["key"]):
        del matches["value"]
        skipped[layer.index, "value"] = "is made from the same tensor as the key"
    elif "value" not in matches:
        skipped[layer.index, "value"] = "no submodule puts out the cached values"
    for channel, (call, layout) in matches.items():
        by_place[layer.index, channel] = Site(layer.index, channel, call.name, call.module, layout)


def _by_structure(layer: _Layer, channel: Channel) -> tuple[_Call, Layout] | None:
    """The last submodule whose output is what the cache holds."""
    times = {id(call.module): 0 for call in layer.calls}
    for call in layer.calls:
        times[id(call.module)] += 1
    for call in reversed(layer.calls):
        if times[id(call.module)] > 1:  # shared between query and key: a hook could not tell them apart
            continue
        layout = match_layout(call.output, layer.cached[channel], channel)
        if layout is not None and (channel == "value" or not _is_after_rope(layer, call, layout)):
            return call, layout
    return None


def _by_adapter(layer: _Layer, channel: Channel, adapter: Adapter) -> tuple[_Call, Layout] | None:
    places = adapter(layer.module)
    if channel not in places:
        return None
    name, layout = places[channel]
    for call in layer.calls:
        if call.name == f"{layer.name}.{name}" and _agrees(layout.view(call.output), layer.cached[channel], channel):
            return call, layout
    raise UnsupportedModelError(
        f"the adapter for {type(layer.module).__name__} says {name} puts out the {channel} of layer {layer.index}, "
        "but the KV cache holds something else"
    )


def match_layout(output: torch.Tensor, cached: torch.Tensor, channel: Channel) -> Layout | None:
    """The layout under which `output` holds the cached tensor [batch, head, token, dim], if any."""
    batch, heads, tokens, dim = cached.shape
    if output.device.type == "meta" or output.shape[0] != batch or output.ndim not in (3, 4):
        return None
    candidates: list[Layout] = []
    if output.ndim == 4:
        if output.shape == (batch, tokens, heads, dim):
            candidates.append(Layout("token_major", heads, dim))
        if output.shape == (batch, heads, tokens, dim):
            candidates.append(Layout("head_major", heads, dim))
    elif output.shape[1] == tokens and output.shape[2] >= heads * dim:
        candidates += _flat_candidates(output, cached, channel)
    for layout in candidates:
        if _agrees(layout.view(output), cached, channel):
            return layout
    return None


def _flat_candidates(output: torch.Tensor, cached: torch.Tensor, channel: Channel) -> list[Layout]:
    """Layouts whose first head lies where its cached row is found; the stride follows from the second."""
    _, heads, _, dim = cached.shape
    row = output[0, 0].to(cached.device)
    width = row.shape[0]
    starts = _places_of(cached[0, 0, 0], row, channel)
    if heads == 1:
        return [Layout("flat", 1, dim, place, dim, 0) for place in starts]
    layouts = []
    seconds = _places_of(cached[0, 1, 0], row, channel) if starts else []
    for place in starts:
        for stride in (second - place for second in seconds):
            # The view needs whole strides: begin them early enough that the last one ends in time.
            inner = max(0, place + heads * stride - width)
            if stride >= dim and inner <= place and inner + dim <= stride:
                layouts.append(Layout("flat", heads, dim, place - inner, stride, inner))
    return layouts


def _places_of(wanted: torch.Tensor, row: torch.Tensor, channel: Channel) -> list[int]:
    """Every column at which `wanted` [dim] stands in `row` [width]."""
    windows = row.unfold(0, wanted.shape[0], 1)
    near = _cosines(windows, wanted) > 0.99
    return [place for place in near.nonzero().flatten().tolist() if _same_row(windows[place], wanted, channel)]


def _cosines(rows: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(rows.float(), other.float().unsqueeze(0), dim=-1)


def _agrees(view: torch.Tensor, cached: torch.Tensor, channel: Channel) -> bool:
    """Values must be equal everywhere; keys at position 0, up to RoPE's own constant factor."""
    if view.transpose(1, 2).shape != cached.shape:
        return False
    if channel == "value":
        return torch.equal(view.transpose(1, 2).to(cached.device), cached)
    return _same_row(view[0, 0].flatten(), cached[0, :, 0].flatten(), channel)


def _same_row(found: torch.Tensor, stored: torch.Tensor, channel: Channel) -> bool:
    found, stored = found.to(stored.device), stored
    if channel == "value":
        return torch.equal(found, stored)
    left, right = found.double(), stored.double()
    size = left.norm()
    if not torch.isfinite(size) or size == 0:
        return False
    ratio = float(right.norm() / size)
    tolerance = max(1e-5, 4 * torch.finfo(found.dtype).eps)
    return 0.1 < ratio < 10 and bool((left * ratio - right).norm() <= tolerance * right.norm())


def _is_after_rope(layer: _Layer, call: _Call, layout: Layout) -> bool:
    """Whether the module got its input from outside any submodule, that is from the rotation.

    Only asked where the output equals the cached key at every position; otherwise RoPE follows.
    """
    view = layout.view(call.output).transpose(1, 2)
    if not torch.equal(view.to(layer.cached["key"].device), layer.cached["key"]):
        return False
    if call.given is None:
        return True
    earlier = layer.entered + [other.output for other in layer.calls[: layer.calls.index(call)]]
    return not any(_same_numbers(call.given, tensor) for tensor in earlier)


def _feeds_key(value: tuple[_Call, Layout], key: tuple[_Call, Layout]) -> bool:
    """Whether editing the value's site would change the key as well."""
    if value[0] is key[0]:
        return value[1] == key[1]
    return key[0].given is not None and _same_numbers(key[0].given, value[0].output)


def _same_numbers(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal up to order: one is a view or transpose of the other."""
    if left.numel() != right.numel() or left.device != right.device:
        return False
    return torch.equal(left.flatten().sort().values, right.flatten().sort().values)


def _common_caller(callers: Mapping[str, nn.Module], names: list[str]) -> tuple[str, nn.Module]:
    """The innermost module that was called with tokens and holds every site."""
    holders = [name for name in callers if all(not name or site.startswith(f"{name}.") for site in names)]
    best = max(holders, key=len)
    return best, callers[best]
