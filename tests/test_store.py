from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import processors

from models_for_tests import PAIRS, tiny_pair
from prism_delta import CaptureOptions, Moments, capture
from prism_delta.cache import cache_dir
from prism_delta.errors import StorageError
from prism_delta.pairs import load_triplets, triplets_hash
from prism_delta.store import cached_moments, moments_path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRISM_DELTA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "moments"


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """A list that grows with every forward pass."""
    passes: list[int] = []
    handle = model.model.register_forward_hook(lambda *_: passes.append(1))
    yield passes
    handle.remove()


def same(left: Moments, right: Moments) -> bool:
    tensors = [
        torch.equal(tensor, right[place].tensors()[name])
        for place in left
        for name, tensor in left[place].tensors().items()
    ]
    return all(tensors) and (left.count, list(left), left.header) == (right.count, list(right), right.header)


def test_captures_once() -> None:
    model, tokenizer = tiny_pair()
    expected = capture(model, tokenizer, PAIRS)
    with counted(model) as passes:
        assert same(cached_moments(model, tokenizer, PAIRS), expected)
        captured = len(passes)
        assert same(cached_moments(model, tokenizer, PAIRS), expected)
    assert captured > 0
    assert len(passes) == captured


def test_the_same_weights_in_another_object_are_the_same_model(cache: Path) -> None:
    expected = cached_moments(*tiny_pair(), PAIRS)
    model, tokenizer = tiny_pair()
    with counted(model) as passes:
        assert same(cached_moments(model, tokenizer, PAIRS), expected)
    assert passes == []
    assert len(list(cache.iterdir())) == 1


def test_other_data_are_captured_and_both_are_kept(cache: Path) -> None:
    model, tokenizer = tiny_pair()
    both, one = cached_moments(model, tokenizer, PAIRS), cached_moments(model, tokenizer, PAIRS[:1])
    assert (both.count, one.count) == (4, 2)
    assert len(list(cache.iterdir())) == 2
    assert same(cached_moments(model, tokenizer, PAIRS), both)


def scale_one_tensor(model: Any, tokenizer: Any) -> None:
    with torch.no_grad():
        model.model.layers[2].self_attn.v_proj.weight.mul_(1.001)


def halve(model: Any, tokenizer: Any) -> None:
    model.bfloat16()


def add_a_word(model: Any, tokenizer: Any) -> None:
    tokenizer.add_tokens(["lighthouse"])


def other_template(model: Any, tokenizer: Any) -> None:
    tokenizer.chat_template = "{{ messages[0].content }}"


def add_bos(model: Any, tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", 1)])


def keep_capitals(model: Any, tokenizer: Any) -> None:
    tokenizer.backend_tokenizer.normalizer = None


@pytest.mark.parametrize("change", [scale_one_tensor, halve, add_a_word, other_template, add_bos, keep_capitals])
def test_another_model_or_tokenizer_has_another_file(change: Any) -> None:
    model, tokenizer = tiny_pair()
    before = moments_path(model, tokenizer, "data", CaptureOptions())
    change(model, tokenizer)
    assert moments_path(model, tokenizer, "data", CaptureOptions()) != before


def test_use_of_a_tokenizer_does_not_change_its_file() -> None:
    model, tokenizer = tiny_pair()
    before = moments_path(model, tokenizer, "data", CaptureOptions())
    tokenizer.pad_token = "</s>"
    used = moments_path(model, tokenizer, "data", CaptureOptions())
    tokenizer(["Anna", "Anna was"], padding=True, truncation=True, max_length=4)
    assert moments_path(model, tokenizer, "data", CaptureOptions()) == used == before


@pytest.mark.parametrize(
    "changed",
    [
        {"convention": "reference"},
        {"answer_tokens": "last"},
        {"special_tokens": False},
        {"template": "chat"},
        {"template": "chat", "position": "assistant"},
    ],
    ids=str,
)
def test_other_options_have_another_file(changed: dict[str, Any]) -> None:
    pair = tiny_pair()
    assert moments_path(*pair, "data", CaptureOptions(**changed)) != moments_path(*pair, "data", CaptureOptions())


def test_options_of_equal_effect_have_one_file() -> None:
    pair = tiny_pair()
    by_name = CaptureOptions(convention="reference")
    by_hand = CaptureOptions(answer_tokens="reference", special_tokens=False)
    assert moments_path(*pair, "data", by_name) == moments_path(*pair, "data", by_hand)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def pickled(path: Path) -> None:
    torch.save({}, path)


def foreign(path: Path) -> None:
    save_file({"a": torch.ones(1)}, path)


def lose_a_tensor(path: Path) -> None:
    _rewrite(path, {"1.key.neutral": None})


def not_a_number(path: Path) -> None:
    _rewrite(path, {"1.key.neutral": torch.full((2, 8, 8), torch.nan, dtype=torch.float64)})


def _rewrite(path: Path, changes: dict[str, torch.Tensor | None]) -> None:
    with safe_open(path, framework="pt") as file:
        metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert changes.keys() <= tensors.keys()
    save_file({name: tensor for name, tensor in {**tensors, **changes}.items() if tensor is not None}, path, metadata)


@pytest.mark.parametrize("damage", [cut, empty, pickled, foreign, lose_a_tensor, not_a_number])
def test_a_damaged_file_is_captured_again(damage: Any, cache: Path) -> None:
    model, tokenizer = tiny_pair()
    expected = cached_moments(model, tokenizer, PAIRS)
    (path,) = cache.iterdir()
    damage(path)
    assert same(cached_moments(model, tokenizer, PAIRS), expected)
    assert same(Moments.load(path), expected)


@pytest.mark.parametrize(
    ("name", "start"),
    [("tiny", "tiny-"), ("org/some model", "org-some-model-"), ("/home/anna/tiny", "tiny-")],
)
def test_the_name_of_the_model_begins_the_file_name(name: str, start: str, cache: Path) -> None:
    model, tokenizer = tiny_pair()
    model.config._name_or_path = name
    path = moments_path(model, tokenizer, triplets_hash(load_triplets(PAIRS)), CaptureOptions())
    assert path.parent == cache
    assert path.name.startswith(start)
    assert path.name.endswith(".moments.safetensors")


@pytest.mark.parametrize(
    ("value", "expected"),
    [("/some/where", "/some/where"), ("~/kept", "/home/anna/kept"), ("", "/home/anna/.cache/prism-delta"),
     (None, "/home/anna/.cache/prism-delta")],
)  # fmt: skip
def test_the_environment_says_where_the_cache_is(
    value: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/anna")
    monkeypatch.delenv("PRISM_DELTA_CACHE")
    if value is not None:
        monkeypatch.setenv("PRISM_DELTA_CACHE", value)
    assert cache_dir() == Path(expected)


def test_a_cache_that_cannot_be_written_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PRISM_DELTA_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="PRISM_DELTA_CACHE"):
        cached_moments(*tiny_pair(), PAIRS)
