"""A ledger that a real scheduler filled, as a person sees it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import sqlite3
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from rich.console import Console

from areal import folder as run_folder
from areal.config import Config
from areal.controller.facts import Completed, Fact, Finished
from areal.controller.ledger import Ledger
from areal.controller.reader import LedgerReader
from areal.controller.scheduler import SchedulerSettings
from areal.errors import ConfigError, LedgerError
from areal.folder import RunFolder
from areal.history.inspection import inspect, pieces, show
from areal.types import NOT_SAMPLED, EpisodeRecord, Trajectory
from tests.controller.told import Told

PROMPT, ANSWER = "<|im_start|>user\nwho?", [" the", " city", "é", "\x1b"]


@pytest.fixture(autouse=True)
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "KEPT_STEPS", 0)


class Run:
    """A run folder whose ledger a real scheduler fills; the test says what happens."""

    def __init__(self, folder: Path, model: str) -> None:
        config = Config.load(
            [
                f"folder={folder}/runs",
                f"model.path={model}",
                *["train.batch_groups=2", "train.steps=10", "group.size=2", "group.uniform=replace"],
                *["staleness.max=1", "episode.retries=1"],
            ]
        )
        self.folder = RunFolder.create(config)
        self.ledger = Ledger.create(self.folder.ledger)
        self.scheduler = Told(SchedulerSettings.from_config(config), self._record)
        self.records: dict[tuple[int, int], EpisodeRecord] = {}

    def _record(self, fact: Fact) -> None:
        self.ledger.append(fact, self.records[fact.group, fact.member] if isinstance(fact, Finished) else None)

    def admit(self) -> None:
        while self.scheduler.may_admit():
            position = self.scheduler.state.position
            self.scheduler.admit(f"task {position}", position)

    def finish(self, group: int, member: int, reward: float, versions: list[int], ids: list[int] | None = None) -> None:
        """An answer with a token of each of the versions, after a prompt of three."""
        ids = ids or [7, 8, 9, *range(20, 20 + len(versions))]
        prompt = len(ids) - len(versions)
        sampled = np.arange(len(ids)) >= prompt
        trajectory = Trajectory(
            np.array(ids, np.int32),
            sampled,
            np.where(sampled, -np.arange(len(ids)) / 8, 0).astype(np.float32),
            np.array([NOT_SAMPLED] * prompt + versions, np.int32),
        )
        record = EpisodeRecord(
            group, member, f"task {group}", reward, (trajectory,), turns=2, seconds=1.25, metrics={"searches": 3.0}
        )
        self.records[group, member] = record
        counts = {version: versions.count(version) for version in versions}
        self.scheduler.finished(group, member, reward, counts)

    def train(self, groups: tuple[int, ...]) -> None:
        batch = self.scheduler.next_batch()
        assert batch is not None
        assert batch.groups == groups
        version = self.scheduler.trained(batch.batch)
        self.scheduler.published(version)
        self.scheduler.serving(version)


def live(run: Run, ids: list[int] | None = None) -> None:
    """Groups 0 and 2 are trained and covered by a checkpoint, 1 is dropped, 3 and 4 are trained, 5 (with a token that
    is too old) and 6 are in the open batch, 7 runs, 8 is dropped."""
    scheduler = run.scheduler
    scheduler.start()
    run.admit()  # 0 to 3
    run.finish(0, 0, 1.0, [0])
    run.finish(0, 1, 0.0, [0, 0])
    run.finish(1, 0, 1.0, [0])
    run.finish(1, 1, 1.0, [0])  # uniform
    run.admit()  # 4
    scheduler.failed(2, 0, "agent", "Traceback:\n  a line\nValueError: \x1b[31mred")
    run.finish(2, 0, 1 / 3, [0, 0, 0])
    run.finish(2, 1, 1.0, [0])
    run.train((0, 2))
    scheduler.checkpointed(1, "step-1")
    run.admit()  # 5, 6
    for group in (3, 4):
        run.finish(group, 0, 1.0, [0, 1])
        run.finish(group, 1, 0.0, [1])
    run.train((3, 4))
    run.finish(5, 0, 1.0, [0, 1, 2, 2], ids)
    run.finish(5, 1, 0.0, [2])
    run.finish(6, 0, 1.0, [2])
    run.finish(6, 1, 0.0, [2])
    run.admit()  # 7, 8
    batch = scheduler.next_batch()
    assert batch.groups == (5, 6)
    run.finish(7, 1, 0.5, [2])
    scheduler.failed(8, 0, "timeout", "no reward")
    scheduler.failed(8, 0, "server", "gone")


@contextlib.asynccontextmanager
async def living(folder: Path, model: str = ""):
    run = Run(folder, model)
    try:
        live(run)
        await run.ledger.barrier()
        yield run
    finally:
        await run.ledger.close()


@pytest.fixture
async def folder(tmp_path: Path) -> RunFolder:
    async with living(tmp_path) as run:
        return run.folder


def plain(folder: RunFolder, **options: str) -> list[str]:
    file = io.StringIO()
    show(inspect(folder, **options), Console(file=file))
    return file.getvalue().splitlines()


def test_the_run(folder: RunFolder) -> None:
    assert (
        "\n".join(plain(folder))
        == """\
run         run-0001, life 0
version     2 of 10; servers at 2
checkpoint  version 1 (step-1)

groups            number
trained                4
dropped, server        1
dropped, uniform       1
open, in a batch       2
open, complete         0
open, unfinished       1
admitted               9

episodes         number
finished             15
failed, agent         1
failed, server        1
failed, timeout       1

staleness  trained tokens  share
0                      11    85%
1                       2    15%

open group  task      state       waiting for  rewards  loss tokens by version
         5  'task 5'  in a batch               1, 0     v0: 1, v1: 1, v2: 3
         6  'task 6'  in a batch               1, 0     v2: 2
         7  'task 7'  unfinished  0            0.5      v2: 1"""
    )


def test_a_group_that_was_trained(folder: RunFolder) -> None:
    assert plain(folder, group="4") == [
        "group     4 of run-0001",
        "task      'task 4', position 4 of the data",
        "admitted  at version 0, servers at 0",
        "complete  at version 1, servers at 1",
        "outcome   trained in batch 1, the step from version 1 to 2",
        "",
        "member  state     reward  advantage  failed  turns  loss tokens by version",
        "     0  finished       1      +0.71              2  v0: 1, v1: 1",
        "     1  finished       0      -0.71              2  v1: 1",
    ]


def test_a_group_that_a_checkpoint_covers_keeps_its_facts(folder: RunFolder) -> None:
    """And control characters in what an agent raised do not reach the terminal."""
    assert plain(folder, group="2")[4:] == [
        "outcome   trained in batch 0, the step from version 0 to 1",
        "",
        "member  state     reward  advantage  failed  turns  loss tokens by version",
        "     0  finished  0.3333      -0.71       1      -  v0: 3",
        "     1  finished       1      +0.71              -  v0: 1",
        "",
        "trajectories: deleted, because the checkpoint of version 1 (step-1) covers their step; rewards, failures and "
        "token counts remain",
        "member 0, try 1 failed (agent):",
        "    Traceback:",
        "      a line",
        "    ValueError: \\x1b[31mred",
    ]


def test_groups_that_were_dropped_or_are_open(folder: RunFolder) -> None:
    dropped = plain(folder, group="1")
    assert dropped[3].startswith("outcome   dropped at version 0, servers at 0; reason uniform: its rewards were all")
    assert dropped[-1] == "trajectories: deleted when the group was dropped"
    hopeless = "\n".join(plain(folder, group="8"))
    assert "reason server: too few members could still finish; the kind of the last failure was server" in hopeless
    assert "     0  given up           -          -       2      -" in hopeless
    assert "     1  not finished       -          -              -" in hopeless
    assert hopeless.endswith(
        "member 0, try 1 failed (timeout):\n    no reward\nmember 0, try 2 failed (server):\n    gone"
    )
    assert "outcome   open, in batch 2, the step from version 2" in plain(folder, group="5")
    assert "     0  finished       1      +0.71              2  v0: 1 masked, v1: 1, v2: 2" in plain(folder, group="5")
    assert plain(folder, group="7")[3] == "outcome   open, waiting for member 0"
    assert plain(folder, group="7")[-1] == "     1  finished         0.5          -              2  v2: 1"


def test_an_episode_token_by_token_without_a_tokenizer(folder: RunFolder) -> None:
    """I2: the token of version 0 is too old for the step from version 2."""
    assert plain(folder, episode="5.0")[4:] == [
        "outcome   open, in batch 2, the step from version 2",
        "member    finished; loss tokens v0: 1 masked, v1: 1, v2: 2",
        "reward    1, advantage +0.71",
        "took      2 turns, 0 forks, 1.2 s",
        "metric    searches 3",
        "",
        "the text of the tokens is not shown: model.path is empty",
        "trajectory 1 of 1: 7 tokens, 4 with a loss; batch 2 used 3, those of version 1 or newer",
        "",
        "token  id  version  log-prob  loss  trained  advantage",
        "    0   7                        0        0",
        "    1   8                        0        0",
        "    2   9                        0        0",
        "    3  20        0    -0.375     1        0",
        "    4  21        1    -0.500     1        1      +0.71",
        "    5  22        2    -0.625     1        1      +0.71",
        "    6  23        2    -0.750     1        1      +0.71",
    ]
    assert "    3  20        2    -0.375     1        -" in plain(folder, episode="7.1")  # no batch yet


def test_an_episode_whose_trajectory_is_gone_or_not_there_yet(folder: RunFolder) -> None:
    covered = plain(folder, episode="2.0")
    assert covered[5:9] == [
        "member    finished; loss tokens v0: 3",
        "reward    0.3333, advantage -0.71",
        "",
        "trajectories: deleted, because the checkpoint of version 1 (step-1) covers their step; rewards, failures and "
        "token counts remain",
    ]
    assert covered[-1] == "    ValueError: \\x1b[31mred"
    assert plain(folder, episode="7.0")[-2:] == [
        "member    not finished; loss tokens none",
        "reward    -, advantage -",
    ]


def tokenizer_of(model: Path):
    from transformers import AutoTokenizer  # which a child process of these tests can do without

    return AutoTokenizer.from_pretrained(model)


async def test_the_text_of_the_tokens(tmp_path: Path, tiny_qwen3: Path) -> None:
    tokenizer = tokenizer_of(tiny_qwen3)
    ids = [token for text in (PROMPT, *ANSWER) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    run = Run(tmp_path, str(tiny_qwen3))
    assert len(tokenizer("é", add_special_tokens=False)["input_ids"]) == 2
    live(run, ids)
    await run.ledger.close()
    lines = plain(run.folder, episode="5.0")
    texts = [line.rpartition("  ")[2] for line in lines[-len(ids) :]]
    assert texts[0] == "'<|im_start|>'"
    assert texts[-4:] == ["'city'", "''", "'é'", "'\\x1b'"]
    assert "".join(map(eval, texts)) == PROMPT + "".join(ANSWER)
    run.folder.config_file.write_text("[model]\npath = '/gone/model'")
    told = "the text of the tokens is not shown: no tokenizer could be loaded from model.path=/gone/model"
    assert any(line.startswith(told) for line in plain(run.folder, episode="5.0"))  # but a checkpoint has one:
    run.folder.checkpoint(1).symlink_to(tiny_qwen3)
    assert plain(run.folder, episode="5.0")[-len(ids) :] == lines[-len(ids) :]


@functools.cache
def sentencepiece_like():
    """As Llama 2's: spaces are marked, the first one is stripped, unknown characters are bytes."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = ["<unk>", "▁the", "▁", "city", "▁of", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE({token: id for id, token in enumerate(vocabulary)}, [], unk_token="<unk>", byte_fallback=True)
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def check_pieces(tokenizer, ids: list[int]) -> None:
    found = pieces(tokenizer, ids)
    assert len(found) == len(ids)
    assert "".join(found) == tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def test_pieces_laid_end_to_end_are_the_text(tiny_qwen3: Path) -> None:
    tokenizer = tokenizer_of(tiny_qwen3)  # byte-level, as Qwen's; most ids are single bytes

    @given(st.lists(st.integers(0, len(tokenizer) + 5), max_size=150))
    def whatever_was_sampled(ids: list[int]) -> None:
        check_pieces(tokenizer, ids)

    whatever_was_sampled()


@given(st.lists(st.sampled_from([" the", "city", " of", "é", "中", "😀", "x"]), max_size=80))
def test_pieces_of_a_tokenizer_that_marks_spaces(texts: list[str]) -> None:
    known = {" the": [1], "city": [3], " of": [4]}
    ids = [id for text in texts for id in known.get(text, [5 + byte for byte in text.encode()])]
    check_pieces(sentencepiece_like(), ids)


def test_pieces_belong_to_their_tokens() -> None:
    tokenizer = sentencepiece_like()
    bytes_of = [5 + byte for byte in "é中".encode()]
    assert pieces(tokenizer, [1, 4, 3, *bytes_of, 1]) == ["the", " of", "city", "", "é", "", "", "中", " the"]
    assert pieces(tokenizer, [1, 5 + 0xE4, 1]) == ["the", "", "\ufffd the"]
    assert pieces(tokenizer, []) == []
    assert pieces(tokenizer, [1] * 100) == ["the", *[" the"] * 99]


# -- what is wrong


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": "9"}, "there is no group 9: the run has groups 0 to 8"),
        ({"episode": "9.0"}, "there is no group 9: the run has groups 0 to 8"),
        ({"episode": "3.2"}, "there is no episode 3.2: group 3 has members 0 to 1"),
        ({"episode": "3"}, "--episode 3: write GROUP.MEMBER, such as 12.0"),
        ({"group": "-1"}, "--group -1: write a number"),
    ],
)
def test_a_wrong_number_is_told_with_the_right_ones(folder: RunFolder, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        inspect(folder, **options)
    assert str(caught.value) == message


async def test_a_run_that_has_just_begun(tmp_path: Path) -> None:
    run = Run(tmp_path, "m")
    await run.ledger.close()
    assert plain(run.folder)[1:3] == ["version     0 of 10; servers at 0", "checkpoint  none"]
    with pytest.raises(ConfigError, match="there is no group 0: the run has no groups yet"):
        inspect(run.folder, group="0")


async def test_a_damaged_trajectory_is_named(folder: RunFolder) -> None:
    with contextlib.closing(sqlite3.connect(folder.ledger / "ledger.db")) as database, database:
        (whole,) = database.execute("SELECT record FROM episodes WHERE grp = 7").fetchone()
        database.execute("UPDATE episodes SET record = ? WHERE grp = 7", (whole[:-30] + b"x" + whole[-29:],))
    assert "group 7, member 1: the record is torn or damaged" in "\n".join(plain(folder, group="7"))
    with pytest.raises(LedgerError, match="torn or damaged"):
        inspect(folder, episode="7.1")


# -- it only looks


def contents(folder: Path) -> dict[str, tuple[int, str]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.stat().st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest()) for path in files}


def look(folder: RunFolder) -> list[str]:
    """In a process of its own, as a person does."""
    source = f"""
import sys
from pathlib import Path
from areal import cli
for command in (["replay"], ["inspect"], ["inspect", "--group", "5"], ["inspect", "--episode", "5.0"]):
    assert cli.main([command[0], {str(folder.path)!r}, *command[1:]]) == 0
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_a_finished_run_is_left_as_it_is(folder: RunFolder) -> None:
    (folder.ledger / "ledger.db-wal").touch()
    assert plain(folder)[0] == "run         run-0001, life 0"
    (folder.ledger / "ledger.db-wal").unlink()
    before = contents(folder.path)
    assert look(folder)[0] == "47 facts, no difference"
    assert contents(folder.path) == before


async def test_a_run_that_goes_on_is_left_as_it_is_and_seen_as_it_grows(tmp_path: Path) -> None:
    async with living(tmp_path) as run:
        before = contents(run.folder.path)
        assert any(name.endswith("-wal") for name in before)
        assert "trained                4" in look(run.folder)
        assert contents(run.folder.path) == before
        run.scheduler.trained(2)
        await run.ledger.barrier()
        assert "trained                6" in look(run.folder)
        assert "trained                6" in plain(run.folder)  # and in the process that writes
        run.scheduler.published(3)
        await run.ledger.barrier()


KILLED = """
import asyncio, os, signal, sys
from pathlib import Path
from tests.history.test_inspection import living
async def main():
    async with living(Path(sys.argv[1])):
        os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""


def test_a_killed_run_is_left_as_it_is(tmp_path: Path, folder: RunFolder) -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "killed")], cwd=root)
    assert done.returncode == -9
    killed = RunFolder(tmp_path / "killed" / "runs" / "latest")
    before = contents(killed.path.resolve())
    assert any(name.endswith("-shm") for name in before)
    assert look(killed) == look(folder)
    assert contents(killed.path.resolve()) == before
    for name in ("-shm", "-wal"):  # a copy may lack SQLite's working files; without the second one, its facts, too
        (killed.ledger / f"ledger.db{name}").unlink()
        assert plain(killed)[0] == "run         run-0001, life 0"


async def test_a_run_that_is_resumed_meanwhile_is_read_again(folder: RunFolder) -> None:
    with LedgerReader.open(folder.ledger) as reader:
        facts = reader.facts()
        next(facts)
        ledger = Ledger.open(folder.ledger)
        try:
            ledger.append(Completed(0))
            await ledger.barrier()
            with pytest.raises(LedgerError, match="the run continued while it was read; read it again"):
                list(facts)
        finally:
            await ledger.close()


# -- on a terminal, and by the command


def test_on_a_terminal_it_is_a_table(folder: RunFolder) -> None:
    file = io.StringIO()
    show(inspect(folder, group="4"), Console(file=file, force_terminal=True, width=100, color_system=None, _environ={}))
    lines = file.getvalue().splitlines()
    assert any(set(line) == {"─", " "} or set(line) == {"─"} for line in lines)
    assert any(line.split() == ["1", "finished", "0", "-0.71", "2", "v1:", "1"] for line in lines)


def command(folder: RunFolder, *arguments: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "areal", "inspect", str(folder.path), *arguments]
    return subprocess.run(words, capture_output=True, text=True)


def test_the_command(folder: RunFolder) -> None:
    done = command(folder, "--episode", "5.0")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == plain(folder, episode="5.0")
    done = command(folder, "--group", "9")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ConfigError: there is no group 9: the run has groups 0 to 8\n"
    assert command(folder, "--group", "1", "--episode", "1.0").returncode == 2


def test_an_output_that_is_closed_is_no_error(folder: RunFolder) -> None:
    words = f"{sys.executable} -m areal inspect {folder.path} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
