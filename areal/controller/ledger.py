"""The ledger: every fact of a run, in order, and the trajectories that training may still need.

Facts are rows of `ledger.db` (SQLite), trajectories are records in segment files; one thread writes both. Appends
are grouped: a group's trajectories are synced to their segment before its rows are committed, and each commit is
synced too. So whatever is killed, the ledger is a prefix of what was appended, everything that a `barrier` waited
for is in it, and each Finished fact that came with an episode has its trajectory (I4).

A trajectory lives until its group is dropped or a checkpoint covers the KEPT_STEPS after its own; a segment file with
no living trajectory is deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sqlite3
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

from areal.agents import journal
from areal.agents.journal import RecordedCall
from areal.controller import facts, segments
from areal.controller.facts import BatchFormed, Checkpointed, Dropped, Fact, Failed, Finished
from areal.controller.reader import (
    DATABASE,
    FORMAT,
    LedgerReader,
    check_exists,
    check_format,
    connect,
    errors,
    format_of,
)
from areal.errors import LedgerError
from areal.types import Batch, EpisodeRecord, Group

BACKLOG_BYTES = 64 << 20
"""Above this much that is not written yet, `ready` waits."""
_LINGER_S = 0.05
"""The writer collects appends for this long while nobody waits for them: each commit costs two syncs."""
_END = sys.maxsize

_SCHEMA = f"""
BEGIN;
CREATE TABLE facts (seq INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE episodes (
    grp INTEGER, member INTEGER, segment INTEGER, offset INTEGER, size INTEGER, from_version INTEGER,
    PRIMARY KEY (grp, member)
) WITHOUT ROWID;
CREATE TABLE calls (
    grp INTEGER, member INTEGER, seq INTEGER, segment INTEGER, offset INTEGER, size INTEGER,
    PRIMARY KEY (grp, member, seq)
) WITHOUT ROWID;
PRAGMA user_version = {FORMAT};
COMMIT;
"""


class _Call(NamedTuple):
    """What an unfinished episode had; no fact, since it only lives until the episode ends."""

    group: int
    member: int


class _Entry(NamedTuple):
    fact: Fact | _Call
    body: bytes
    record: bytes


class _Store:
    """Database and segments, blocking. One thread at a time uses it."""

    def __init__(self, folder: Path, *, durable: bool) -> None:
        self._database = connect(folder)
        self._database.execute(f"PRAGMA synchronous = {'FULL' if durable else 'OFF'}")
        self._segments = segments.Segments(folder, durable=durable)
        query = "SELECT segment, COUNT(*) FROM (SELECT segment FROM {} UNION ALL SELECT segment FROM {}) GROUP BY 1"
        self._living: dict[int, int] = dict(self._database.execute(query.format("episodes", "calls")).fetchall())
        self._calls = self._database.execute("SELECT COALESCE(MAX(seq), 0) FROM calls").fetchone()[0]
        for number in self._segments.numbers():
            if number not in self._living:  # torn before its first commit, or killed before it was deleted
                self._segments.delete(number)

    def write(self, entries: Iterable[_Entry]) -> None:
        """Write entries in order, all of them or (after an error) none."""
        places = [(entry, self._segments.append(entry.record) if entry.record else None) for entry in entries]
        self._segments.sync()
        with self._database as database:
            for entry, place in places:
                fact = entry.fact
                if not isinstance(fact, _Call):
                    database.execute("INSERT INTO facts (body) VALUES (?)", (entry.body.decode(),))
                    for (segment,) in self._follow(fact):
                        self._living[segment] -= 1
                if place is not None:
                    assert isinstance(fact, Finished | _Call)
                    self._living[place[0]] = self._living.get(place[0], 0) + 1
                    row = (fact.group, fact.member, *place, len(entry.record))
                    if isinstance(fact, _Call):
                        self._calls += 1
                        database.execute(
                            "INSERT INTO calls VALUES (?, ?, ?, ?, ?, ?)", (*row[:2], self._calls, *row[2:])
                        )
                    else:
                        database.execute("INSERT INTO episodes VALUES (?, ?, ?, ?, ?, NULL)", row)
        for number in [n for n, count in self._living.items() if not count and n != self._segments.current]:
            self._segments.delete(number)
            del self._living[number]

    def _follow(self, fact: Fact) -> list[tuple[int]]:
        """Keep `episodes` and `calls` in step with a fact; returns the segment of each record that ended."""
        match fact:
            case Finished() | Failed():
                query = "DELETE FROM calls WHERE grp = ? AND member = ? RETURNING segment"
                return self._database.execute(query, (fact.group, fact.member)).fetchall()
            case BatchFormed():
                rows = [(fact.from_version, group) for group in fact.groups]
                self._database.executemany("UPDATE episodes SET from_version = ? WHERE grp = ?", rows)
            case Dropped():
                ended = []
                for table in ("episodes", "calls"):
                    query = f"DELETE FROM {table} WHERE grp = ? RETURNING segment"
                    ended += self._database.execute(query, (fact.group,)).fetchall()
                return ended
            case Checkpointed():
                query = "DELETE FROM episodes WHERE from_version < ? RETURNING segment"
                return self._database.execute(query, (fact.version - facts.KEPT_STEPS,)).fetchall()
        return []

    def close(self) -> None:
        try:
            self._segments.close()
        finally:
            self._database.close()


class Ledger:
    """Append-only log of facts with trajectories. Made by `create` or `open`; one process at a time has it.

    `append` never blocks. `barrier` waits until all that was appended is on disk; `ready` waits only while the disk
    is far behind. A writer that failed (disk full) makes every later call raise LedgerError with the cause.

    inline: no thread and no sync to disk, for the simulation: what was appended is written by the next barrier,
    read or close, and lost if the ledger is abandoned before.
    """

    def __init__(self, folder: Path, *, inline: bool) -> None:
        self._folder = folder
        with errors(folder, "opened"):
            self._lock_file = _lock(folder)
            self._store = _Store(folder, durable=not inline)
            self._reader = LedgerReader(folder, connect(folder))
        self._changed = threading.Condition()  # guards what follows
        self._backlog: list[_Entry] = []
        self._appended = 0
        self._written = 0
        self._unwritten_bytes = 0
        self._waiters: list[tuple[int, asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        self._ending = False
        self._closed = False
        self._failure: Exception | None = None
        self._thread = None if inline else threading.Thread(target=self._run, name="ledger", daemon=True)
        if self._thread is not None:
            self._thread.start()

    @classmethod
    def create(cls, folder: str | Path, *, inline: bool = False) -> Ledger:
        """A new ledger in a folder that has none. LedgerError if it has one or cannot be written."""
        folder = Path(folder)
        with errors(folder, "created"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(segments.open_private(str(folder / DATABASE), os.O_CREAT | os.O_RDWR))
            with contextlib.closing(connect(folder)) as database:
                if format_of(database):
                    raise LedgerError(f"{folder} has a ledger already: resume that run or take another folder")
                database.execute("PRAGMA journal_mode = WAL")
                database.executescript(_SCHEMA)
            if not inline:
                segments.sync_folder(folder)
        return cls(folder, inline=inline)

    @classmethod
    def open(cls, folder: str | Path, *, inline: bool = False) -> Ledger:
        """The ledger that `folder` has. LedgerError if it has none, or another process writes it."""
        folder = Path(folder)
        with errors(folder, "opened"):
            check_exists(folder)
            with contextlib.closing(connect(folder)) as database:
                check_format(folder, database)
        return cls(folder, inline=inline)

    def append(self, fact: Fact, episode: EpisodeRecord | None = None) -> None:
        """Add a fact; a Finished one with its episode. Returns at once; LedgerError if the writer has failed."""
        if episode is not None and not (
            isinstance(fact, Finished) and (fact.group, fact.member) == (episode.group, episode.member)
        ):
            raise ValueError(f"{fact} is not the end of the episode of group {episode.group}, member {episode.member}")
        self._append(_Entry(fact, facts.encode(fact), segments.encode(episode) if episode else b""))

    def append_call(self, group: int, member: int, call: RecordedCall) -> None:
        """Keep a call of an episode until that ends. Returns at once; LedgerError if the writer has failed."""
        self._append(_Entry(_Call(group, member), b"", journal.encode(call)))

    def _append(self, entry: _Entry) -> None:
        with self._changed:
            self._check()
            self._backlog.append(entry)
            self._appended += 1
            self._unwritten_bytes += len(entry.body) + len(entry.record)
            if len(self._backlog) == 1 or self._unwritten_bytes > BACKLOG_BYTES:
                self._changed.notify()

    async def ready(self) -> None:
        """Back-pressure: returns at once unless more than BACKLOG_BYTES wait for the disk."""
        self._check()
        if self._unwritten_bytes > BACKLOG_BYTES:
            await self.barrier()

    async def barrier(self) -> None:
        """Wait until everything appended so far is on disk. LedgerError if that failed."""
        if self._thread is None:
            self._flush()
        else:
            await self._wait(self._appended)

    async def _wait(self, target: int) -> None:
        """Until `target` facts are written, or the writer has ended."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._changed:
            self._check()
            if self._written >= target:
                return
            self._waiters.append((target, loop, future))
            self._ending = self._ending or target == _END
            self._changed.notify()
        await future

    def facts(self, after: int = 0) -> Iterator[Fact]:
        """All facts on disk, in order, without the first `after`."""
        self._flush()
        return self._reader.facts(after)

    def episode(self, group: int, member: int) -> EpisodeRecord:
        """A trajectory on disk. LedgerError if it is not there, no longer needed, or damaged."""
        self._flush()
        return self._reader.episode(group, member)

    def calls(self, group: int, member: int) -> list[RecordedCall]:
        """The calls of an unfinished episode that are on disk, in order."""
        self._flush()
        return self._reader.calls(group, member)

    async def batch(self, formed: BatchFormed) -> Batch:
        """The batch of `formed`, with the trajectories of its groups, once everything appended so far is on disk."""
        await self.barrier()
        groups = await asyncio.to_thread(lambda: tuple(map(self._group, formed.groups)))
        return Batch(formed.batch, formed.from_version, groups)

    def _group(self, number: int) -> Group:
        episodes = self.episodes(number)
        return Group(number, episodes[0].task_id, episodes)

    def episodes(self, group: int) -> tuple[EpisodeRecord, ...]:
        """All trajectories of a group that are on disk, by member. LedgerError as in `episode`."""
        self._flush()
        return tuple(self._reader.episode(group, member) for member in self._reader.members(group))

    async def close(self, deadline_s: float = 10.0) -> None:
        """Write what is left and end the thread. LedgerError if that fails or the disk needs longer."""
        if self._closed:
            return
        try:
            if self._thread is None:
                self._flush()
            else:
                async with asyncio.timeout(deadline_s):
                    await self._wait(_END)
                self._thread.join()  # nothing is left for it to do
        except TimeoutError:
            raise LedgerError(
                f"ledger {self._folder}: the disk took longer than {deadline_s:g} s; "
                f"{self._appended - self._written} facts may be lost"
            ) from None
        finally:
            self._closed = True
            self._reader.close()
            if self._thread is None:
                self._release()

    def abandon(self) -> None:
        """What SIGKILL does to an inline ledger: what was not written is lost, and nothing is written any more."""
        if not self._closed:
            self._closed = True
            self._backlog.clear()
            self._reader.close()
            self._release()

    # -- the writer

    def _check(self) -> None:
        if self._failure is not None:
            raise self._error()
        if self._closed or self._ending:
            raise LedgerError(f"ledger {self._folder} is closed")

    def _error(self) -> LedgerError:
        error = LedgerError(
            f"ledger {self._folder} cannot be written: {self._failure}. {self._appended - self._written} facts are "
            "lost; make room there and resume the run"
        )
        error.__cause__ = self._failure
        return error

    def _run(self) -> None:
        while self._failure is None:
            with self._changed:
                self._changed.wait_for(lambda: self._backlog or self._ending)
                self._changed.wait_for(self._is_urgent, timeout=_LINGER_S)
                if not self._backlog:
                    break
            self._write()
        self._release()
        self._wake(_END)

    def _is_urgent(self) -> bool:
        return bool(self._waiters) or self._unwritten_bytes > BACKLOG_BYTES

    def _write(self) -> None:
        """Write the backlog, and wake who waited for it; a failure is kept for whoever comes next."""
        with self._changed:
            entries, self._backlog = self._backlog, []
        try:
            self._store.write(entries)
        except Exception as error:
            self._failure = error
            return
        with self._changed:
            self._written += len(entries)
            self._unwritten_bytes -= sum(len(entry.body) + len(entry.record) for entry in entries)
        self._wake(self._written)

    def _wake(self, written: int) -> None:
        with self._changed:
            due = [waiter for waiter in self._waiters if waiter[0] <= written]
            self._waiters = [waiter for waiter in self._waiters if waiter[0] > written]
        for _, loop, future in due:
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._resolve, future)

    def _resolve(self, future: asyncio.Future[None]) -> None:
        if future.done():
            return
        if self._failure is None:
            future.set_result(None)
        else:
            future.set_exception(self._error())

    def _flush(self) -> None:
        """Inline: write the backlog here and now."""
        if self._thread is None:
            self._check()
            if self._backlog:
                self._write()
                self._check()

    def _release(self) -> None:
        with contextlib.suppress(OSError, sqlite3.Error):  # after a failure it may fail again; that one is kept
            self._store.close()
        self._lock_file.close()


def _lock(folder: Path) -> TextIO:
    """Held by the process (not by its children) until the file is closed or the process ends."""
    file = open(folder / "ledger.lock", "w", opener=segments.open_private)  # noqa: SIM115
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise LedgerError(f"ledger {folder} is written by another process: end that one first") from None
    return file
