"""One generation in a process of its own; prints its peak memory as JSON. Started by memory.py."""

from __future__ import annotations

import argparse
import json
import resource
import sys
from functools import partial
from pathlib import Path

import torch

from common import call_with, generate, random_batch
from prism_delta import Plan, load_model

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--plan", help="a plan file; without one the model stays plain")
    for name in ("prompt", "highlighted", "new-tokens", "seed", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model, _ = load_model(args.model)
    plan = Plan.load(args.plan) if args.plan else None
    batch = random_batch(int(model.config.vocab_size), 1, args.prompt, args.highlighted, args.seed)
    whole_life = reset_peak()
    call_with(model, plan, batch, partial(generate, new_tokens=args.new_tokens))()
    print(json.dumps({"peak": peak(), "peak_from": "generation" if whole_life else "process start"}))


def reset_peak() -> bool:
    """Forget the peak of loading the model, where the system can (Linux)."""
    try:
        RESET.write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def peak() -> int:
    """Peak resident bytes of this process.

    Linux's own counter is preferred to getrusage, whose maximum survives exec and so begins with the size
    of the parent process.
    """
    try:
        lines = STATUS.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


if __name__ == "__main__":
    main()
