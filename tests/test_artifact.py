from __future__ import annotations

import json
import os
import pickle
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from prism_delta.artifact import artifact_kind, read_artifact, write_artifact, write_bytes
from prism_delta.errors import (
    ArtifactError,
    NewerArtifactError,
    PickleArtifactError,
    StorageError,
    TruncatedArtifactError,
)

TENSORS = {
    "double": torch.arange(6, dtype=torch.float64).reshape(2, 3) / 7,
    "half": torch.tensor([0.1, -2.0], dtype=torch.bfloat16),
    "integer": torch.tensor([[2**40]]),
    "mask": torch.tensor([True, False]),
    "scalar": torch.tensor(1.5),
    "turned": torch.arange(6.0).reshape(2, 3).T,
}
HEADER = {"method": "prism", "nested": {"a": [1, 2.5, None, True]}, "name": "Δ 日本"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_artifact(tmp_path / "x.plan.safetensors", "plan", 1, HEADER, TENSORS)


def test_what_is_written_is_read(path: Path) -> None:
    header, tensors = read_artifact(path, "plan", 1)
    assert header == {"kind": "plan", "version": 1, **HEADER}
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)
    assert artifact_kind(path) == "plan"


@pytest.mark.parametrize("tensors", [{}, {"a": torch.zeros(0)}], ids=["none", "empty"])
def test_a_file_may_hold_no_numbers(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    path = write_artifact(tmp_path / "x", "plan", 1, {}, tensors)
    assert read_artifact(path, "plan", 1)[1].keys() == tensors.keys()


@pytest.mark.parametrize("kind", [str, Path])
def test_writing_makes_folders_and_returns_the_path(kind: Any, tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "x.safetensors"
    assert write_artifact(kind(target), "plan", 1, {}, TENSORS) == target
    assert os.listdir(target.parent) == ["x.safetensors"]


def test_equal_content_gives_equal_bytes(tmp_path: Path) -> None:
    first = write_artifact(tmp_path / "a", "plan", 1, HEADER, TENSORS)
    second = write_artifact(tmp_path / "b", "plan", 1, dict(reversed(HEADER.items())), TENSORS)
    assert first.read_bytes() == second.read_bytes()


def test_an_older_version_is_read(path: Path) -> None:
    assert read_artifact(path, "plan", 3)[0]["version"] == 1


# A safetensors file begins with the length of its header; some lengths look like the start of a pickle or a zip.
@pytest.mark.parametrize("length", [0x80 + 0x100, 0x80 + 0x200, 0x80 + 0x300, 0x400, 0x4B50])
def test_a_header_of_any_length_is_read(length: int, tmp_path: Path) -> None:
    def header_length(padding: int) -> int:
        write_artifact(tmp_path / "x", "plan", 1, {"padding": "x" * padding}, {"a": torch.ones(1)})
        return int.from_bytes((tmp_path / "x").read_bytes()[:8], "little")

    assert header_length(length - header_length(0)) == length
    assert read_artifact(tmp_path / "x", "plan", 1)[1]["a"].item() == 1
    assert artifact_kind(tmp_path / "x") == "plan"


def test_a_file_cut_anywhere_is_refused(path: Path) -> None:
    data = path.read_bytes()
    for length in {*range(16), *range(16, len(data), 11), *range(len(data) - 8, len(data))}:
        path.write_bytes(data[:length])
        with pytest.raises(TruncatedArtifactError, match="is empty" if not length else "is truncated"):
            read_artifact(path, "plan", 1)
        with pytest.raises(TruncatedArtifactError):
            artifact_kind(path)


def test_a_file_with_a_tail_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(TruncatedArtifactError):
        read_artifact(path, "plan", 1)


def test_damage_in_the_header_is_an_artifact_error_or_harmless(tmp_path: Path) -> None:
    path = write_artifact(tmp_path / "x", "plan", 1, {}, {"a": torch.ones(1)})
    data = path.read_bytes()
    for place in range(8 + int.from_bytes(data[:8], "little")):
        damaged = bytearray(data)
        damaged[place] ^= 0x15
        path.write_bytes(damaged)
        try:
            header, _ = read_artifact(path, "plan", 1)
        except ArtifactError:
            continue
        assert header["kind"] == "plan"


class Bomb:
    """Unpickling it makes the file named in it."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("form", ["zip", "legacy", *range(pickle.HIGHEST_PROTOCOL + 1)])
def test_a_pickle_is_refused_and_not_run(form: Any, tmp_path: Path) -> None:
    path, crater = tmp_path / "x.pt", tmp_path / "crater"
    payload = {"proj": torch.ones(2), "bomb": Bomb(crater)}
    if isinstance(form, int):
        path.write_bytes(pickle.dumps(payload, protocol=form))
    else:
        torch.save(payload, path, _use_new_zipfile_serialization=form == "zip")
    # The two oldest protocols are plain text without a mark.
    expected = ArtifactError if form in (0, 1) else PickleArtifactError
    for read in (lambda: read_artifact(path, "plan", 1), lambda: artifact_kind(path)):
        with pytest.raises(expected):
            read()
    assert not crater.exists()


def test_the_refusal_of_a_pickle_says_what_to_do(tmp_path: Path) -> None:
    torch.save(torch.ones(2), tmp_path / "x.pt")
    with pytest.raises(PickleArtifactError) as caught:
        read_artifact(tmp_path / "x.pt", "plan", 1)
    for part in (str(tmp_path / "x.pt"), "can run code", "expected a plan file", "prism import FILE.pt"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("metadata", "error", "reason"),
    [
        (None, ArtifactError, "was not written by prism-delta"),
        ({}, ArtifactError, "was not written by prism-delta"),
        ({"format": "pt"}, ArtifactError, "was not written by prism-delta"),
        ({"prism_delta": "{oops"}, ArtifactError, "was not written by prism-delta"),
        ({"prism_delta": "[1]"}, ArtifactError, "has a damaged header"),
        ({"prism_delta": "{}"}, ArtifactError, "holds None, expected 'plan'"),
        ({"prism_delta": '{"kind": "moments", "version": 1}'}, ArtifactError, "holds 'moments', expected 'plan'"),
        ({"prism_delta": '{"kind": "plan", "version": 2}'}, NewerArtifactError, "has format version 2, .* up to 1"),
        ({"prism_delta": '{"kind": "plan", "version": "1"}'}, NewerArtifactError, "upgrade prism-delta"),
        ({"prism_delta": '{"kind": "plan"}'}, NewerArtifactError, "has format version None"),
    ],
)
def test_a_foreign_file_is_refused(
    metadata: dict[str, str] | None, error: type[Exception], reason: str, tmp_path: Path
) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "x", metadata)
    with pytest.raises(error, match=reason) as caught:
        read_artifact(tmp_path / "x", "plan", 1)
    assert str(tmp_path / "x") in str(caught.value)


def test_the_kind_of_a_newer_file_is_still_known(tmp_path: Path) -> None:
    assert artifact_kind(write_artifact(tmp_path / "x", "moments", 99, {}, {})) == "moments"


@pytest.mark.parametrize(
    ("data", "error", "reason"),
    [
        (b"", TruncatedArtifactError, "is empty; expected a plan file"),
        (b"hello, world, this is text", TruncatedArtifactError, "is truncated or not a safetensors file"),
        (b"\0" * 64, TruncatedArtifactError, "is truncated or not a safetensors file"),
        (b"\xff" * 64, TruncatedArtifactError, "is truncated or not a safetensors file"),
        (b"GGUF\x03\0\0\0", TruncatedArtifactError, "is truncated or not a safetensors file"),
    ],
)
def test_any_other_bytes_are_refused(data: bytes, error: type[Exception], reason: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(data)
    with pytest.raises(error, match=reason):
        read_artifact(tmp_path / "x", "plan", 1)


@pytest.mark.parametrize(("name", "reason"), [("nothing", "No such file"), (".", "Is a directory")])
def test_what_is_no_file_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"cannot read .*: {reason}"):
        read_artifact(tmp_path / name, "plan", 1)
    with pytest.raises(StorageError, match=f"cannot read .*: {reason}"):
        artifact_kind(tmp_path / name)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_the_file_mode_follows_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        path = write_bytes(tmp_path / "x", b"data")
        assert os.umask(umask) == umask
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "read only"
    folder.mkdir(mode=0o555)
    # Root may write anywhere, so root becomes nobody meanwhile.
    if is_root := os.geteuid() == 0:
        os.seteuid(65534)
    yield folder
    if is_root:
        os.seteuid(0)
    assert os.listdir(folder) == []


def test_a_folder_without_permission_is_a_storage_error(read_only: Path) -> None:
    for target in (read_only / "x", read_only / "new" / "x"):
        with pytest.raises(StorageError, match=r"cannot write .*Permission denied.*PRISM_DELTA_CACHE"):
            write_bytes(target, b"data")


@pytest.mark.parametrize(
    ("target", "left"),
    [("file/x", ["file", "folder"]), ("folder", ["file", "folder"]), ("n" * 300, ["file", "folder"])],
    ids=["below a file", "over a folder", "name too long"],
)
def test_a_place_that_cannot_be_written_is_left_as_it_was(target: str, left: list[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match="nothing half-written was left"):
        write_bytes(tmp_path / target, b"data")
    assert sorted(os.listdir(tmp_path)) == left
    assert (tmp_path / "file").read_bytes() == b"old"


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    path = write_bytes(tmp_path / "x", b"old")
    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_bytes(path, b"new")
    monkeypatch.undo()
    assert os.listdir(tmp_path) == ["x"]
    assert path.read_bytes() == b"old"


DISK_FULL = """
import json, os, resource, signal, sys
from prism_delta.artifact import write_bytes
from prism_delta.errors import StorageError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder, found = sys.argv[1], []
for limit in (0, 1, 5000, 99_999, 100_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        write_bytes(os.path.join(folder, "x"), b"n" * 100_000)
        said = "written"
    except StorageError as error:
        said = str(error)
    found.append([limit, said, os.listdir(folder), os.path.getsize(os.path.join(folder, "x"))])
print(json.dumps(found))
"""


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    path = write_bytes(tmp_path / "x", b"old")
    done = subprocess.run(
        [sys.executable, "-c", DISK_FULL, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    *failures, success = json.loads(done.stdout)
    assert [limit for limit, *_ in failures] == [0, 1, 5000, 99_999]
    for _, said, left, size in failures:
        assert said.startswith(f"cannot write {path}: File too large; nothing half-written was left. Free some space")
        assert (left, size) == (["x"], 3)
    assert success == [100_000, "written", ["x"], 100_000]
