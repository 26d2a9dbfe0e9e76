"""The ledger on disk, for reading: by the run itself, and by commands that look at a run."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from areal.agents import journal
from areal.agents.journal import RecordedCall
from areal.controller import codec, facts
from areal.controller.facts import Fact
from areal.errors import LedgerError
from areal.types import EpisodeRecord

DATABASE = "ledger.db"
FORMAT = 3


class Records:
    """What a ledger has on disk, through one connection. is_still: nothing writes it, as far as is known; SQLite reads
    without any lock."""

    def __init__(self, folder: Path, database: sqlite3.Connection, *, is_still: bool = False) -> None:
        self._folder = folder
        self._database = database
        self._is_still = is_still

    def facts(self, after: int = 0) -> Iterator[Fact]:
        """All facts, in order, without the first `after`. LedgerError for one that is not known here."""
        with errors(self._folder, "read"):
            query = "SELECT seq, body FROM facts WHERE seq > ? ORDER BY seq"
            for seq, body in self._database.execute(query, (after,)):
                try:
                    fact = facts.decode(body)
                except ValueError as error:
                    raise LedgerError(f"ledger {self._folder}, fact {seq}: {error}") from error
                yield fact
            self._check_still()

    def members(self, group: int) -> list[int]:
        """The members of a group whose trajectories are there."""
        with errors(self._folder, "read"):
            query = "SELECT member FROM episodes WHERE grp = ? ORDER BY member"
            found = [member for (member,) in self._database.execute(query, (group,))]
            self._check_still()
        return found

    def episodes(self, group: int) -> tuple[EpisodeRecord, ...]:
        """The trajectories of a group, by member. LedgerError for one that is damaged."""
        query = "SELECT member, record FROM episodes WHERE grp = ? ORDER BY member"
        with errors(self._folder, "read"):
            rows = self._database.execute(query, (group,)).fetchall()
            self._check_still()
        return tuple(self._decoded(group, member, record) for member, record in rows)

    def episode(self, group: int, member: int) -> EpisodeRecord:
        """A trajectory. LedgerError if it is not there, no longer needed, or damaged."""
        query = "SELECT record FROM episodes WHERE grp = ? AND member = ?"
        with errors(self._folder, "read"):
            row = self._database.execute(query, (group, member)).fetchone()
        if row is None:
            why = "it was not written yet, or its group was dropped, or a checkpoint covers it"
            raise LedgerError(f"ledger {self._folder}, episode of group {group}, member {member}: none; {why}")
        return self._decoded(group, member, row[0])

    def calls(self, group: int, member: int) -> list[RecordedCall]:
        """The calls of an unfinished episode, in order. LedgerError for one that is damaged."""
        query = "SELECT record FROM calls WHERE grp = ? AND member = ? ORDER BY seq"
        with errors(self._folder, "read"):
            rows = self._database.execute(query, (group, member)).fetchall()
        try:
            return [journal.decode(record) for (record,) in rows]
        except ValueError as error:
            raise LedgerError(f"ledger {self._folder}, calls of group {group}, member {member}: {error}") from error

    def _decoded(self, group: int, member: int, record: bytes) -> EpisodeRecord:
        try:
            return codec.decode(record)
        except ValueError as error:
            raise LedgerError(f"ledger {self._folder}, episode of group {group}, member {member}: {error}") from error

    def _check_still(self) -> None:
        if self._is_still and _bytes_of(self._folder / f"{DATABASE}-wal"):
            raise LedgerError(f"ledger {self._folder}: the run continued while it was read; read it again")


class LedgerReader(Records):
    """`open` it to look at a run that is over, was killed, or is running: that takes no lock and changes no file. Then
    use it as a context manager."""

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """LedgerError if the folder has no ledger, or one of another format."""
        folder = Path(folder)
        with errors(folder, "read"):
            check_exists(folder)
            log, index = folder / f"{DATABASE}-wal", folder / f"{DATABASE}-shm"
            is_still = not _bytes_of(log) and not (log.exists() and index.exists())
            mode = "mode=ro&readonly_shm=1" if index.exists() else "mode=ro"
            if is_still:  # with mode=ro SQLite would leave its two working files behind
                mode = "immutable=1"
            address = f"{(folder / DATABASE).absolute().as_uri()}?{mode}"
            database = sqlite3.connect(address, uri=True, check_same_thread=False)
            try:
                check_format(folder, database)
            except BaseException:
                database.close()
                raise
        return cls(folder, database, is_still=is_still)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._database.close()


def connect(folder: Path) -> sqlite3.Connection:
    return sqlite3.connect(folder / DATABASE, check_same_thread=False)


def format_of(database: sqlite3.Connection) -> int:
    return database.execute("PRAGMA user_version").fetchone()[0]


def _bytes_of(file: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return file.stat().st_size
    return 0


def check_exists(folder: Path) -> None:
    if not (folder / DATABASE).exists():
        raise LedgerError(f"{folder} has no ledger")


def check_format(folder: Path, database: sqlite3.Connection) -> None:
    if (found := format_of(database)) != FORMAT:
        raise LedgerError(
            f"ledger {folder} has format {found}, and this version of areal reads {FORMAT}: resume the run with the "
            "version that began it, or begin a new run with model.path=<its last checkpoint>"
        )


@contextlib.contextmanager
def errors(folder: Path, what: str) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise LedgerError(f"ledger {folder} cannot be {what}: {error}") from error
