"""`python -m areal`."""

import sys

from areal.cli import main

sys.exit(main())
