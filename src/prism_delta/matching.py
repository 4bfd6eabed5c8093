"""Which submodule of an attention layer puts out its keys and values, judged by what the probe recorded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from .errors import UnsupportedModelError
from .sites import CHANNELS, Adapter, Channel, Layout, Site

HOW_TO = (
    "If this family does have such a place, add an entry to prism_delta.sites.ADAPTERS (docs: 'Adding a model family')."
)


@dataclass
class Call:
    """One call of a submodule of an attention layer."""

    name: str
    module: nn.Module
    given: torch.Tensor | None
    output: torch.Tensor


@dataclass
class LayerRecord:
    """What one attention layer did in the probe."""

    index: int
    name: str
    module: nn.Module
    calls: list[Call] = field(default_factory=list)
    entered: list[torch.Tensor] = field(default_factory=list)
    cached: dict[Channel, torch.Tensor] = field(default_factory=dict)  # [batch, head, token, dim]


def match_layer(
    layer: LayerRecord,
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
    matches: dict[Channel, tuple[Call, Layout]] = {}
    for channel in CHANNELS:
        found = _by_adapter(layer, channel, adapter) if adapter else _by_structure(layer, channel)
        if found is not None:
            matches[channel] = found
    if "key" not in matches:
        tried = ", ".join(f"{call.name.rsplit('.', 1)[-1]} {list(call.output.shape)}" for call in layer.calls)
        raise UnsupportedModelError(
            f"layer {layer.index} ({type(layer.module).__name__}): no submodule puts out the pre-RoPE keys; looked for "
            f"the cached key of position 0, {list(layer.cached['key'].shape)}, in: {tried or 'no submodules'}. "
            f"Compressed (MLA) keys, and keys normalised after RoPE, cannot be edited this way. {HOW_TO}"
        )
    if "value" in matches and _feeds_key(matches["value"], matches["key"]):
        del matches["value"]
        skipped[layer.index, "value"] = "is made from the same tensor as the key"
    elif "value" not in matches:
        skipped[layer.index, "value"] = "no submodule puts out the cached values"
    for channel, (call, layout) in matches.items():
        by_place[layer.index, channel] = Site(layer.index, channel, call.name, call.module, layout)


def _by_structure(layer: LayerRecord, channel: Channel) -> tuple[Call, Layout] | None:
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


def _by_adapter(layer: LayerRecord, channel: Channel, adapter: Adapter) -> tuple[Call, Layout] | None:
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


def _is_after_rope(layer: LayerRecord, call: Call, layout: Layout) -> bool:
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


def _feeds_key(value: tuple[Call, Layout], key: tuple[Call, Layout]) -> bool:
    """Whether editing the value's site would change the key as well."""
    if value[0] is key[0]:
        return value[1] == key[1]
    return key[0].given is not None and _same_numbers(key[0].given, value[0].output)


def _same_numbers(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal up to order: one is a view or transpose of the other."""
    if left.numel() != right.numel() or left.device != right.device:
        return False
    return torch.equal(left.flatten().sort().values, right.flatten().sort().values)
