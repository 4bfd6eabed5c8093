"""Memory that steering needs: live tensor bytes of a pass, peak RSS of a process, and the size of plans."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common import PLAIN, Setup, prefill, steering
from live_bytes import LiveBytes, storage_bytes
from prism_delta import Batch, Plan, get_method, list_methods
from prism_delta.methods.prism import CONVENTIONS
from prism_delta.presets import PRESETS
from report import BenchError, Report, Table, bytes_text, say
from timing import bootstrap_median, differences, interleave

CONTROL = f"{PLAIN} (A/A)"


def run(setup: Setup) -> Report:
    parts = (live_bytes(setup), plan_sizes(setup), resident(setup))
    tables = [table for table, _ in parts]
    live, sizes, rss = (data for _, data in parts)
    return Report("memory", tables, {"live_bytes": live, "plan_sizes": sizes, "peak_rss": rss})


# --- live tensor bytes of one pass ---------------------------------------------------------------


def live_bytes(setup: Setup) -> tuple[Table, list[dict[str, Any]]]:
    rows: list[list[object]] = []
    data: list[dict[str, Any]] = []
    for length in (64, 256) if setup.quick else (512, 4096):
        for share in (0.25, 1.0):
            batch = setup.batch(1, length, int(share * length))
            say(f"memory: live bytes, {length} tokens, {share:.0%} highlighted")
            plain = peak_of_pass(setup.model, None, batch)
            for name, plan in setup.plans.items():
                steered = peak_of_pass(setup.model, plan, batch)
                held = storage_bytes(tensor for edit in plan.edits.values() for tensor in edit.tensors().values())
                more = steered - plain
                rows.append([length, f"{share:.0%}", name, *map(bytes_text, (plain, more, held, more + held))])
                item = {"prompt": length, "share": share, "plan": name, "plain_peak": plain, "steered_peak": steered}
                data.append({**item, "difference": more, "plan_bytes": held, "total_over_plain": more + held})
    columns = ("prompt", "highlighted", "plan", "plain peak", "steered - plain", "plan itself", "total over plain")
    return Table("peak of live tensor bytes in a prefill, weights not counted", columns, rows), data


def peak_of_pass(model: Any, plan: Plan | None, batch: Batch) -> int:
    """Peak of new bytes in a prefill, from before the steer block is entered until after it is left."""
    known = [*model.parameters(), *model.buffers(), *batch.inputs.values(), batch.strengths]
    if plan is not None:
        plan.check(model)  # sites are found once per model, not per request
        known += [tensor for edit in plan.edits.values() for tensor in edit.tensors().values()]
    with torch.no_grad(), LiveBytes(known) as counter, steering(model, plan, batch):
        prefill(model, batch)
    return int(counter.peak)


# --- size of plans -------------------------------------------------------------------------------


def plan_sizes(setup: Setup) -> tuple[Table, list[dict[str, Any]]]:
    rows: list[list[object]] = []
    data: list[dict[str, Any]] = []
    model = str(setup.moments.header["model"]["name"])
    with tempfile.TemporaryDirectory() as folder:
        for name, plan in every_plan(setup, model).items():
            size = plan.save(Path(folder) / "plan.safetensors").stat().st_size
            forms = sorted({edit.form for edit in plan.edits.values()})
            rows.append([name, bytes_text(plan.nbytes), bytes_text(size), ", ".join(forms) or "no edit"])
            data.append({"plan": name, "params": plan.header["params"], "bytes": plan.nbytes, "file_bytes": size})
    weights = storage_bytes(setup.model.parameters())
    rows.append(["(the model's weights)", bytes_text(weights), "", ""])
    return Table("size of plans for this model", ("plan", "in memory", "file", "forms"), rows), data


def every_plan(setup: Setup, model: str) -> dict[str, Plan]:
    """Every method at its defaults and under each convention, the model's presets, and the other benchmarks' plans."""
    plans = {f"{method.name} (defaults)": method.plan(setup.moments) for method in list_methods()}
    for name in ("prism", "prism-v"):
        for convention in CONVENTIONS:
            plans[f"{name} (convention={convention})"] = get_method(name).plan(setup.moments, convention=convention)
    for preset in PRESETS.values():
        if preset.name.split("/")[1] == model:
            plans[f"preset {preset.name}"] = get_method(preset.method).plan(setup.moments, **preset.params)
    return plans | {f"benchmark plan {name}": plan for name, plan in setup.plans.items()}


# --- peak RSS of fresh processes -----------------------------------------------------------------


def resident(setup: Setup) -> tuple[Table, dict[str, Any]]:
    sizes = {"prompt": 64 if setup.quick else 512, "highlighted": 16 if setup.quick else 128}
    sizes |= {"new_tokens": 4 if setup.quick else 32, "seed": setup.seed, "threads": torch.get_num_threads()}
    plans: Mapping[str, Plan | None] = {PLAIN: None, CONTROL: None, **setup.plans}
    origin: set[str] = set()
    with tempfile.TemporaryDirectory() as folder:
        samplers = {}
        for number, (name, plan) in enumerate(plans.items()):
            path = None if plan is None else plan.save(Path(folder) / f"{number}.safetensors")
            samplers[name] = partial(child_peak, setup.args.model, path, sizes, origin)
        rounds = setup.rounds(7)
        say(f"memory: peak RSS, {len(samplers)} processes a round, {rounds} rounds")
        samples = interleave(samplers, rounds=rounds, seed=setup.seed)
    return resident_table(plans, samples, origin, setup.seed, sizes)


def resident_table(
    plans: Mapping[str, Plan | None],
    samples: Mapping[str, list[float]],
    origin: set[str],
    seed: int,
    sizes: Mapping[str, int],
) -> tuple[Table, dict[str, Any]]:
    rounds = len(samples[PLAIN])
    rows: list[list[object]] = []
    data: dict[str, Any] = {**sizes, "rounds": rounds, "peak_of": sorted(origin), "samples": samples, "variants": {}}
    for name, values in samples.items():
        more = bootstrap_median(differences(values, samples[PLAIN]), seed)
        plan = plans[name]
        held = 0 if plan is None else plan.nbytes
        interval = f"{bytes_text(more.median)} [{bytes_text(more.low)}, {bytes_text(more.high)}]"
        rows.append([name, bytes_text(statistics.median(values)), interval, bytes_text(held), rounds])
        data["variants"][name] = {"difference": asdict(more), "plan_bytes": held}
    columns = ("variant", "peak RSS", "over plain [95 %]", "plan itself", "rounds")
    return Table(f"peak RSS of a process from {' or '.join(sorted(origin))} on", columns, rows), data


def child_peak(model: str, plan: Path | None, sizes: Mapping[str, int], origin: set[str]) -> float:
    """Peak resident bytes of one generation in a fresh process."""
    command = [sys.executable, str(Path(__file__).with_name("memory_child.py")), "--model", model]
    command += [word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    done = subprocess.run(
        command + (["--plan", str(plan)] if plan else []), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BenchError(f"the child process failed with code {done.returncode}:\n{done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    origin.add(found["peak_from"])
    return float(found["peak"])
