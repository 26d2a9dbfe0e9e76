"""The ledger: every fact of a run, in order, and the trajectories and model calls that the run may still need.

It is one SQLite file. A fact and its episode are written in one transaction, so a kill at any moment leaves a prefix of
what was appended. Appends are collected for LINGER_S before they are committed, since each commit waits for the disk;
`barrier` commits at once. An episode lives until its group is dropped or a checkpoint covers the KEPT_STEPS after its
step; a recorded call lives until its episode ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

from areal import folder as run_folder
from areal.agents import journal
from areal.agents.journal import RecordedCall
from areal.controller import codec, facts
from areal.controller.facts import BatchFormed, Checkpointed, Dropped, Fact, Failed, Finished
from areal.controller.reader import (
    DATABASE,
    FORMAT,
    Records,
    check_exists,
    check_format,
    connect,
    errors,
    format_of,
)
from areal.controller.signal import Signal
from areal.errors import LedgerError
from areal.threads import DaemonExecutor
from areal.types import Batch, EpisodeRecord, Group

BACKLOG_BYTES = 64 << 20
"""Above this much that is not on disk yet, `ready` waits."""
LINGER_S = 0.05

_SCHEMA = f"""
PRAGMA page_size = 16384;
PRAGMA journal_mode = WAL;
BEGIN;
CREATE TABLE facts (seq INTEGER PRIMARY KEY, body TEXT NOT NULL);
CREATE TABLE episodes (grp INTEGER NOT NULL, member INTEGER NOT NULL, record BLOB NOT NULL, UNIQUE (grp, member));
CREATE TABLE calls (seq INTEGER PRIMARY KEY, grp INTEGER NOT NULL, member INTEGER NOT NULL, record BLOB NOT NULL);
CREATE INDEX calls_of ON calls (grp, member);
CREATE TABLE trained (grp INTEGER PRIMARY KEY, from_version INTEGER NOT NULL);
PRAGMA user_version = {FORMAT};
COMMIT;
"""


class _Entry(NamedTuple):
    """A fact, with its episode if it has one, or a recorded call of the episode `owner`."""

    fact: Fact | None
    body: bytes
    record: bytes
    owner: tuple[int, int] = (-1, -1)


class Ledger(Records):
    """Append-only; made by `create` or `open`. One process at a time has a ledger.

    `append` never blocks. `barrier` waits until everything appended so far is on disk; `ready` waits only while the
    disk is far behind. Once a write has failed (a full disk) every call raises LedgerError with the cause. What is read
    is what is on disk.
    """

    def __init__(self, folder: Path) -> None:
        self._backlog: list[_Entry] = []
        self._unwritten_bytes = 0
        self._appended = self._written = self._awaited = 0
        self._failure: BaseException | None = None
        self._closed = False
        self._changed = Signal()
        self._writing: asyncio.Task[None] | None = None
        with errors(folder, "opened"), contextlib.ExitStack() as undo:
            self._lock = undo.enter_context(_lock(folder))
            self._written_to = undo.enter_context(contextlib.closing(connect(folder)))
            # FULL: a commit waits for the disk. Freed pages need no zeros over them: the folder is private.
            self._written_to.executescript(
                "PRAGMA synchronous = FULL; PRAGMA secure_delete = OFF; PRAGMA journal_size_limit = 67108864"
            )
            super().__init__(folder, connect(folder))
            undo.pop_all()
        self._thread = DaemonExecutor("ledger")

    @classmethod
    def create(cls, folder: str | Path) -> Ledger:
        """A new ledger in a folder that has none. LedgerError if it has one or cannot be written."""
        folder = Path(folder)
        with errors(folder, "created"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(_open_private(str(folder / DATABASE), os.O_CREAT | os.O_RDWR))
            with contextlib.closing(connect(folder)) as database:
                if format_of(database):
                    raise LedgerError(f"{folder} has a ledger already: resume that run or choose another folder")
                database.executescript(_SCHEMA)
        return cls(folder)

    @classmethod
    def open(cls, folder: str | Path) -> Ledger:
        """The ledger that `folder` has. LedgerError if it has none, or if another process writes it."""
        folder = Path(folder)
        with errors(folder, "opened"):
            check_exists(folder)
            with contextlib.closing(connect(folder)) as database:
                check_format(folder, database)
        return cls(folder)

    def append(self, fact: Fact, episode: EpisodeRecord | None = None) -> None:
        """Add a fact; a Finished one with its episode. Returns at once; LedgerError if a write has failed."""
        if episode is not None and not (
            isinstance(fact, Finished) and (fact.group, fact.member) == (episode.group, episode.member)
        ):
            raise ValueError(f"{fact} is not the end of the episode of group {episode.group}, member {episode.member}")
        self._append(_Entry(fact, facts.encode(fact), codec.encode(episode) if episode else b""))

    def append_call(self, group: int, member: int, call: RecordedCall) -> None:
        """Keep a call of an episode until that ends. Returns at once; LedgerError if a write has failed."""
        self._append(_Entry(None, b"", journal.encode(call), (group, member)))

    def _append(self, entry: _Entry) -> None:
        self._check()
        self._backlog.append(entry)
        self._appended += 1
        self._unwritten_bytes += len(entry.body) + len(entry.record)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write_backlog(), name="ledger")
        elif self._unwritten_bytes > BACKLOG_BYTES:
            self._changed.notify()

    async def ready(self) -> None:
        """Back-pressure: returns at once unless more than BACKLOG_BYTES wait for the disk."""
        self._check()
        while self._unwritten_bytes > BACKLOG_BYTES:
            await self._changed.wait()
            self._check()

    async def barrier(self) -> None:
        """Wait until everything appended so far is on disk. LedgerError if that failed."""
        self._check()
        await self._flush()
        self._check()

    async def _flush(self) -> None:
        target = self._awaited = self._appended
        if self._written < target:
            self._changed.notify()
        while self._written < target and self._failure is None:
            await self._changed.wait()

    async def batch(self, formed: BatchFormed) -> Batch:
        """The batch of `formed`, with the trajectories of its groups, once everything appended so far is on disk."""
        await self.barrier()
        groups = await asyncio.to_thread(lambda: [self._group(number) for number in formed.groups])
        return Batch(formed.batch, formed.from_version, tuple(groups))

    def _group(self, number: int) -> Group:
        episodes = self.episodes(number)
        return Group(number, episodes[0].task_id, episodes)

    # -- writing

    def _check(self) -> None:
        if self._failure is not None:
            raise LedgerError(
                f"ledger {self._folder} cannot be written: {self._failure}. {self._appended - self._written} facts are "
                "lost; make room there and resume the run"
            ) from self._failure
        if self._closed:
            raise LedgerError(f"ledger {self._folder} is closed")

    async def _write_backlog(self) -> None:
        """Until nothing is left. The one task that writes."""
        loop = asyncio.get_running_loop()
        try:
            while self._backlog:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LINGER_S):
                        while self._awaited <= self._written and self._unwritten_bytes <= BACKLOG_BYTES:
                            await self._changed.wait()
                entries, self._backlog = self._backlog, []
                await loop.run_in_executor(self._thread, self._write, entries)
                self._written += len(entries)
                self._unwritten_bytes -= sum(len(entry.body) + len(entry.record) for entry in entries)
                self._changed.notify()
        except BaseException as error:
            self._failure = error
            self._changed.notify()
            if not isinstance(error, Exception):
                raise

    def _write(self, entries: Sequence[_Entry]) -> None:
        """All entries in one transaction: all of them are on disk afterwards or, after an error, none."""
        with self._written_to as database:
            for fact, body, record, owner in entries:
                if fact is None:
                    database.execute("INSERT INTO calls (grp, member, record) VALUES (?, ?, ?)", (*owner, record))
                    continue
                database.execute("INSERT INTO facts (body) VALUES (?)", (body.decode(),))
                if record and isinstance(fact, Finished):
                    database.execute("INSERT INTO episodes VALUES (?, ?, ?)", (fact.group, fact.member, record))
                self._forget(fact)

    def _forget(self, fact: Fact) -> None:
        """Delete what is not needed any more after `fact`."""
        execute = self._written_to.execute
        match fact:
            case Finished() | Failed():
                execute("DELETE FROM calls WHERE grp = ? AND member = ?", (fact.group, fact.member))
            case BatchFormed():
                rows = [(group, fact.from_version) for group in fact.groups]
                self._written_to.executemany("INSERT INTO trained VALUES (?, ?)", rows)
            case Dropped():
                for table in ("episodes", "calls"):
                    execute(f"DELETE FROM {table} WHERE grp = ?", (fact.group,))
            case Checkpointed():
                oldest = (fact.version - run_folder.KEPT_STEPS,)
                execute("DELETE FROM episodes WHERE grp IN (SELECT grp FROM trained WHERE from_version < ?)", oldest)
                execute("DELETE FROM trained WHERE from_version < ?", oldest)

    async def close(self, deadline_s: float = 10.0) -> None:
        """Write what is left. LedgerError if that fails or the disk needs longer."""
        if self._closed:
            return
        self._closed = True
        try:
            async with asyncio.timeout(deadline_s):
                await self._flush()
                if self._failure is None:  # folds the write-ahead log into the file, which may take a while
                    await asyncio.get_running_loop().run_in_executor(self._thread, self._written_to.close)
        except TimeoutError:
            raise LedgerError(
                f"ledger {self._folder}: the disk took longer than {deadline_s:g} s; "
                f"{self._appended - self._written} facts may be lost"
            ) from None
        finally:
            self._release()
        if self._failure is not None:
            with contextlib.suppress(sqlite3.Error):
                self._written_to.close()
            self._check()

    def abandon(self) -> None:
        """What SIGKILL does: nothing is written any more. For simulations."""
        self._closed = True
        self._backlog.clear()
        self._written_to.close()
        self._release()

    def _release(self) -> None:
        self._database.close()
        self._lock.close()


def _lock(folder: Path) -> TextIO:
    """Held until the file is closed or the process ends; children do not inherit it."""
    file = open(folder / "ledger.lock", "w", opener=_open_private)  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise LedgerError(f"ledger {folder} is written by another run: end that one first") from None
    return file


def _open_private(path: str, flags: int) -> int:
    """An opener that makes files which only this user may read."""
    return os.open(path, flags, 0o600)
