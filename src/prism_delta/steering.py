"""steer(model, plan, batch): the one context manager.

A hook on the decoder asks, at each forward pass, whether highlighted prompt tokens are among those being
processed. If so it hooks the sites for that pass alone; a decode step therefore runs the plain model.
Tokens are known by their absolute slot (cache length + place in the pass), so chunks, reused prefixes,
beams and several returned sequences need nothing special.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .batch import Batch
from .edit import edit_rows
from .errors import BatchError, SteeringError, UnsupportedModelError
from .plan import Place, Plan
from .rows import TokenRows, check_history, mark_cache
from .sites import Sites, refuse_compiled

_steered: weakref.WeakKeyDictionary[nn.Module, _Block] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@dataclass
class Trace:
    """What was really edited: token slots of each prompt in the batch, layers, and how many passes did it."""

    positions: list[list[int]] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    channels: list[str] = field(default_factory=list)
    edited_passes: int = 0
    passes: int = 0


@contextmanager
def steer(model: nn.Module, plan: Plan, batch: Batch, *, strength: float = 1.0) -> Iterator[Trace]:
    """Edit the highlighted prompt tokens of `batch` in every forward or generate call of the block.

    strength multiplies all strengths of the batch; 0 leaves the plain model. The model may be run any number
    of times, on this batch only. Raises SteeringError where an edit asked for cannot be made exactly.
    """
    sites = plan.check(model)
    strengths = batch.strengths if strength == 1 else batch.strengths * float(strength)
    if not bool(torch.isfinite(strengths).all()):
        raise BatchError(f"strength must be finite, found {strength}")
    trace = Trace(positions=[[] for _ in range(len(batch))])
    if not plan.edits or not bool(strengths.any()):
        yield trace
        return
    refuse_compiled(model)
    block = _Block(sites, plan, batch, strengths, trace)
    with _lock:
        if sites.decoder in _steered:
            raise SteeringError(
                "this model is already being steered; end that block first (combine edits in one Plan, and run "
                "requests of different plans one after the other)"
            )
        _steered[sites.decoder] = block
    try:
        block.install()
        yield trace
    finally:
        block.remove()
        with _lock:
            del _steered[sites.decoder]
    block.check_complete()


class _Block:
    """The state of one steer block."""

    def __init__(self, sites: Sites, plan: Plan, batch: Batch, strengths: torch.Tensor, trace: Trace) -> None:
        self.sites, self.plan, self.batch, self.trace = sites, plan, batch, trace
        self.strengths = strengths
        self.length = int(strengths.shape[1])
        self.thread = threading.get_ident()
        parameters = list(inspect.signature(sites.decoder.forward).parameters)
        self.places = {name: number for number, name in enumerate(parameters)}
        self.permanent: list[Any] = []
        self.passing: list[Any] = []  # site hooks of the current pass
        self.rows: TokenRows | None = None
        self.fired: set[Place] = set()
        self.span: tuple[int, int, Any] = (0, 0, None)  # slots and cache of the current pass
        self.seen_ids: torch.Tensor | None = None
        self.mismatch: torch.Tensor | None = None
        self.reached = 0
        self.recorded: list[TokenRows] = []
        self.known_cache: weakref.ref[Any] | None = None
        self.planned: dict[tuple[int, int, int], TokenRows | None] = {}

    # --- hooks ---------------------------------------------------------------------------------

    def install(self) -> None:
        decoder, keep = self.sites.decoder, self.permanent.append  # one by one: an install may fail half way
        keep(self.sites.embedding.register_forward_pre_hook(self._see_ids))
        keep(decoder.register_forward_pre_hook(self._before, with_kwargs=True))
        keep(decoder.register_forward_hook(self._after, always_call=True))

    def remove(self) -> None:
        for handle in (*self.passing, *self.permanent):
            handle.remove()
        self.passing, self.permanent = [], []

    def _see_ids(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.seen_ids = args[0] if args and isinstance(args[0], torch.Tensor) else None

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan the pass; hook the sites if highlighted tokens are in it."""
        self._refuse_foreign()
        if module.training and getattr(module, "gradient_checkpointing", False) and torch.is_grad_enabled():
            raise SteeringError(
                "gradient checkpointing runs layers again after the pass, when their edits are gone; switch it off to "
                "train while steering"
            )
        given = self._argument("input_ids", args, kwargs)
        given = self._argument("inputs_embeds", args, kwargs) if given is None else given
        if given is None:
            raise SteeringError("the decoder was called without input_ids or inputs_embeds")
        cache = self._argument("past_key_values", args, kwargs)
        samples, tokens = int(given.shape[0]), int(given.shape[1])
        start = self._cached(cache)
        self.trace.passes += 1
        self.span = (start, start + tokens, cache)
        self.rows = None
        if start >= self.length and self._is_known(cache):
            return
        if start and not self._is_known(cache):
            check_history(cache, self.plan.fingerprint, self.strengths[:, :start])
            self.reached = max(self.reached, min(start, self.length))
            self.known_cache = weakref.ref(cache)
        key = (start, tokens, self._copies(samples))
        if key not in self.planned:
            self.planned[key] = TokenRows.of_pass(self.strengths, *key)
        self.rows = self.planned[key]
        if self.rows is not None:
            self.fired = set()
            for place in self.plan.edits:
                self.passing.append(self.sites[place].module.register_forward_hook(self._editor(place)))

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Unhook the sites and make sure that everything planned has happened."""
        for handle in self.passing:
            handle.remove()
        self.passing = []
        seen, self.seen_ids = self.seen_ids, None
        if output is None:  # the pass failed; its own error is on the way
            return
        start, end, cache = self.span
        cache = _new_cache(output) if cache is None else cache
        if self.rows is not None:
            self._check_pass(self.rows, seen)
            self._record(self.rows)
        if start < self.length:
            self.reached = max(self.reached, min(end, self.length)) if start <= self.reached else self.reached
            if cache is not None:
                mark_cache(cache, self.plan.fingerprint, self.strengths)
                self.known_cache = weakref.ref(cache)

    def _editor(self, place: Place) -> Any:
        site = self.sites[place]

        def edit(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            self._refuse_foreign()
            if self.rows is None:
                return
            dtype = torch.promote_types(output.dtype, torch.float32)
            samples, places, strengths = self.rows.on(output.device, dtype)
            matrices = self.plan.edit_on(place, output.device, dtype)
            edit_rows(site.layout.view(output), (samples, places), strengths, matrices)
            self.fired.add(place)

        return edit

    def _refuse_foreign(self) -> None:
        if torch.compiler.is_compiling():
            raise UnsupportedModelError(
                "the model is being compiled inside a steer block; compiled graphs ignore hooks. Pass "
                "disable_compile=True to generate, or run eagerly"
            )
        if threading.get_ident() != self.thread:
            raise SteeringError(
                "another thread runs this model while it is being steered; steer and run in the same thread, one "
                "request at a time (Highlighter does this for you)"
            )

    # --- planning a pass -------------------------------------------------------------------------

    def _argument(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in kwargs:
            return kwargs[name]
        place = self.places.get(name, len(args))
        return args[place] if place < len(args) else None

    def _cached(self, cache: Any) -> int:
        """How many slots the cache holds before this pass."""
        if cache is None:
            return 0
        length = cache.get_seq_length()
        if isinstance(length, torch.Tensor) and self._is_known(cache) and self.reached >= self.length:
            return self.length  # the prompt is behind us: do not make the host wait to learn by how much
        return int(length)

    def _is_known(self, cache: Any) -> bool:
        return self.known_cache is not None and cache is not None and self.known_cache() is cache

    def _copies(self, samples: int) -> int:
        copies, rest = divmod(samples, len(self.batch))
        if rest or not copies:
            raise SteeringError(
                f"the model was run on {samples} sequences, the batch has {len(self.batch)}; run it on the batch that "
                "was given to steer (beams and returned sequences may multiply it)"
            )
        return copies

    # --- after a pass ----------------------------------------------------------------------------

    def _check_pass(self, rows: TokenRows, seen: torch.Tensor | None) -> None:
        missing = sorted(set(self.plan.edits) - self.fired)
        if missing:
            raise SteeringError(
                f"{len(missing)} of {len(self.plan.edits)} edits did not happen in this pass, first: layer "
                f"{missing[0][0]} {missing[0][1]}; the model ran a path its probe did not show"
            )
        tokens = self.span[1] - self.span[0]
        if seen is None or seen.ndim != 2 or seen.shape[1] != tokens:
            return  # embeddings were given: there are no token ids to compare
        expected = self.batch.input_ids[rows.origin, rows.slots].to(seen.device)
        found = seen[rows.samples.to(seen.device), rows.places.to(seen.device)]
        wrong = (found != expected).any()
        if seen.device.type == "cpu":
            self._raise_if_other_tokens(wrong)
        else:  # looked at when the block ends, so that the host need not wait now
            self.mismatch = wrong if self.mismatch is None else self.mismatch | wrong

    def _record(self, rows: TokenRows) -> None:
        self.trace.edited_passes += 1
        if rows not in self.recorded:
            self.recorded.append(rows)
            for origin, slot in set(zip(rows.origin.tolist(), rows.slots.tolist(), strict=True)):
                self.trace.positions[origin].append(slot)
            self.trace.positions = [sorted(set(slots)) for slots in self.trace.positions]
        self.trace.layers = sorted({layer for layer, _ in self.fired})
        self.trace.channels = sorted({channel for _, channel in self.fired})

    def _raise_if_other_tokens(self, wrong: torch.Tensor) -> None:
        if bool(wrong):
            raise SteeringError(
                "the model was run on other tokens than the batch given to steer has at the highlighted positions"
            )

    def check_complete(self) -> None:
        """At the end of a block: everything highlighted has passed through the model."""
        if self.mismatch is not None:
            self._raise_if_other_tokens(self.mismatch)
        late = self.strengths[:, self.reached :].nonzero()
        if len(late):
            raise SteeringError(
                f"{len(late)} highlighted tokens never passed through the model in this steer block (it ran "
                f"{self.trace.passes} passes, up to token {self.reached} of {self.length}); run the model on "
                "batch.inputs inside the block"
            )


def _new_cache(output: Any) -> Any:
    """The KV cache a pass made because it was given none, whatever form its output has."""
    parts = output if isinstance(output, tuple) else (getattr(output, "past_key_values", None),)
    return next((part for part in parts if hasattr(part, "get_seq_length")), None)
