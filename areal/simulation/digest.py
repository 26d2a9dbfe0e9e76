"""A digest of each seed's facts, to show that a change of the code left every decision as it was.

    python -m areal.simulation.digest --seeds 500 > before.txt      # ... change the code ...
    python -m areal.simulation.digest --seeds 500 | diff before.txt -

Names of fields and texts of tracebacks are left out, so that renaming something changes no digest.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

import orjson

from areal.controller.facts import Fact, Failed
from areal.controller.reader import LedgerReader
from areal.simulation.campaign import quiet, simulate


def digest(facts: Iterable[Fact]) -> tuple[int, str]:
    """How many facts there are, and a hash of them in order."""
    count, total = 0, hashlib.blake2b(digest_size=12)
    for fact in facts:
        omitted = {"message"} if isinstance(fact, Failed) else set()
        values = [getattr(fact, field.name) for field in fields(fact) if field.name not in omitted]
        total.update(orjson.dumps([type(fact).__name__, *values]))
        count += 1
    return count, total.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m areal.simulation.digest", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--seeds", type=int, default=500)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    quiet()
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
            outcome = simulate(seed, Path(folder))
            runs = sorted(Path(folder).glob("run-*"))
            count, value = 0, "none"
            if runs and (runs[0] / "ledger" / "ledger.db").exists():
                with LedgerReader.open(runs[0] / "ledger") as reader:
                    count, value = digest(reader.facts())
        print(seed, count, value, outcome.violation, flush=True)


if __name__ == "__main__":
    main()
