from __future__ import annotations

import io
import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.models import CommandInfo

import prism_delta
from models_for_tests import PAIRS, PROMPT, save_tiny, write_pairs
from prism_delta import Highlighter, Moments, Plan, capture, find_sites, get_method, list_methods, load_model
from prism_delta import errors as e
from prism_delta.artifact import write_artifact
from prism_delta.cli import app, listing, main
from prism_delta.families import NOT_STEERABLE, TESTED_FAMILIES
from prism_delta.importer import import_projections
from prism_delta.methods.prism import PrismParams
from prism_delta.models import PACKAGED, packaged_path
from prism_delta.presets import PRESETS
from prism_delta.subspace import discriminability


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """stdout as JSON, strictly: NaN and infinity are not JSON."""
        return json.loads(self.out, parse_constant=pytest.fail)


Run = Callable[..., Result]


@pytest.fixture
def prism(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process, with a cache of its own."""
    monkeypatch.setenv("PRISM_DELTA_CACHE", str(tmp_path / "cache"))

    def run(*words: Any, stdin: Any = b"") -> Result:
        monkeypatch.setattr(sys, "argv", ["prism", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)) if isinstance(stdin, bytes) else stdin)
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        return Result(caught.value.code, *capsys.readouterr())

    return run


@pytest.fixture
def ok(prism: Run) -> Run:
    """Run a command that must succeed and say nothing on stderr."""

    def run(*words: Any, **options: Any) -> Result:
        result = prism(*words, **options)
        assert (result.code, result.err) == (0, "")
        return result

    return run


class Bomb:
    def __reduce__(self) -> Any:
        return print, ("BOOM",)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models and good and bad files, by name; no test changes them."""
    root = tmp_path_factory.mktemp("cli")
    made = {"model": save_tiny(root / "tiny"), "other_model": save_tiny(root / "other", "qwen3", template=None)}
    made["pairs"] = write_pairs(root / "pairs.jsonl")

    def keep(name: str, text: str | bytes) -> Path:
        made[name] = root / name
        made[name].write_bytes(text.encode() if isinstance(text, str) else text)
        return made[name]

    for prefix, gains in (("", {"key_gain": 3.0, "value_gain": 0.5}), ("other_", {"key_gain": 1.0})):
        moments = capture(*load_model(str(made[f"{prefix}model"])), PAIRS)
        made[f"{prefix}moments"] = moments.save(root / f"{prefix}moments.safetensors")
        plan = get_method("prism").plan(moments, keep=1.0, **gains)
        made[f"{prefix}plan"] = plan.save(root / f"{prefix}plan.safetensors")

    keep("cut_plan", made["plan"].read_bytes()[:-20])
    keep("cut_moments", made["moments"].read_bytes()[:-20])
    keep("empty", b"")
    made["foreign"] = root / "foreign"
    save_file({"weight": torch.ones(2)}, made["foreign"])
    for kind in ("plan", "moments"):
        made[f"newer_{kind}"] = write_artifact(root / f"newer_{kind}", kind, 99, {}, {})
    projections = {"proj": torch.eye(8).repeat(3, 2, 1, 1), "layers": [0, 1, 2]}
    torch.save(projections, keep("projections.pt", b""))
    torch.save({**projections, "bomb": Bomb()}, keep("bomb", b""))
    keep("garbage", "This is no tensor.")

    keep("latin", "Anna était **nurse**".encode("latin-1"))
    keep("long", "Anna " * 300)
    lines = [json.dumps(pair) for pair in PAIRS]
    keep("pairs_without_answer", "\n".join([lines[0], json.dumps({**PAIRS[1], "answer_1": "Tom"})]))
    keep("pairs_without_field", "\n".join([lines[0], "", json.dumps({"context_1": "Anna was a nurse."})]))
    keep("pairs_no_json", "\n".join([lines[0], "Anna was a nurse."]))
    keep("pairs_empty", "\n")
    keep("pairs_latin", b'{"context_1": "\xe9"}')
    return made


@pytest.fixture
def highlighter(files: dict[str, Path]) -> Highlighter:
    return Highlighter(*load_model(str(files["model"])), Plan.load(files["plan"]))


def generate(files: dict[str, Path], *words: Any) -> tuple[Any, ...]:
    return "generate", "--model", files["model"], "--plan", files["plan"], "-n", 9, *words


# --- capture, plan, show ------------------------------------------------------------------------------


def test_from_pairs_to_text(ok: Run, files: dict[str, Path], tmp_path: Path) -> None:
    moments, plan = tmp_path / "m.safetensors", tmp_path / "p.safetensors"
    captured = ok("capture", files["model"], "--pairs", files["pairs"], "-o", moments, "--json").json
    assert captured == {"file": str(moments), "rows": 4, **Moments.load(files["moments"]).header}
    made = ok("plan", moments, "-o", plan, "-s", "keep=1", "-s", "key_gain=3", "-s", "value-gain=0.5", "--json").json
    assert made == {"file": str(plan), **Plan.load(files["plan"]).describe()}
    assert ok("show", plan, "--json").json["fingerprint"] == made["fingerprint"]
    words = ("generate", PROMPT, "-m", files["model"], "-n", 9, "--plan")
    assert ok(*words, plan).out == ok(*words, files["plan"]).out


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ((), {}),
        (("--convention", "reference"), {"answer_tokens": "reference", "special_tokens": False}),
        (("--answer-tokens", "last", "--no-special-tokens"), {"answer_tokens": "last", "special_tokens": False}),
        (("--template", "chat", "--position", "assistant"), {"template": "chat", "position": "assistant"}),
    ],
    ids=["paper", "reference", "tokens", "chat"],
)
def test_capture_options(
    ok: Run, files: dict[str, Path], tmp_path: Path, words: tuple[str, ...], options: dict[str, Any]
) -> None:
    out = tmp_path / "m"
    ok("capture", files["model"], "--pairs", files["pairs"], "-o", out, "--batch-tokens", 50, *words)
    paper = {"answer_tokens": "all", "special_tokens": True, "template": "base", "position": "answer"}
    assert Moments.load(out).header["options"] == {**paper, **options}


@pytest.mark.parametrize("model", ["tiny", "."])
def test_moments_are_named_after_the_model(
    ok: Run, files: dict[str, Path], tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny(tmp_path / "tiny")
    monkeypatch.chdir(folder if model == "." else tmp_path)
    ok("capture", model, "--pairs", files["pairs"])
    assert Path("tiny.moments.safetensors").is_file()


def test_plan_takes_a_preset_and_settings_on_top(ok: Run, files: dict[str, Path], tmp_path: Path) -> None:
    words = ("--preset", "prism-v/qwen3-4b/biasbios", "--set", "gamma=0.5", "--json")
    made = ok("plan", files["moments"], "-o", tmp_path / "p", *words).json
    assert made["method"] == "prism-v"
    expected = {"convention": "reference", "gamma": 0.5, "delta_min": 0.08, "key_gain": 0.4, "value_gain": 0.1}
    assert expected.items() <= made["params"].items()


def test_plan_is_named_by_default(ok: Run, files: dict[str, Path], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    ok("plan", files["moments"], "--method", "scale")
    assert Plan.load("prism.plan.safetensors").header["method"] == "scale"


def heat_map(out: str, title: str) -> list[tuple[int, list[float]]]:
    """(layer, numbers of its heads) for each line below a title; darkness must follow the numbers."""
    lines = out.split(title, 1)[1].splitlines()[1:]
    found, shades = [], {}
    for line in lines:
        match = re.fullmatch(r" *(\d+) \|([ ░▒▓█]{4})\| ([-\d. e]+?) *", line)
        if match is None:
            break
        values = [float(word) for word in match[3].split()]
        found.append((int(match[1]), values))
        shades |= dict(zip(values, (match[2][:2], match[2][2:]), strict=True))
    darkness = ["  ░░▒▒▓▓██".index(shades[value]) for value in sorted(shades)]
    assert darkness == sorted(darkness)
    assert shades[max(shades)] == "██"
    assert shades.get(0.0, "  ") == "  "
    return found


def rounded(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.3g}") for value in values.tolist()]


@pytest.mark.parametrize("by", ["weight", "rank", "score"])
def test_show_of_a_plan_has_a_line_for_each_layer(ok: Run, files: dict[str, Path], by: str) -> None:
    result, plan = ok("show", files["plan"], "--by", by), Plan.load(files["plan"])
    for channel in ("key", "value"):
        expected = [(layer, rounded(getattr(plan.stats[layer, channel], by))) for layer in range(3)]
        assert heat_map(result.out, f"{channel} {by} by layer") == expected
    assert f"fingerprint  {plan.fingerprint}" in result.out


def test_show_of_moments_has_a_line_for_each_layer(ok: Run, files: dict[str, Path]) -> None:
    result, moments = ok("show", files["moments"]), Moments.load(files["moments"])
    for channel in ("key", "value"):
        rows = [(layer, moments[layer, channel]) for layer in range(3)]
        scores = [discriminability(4, row.contrast_norm, row.contrast_square, "frobenius") for _, row in rows]
        expected = [(layer, rounded(score)) for layer, score in enumerate(scores)]
        assert heat_map(result.out, f"{channel} discriminability") == expected


def test_show_as_json(ok: Run, files: dict[str, Path]) -> None:
    plan, moments = Plan.load(files["plan"]), Moments.load(files["moments"])
    shown = ok("show", files["plan"], "--json").json
    heads = shown.pop("heads")
    assert shown == plan.describe()
    assert heads["2.key"] == {
        name: getattr(plan.stats[2, "key"], name).tolist() for name in ("rank", "weight", "score")
    }
    assert len(heads) == 6
    shown = ok("show", files["moments"], "--json").json
    assert len(shown.pop("discriminability")) == 6
    assert shown == {"rows": 4, **moments.header}


def test_show_of_a_plan_without_scores_is_json_too(ok: Run, files: dict[str, Path], tmp_path: Path) -> None:
    plan = import_projections(files["projections.pt"]).save(tmp_path / "p")
    assert ok("show", plan, "--json").json["heads"]["1.key"]["weight"] == [1.0, 1.0]
    assert "key score by layer" in ok("show", plan, "--by", "score").out


def test_show_of_a_plan_that_edits_nothing(ok: Run, files: dict[str, Path], tmp_path: Path) -> None:
    ok("plan", files["moments"], "--method", "none", "-o", tmp_path / "p")
    assert "method       none" in ok("show", tmp_path / "p").out
    assert ok("show", tmp_path / "p", "--json").json["channels"] == {}


# --- generate -----------------------------------------------------------------------------------------


def test_generate_prints_the_continuation(ok: Run, files: dict[str, Path], highlighter: Highlighter) -> None:
    expected = highlighter.generate(PROMPT, max_new_tokens=9)
    assert ok(*generate(files, PROMPT)).out == f"{expected}\n"
    assert expected != highlighter.generate(PROMPT, strength=0.0, max_new_tokens=9)


PLACES = {
    "argument": ([PROMPT], None, b""),
    "file": (["--file"], PROMPT, b""),
    "file with a last newline": (["-f"], f"{PROMPT}\n", b""),
    "file of another system": (["-f"], f"\ufeff{PROMPT}\r\n", b""),
    "stdin": ([], None, f"{PROMPT}\n".encode()),
    "dash": (["-"], None, PROMPT.encode()),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_prompt_comes_from(ok: Run, files: dict[str, Path], tmp_path: Path, place: str) -> None:
    words, text, stdin = PLACES[place]
    if text is not None:
        (tmp_path / "prompt.txt").write_bytes(text.encode())
        words = [*words, tmp_path / "prompt.txt"]
    result = ok(*generate(files, *words, "--json"), stdin=stdin)
    assert result.json["prompt"] == PROMPT.replace("**", "")
    assert result.out == ok(*generate(files, PROMPT, "--json")).out


def test_generate_as_json(ok: Run, files: dict[str, Path], highlighter: Highlighter) -> None:
    text = highlighter.generate(PROMPT, strength=2.0, max_new_tokens=9)
    assert ok(*generate(files, PROMPT, "--strength", 2, "--json")).json == {
        "prompt": PROMPT.replace("**", ""),
        "spans": [{"start": 18, "end": 37, "strength": 1.0}],
        "results": [{"strength": 2.0, "text": text}],
    }


def test_compare(ok: Run, files: dict[str, Path], highlighter: Highlighter) -> None:
    texts = [highlighter.generate(PROMPT, strength=strength, max_new_tokens=9) for strength in (0.0, 1.0)]
    assert ok(*generate(files, PROMPT, "--compare", "--json")).json["results"] == [
        {"strength": 0.0, "text": texts[0]},
        {"strength": 1.0, "text": texts[1]},
    ]
    out = ok(*generate(files, PROMPT, "--compare")).out
    assert out.startswith("Anna was a nurse. [She is now a pilot.] Anna is\n")
    for word in ("plain", "highlighted, strength 1", *texts):
        assert word in out


@pytest.mark.parametrize(
    ("markup", "prompt", "shown"),
    [
        ("stars", "**Anna** **was** a", "[Anna] [was] a"),
        ("tags", "<hl>Anna <hl strength=2>was</hl> a</hl> nurse", "[Anna [was] a] nurse"),
        ("none", "2**3", "2**3"),
    ],
)
def test_compare_shows_the_spans(ok: Run, files: dict[str, Path], markup: str, prompt: str, shown: str) -> None:
    assert ok(*generate(files, prompt, "--markup", markup, "--compare")).out.startswith(f"{shown}\n")


def test_strength_0_is_the_plain_model(ok: Run, files: dict[str, Path]) -> None:
    model, tokenizer = load_model(str(files["model"]))
    inputs = tokenizer(PROMPT.replace("**", ""), return_tensors="pt")
    ids = model.generate(**inputs, max_new_tokens=9, do_sample=False)
    expected = tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert ok(*generate(files, PROMPT, "--strength", 0)).out == f"{expected}\n"


def test_chat(ok: Run, files: dict[str, Path], highlighter: Highlighter) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    result = ok(*generate(files, PROMPT, "--chat", "--json")).json
    assert result["prompt"] == f"<s>{PROMPT.replace('**', '')}</s>"
    assert result["spans"] == [{"start": 21, "end": 40, "strength": 1.0}]
    assert result["results"][0]["text"] == highlighter.chat(messages, max_new_tokens=9)


def test_generate_without_a_plan_captures_once(ok: Run, files: dict[str, Path], tmp_path: Path) -> None:
    words = ("generate", PROMPT, "-m", files["model"], "--method", "prism-v", "-s", "key_gain=4", "-n", 9)
    first = ok(*words).out
    (kept,) = (tmp_path / "cache" / "moments").iterdir()
    captured = kept.stat().st_mtime_ns
    assert ok(*words).out == first
    assert kept.stat().st_mtime_ns == captured
    plan = get_method("prism-v").plan(Moments.load(kept), key_gain=4)
    assert first == f"{Highlighter(*load_model(str(files['model'])), plan).generate(PROMPT, max_new_tokens=9)}\n"


# --- import, ls, doctor -------------------------------------------------------------------------------


def test_import(ok: Run, files: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "keys.pt"
    path.write_bytes(files["projections.pt"].read_bytes())
    made = ok("import", path, "--key-gain", 0.4, "--uniform", "--json").json
    target = tmp_path / "keys.plan.safetensors"
    assert made == {"file": str(target), **Plan.load(target).describe()}
    assert torch.equal(Plan.load(target).matrix(1, "key"), 0.4 * torch.eye(8).repeat(2, 1, 1))
    assert ok("generate", PROMPT, "-m", files["model"], "--plan", target, "-n", 2).out


LISTS = {
    "methods": ("method", [method.name for method in list_methods()]),
    "models": ("alias", list(PACKAGED)),
    "families": ("family", [*TESTED_FAMILIES, *NOT_STEERABLE]),
    "presets": ("preset", list(PRESETS)),
}


@pytest.mark.parametrize("what", LISTS)
def test_ls(ok: Run, what: str) -> None:
    column, names = LISTS[what]
    assert [row[column] for row in ok("ls", what, "--json").json] == names
    out = ok("ls", what).out
    assert [name for name in names if name not in out] == []


def test_ls_is_about_methods_and_their_parameters(ok: Run) -> None:
    assert ok("ls").out == ok("ls", "methods").out
    (row,) = (row for row in ok("ls", "--json").json if row["method"] == "prism")
    assert [item["parameter"] for item in row["parameters"]] == list(PrismParams.__dataclass_fields__)
    assert all(item["meaning"] for item in row["parameters"])


def test_ls_models_says_which_are_here(ok: Run) -> None:
    folder = packaged_path(PACKAGED["gemma3-270m"])
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    here = {row["alias"]: row["here"] for row in ok("ls", "models", "--json").json}
    assert {alias for alias, word in here.items() if word == "yes"} == {"gemma3-270m"}


def test_doctor_tells_what_is_installed(ok: Run, tmp_path: Path) -> None:
    found = ok("doctor", "--json").json
    assert found["prism-delta"] == prism_delta.__version__
    assert found["torch"] == metadata.version("torch")
    assert str(tmp_path / "cache") in found["cache"]
    assert "sites" not in found
    assert metadata.version("transformers") in ok("doctor").out


def test_doctor_tells_what_of_a_model_can_be_steered(ok: Run, files: dict[str, Path]) -> None:
    found = ok("doctor", files["model"], "--json").json
    sites = find_sites(load_model(str(files["model"]))[0])
    assert [(row["layer"], row["channel"], row["module"], row["heads"], row["dim"]) for row in found["sites"]] == [
        (site.layer, site.channel, site.name, *site.shape) for site in sites
    ]
    assert found["left_out"] == []
    out = ok("doctor", files["model"]).out
    assert "LlamaForCausalLM (llama)" in out
    assert "key: 3 layers, 2 heads x 8; value: 3 layers, 2 heads x 8" in out


def test_version(ok: Run) -> None:
    assert ok("--version").out == f"prism-delta {prism_delta.__version__}\n"


@pytest.mark.parametrize("command", app.registered_commands, ids=lambda command: command.callback.__name__)
def test_help_of_every_command(ok: Run, command: CommandInfo) -> None:
    out = ok(command.name or command.callback.__name__, "--help").out
    assert " ".join(command.callback.__doc__.split()) in " ".join(out.split())
    options = re.findall(r"^  (?:-\w, )?--\S+(.*(?:\n {8}.*)*)", out, re.MULTILINE)
    assert len(options) >= 2
    assert all(re.search("[a-z]{2}", text) for text in options)


def test_help_is_quick_and_does_not_load_torch() -> None:
    code = (
        "import atexit, sys; from prism_delta.cli import main; sys.argv = ['prism', '--help']\n"
        "atexit.register(lambda: sys.stderr.write(' '.join({'torch', 'transformers', 'numpy'} & set(sys.modules))))\n"
        "main()"
    )
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        times.append(time.perf_counter() - begin)
        assert done.stdout.startswith("Usage: prism")
        assert done.stderr == ""
    assert min(times) < 0.5


# --- errors -------------------------------------------------------------------------------------------

GENERATE = "generate Anna -m {model} --plan {plan}"

BAD: dict[str, tuple[Any, ...]] = {
    # prompts
    "unbalanced markup": ("generate 'Anna **was'", e.MarkupError, "never closed (line 1, column 6)", "\\**"),
    "unbalanced tags": ("generate 'a</hl>' --markup tags", e.MarkupError, "never opened"),
    "empty highlight": ("generate 'Anna ** ** was'", e.MarkupError, "holds no visible text"),
    "bad markup": ("generate Anna --markup bold", e.ParameterError, "unknown markup 'bold'", "stars, tags, none"),
    "empty prompt": ("generate ''", e.PromptError, "the prompt is empty"),
    "empty stdin": ("generate", e.PromptError, "the prompt is empty"),
    "two prompts": ("generate Anna -f {long}", e.PromptError, "not both"),
    "prompt no text": ("generate 'Anna \udcff **was**' -m {model} --plan {plan}", e.PromptError),
    "prompt not UTF-8": ("generate -f {latin}", e.StorageError, "{latin} is not UTF-8 text (byte 5)"),
    "no prompt file": ("generate -f {root}/nowhere", e.StorageError, "cannot read {root}/nowhere: No such file"),
    "prompt too long": ("generate -f {long} -m {model} --plan {plan}", e.PromptTooLongError,
                        "has 300 tokens and 64 more", "room for 256"),
    "no room to generate": (f"{GENERATE} -n 256", e.PromptTooLongError, "has 1 tokens and 256 more"),
    "nothing to generate": ("generate Anna -n 0", e.ParameterError, "--max-new-tokens must be at least 1, found 0"),
    "strength no number": ("generate **Anna** -m {model} --plan {plan} --strength nan", e.BatchError, "must be finite"),
    "no chat template": ("generate Anna --chat -m {other_model} --plan {other_plan}", e.ChatTemplateError,
                         "no chat template"),
    # files
    "plan for another model": ("generate Anna -m {model} --plan {other_plan}", e.PlanMismatchError,
                               "3 layers of 2 heads x 16 of keys (other)", "has 3 layers of 2 heads x 8"),
    "no plan": ("generate Anna --plan {root}/nowhere", e.StorageError, "cannot read {root}/nowhere: No such file"),
    "cut plan": ("generate Anna --plan {cut_plan}", e.TruncatedArtifactError, "{cut_plan} is truncated"),
    "cut moments": ("plan {cut_moments} -o {out}", e.TruncatedArtifactError, "{cut_moments} is truncated"),
    "cut file to show": ("show {cut_plan}", e.TruncatedArtifactError, "{cut_plan} is truncated"),
    "empty plan": ("generate Anna --plan {empty}", e.TruncatedArtifactError, "{empty} is empty"),
    "empty moments": ("plan {empty} -o {out}", e.TruncatedArtifactError, "{empty} is empty"),
    "pickle as plan": ("generate Anna --plan {projections.pt}", e.PickleArtifactError,
                       "is a pickle (.pt) file", "expected a plan file", "prism import FILE.pt"),
    "pickle as moments": ("plan {projections.pt} -o {out}", e.PickleArtifactError, "expected a moments file"),
    "pickle to show": ("show {projections.pt}", e.PickleArtifactError, "is a pickle (.pt) file"),
    "foreign plan": ("generate Anna --plan {foreign}", e.ArtifactError, "was not written by prism-delta"),
    "foreign moments": ("plan {foreign} -o {out}", e.ArtifactError, "was not written by prism-delta"),
    "newer plan": ("generate Anna --plan {newer_plan}", e.NewerArtifactError,
                   "{newer_plan} has format version 99", "reads up to 1", "upgrade prism-delta"),
    "newer moments": ("plan {newer_moments} -o {out}", e.NewerArtifactError, "has format version 99"),
    "moments as plan": ("generate Anna --plan {moments}", e.ArtifactError, "holds 'moments', expected 'plan'"),
    "plan as moments": ("plan {plan} -o {out}", e.ArtifactError, "holds 'plan', expected 'moments'"),
    "folder to show": ("show {root}", e.StorageError, "cannot read {root}: Is a directory"),
    "bad heat map": ("show {plan} --by height", e.ParameterError, "weight, rank or score, found 'height'"),
    "code to import": ("import {bomb} -o {out}", e.ArtifactError, "{bomb} is not a .pt file of plain tensors"),
    "garbage to import": ("import {garbage} -o {out}", e.ArtifactError, "{garbage} is not a .pt file"),
    "no file to import": ("import {root}/nowhere.pt -o {out}", e.StorageError, "cannot read {root}/nowhere.pt"),
    "no name to import": ("import ''", e.StorageError, "cannot read"),
    "no values to import": ("import {projections.pt} --value-gain 1 -o {out}", e.ArtifactError, "no value projections"),
    # models and methods
    "unknown model": ("generate Anna -m smolm2-135m", e.UnknownModelError, "did you mean 'smollm2-135m'"),
    "unknown model to capture": ("capture smolm2-135m -o {out}", e.UnknownModelError, "did you mean 'smollm2-135m'"),
    "no such folder": ("doctor {root}/nowhere", e.UnknownModelError, "no such folder: {root}/nowhere"),
    "no model in a folder": ("doctor {root}", e.UnknownModelError, "cannot load '{root}'"),
    "unknown device": ("doctor {model} --device abacus", e.ParameterError, "--device 'abacus' cannot be used"),
    "unknown dtype": ("doctor {model} --dtype int3", e.ParameterError, "float32, bfloat16, float16, found 'int3'"),
    "unknown method": ("generate Anna --method prisn", e.UnknownMethodError, "no method 'prisn', did you mean 'prism'"),
    "unknown method to plan": ("plan {moments} --method prisn -o {out}", e.UnknownMethodError, "did you mean 'prism'"),
    "unknown parameter": ("generate Anna -s gama=1", e.ParameterError, "no parameter 'gama', did you mean 'gamma'"),
    "unknown parameter to plan": ("plan {moments} -s gama=1 -o {out}", e.ParameterError, "did you mean 'gamma'"),
    "out of range": ("generate Anna -s gamma=2", e.ParameterError, "gamma must lie in (0, 1], found 2"),
    "no number": ("generate Anna -s gamma=much", e.ParameterError, "gamma must be a finite number, found 'much'"),
    "no choice": ("generate Anna -s energy=all", e.ParameterError, "energy must be one of sigma, sigma2, found 'all'"),
    "no such layer": ("plan {moments} -s layers=7 -o {out}", e.ParameterError, "no such layers: [7]"),
    "no value": ("generate Anna -s gamma", e.ParameterError, "expected key=value, found 'gamma'"),
    "unknown preset": ("generate Anna --preset prism/qwen3-4b/biasbio", e.UnknownMethodError,
                       "did you mean 'prism/qwen3-4b/biasbios'"),
    "settings beside a plan": (f"{GENERATE} -s gamma=0.5", e.ParameterError, "--plan"),
    "unknown list": ("ls modles", e.ParameterError, "no list 'modles', did you mean 'models'"),
    # pairs
    "answer not in context": ("capture {model} --pairs {pairs_without_answer} -o {out}", e.PairsError,
                              "{pairs_without_answer}, line 2: the answer 'Tom' is not in its context"),
    "field missing": ("capture {model} --pairs {pairs_without_field} -o {out}", e.PairsError,
                      "line 3: missing question_1, answer_1"),
    "pairs no JSON": ("capture {model} --pairs {pairs_no_json} -o {out}", e.PairsError, "line 2: not JSON"),
    "no pairs": ("capture {model} --pairs {pairs_empty} -o {out}", e.PairsError, "no pairs found"),
    "no pairs file": ("capture {model} --pairs {root}/nowhere -o {out}", e.StorageError, "cannot read {root}/nowhere"),
    "pairs not UTF-8": ("capture {model} --pairs {pairs_latin} -o {out}", e.StorageError,
                        "{pairs_latin} is not UTF-8 text (byte 15)"),
    "bad convention": ("capture {model} --convention mine -o {out}", e.ParameterError, "reference, found 'mine'"),
    "bad position": ("capture {model} --position assistant -o {out}", e.ParameterError, "needs template='chat'"),
    "bad batch": ("capture {model} --batch-tokens 0 -o {out}", e.ParameterError, "at least 1, found 0"),
    # output
    "moments exist": ("capture {model} -o {moments}", e.StorageError,
                      "{moments} exists; choose another name or pass --force"),
    "plan exists": ("plan {moments} -o {plan}", e.StorageError, "{plan} exists"),
    "imported plan exists": ("import {projections.pt} -o {plan}", e.StorageError, "{plan} exists"),
    "output is a folder": ("plan {moments} -o {root} --force", e.StorageError, "cannot write {root}"),
    "output below a file": ("plan {moments} -o {empty}/x", e.StorageError, "cannot write {empty}/x"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(prism: Run, files: dict[str, Path], tmp_path: Path, name: str) -> None:
    words, error, *reasons = BAD[name]
    places = {**files, "root": files["empty"].parent, "out": tmp_path / "out"}
    before = sorted(path.name for path in places["root"].iterdir())

    def fill(text: str) -> str:
        return re.sub(r"{([\w.]+)}", lambda match: str(places[match[1]]), text)

    result = prism(*map(fill, shlex.split(words)))
    assert (result.code, result.out) == (error.exit_code, "")
    assert result.err.startswith("prism: ")
    for reason in reasons:
        assert fill(reason) in result.err
    assert sorted(path.name for path in places["root"].iterdir()) == before
    assert not places["out"].exists()


@pytest.mark.parametrize("words", ["genrate", "generate Anna --strenght 2", "generate Anna --strength much", "plan"])
def test_wrong_usage_is_exit_code_2(prism: Run, words: str) -> None:
    result = prism(*words.split())
    assert (result.code, result.out) == (2, "")
    assert "Usage: " in result.err


def test_force_overwrites(ok: Run, files: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "p"
    out.write_bytes(b"old")
    ok("plan", files["moments"], "-o", out, "--force", "-s", "keep=1", "-s", "key_gain=3", "-s", "value_gain=0.5")
    assert out.read_bytes() == files["plan"].read_bytes()


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stdin", [Terminal(io.BytesIO()), None], ids=["terminal", "closed"])
def test_a_stdin_that_says_nothing_is_not_waited_for(prism: Run, stdin: Any) -> None:
    result = prism("generate", stdin=stdin)
    assert (result.code, result.out) == (e.PromptError.exit_code, "")
    assert "no prompt; give it as an argument, with --file, or on stdin" in result.err


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="needs a limit on the size of files")
def test_a_full_disk_leaves_what_was_there(files: dict[str, Path], tmp_path: Path) -> None:
    code = (
        "import resource, signal, sys, prism_delta.moments, prism_delta.methods\n"
        "from prism_delta.cli import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "main()"
    )
    target = tmp_path / "plan"
    target.write_bytes(b"old")
    words = ["plan", files["moments"], "-o", target, "--force"]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (e.StorageError.exit_code, "")
    assert done.stderr.startswith(f"prism: cannot write {target}: File too large; nothing half-written was left.")
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_bytes() == b"old"


def test_an_interruption_is_no_traceback(prism: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(listing, "print_list", interrupt)
    assert prism("ls").code == 130


def all_errors(base: type[e.PrismError] = e.PrismError) -> list[type[e.PrismError]]:
    return [base, *(found for kind in base.__subclasses__() for found in all_errors(kind))]


def test_every_error_has_a_code_and_a_meaning_of_its_own() -> None:
    found = all_errors()
    assert {kind.__module__ for kind in found} == {e.__name__}
    codes = [kind.exit_code for kind in found]
    assert len(set(codes)) == len(codes)
    assert all(10 <= code <= 125 for code in codes)
    assert all("exit_code" in vars(kind) and vars(kind)["__doc__"] for kind in found)
