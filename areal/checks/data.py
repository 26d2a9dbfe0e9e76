"""Checks the training data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from heapq import nlargest, nsmallest
from itertools import islice
from typing import Any

import orjson

from areal.checks.findings import Level, Result
from areal.config import Config
from areal.data import evaluation_tasks, read
from areal.types import Task

SCANNED_ROWS = 50_000
"""Maximum number of rows checked. (Ids are checked in all rows.)"""
TOKENISED_ROWS = 64
"""Number of prompts, longest in bytes first, whose tokens are counted."""
PROMPT_KEYS = ("messages", "prompt", "question", "problem", "instruction", "query", "input", "text")
"""Possible keys of a row's prompt; the first one present is used."""


def rows(config: Config, tasks: Sequence[Task] | None, tokenizer: Any | None, room: int) -> Iterator[Result]:
    """Whether the rows can be trained on. room: maximum tokens of a prompt, checked if there is a `tokenizer`."""
    if tasks is None and not config.data.train:
        yield "the program passes its own tasks"
        return
    rows = read(config.data.train) if tasks is None else tasks
    evaluation: Sequence[Task] = []
    held_out: set[str] = set()
    if config.data.evaluation:
        evaluation = read(config.data.evaluation)
    elif config.data.evaluation_size and tasks is None:
        evaluation = evaluation_tasks(config)
        held_out = {row["id"] for row in evaluation}
    seen = [row for row in islice(rows, SCANNED_ROWS) if row["id"] not in held_out]
    bad = [*_keys(seen), *_prompts(seen, tokenizer, room), *_leaks(seen, evaluation)]
    if (count := len(rows) - len(held_out)) < (size := config.train.batch_groups):
        few = f"{count} tasks are fewer than a batch, train.batch_groups={size}: steps repeat tasks within a batch"
        bad.append(("warning", few, "lower train.batch_groups, or add tasks"))
    yield from bad
    if not bad:
        yield f"{count} tasks to train on, {len(evaluation)} to evaluate on"


def _keys(rows: Sequence[Task]) -> Iterator[Result]:
    kinds = Counter(frozenset(row) for row in rows)
    usual, number = kinds.most_common(1)[0]
    if other := next((row for row in rows if frozenset(row) != usual), None):
        yield (
            "warning",
            f"{len(rows) - number} of {len(rows)} rows have unusual keys; for example {other['id']!r} differs in "
            f"{', '.join(sorted(usual ^ frozenset(other)))}",
            "give all rows the same keys",
        )


def _prompts(rows: Sequence[Task], tokenizer: Any | None, room: int) -> Iterator[Result]:
    texts = {row["id"]: text for row in rows if (text := _prompt(row)) is not None}
    if empty := [name for name, text in texts.items() if not text.strip()]:
        yield "warning", f"{len(empty)} rows have an empty prompt, such as {empty[0]!r}", "remove them"
    if tokenizer is None:
        return
    # A token has at least one byte, so most rows are short enough without tokenising.
    sizes = {name: size for name, text in texts.items() if (size := len(text.encode(errors="replace"))) > room}
    longest = nlargest(TOKENISED_ROWS, sizes, key=sizes.__getitem__)

    def tokens(name: str) -> int:
        return len(tokenizer.encode(texts[name], add_special_tokens=False))

    counts = {name: tokens(name) for name in longest}
    if huge := {name: count for name, count in counts.items() if count > room}:
        name = max(huge, key=huge.__getitem__)
        shortest = nsmallest(TOKENISED_ROWS, sizes, key=sizes.__getitem__) if len(sizes) == len(rows) else []
        level: Level = "problem" if shortest and all(tokens(name) > room for name in shortest) else "warning"
        least = "at least " if len(huge) == TOKENISED_ROWS else ""
        yield (
            level,
            f"{least}{len(huge)} prompts leave no room for an answer in the model's context, so that their episodes "
            f"fail; the longest, {name!r}, has {huge[name]} tokens, but only {room} fit",
            "remove them, or raise model.context_length",
        )


def _prompt(row: Task) -> str | None:
    value = next((row[key] for key in PROMPT_KEYS if key in row), None)
    if isinstance(value, list):
        value = "\n".join(str(each.get("content") or "") for each in value if isinstance(each, Mapping))
    return value if isinstance(value, str) else None


def _leaks(rows: Sequence[Task], evaluation: Sequence[Task]) -> Iterator[Result]:
    known = {_content(row): row["id"] for row in islice(evaluation, SCANNED_ROWS)}
    leaked = [(row["id"], known[content]) for row in rows if known and (content := _content(row)) in known]
    if leaked:
        yield (
            "warning",
            f"{len(leaked)} evaluation rows are among the training rows, such as {leaked[0][1]!r} (training row "
            f"{leaked[0][0]!r}): the evaluation would include training tasks",
            "remove them from one of the two",
        )


def _content(row: Task) -> bytes:
    bare = {key: value for key, value in row.items() if key != "id"}
    return orjson.dumps(bare, default=str, option=orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY)
