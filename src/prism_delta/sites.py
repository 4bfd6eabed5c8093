"""Where a model writes its pre-RoPE keys and its values.

Nothing here knows a model by name. One short forward pass (see `probe`) records what every layer stores
in its KV cache and what every submodule of its attention put out; the submodule whose output *is* the
cached value, and whose output at position 0 (where RoPE turns nothing) is the cached key, is the site.
The comparison also settles the layout, once, from values instead of shapes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import torch
from torch import nn

from .errors import UnsupportedModelError

Channel: TypeAlias = Literal["key", "value"]
CHANNELS: tuple[Channel, ...] = ("key", "value")


@dataclass(frozen=True)
class Layout:
    """How the heads of a channel lie in a module's output.

    kind: "token_major" [batch, token, head, dim], "head_major" [batch, head, token, dim], or
    "flat" [batch, token, width], where head h occupies `dim` columns from `start + h * stride + inner`.
    A plain projection has start 0, stride dim, inner 0; a fused one starts later; an interleaved one
    (query, key, value side by side in each head) has a longer stride.
    """

    kind: Literal["token_major", "head_major", "flat"]
    heads: int
    dim: int
    start: int = 0
    stride: int = 0
    inner: int = 0

    def view(self, output: torch.Tensor) -> torch.Tensor:
        """The heads as a [batch, token, head, dim] view; writing to it writes to `output`."""
        if self.kind == "token_major":
            return output
        if self.kind == "head_major":
            return output.transpose(1, 2)
        columns = output[..., self.start : self.start + self.heads * self.stride]
        by_head = columns.view(*columns.shape[:-1], self.heads, self.stride)
        return by_head[..., self.inner : self.inner + self.dim]


@dataclass(frozen=True)
class Site:
    """One channel of one layer: the module that writes it and how."""

    layer: int
    channel: Channel
    name: str
    module: nn.Module = field(repr=False, compare=False)
    layout: Layout

    @property
    def shape(self) -> tuple[int, int]:
        """(heads, dim)."""
        return self.layout.heads, self.layout.dim


@dataclass(frozen=True)
class Sites:
    """All sites of a model, and what was left out with the reason."""

    by_place: Mapping[tuple[int, Channel], Site]
    skipped: Mapping[tuple[int, str], str]
    decoder: nn.Module = field(repr=False)
    decoder_name: str
    embedding: nn.Module = field(repr=False)

    def __getitem__(self, place: tuple[int, Channel]) -> Site:
        return self.by_place[place]

    def __contains__(self, place: object) -> bool:
        return place in self.by_place

    def __iter__(self) -> Iterator[Site]:
        return iter(self.by_place.values())

    def __len__(self) -> int:
        return len(self.by_place)

    @property
    def layers(self) -> list[int]:
        return sorted({layer for layer, _ in self.by_place})

    def shape(self, channel: Channel) -> dict[int, tuple[int, int]]:
        """(heads, dim) of every layer that has this channel."""
        return {layer: site.shape for (layer, kind), site in self.by_place.items() if kind == channel}

    def describe(self) -> str:
        """A few lines for people: what can be steered, what cannot and why."""
        lines = []
        for channel in CHANNELS:
            shapes = sorted(set(self.shape(channel).values()))
            layers = len(self.shape(channel))
            text = ", ".join(f"{heads} heads x {dim}" for heads, dim in shapes) or "none"
            lines.append(f"{channel}: {layers} layers, {text}")
        lines += [f"left out: layer {layer} {what}: {why}" for (layer, what), why in self.skipped.items()]
        return "\n".join(lines)


Adapter: TypeAlias = Callable[[nn.Module], Mapping[Channel, tuple[str, Layout]]]
"""From an attention module to, per channel, the name of a submodule and the layout of its output."""

ADAPTERS: dict[str, Adapter] = {}
"""For a family whose sites the structural search does not find: class name of its attention -> Adapter.
What an adapter says is verified by the same probe."""

_found: weakref.WeakKeyDictionary[nn.Module, Sites] = weakref.WeakKeyDictionary()
_ITSELF = nn.Identity()  # stands for a decoder that is the model: a strong reference would keep its own key alive


def find_sites(model: nn.Module) -> Sites:
    """Find every site of a causal decoder, or raise UnsupportedModelError.

    The result is remembered for the model object and found again if its modules were exchanged since
    (an adapter was added, layers were quantised).
    """
    known = _found.get(model)
    if known is not None and _still_there(model, known):
        return replace(known, decoder=model) if known.decoder is _ITSELF else known
    refuse_compiled(model)
    from .probe import probe_sites

    sites = probe_sites(model, ADAPTERS)
    _found[model] = replace(sites, decoder=_ITSELF) if sites.decoder is model else sites
    return sites


def _still_there(model: nn.Module, sites: Sites) -> bool:
    modules = dict(model.named_modules(remove_duplicate=False))
    return all(modules.get(site.name) is site.module for site in sites)


def refuse_compiled(model: nn.Module) -> None:
    """torch.compile ignores hooks added after compilation, so a compiled model cannot be steered exactly."""
    from torch._dynamo.eval_frame import OptimizedModule

    for name, module in model.named_modules():
        if isinstance(module, OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None:
            raise UnsupportedModelError(
                f"{name or 'the model'} was compiled with torch.compile, which ignores hooks added later; steer the "
                "original module (model._orig_mod), compile after this library is done, or run eagerly"
            )
