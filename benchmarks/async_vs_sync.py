"""The search agent with eta = 0, 2 and 4, same seed and settings: seconds per step and time to reward 0.8.

The bound is what perfect overlap would give over eta = 0: (generation + training) / max(generation, training), both
measured in the run with eta = 0. Training includes the publication of the weights.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from itertools import accumulate
from pathlib import Path
from typing import Any

import orjson

from benchmarks.table import arguments, report

SCRIPT = Path(__file__).parent.parent / "examples" / "agentic" / "search_agent.py"
STEPS = 40
SKIPPED = 5
"""First steps that are left out of the times: the pipeline fills."""
GOAL = 0.8
WINDOW = 3
"""Steps over which the reward is averaged before it is compared with GOAL."""


def run(eta: int, folder: str) -> list[dict[str, Any]]:
    settings = [f"staleness.max={eta}", f"train.steps={STEPS}", f"name=eta{eta}", f"folder={folder}", "view=plain"]
    print(f"  eta = {eta}: {STEPS} steps", flush=True)
    subprocess.run([sys.executable, str(SCRIPT), *settings], check=True, stdout=subprocess.DEVNULL)
    lines = (Path(folder) / f"eta{eta}-0001" / "metrics.jsonl").read_bytes().splitlines()
    return [orjson.loads(line) for line in lines]


def time_to_goal(steps: list[dict[str, Any]]) -> float | None:
    """Seconds of training until the mean reward of WINDOW steps reaches GOAL; None if it never does."""
    elapsed = list(accumulate(step["seconds"] for step in steps))
    for end in range(WINDOW, len(steps) + 1):
        if statistics.fmean(step["reward"] for step in steps[end - WINDOW : end]) >= GOAL:
            return elapsed[end - 1]
    return None


def main() -> None:
    options = arguments()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="areal-bench-") as folder:
        for eta in (0, 2, 4):
            steps = run(eta, folder)
            seconds = statistics.fmean(step["seconds"] for step in steps[SKIPPED:])
            training = statistics.fmean(
                step["train"]["seconds"] + step["publish"]["prepare_s"] + step["publish"]["pause_max_s"]
                for step in steps[SKIPPED:]
            )
            row: dict[str, Any] = {"eta": eta, "s_per_step": seconds, "s_to_reward_0.8": time_to_goal(steps)}
            if eta == 0:
                generation = seconds - training
                row |= {"speedup": 1.0, "bound": seconds / max(generation, training)}
            else:
                row |= {"speedup": rows[0]["s_per_step"] / seconds, "bound": rows[0]["bound"]}
            row |= {"max_staleness": max(int(age) for step in steps for age in step["staleness"])}
            row |= {"last_reward": statistics.fmean(step["reward"] for step in steps[-5:])}
            rows.append(row)
    report(f"async_vs_sync: search agent, {STEPS} steps", rows, options.json)


if __name__ == "__main__":
    main()
