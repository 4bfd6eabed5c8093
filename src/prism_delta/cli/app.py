"""The commands and their options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from .. import __version__
from ..errors import ParameterError, PromptError, StorageError

app = typer.Typer(
    name="prism",
    help="Prompt highlighting for language models: mark a **span**, and the model prioritises it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"max_content_width": 110},
    pretty_exceptions_enable=False,
)

Model = Annotated[str, typer.Option("--model", "-m", help="Alias (prism ls models), folder or Hub id.")]
Device = Annotated[Optional[str], typer.Option("--device", help="cpu, cuda, cuda:1, mps ...")]  # noqa: UP045
Dtype = Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Settings = Annotated[
    list[str], typer.Option("--set", "-s", help="A method parameter as key=value; repeat. See: prism ls methods.")
]
Method = Annotated[str, typer.Option("--method", help="A method of `prism ls methods`.")]
PresetName = Annotated[str, typer.Option("--preset", help="Settings of `prism ls presets`; --set goes on top.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the output file.")]


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"prism-delta {__version__}")
        raise typer.Exit


@app.command()
def demo(model: Model = "smollm2-135m", json: Json = False) -> None:
    """Three prompts, plain against highlighted.

    The model is downloaded on first use.
    """
    from .demo import run_demo

    run_demo(_load(model, None, "float32"), model, json)


@app.command()
def capture(
    model: Annotated[str, typer.Argument(help="Alias, folder or Hub id.")],
    out: Annotated[Optional[Path], typer.Option("--out", "-o", help="The moments file to write.")] = None,  # noqa: UP045
    pairs: Annotated[str, typer.Option(help="Contrastive pairs (JSON lines); the shipped ones if left out.")] = "",
    convention: Annotated[str, typer.Option(help="paper or reference; sets the next two.")] = "paper",
    answer_tokens: Annotated[str, typer.Option(help="all, reference or last.")] = "",
    special_tokens: Annotated[Optional[bool], typer.Option(help="Add BOS and the like.")] = None,  # noqa: UP045
    template: Annotated[str, typer.Option(help="base or chat.")] = "base",
    position: Annotated[str, typer.Option(help="answer, or assistant (chat only).")] = "answer",
    batch_tokens: Annotated[int, typer.Option(help="Padded tokens per forward pass.")] = 4096,
    device: Device = None,
    dtype: Dtype = "float32",
    force: Force = False,
    json: Json = False,
) -> None:
    """Run contrastive pairs through a model once and keep their moments."""
    from ..capturing import capture as run_capture
    from ..examples import CaptureOptions
    from .output import emit

    fields: dict[str, Any] = {"convention": convention, "template": template, "position": position}
    fields |= {"answer_tokens": answer_tokens or None, "special_tokens": special_tokens}
    options = CaptureOptions(**fields)
    target = out or Path(f"{Path(model).resolve().name}.moments.safetensors")
    _check_target(target, force)
    loaded, tokenizer = _load(model, device, dtype)
    moments = run_capture(loaded, tokenizer, pairs or None, options=options, batch_tokens=batch_tokens, progress=True)
    moments.save(target)
    emit({"file": str(target), "rows": moments.count, **moments.header}, json)


@app.command()
def plan(
    moments: Annotated[Path, typer.Argument(help="A moments file (prism capture).")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The plan file to write.")] = Path("prism.plan.safetensors"),
    method: Method = "prism",
    preset: PresetName = "",
    settings: Settings = [],  # noqa: B006
    force: Force = False,
    json: Json = False,
) -> None:
    """Turn a moments file into a plan, without a model."""
    from ..moments import Moments
    from .output import emit

    _check_target(out, force)
    made = _make_plan(Moments.load(moments), method, preset, settings)
    made.save(out)
    emit({"file": str(out), **made.describe()}, json)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt with its **highlights**; - or nothing reads stdin.")] = "-",
    model: Model = "smollm2-135m",
    file: Annotated[Optional[Path], typer.Option("--file", "-f", help="Read the prompt from a file.")] = None,  # noqa: UP045
    strength: Annotated[float, typer.Option(help="0 = plain model, 1 = recommended, negative = de-emphasise.")] = 1.0,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Most tokens to generate.")] = 64,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a user message; use the chat template.")] = False,
    markup: Annotated[str, typer.Option(help="stars (**span**), tags (<hl>span</hl>) or none.")] = "stars",
    compare: Annotated[bool, typer.Option("--compare", help="Print plain and highlighted side by side.")] = False,
    plan_file: Annotated[Optional[Path], typer.Option("--plan", help="A plan file, instead of a method.")] = None,  # noqa: UP045
    method: Method = "prism",
    preset: PresetName = "",
    settings: Settings = [],  # noqa: B006
    device: Device = None,
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """Continue a prompt with its highlights in force."""
    from ..highlighter import Highlighter
    from ..plan import Plan
    from ..prompt import Prompt
    from ..store import cached_moments
    from .output import print_generation

    text = _read_prompt(prompt, file)
    if max_new_tokens < 1:
        raise ParameterError(f"--max-new-tokens must be at least 1, found {max_new_tokens}")
    if plan_file is not None and (preset or settings or method != "prism"):
        raise ParameterError("--plan is a finished plan; --method, --preset and --set belong to making one")
    parsed = Prompt.parse(text, markup)  # type: ignore[arg-type]  # bad markup is told before a model is loaded
    shown = parsed
    given = None if plan_file is None else Plan.load(plan_file)
    if given is None:
        _check_method(method, preset, settings)
    loaded, tokenizer = _load(model, device, dtype)
    if given is None:
        given = _make_plan(cached_moments(loaded, tokenizer, progress=True), method, preset, settings)
    highlighter = Highlighter(loaded, tokenizer, given)
    if chat:
        parsed = highlighter.chat_prompt([{"role": "user", "content": text}], markup=markup)  # type: ignore[arg-type]
    wanted = [0.0, strength] if compare else [strength]
    texts = {value: highlighter.generate(parsed, strength=value, max_new_tokens=max_new_tokens) for value in wanted}
    print_generation(parsed, texts, json, shown)


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A moments or plan file.")],
    by: Annotated[str, typer.Option(help="What the heat map shows: weight, rank or score.")] = "weight",
    json: Json = False,
) -> None:
    """A moments or plan file as a table and a heat map."""
    from .show import show_file

    show_file(file, by, json)


@app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(help="A projection file (.pt) of the official release.")],
    out: Annotated[Optional[Path], typer.Option("--out", "-o", help="The plan file to write.")] = None,  # noqa: UP045
    key_gain: Annotated[float, typer.Option(help="g_K")] = 1.0,
    value_gain: Annotated[float, typer.Option(help="g_V")] = 0.0,
    uniform: Annotated[bool, typer.Option("--uniform", help="All weights 1, whatever norm_diffs says.")] = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Convert a projection file of the official release.

    The file is read as plain tensors; code in it is never run.
    """
    from ..importer import import_projections
    from .output import emit

    target = out or file.parent / f"{file.stem}.plan.safetensors"
    _check_target(target, force)
    made = import_projections(file, key_gain=key_gain, value_gain=value_gain, uniform=uniform)
    made.save(target)
    emit({"file": str(target), **made.describe()}, json)


@app.command()
def ls(
    what: Annotated[str, typer.Argument(help="methods, models, families or presets.")] = "methods",
    json: Json = False,
) -> None:
    """Methods, models, families, presets."""
    from .listing import print_list

    print_list(what, json)


@app.command()
def doctor(
    model: Annotated[str, typer.Argument(help="A model to look into; left out: the installation only.")] = "",
    device: Device = None,
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """What is installed, and what of a model can be steered.

    What cannot be steered is listed with the reason.
    """
    from .doctor import report

    report(_load(model, device, dtype)[0] if model else None, json)


# --- shared -----------------------------------------------------------------------------------------


def _load(model: str, device: str | None, dtype: str) -> tuple[Any, Any]:
    import torch
    from transformers.utils import logging

    from ..models import load_model

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if dtype not in known:
        raise ParameterError(f"--dtype must be one of {', '.join(known)}, found {dtype!r}")
    transformers_logging: Any = logging
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        return load_model(model, dtype=known[dtype], device=device)
    except (RuntimeError, AssertionError) as error:  # torch: no such device, not built with it
        if device is None:
            raise
        raise ParameterError(f"--device {device!r} cannot be used: {str(error).splitlines()[0]}") from error


def _settings(preset: str, method: str, settings: list[str]) -> tuple[str, dict[str, Any]]:
    from ..methods.base import parse_settings
    from ..presets import get_preset

    chosen: dict[str, Any] = {}
    if preset:
        found = get_preset(preset)
        if method not in ("prism", found.method):
            raise ParameterError(f"the preset {preset} is one of {found.method}, not of {method}; leave --method out")
        method, chosen = found.method, dict(found.params)
    return method, {**chosen, **parse_settings(settings)}


def _check_method(method: str, preset: str, settings: list[str]) -> None:
    """Complain about a method or parameter before a model is loaded."""
    from ..methods import get_method

    name, params = _settings(preset, method, settings)
    get_method(name).params(**params)


def _make_plan(moments: Any, method: str, preset: str, settings: list[str]) -> Any:
    from ..highlighter import make_plan

    return make_plan(moments, *_settings(preset, method, settings))


def _read_prompt(prompt: str, file: Path | None) -> str:
    if file is not None:
        if prompt != "-":
            raise PromptError("give the prompt as an argument or with --file, not both")
        try:
            raw = file.read_bytes()
        except OSError as error:
            raise StorageError(f"cannot read {file}: {error.strerror or error}") from error
        name = str(file)
    elif prompt == "-":
        if sys.stdin is None or sys.stdin.isatty():
            raise PromptError("no prompt; give it as an argument, with --file, or on stdin")
        raw, name = sys.stdin.buffer.read(), "stdin"
    else:
        return prompt
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise StorageError(f"{name} is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    return text.removesuffix("\n").removesuffix("\r")  # the newline that ends the last line of a file


def _check_target(target: Path, force: bool) -> None:
    if target.exists() and not force:
        raise StorageError(f"{target} exists; choose another name or pass --force")
