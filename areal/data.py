"""Tasks: reading them, the order of training, and the evaluation split.

    tasks = Tasks(None, config)                 # from `data.train`; or pass rows
    async for task, position in tasks: ...      # `tasks.seek(position + 1)` continues after this one
    evaluation_tasks(config)                    # from `data.evaluation`, or the rows held out

A position counts tasks from 0 across epochs. Order and split depend on the seed only. Every task gets a stable string
`id`: the row's own, or a hash of its content. Unreadable data raises a DataError that names the file and the line,
before anything starts.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterable, AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import orjson

from areal.config import Config
from areal.config.schema import Data
from areal.errors import ConfigError, DataError
from areal.types import Task

Row = Mapping[str, Any]
Source = str | Iterable[Row] | AsyncIterable[Row]


class Rows(Sequence[Task]):
    """Rows of a table as tasks with ids. A row is built on access, from the single copy in memory."""

    def __init__(self, table: Any, ids: Sequence[str], chosen: Sequence[int] | None = None):
        self._table = table
        self._ids = ids
        self._chosen = range(len(ids)) if chosen is None else chosen

    def __len__(self) -> int:
        return len(self._chosen)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Rows: ...
    def __getitem__(self, index: int | slice) -> Task | Rows:
        if isinstance(index, slice):
            return Rows(self._table, self._ids, self._chosen[index])
        row = int(self._chosen[index])
        return {**self._table[row], "id": self._ids[row]}

    def take(self, chosen: Sequence[int]) -> Rows:
        return Rows(self._table, self._ids, [self._chosen[index] for index in chosen])


class Tasks:
    """Training tasks, for one `async for`. `held_out` holds the rows kept for evaluation.

    source: a path or data set name (see the setting `data.train`), a sequence, an iterable, or an async iterable such
    as the queue of a live service; None takes `data.train`. A sequence can be shuffled, split and repeated. A stream
    (anything without a length) is consumed once, in order, one row at a time; settings that need a length are refused.
    `next()` of a plain iterable runs on the event loop: an iterable that blocks should be async.

    Construct it in a thread if an event loop is running: reading a large file takes time. Raises DataError.
    """

    def __init__(self, source: Source | None, config: Config):
        data = config.data
        if source is None:
            if not data.train:
                raise DataError("no tasks: set data.train=FILE, or pass tasks in the program")
            source = data.train
        elif data.train:
            raise DataError(f"data.train={data.train!r}, but the program passes tasks itself; remove one of the two")
        self.position = 0
        self._epochs = data.epochs
        self._seed = config.seed if data.shuffle else None
        self._rows: Rows | None = None
        self._stream: Iterator[Row] | AsyncIterator[Row] | None = None
        self._order: tuple[int, Sequence[int]] | None = None
        self.held_out: Sequence[Task] = []
        if isinstance(source, str) or (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            rows = read(source) if isinstance(source, str) else check(source)
            self._rows, self.held_out = _split(rows, data.evaluation_size, config.seed)
        else:
            _refuse_for_stream(data)
            self._stream = aiter(source) if isinstance(source, AsyncIterable) else iter(source)

    def __aiter__(self) -> Tasks:
        return self

    async def __anext__(self) -> tuple[Task, int]:
        """The next task and its position."""
        position = self.position
        if self._rows is None:
            task = self._named(await self._next_of_stream(), position)
        else:
            if self._epochs and position >= self._epochs * len(self._rows):
                raise StopAsyncIteration
            task = self.at(position)
        self.position = position + 1
        return task, position

    def at(self, position: int) -> Task:
        """The task at a position. Raises DataError for a stream, which keeps none."""
        if self._rows is None:
            raise DataError(f"the task at position {position} came from a stream and cannot be read again")
        epoch, index = divmod(position, len(self._rows))
        return self._rows[self._epoch_order(epoch)[index]]

    def seek(self, position: int, again: Collection[int] = ()) -> dict[int, Task]:
        """Continue at `position` >= 0. Returns the tasks at the earlier positions `again`, as far as they can be read:
        an iterable is read up to `position` (DataError if it ends before); an async stream returns none and continues
        with whatever comes next."""
        found: dict[int, Task] = {}
        if self._rows is not None:
            found = {earlier: self.at(earlier) for earlier in again}
        elif isinstance(self._stream, Iterator):
            for past in range(self.position, position):
                row = next(self._stream, None)
                if row is None:
                    raise DataError(f"position {position} is past the end of the stream, which has {past} tasks")
                if past in again:
                    found[past] = self._named(row, past)
        self.position = position
        return found

    def _named(self, row: Row, position: int) -> Task:
        return {**row, "id": _id(row, f"task {position} of the stream")}

    async def _next_of_stream(self) -> Row:
        if isinstance(self._stream, AsyncIterator):
            return await anext(self._stream)
        assert self._stream is not None
        try:
            return next(self._stream)
        except StopIteration:
            raise StopAsyncIteration from None

    def _epoch_order(self, epoch: int) -> Sequence[int]:
        assert self._rows is not None
        if self._order is None or self._order[0] != epoch:
            size = len(self._rows)
            self._order = epoch, range(size) if self._seed is None else _permutation(size, self._seed, f"epoch {epoch}")
        return self._order[1]


def evaluation_tasks(config: Config) -> Sequence[Task]:
    """The tasks of `data.evaluation`, or those held out of `data.train` (the same for the same seed). Raises DataError
    if there are neither."""
    data = config.data
    if data.evaluation:
        return read(data.evaluation)
    if not (data.train and data.evaluation_size):
        raise DataError("no evaluation tasks: set data.evaluation=FILE, or data.train=FILE and data.evaluation_size=N")
    return _split(read(data.train), data.evaluation_size, config.seed)[1]


def check(tasks: Any) -> Rows:
    """Turn a sequence of rows (anything with len and index) into tasks with ids. Raises DataError."""
    return _checked(tasks, (tasks[i] for i in range(len(tasks))), "tasks", "tasks[{}]".format)


def read(source: str) -> Rows:
    """Read all rows of a .jsonl or .parquet file, a folder saved by `datasets`, or a Hugging Face data set ("name",
    "name:split", "name:config:split"). Raises DataError."""
    path = Path(source)
    if path.suffix == ".jsonl":
        return _read_jsonl(path)
    if path.suffix == ".parquet":
        return _read_parquet(path)
    if path.is_file():
        raise DataError(f"{source}: unknown file type; use .jsonl (one JSON object per line) or .parquet")
    return _read_dataset(source)


def _read_jsonl(path: Path) -> Rows:
    rows: list[Row] = []
    lines: list[int] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                text = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
                if text:
                    rows.append(_parse(text, f"{path} line {number}"))
                    lines.append(number)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    return _checked(rows, rows, str(path), lambda i: f"{path} line {lines[i]}")


def _parse(text: bytes, place: str) -> Row:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        shown = text.decode(errors="replace")
        start = max(0, error.pos - 30)
        piece = ("..." if start else "") + shown[start : start + 60] + ("..." if start + 60 < len(shown) else "")
        raise DataError(f"{place} is not JSON: {error.msg} at character {error.pos + 1}, near {piece!r}") from None


class _Parquet:
    """An Arrow table as a sequence of dicts. It stays columnar; rows are built on access."""

    def __init__(self, table: Any):
        self._table = table

    def __getitem__(self, index: int) -> Row:
        return self._table.slice(index, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[Row]:
        for batch in self._table.to_batches(max_chunksize=1024):
            yield from batch.to_pylist()


def _read_parquet(path: Path) -> Rows:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError(f'{path}: reading Parquet needs pyarrow; pip install "areal[parquet]"') from None
    try:
        table = pyarrow.parquet.read_table(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    except pyarrow.ArrowException as error:
        raise DataError(f"{path} is not Parquet: {error}") from None
    only_ids = table.select(["id"]) if "id" in table.column_names else table
    return _checked(_Parquet(table), _Parquet(only_ids), str(path), lambda i: f"{path} row {i}")


def _read_dataset(source: str) -> Rows:
    """Needs the extra `datasets`. The default split is "train", or the only one."""
    try:
        import datasets
    except ImportError:
        raise DataError(f'{source}: data sets need `datasets`; pip install "areal[datasets]"') from None
    name, *options = source.split(":")
    if len(options) > 2:
        raise DataError(f"{source}: write name, name:split or name:config:split")
    split = options[-1] if options else None
    try:
        if (Path(name) / "dataset_info.json").is_file() or (Path(name) / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(name)
        else:
            found = datasets.load_dataset(name, options[0] if len(options) == 2 else None)
    except Exception as error:  # datasets raises ValueError, OSError, its own errors and the hub's
        reason = f"{type(error).__name__}: {error}"
        hint = "a file name must end in .jsonl or .parquet"
        raise DataError(f"{source}: cannot load this data set ({reason}); {hint}") from None
    if isinstance(found, dict):
        split = split or ("train" if "train" in found or len(found) != 1 else next(iter(found)))
        if split not in found:
            raise DataError(f"{source}: no split {split!r}; it has {', '.join(found)}")
        found = found[split]
    elif split:
        raise DataError(f"{source}: this data set has no splits; remove {split!r}")
    only_ids = found.select_columns(["id"]) if "id" in found.column_names else found
    return _checked(found, only_ids, source, lambda i: f"{source} row {i}")


def _checked(table: Any, rows: Iterable[Row], whole: str, place: Callable[[int], str]) -> Rows:
    """rows: those of `table`, or only their ids; place(i) names row i. Raises DataError if empty or an id repeats."""
    seen: dict[str, int] = {}
    for i, row in enumerate(rows):
        name = _id(row, place(i))
        if name in seen:
            same = f"have the same id {name!r}" if "id" in row else "are the same task; give them ids or remove one"
            raise DataError(f"{place(seen[name])} and {place(i)} {same}")
        seen[name] = i
    if not seen:
        raise DataError(f"{whole}: no tasks")
    return Rows(table, list(seen))


def _split(rows: Rows, size: int, seed: int) -> tuple[Rows, Rows]:
    """(training rows, `size` held-out rows), both in their original order."""
    if size >= len(rows):
        raise DataError(f"data.evaluation_size={size} leaves nothing to train on: there are {len(rows)} tasks")
    order = _permutation(len(rows), seed, "split")
    return rows.take(sorted(order[size:])), rows.take(sorted(order[:size]))


def _id(row: Any, place: str) -> str:
    if not isinstance(row, Mapping):
        raise DataError(f"{place} is a {type(row).__name__}, not an object (a dict of named values)")
    if "id" not in row:
        try:
            content = orjson.dumps(dict(row), option=orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY)
        except TypeError as error:
            raise DataError(f"{place} needs an `id`: its content cannot be hashed ({error})") from None
        return hashlib.blake2b(content, digest_size=12).hexdigest()
    name = row["id"]
    if isinstance(name, int | np.integer) and not isinstance(name, bool):
        return str(name)
    if not isinstance(name, str) or not name:
        raise DataError(f"{place}: id={name!r} must be a non-empty string or an integer")
    return name


def _refuse_for_stream(data: Data) -> None:
    """Refuse settings that need a length (I10). `data.shuffle` is documented not to apply to streams."""
    wrong = [f"data.epochs={data.epochs}"] if data.epochs > 1 else []
    wrong += [f"data.evaluation_size={data.evaluation_size}"] if data.evaluation_size else []
    if wrong:
        raise ConfigError(f"{', '.join(wrong)} needs tasks with a length, but got a stream; pass a list or a file")


def _permutation(size: int, seed: int, purpose: str) -> list[int]:
    """Random order of range(size), from raw 64-bit words, which are the same in all numpy versions."""
    key = int.from_bytes(hashlib.blake2b(f"{seed} {purpose}".encode(), digest_size=16).digest(), "big")
    words = np.random.PCG64(key).random_raw(size)
    return np.argsort(words, kind="stable").tolist()
