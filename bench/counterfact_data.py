"""CounterFact records and the prompt made of them: `Previously {old fact}. Currently {new fact}. {prompt}`."""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

from prism_delta import Prompt, Span
from report import BenchError

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "counterfact_core_10k.jsonl.gz"


@dataclass(frozen=True)
class Record:
    """One counterfactual: the prompt with its subject filled in, and both objects."""

    case_id: int
    prompt: str
    new: str
    old: str

    def highlighted(self) -> Prompt:
        """The benchmark's prompt; the span is the new fact without the full stop that ends the sentence."""
        before = f"Previously {sentence(self.prompt, self.old)} Currently "
        fact = f"{self.prompt} {self.new}"
        text = f"{before}{sentence(self.prompt, self.new)} {self.prompt}"
        return Prompt(text, [Span(len(before), len(before) + len(fact))])


def default_data_text() -> str:
    return "../shared/data/" + DATA.name + " beside the repository"


def missing_text(path: Path) -> str:
    return (
        f"no CounterFact records: {path.name} is not there (default: {default_data_text()}). Give --data PATH to a "
        "JSON-lines file (.jsonl or .jsonl.gz) with case_id, prompt (with {}), subject, target_new and target_true"
    )


def load_records(path: Path, first: int, last: int) -> list[Record]:
    """Records with first <= case_id <= last."""
    if not path.is_file():
        raise BenchError(missing_text(path))
    lines = (gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()).decode("utf-8")
    items = (json.loads(line) for line in lines.splitlines() if line.strip())
    records = [
        Record(item["case_id"], item["prompt"].format(item["subject"]), item["target_new"], item["target_true"])
        for item in items
        if first <= item["case_id"] <= last
    ]
    if not records:
        raise BenchError(f"{path.name} has no record with case_id {first} to {last}")
    return records


def sentence(prompt: str, target: str) -> str:
    """The fact with one full stop, also where the object ends with one."""
    return f"{prompt} {target.removesuffix('.')}."
