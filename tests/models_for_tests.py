"""A tiny random model with a tokenizer of a few words: as objects, or as the folder transformers would load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from families import tiny_model
from tokenizers_for_tests import word_level

TEMPLATE = "{% for m in messages %}<s>{{ m.content }}{% endfor %}{% if add_generation_prompt %}</s>{% endif %}"

# Words the tokenizer knows, so that every text the model writes is made of words too.
PROMPT = "Anna was a nurse. **She is now a pilot.** Anna is"
OTHERS = ("Rome", "Previously the capital was Paris. **Currently the capital is Rome.** The capital is")

PAIRS = (
    {
        "context_1": "Anna was a nurse.",
        "question_1": "Who was the nurse?",
        "answer_1": "Anna",
        "context_2": "Currently the capital is Rome.",
        "question_2": "Is the capital Rome?",
        "answer_2": "Rome",
    },
    {
        "context_1": "She is now a pilot.",
        "question_1": "Who is now a pilot?",
        "answer_1": "She",
        "context_2": "Previously the capital was Paris.",
        "question_2": "The capital was?",
        "answer_2": "Paris",
    },
)


def tiny_pair(family: str = "llama", template: str | None = TEMPLATE) -> tuple[Any, Any]:
    """A model and its tokenizer; the same numbers every time."""
    tokenizer = word_level(chat_template=template)
    model: Any = tiny_model(family)
    model.resize_token_embeddings(len(tokenizer))
    return model, tokenizer


def save_tiny(folder: Path, family: str = "llama", template: str | None = TEMPLATE) -> Path:
    """The same as a folder."""
    for part in tiny_pair(family, template):
        part.save_pretrained(folder)
    return folder


def write_pairs(path: Path) -> Path:
    path.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS), encoding="utf-8")
    return path
