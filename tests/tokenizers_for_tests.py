"""Small tokenizers of the common kinds, built in memory in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SENTENCES = (
    "Anna was a nurse. She is now a pilot.",
    "Previously the capital was Paris. Currently the capital is Rome.",
    "Question: Who was the nurse?\nContext: The nurse was Anna.",
)


def byte_level(*, trim_offsets: bool, bos: bool = False, **options: Any) -> PreTrainedTokenizerFast:
    """Byte-level BPE as GPT-2 (trim_offsets) or Qwen (not): every text has tokens and nothing is unknown."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    _train(core, trainers.BpeTrainer, vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    steps: list[Any] = [processors.ByteLevel(trim_offsets=trim_offsets)]
    if bos:
        template = {"single": "<s> $A", "special_tokens": [("<s>", core.token_to_id("<s>"))]}
        steps.append(processors.TemplateProcessing(**template))
    core.post_processor = processors.Sequence(steps)
    return _wrap(core, **options)


def metaspace(**options: Any) -> PreTrainedTokenizerFast:
    """SentencePiece style: a visible mark stands for the space before a word, and one more at the start."""
    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    _train(core, trainers.BpeTrainer, vocab_size=200)
    return _wrap(core, **options)


def word_level(**options: Any) -> PreTrainedTokenizerFast:
    """Whole words, lower-cased first; every word it has not seen is the same unknown token."""
    core = Tokenizer(models.WordLevel(unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    _train(core, trainers.WordLevelTrainer)
    return _wrap(core, **options)


def pattern_level(pattern: str, *, dropping: str | None = None) -> PreTrainedTokenizerFast:
    """One token per match of a pattern; `dropping` is a text that the normalizer deletes."""
    core = Tokenizer(models.WordLevel(vocab={"<unk>": 0}, unk_token="<unk>"))
    if dropping is not None:
        core.normalizer = normalizers.Replace(dropping, "")
    core.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="removed", invert=True)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


KINDS: dict[str, Callable[..., PreTrainedTokenizerFast]] = {
    "trimmed": partial(byte_level, trim_offsets=True),
    "untrimmed": partial(byte_level, trim_offsets=False),
    "bos": partial(byte_level, trim_offsets=False, bos=True),
    "metaspace": metaspace,
    "words": word_level,
}


@cache
def shared(kind: str) -> PreTrainedTokenizerFast:
    """One instance per kind for tests that do not change it."""
    return KINDS[kind]()


def _train(core: Tokenizer, trainer: Callable[..., Any], **settings: Any) -> None:
    special_tokens = ["<unk>", "<s>", "</s>"]
    core.train_from_iterator(SENTENCES, trainer(special_tokens=special_tokens, show_progress=False, **settings))


def _wrap(core: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **{**names, **options})
