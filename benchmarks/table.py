"""What every benchmark shares: one printed table and `--json FILE`."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table


def arguments() -> argparse.Namespace:
    """The command line of a benchmark: `json` is the file to write, or None."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", metavar="FILE", help="write the rows there as JSON")
    return parser.parse_args()


def report(title: str, rows: list[dict[str, Any]], json_path: str | None) -> None:
    """Print the rows as a table; with json_path also write {"title", "rows"} there.

    The columns are the keys of the rows in order of appearance; a row may lack some.
    """
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table()
    for column in columns:
        numeric = _numeric(row.get(column) for row in rows)
        table.add_column(column, justify="right" if numeric else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a pipe has no width; 80 columns would cut the numbers
    console.print(title, table, sep="\n", highlight=False)
    if json_path:
        path = Path(json_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(orjson.dumps({"title": title, "rows": rows}, option=orjson.OPT_INDENT_2) + b"\n")


def _numeric(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values if value is not None)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
