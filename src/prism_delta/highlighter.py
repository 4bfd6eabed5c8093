"""The five-line facade: load once, then generate with spans that matter."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from queue import Queue
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import nn

from .batch import Batch, encode
from .errors import ParameterError, PromptError, PromptTooLongError
from .examples import CaptureOptions
from .markup import Markup
from .methods import get_method
from .moments import Moments
from .pairs import Pairs
from .plan import Plan
from .presets import recommended
from .prompt import Prompt
from .steering import steer
from .store import cached_moments

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Highlighter:
    """A model, its tokenizer and a plan. Decoding is greedy unless you pass sampling options.

    Safe to share between threads: requests run one at a time.
    """

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, plan: Plan) -> None:
        plan.check(model)
        self.model: Any = model
        self.tokenizer: Any = tokenizer
        self.plan = plan
        self._lock = threading.RLock()

    @classmethod
    def load(
        cls,
        model: str | nn.Module = "smollm2-135m",
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        method: str = "prism",
        pairs: Pairs = None,
        options: CaptureOptions | None = None,
        plan: Plan | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        progress: bool = True,
        **params: Any,
    ) -> Highlighter:
        """Load a model by alias, Hub id or path (or take yours with its tokenizer) and make a plan for it.

        The moments are captured once and kept in the cache. `params` are those of the method; without any,
        the settings recommended for the model are used (docs: 'Defaults'). `device` and `dtype` serve loading by
        name.
        """
        get_method(method).params(**params)  # a typing error should not have to wait for a model
        if isinstance(model, str):
            from .models import load_model

            loaded: tuple[Any, Any] = load_model(model, dtype=dtype, device=device)
        elif tokenizer is None:
            raise ParameterError("give the tokenizer together with the model")
        else:
            loaded = (model, tokenizer)
        if plan is None:
            moments = cached_moments(*loaded, pairs, options=options, progress=progress)
            plan = make_plan(moments, method, params)
        return cls(*loaded, plan)

    @overload
    def generate(self, prompts: str | Prompt, **options: Any) -> str: ...
    @overload
    def generate(self, prompts: Sequence[str | Prompt], **options: Any) -> list[str]: ...

    def generate(
        self,
        prompts: str | Prompt | Sequence[str | Prompt],
        *,
        strength: float = 1.0,
        max_new_tokens: int = 64,
        markup: Markup = "stars",
        batch_size: int = 8,
        **options: Any,
    ) -> str | list[str]:
        """Continue prompts with their highlights in force; text in, text out; a list in, a list out.

        Further options go to transformers' `generate`.
        """
        single = isinstance(prompts, str | Prompt)
        given = [prompts] if isinstance(prompts, str | Prompt) else prompts
        items = [_as_prompt(item, markup) for item in given]
        if not items:
            raise PromptError("no prompts given; give at least one")
        order = sorted(range(len(items)), key=lambda i: len(items[i].text))
        replies: list[str] = [""] * len(items)
        for begin in range(0, len(order), max(1, batch_size)):
            chosen = order[begin : begin + max(1, batch_size)]
            texts = self._generate([items[i] for i in chosen], strength, max_new_tokens, options)
            for i, text in zip(chosen, texts, strict=True):
                replies[i] = text
        return replies[0] if single else replies

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        markup: Markup = "stars",
        template_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> str:
        """The assistant's reply to messages whose contents may hold highlights."""
        return self.generate(self.chat_prompt(messages, markup=markup, **dict(template_options or {})), **options)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], *, markup: Markup = "stars", **options: Any) -> Prompt:
        """The rendered chat with its spans."""
        return Prompt.chat(messages, self.tokenizer, markup, **options)

    def stream(
        self,
        prompt: str | Prompt,
        *,
        strength: float = 1.0,
        max_new_tokens: int = 64,
        markup: Markup = "stars",
        **options: Any,
    ) -> Iterator[str]:
        """Yield pieces of text as they are generated. Closing the iterator stops the generation."""
        from transformers import StoppingCriteriaList, TextIteratorStreamer

        batch = self._encode([_as_prompt(prompt, markup)], max_new_tokens)
        streamer: Any = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        closed = threading.Event()
        failure: Queue[BaseException] = Queue()

        def stop(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            return torch.full((ids.shape[0],), closed.is_set(), dtype=torch.bool, device=ids.device)

        criteria = StoppingCriteriaList([*options.pop("stopping_criteria", []), stop])

        def work() -> None:
            try:
                self._run(
                    batch, strength, max_new_tokens, {**options, "streamer": streamer, "stopping_criteria": criteria}
                )
            except BaseException as error:  # handed to the reader below
                failure.put(error)
                streamer.end()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield from (piece for piece in streamer if piece)
        finally:
            closed.set()
            thread.join()
        if not failure.empty():
            raise failure.get()

    def probabilities(
        self,
        prompt: str | Prompt,
        candidates: Sequence[str],
        *,
        strength: float = 1.0,
        markup: Markup = "stars",
    ) -> dict[str, float]:
        """The probability of each candidate's first token as the next one."""
        scores = self.next_token_logits([prompt], strength=strength, markup=markup)[0].softmax(-1)
        found = {}
        for text in candidates:
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            if not ids:
                raise PromptError(f"the candidate {text!r} has no tokens")
            found[text] = float(scores[ids[0]])
        return found

    def next_token_logits(
        self, prompts: Sequence[str | Prompt], *, strength: float = 1.0, markup: Markup = "stars"
    ) -> torch.Tensor:
        """Logits of the token after each prompt, [prompt, vocabulary], in float32 on the CPU."""
        batch = self._encode([_as_prompt(item, markup) for item in prompts], 1)
        # generate() derives positions of padded rows from the mask; a bare forward needs them given.
        positions = (batch.attention_mask.cumsum(-1) - 1).clamp_min(0)
        with self._lock, torch.no_grad(), steer(self.model, self.plan, batch, strength=strength):
            output = self.model(**batch.inputs, position_ids=positions, use_cache=False, logits_to_keep=1)
        return torch.as_tensor(output.logits[:, -1]).float().cpu()

    def _generate(
        self, prompts: list[Prompt], strength: float, max_new_tokens: int, options: Mapping[str, Any]
    ) -> list[str]:
        if options.get("num_return_sequences", 1) != 1:
            raise ParameterError("num_return_sequences must be 1: one text a prompt; for several use steer()")
        batch = self._encode(prompts, max_new_tokens)
        ids = self._run(batch, strength, max_new_tokens, options)
        texts: list[str] = self.tokenizer.batch_decode(ids[:, batch.input_ids.shape[1] :], skip_special_tokens=True)
        return texts

    def _run(self, batch: Batch, strength: float, max_new_tokens: int, options: Mapping[str, Any]) -> torch.Tensor:
        settings: dict[str, Any] = {"do_sample": False, "pad_token_id": self._pad_id(), **options}
        if not settings["do_sample"]:  # a checkpoint's sampling defaults mean nothing to greedy decoding
            settings = {"temperature": None, "top_p": None, "top_k": None, **settings}
        with self._lock, torch.no_grad(), steer(self.model, self.plan, batch, strength=strength):
            return torch.as_tensor(self.model.generate(**batch.inputs, max_new_tokens=max_new_tokens, **settings))

    def _pad_id(self) -> int | None:
        pad = self.tokenizer.pad_token_id
        found: int | None = pad if pad is not None else self.tokenizer.eos_token_id
        return found

    def _encode(self, prompts: Sequence[Prompt], new_tokens: int) -> Batch:
        batch = encode(prompts, self.tokenizer, device=self.model.device)
        limit = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        length = batch.input_ids.shape[1]
        if limit is not None and length + new_tokens > limit:
            raise PromptTooLongError(
                f"the prompt has {length} tokens and {new_tokens} more may be generated; the model has room for {limit}"
            )
        return batch


def make_plan(moments: Moments, method: str, params: Mapping[str, Any]) -> Plan:
    """The plan of a method: with these parameters, or without any with those recommended for the model."""
    chosen = dict(params) or recommended(str(dict(moments.header.get("model") or {}).get("name", "")), method)
    return get_method(method).plan(moments, **chosen)


def _as_prompt(item: str | Prompt, markup: Markup) -> Prompt:
    return item if isinstance(item, Prompt) else Prompt.parse(item, markup)
