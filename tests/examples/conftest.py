"""The examples are programs, not a package: their folder is put on the path, as Python does for a program."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "agentic"))
