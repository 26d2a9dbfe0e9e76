"""All benchmarks, one after the other, each in a process of its own.

python -m benchmarks [--json FOLDER]        # or one: python -m benchmarks.packing [--json FILE]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

HELPERS = {"__init__", "__main__", "table"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("--json", metavar="FOLDER", type=Path, help="write FOLDER/NAME.json for each benchmark")
    folder = parser.parse_args().json
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path.stem not in HELPERS)
    failed = []
    for name in names:
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        if folder:
            command += ["--json", str(folder / f"{name}.json")]
        print(f"\n{name}", flush=True)
        if subprocess.run(command).returncode:
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
