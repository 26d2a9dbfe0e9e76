"""`areal inspect`: show what a ledger records about the run, one group, or one episode token by token.

    show(inspect(RunFolder(Path("runs/latest")), episode="12.0"))

Read-only, and works while the run is in progress. A page is a list of strings and sheets; `show` prints sheets as
tables on a terminal and as aligned lines elsewhere. Control characters in what an agent or model wrote are escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal import folder as run_folder
from areal.algorithms.advantages import grpo
from areal.config import Config
from areal.controller import facts
from areal.controller.reader import LedgerReader
from areal.controller.scheduler import State
from areal.errors import ConfigError, LedgerError
from areal.folder import RunFolder
from areal.types import NOT_SAMPLED, EpisodeRecord, Trajectory

_OPEN_GROUPS = 10
"""Maximum number of open groups on the page of a run."""
_WINDOW = 32
"""Minimum number of tokens that are decoded together."""
_REASONS = {
    "stale": "all its tokens were stale, or one was and staleness.late=drop",
    "uniform": "its rewards were all equal, and group.uniform=replace",
    "empty": "it had no loss tokens",
    "lost": "after the run was resumed, too few members could still finish",
}


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table. columns: names, none for a table without a header. align: "<" or ">" per column."""

    align: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


Page = list[Sheet | str]


@dataclass(slots=True)
class Member:
    """What the facts say about one member; `tokens` are (version, number of loss tokens)."""

    reward: float | None = None
    tokens: tuple[tuple[int, int], ...] = ()
    failures: list[facts.Failed] = field(default_factory=list)
    gave_up: bool = False

    @property
    def state(self) -> str:
        return "given up" if self.gave_up else "not finished" if self.reward is None else "finished"


@dataclass(slots=True)
class Story:
    """What the facts say about one group. Pairs: version of the trainer, lowest version of the servers."""

    begin: facts.Admitted
    members: list[Member]
    admitted: tuple[int, int]
    ready: tuple[int, int] | None = None
    batch: facts.BatchFormed | None = None
    trained: facts.Trained | None = None
    dropped: facts.Dropped | None = None
    dropped_at: tuple[int, int] = (0, 0)
    covered: facts.Checkpointed | None = None
    """The checkpoint after which the trajectories were deleted."""

    @property
    def oldest(self) -> int:
        """The lowest version in the loss."""
        return self.batch.oldest_version if self.batch else 0

    @property
    def outcome(self) -> str:
        if self.dropped:
            reason = self.dropped.reason
            given_up = f"too few members could still finish; the kind of the last failure was {reason}"
            why = given_up if any(member.gave_up for member in self.members) else "decided outside the scheduler"
            return f"dropped {_at(self.dropped_at)}; reason {reason}: {_REASONS.get(reason, why)}"
        if self.batch:
            step = f"batch {self.batch.batch}, the step from version {self.batch.from_version}"
            return f"trained in {step} to {self.trained.version}" if self.trained else f"open, in {step}"
        out = _list(i for i, member in enumerate(self.members) if member.state == "not finished")
        return "open, complete: waiting for a batch" if self.ready else f"open, waiting for member {out}"

    @property
    def trajectories(self) -> str:
        """Why the ledger has none."""
        if self.dropped:
            return "deleted when the group was dropped"
        if self.covered:
            covers = f"the checkpoint of version {self.covered.version} ({self.covered.path}) covers their step"
            return f"deleted, because {covers}; rewards, failures and token counts remain"
        return "not in the ledger yet, or just deleted: try again"

    def advantages(self, config: Config) -> dict[int, float]:
        """By member, as in the loss; empty for a group that is incomplete or dropped."""
        rewards = {i: member.reward for i, member in enumerate(self.members) if member.reward is not None}
        if not self.ready or self.dropped:
            return {}
        values = grpo(list(rewards.values()), std=config.algorithm.advantage == "grpo")
        return dict(zip(rewards, values.tolist(), strict=True))


def inspect(folder: RunFolder, *, group: str | None = None, episode: str | None = None) -> Page:
    """The page of the run, a group ("12"), or an episode ("12.0": group and member).

    Raises ConfigError if this is not a run folder or the run has no such number, LedgerError for an unreadable ledger.
    """
    config, name = folder.configs()[-1], folder.path.resolve().name
    wanted = _numbers("--episode", "GROUP.MEMBER, such as 12.0", r"(\d+)\.(\d+)", episode) if episode else ()
    wanted = _numbers("--group", "a number", r"(\d+)", group) if group else wanted
    with LedgerReader.open(folder.ledger) as ledger:
        state, story = follow(ledger.facts(), wanted[0] if wanted else -1)
        if not wanted:
            return _run_page(name, config, state)
        if story is None:
            known = f"the run has groups 0 to {state.admitted - 1}" if state.admitted else "the run has no groups yet"
            raise ConfigError(f"there is no group {wanted[0]}: {known}")
        if group:
            return _group_page(name, config, story, ledger)
        if wanted[1] >= len(story.members):
            last = len(story.members) - 1
            raise ConfigError(f"there is no episode {episode}: group {wanted[0]} has members 0 to {last}")
        return _episode_page(folder, config, story, wanted[1], ledger)


def follow(history: Iterable[facts.Fact], group: int) -> tuple[State, Story | None]:
    """Fold the facts of `history`; also returns the story of `group`, None if there is no such group."""
    state = State()
    story: Story | None = None
    for fact in history:
        state.apply(fact)
        now = state.version, state.serving
        if isinstance(fact, facts.Admitted) and fact.group == group:
            story = Story(fact, [Member() for _ in range(fact.members)], now)
        if story is None or getattr(fact, "group", group) != group:
            continue
        match fact:
            case facts.Finished():
                story.members[fact.member].reward, story.members[fact.member].tokens = fact.reward, fact.tokens
            case facts.Failed():
                story.members[fact.member].failures.append(fact)
            case facts.GaveUp():
                story.members[fact.member].gave_up = True
            case facts.Completed():
                story.ready = now
            case facts.Dropped():
                story.dropped, story.dropped_at = fact, now
            case facts.BatchFormed() if group in fact.groups:
                story.batch = fact
            case facts.Trained() if story.batch and fact.batch == story.batch.batch:
                story.trained = fact
            case facts.Checkpointed() if story.batch and not story.covered:
                story.covered = fact if fact.version - run_folder.KEPT_STEPS > story.batch.from_version else None
    return state, story


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each id adds; joined, they are the decoded ids with special tokens. The bytes of a character that
    spans several ids are shown at the last of them."""
    decode = partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    found: list[str] = []
    start, shown = 0, 0  # shown: how many characters of the text of ids[start:] are in `found`
    for end in range(1, len(ids) + 1):
        text = decode(ids[start:end])
        if end < len(ids):
            text = text.rstrip("\ufffd")  # the next ids may complete this character
        found.append(text[shown:])
        shown = max(shown, len(text))
        # A new window starts with an id already shown, because some tokenizers strip a leading space.
        if end - start >= _WINDOW and "\ufffd" not in (last := decode(ids[end - 1 : end])):
            start, shown = end - 1, len(last)
    return found


# -- pages


def _run_page(name: str, config: Config, state: State) -> Page:
    saved = f"version {state.checkpoint.version} ({state.checkpoint.path})" if state.checkpoint else "none"
    head = [
        ("run", f"{name}, life {max(0, state.life)}"),
        ("version", f"{state.version} of {config.train.steps}; servers at {state.serving}"),
        ("checkpoint", saved),
        *((f"success {label}", f"{share:.2f}") for label, share in state.success.items()),
    ]
    batch = state.batch.groups if state.batch else ()
    groups = {
        "trained": state.trained,
        **{f"dropped, {reason}": count for reason, count in sorted(state.dropped.items())},
        "open, in a batch": len(batch),
        "open, complete": len(state.open) - state.running - len(batch),
        "open, unfinished": state.running,
        "admitted": state.admitted,
    }
    episodes = {"finished": state.finished}
    episodes |= {f"failed, {kind}": count for kind, count in sorted(state.failures.items())}
    tokens = sum(state.staleness.values())
    ages = [(str(age), str(of_age), f"{of_age / tokens:.0%}") for age, of_age in sorted(state.staleness.items())]
    ages += [("stale, masked", str(state.masked_tokens), "")] if state.masked_tokens else []
    page: Page = [
        Sheet("<<", (), head),
        Sheet("<>", ("groups", "number"), [(what, str(count)) for what, count in groups.items()]),
        Sheet("<>", ("episodes", "number"), [(what, str(count)) for what, count in episodes.items()]),
        Sheet("<>>", ("staleness", "trained tokens", "share"), ages),
    ]
    rows = []
    for group in list(state.open.values())[:_OPEN_GROUPS]:
        where = "in a batch" if group.number in batch else "complete" if group.ready else "unfinished"
        rewards = _list(f"{group.rewards[member]:.4g}" for member in sorted(group.rewards))
        by_version = _by_version(group.tokens.items())
        rows.append((str(group.number), repr(group.task_id), where, _list(group.pending), rewards, by_version))
    if rows:
        columns = ("open group", "task", "state", "waiting for", "rewards", "loss tokens by version")
        page.append(Sheet("><<<<<", columns, rows))
    if len(state.open) > len(rows):
        page.append(f"and {len(state.open) - len(rows)} more open groups; --group NUMBER shows one of them")
    return page


def _group_page(name: str, config: Config, story: Story, ledger: LedgerReader) -> Page:
    number = story.begin.group
    advantages = story.advantages(config)
    records: dict[int, EpisodeRecord] = {}
    damaged = []
    for i in ledger.members(number):
        try:
            records[i] = ledger.episode(number, i)
        except LedgerError as error:
            damaged.append(str(error))
    rows = []
    for i, member in enumerate(story.members):
        failed = f"{len(member.failures)}" if member.failures else ""
        turns = str(records[i].turns) if i in records else "-"
        reward, advantage = _number(member.reward), _signed(advantages.get(i))
        tokens = _by_version(member.tokens, story.oldest)
        rows.append((str(i), member.state, reward, advantage, failed, turns, tokens))
    columns = ("member", "state", "reward", "advantage", "failed", "turns", "loss tokens by version")
    page: Page = [Sheet("<<", (), _head("group", f"{number} of {name}", story)), Sheet("><>>>><", columns, rows)]
    if not records and any(member.reward is not None for member in story.members):
        page.append(f"trajectories: {story.trajectories}")
    return [*page, *damaged, *_failures(story.members)]


def _episode_page(folder: RunFolder, config: Config, story: Story, index: int, ledger: LedgerReader) -> Page:
    number, member = story.begin.group, story.members[index]
    advantage = story.advantages(config).get(index)
    head = _head("episode", f"{number}.{index} of {folder.path.resolve().name}", story)
    head.append(("member", f"{member.state}; loss tokens {_by_version(member.tokens, story.oldest) or 'none'}"))
    head.append(("reward", f"{_number(member.reward)}, advantage {_signed(advantage)}"))
    page: Page = [Sheet("<<", (), head)]
    if index in ledger.members(number):
        record = ledger.episode(number, index)
        head.append(("took", f"{record.turns} turns, {record.forks} forks, {record.seconds:.1f} s"))
        head += [("metric", f"{_visible(key)} {value:.4g}") for key, value in record.metrics.items()]
        tokenizer = _tokenizer(folder, config) if record.trajectories else ""
        if isinstance(tokenizer, str):
            page.append(f"the text of the tokens is not shown: {tokenizer or 'there are no tokens'}")
        for i, trajectory in enumerate(record.trajectories, 1):
            title = f"trajectory {i} of {len(record.trajectories)}: {len(trajectory.ids)} tokens"
            page += _trajectory(title, trajectory, story, advantage, tokenizer)
    elif member.reward is not None:
        page.append(f"trajectories: {story.trajectories}")
    return [*page, *_failures([member], index)]


def _trajectory(title: str, trajectory: Trajectory, story: Story, advantage: float | None, tokenizer: Any) -> Page:
    """tokenizer: a string if there is none."""
    keep = trajectory.loss_mask & (trajectory.versions >= story.oldest)
    title += f", {trajectory.loss_mask.sum()} with a loss"
    if story.batch:
        title += f"; batch {story.batch.batch} used {keep.sum()}, those of version {story.oldest} or newer"
    versions = trajectory.versions.tolist()
    columns = {
        "token": map(str, range(len(keep))),
        "id": map(str, trajectory.ids),
        "version": ["" if version == NOT_SAMPLED else str(version) for version in versions],
        "log-prob": [
            "" if v == NOT_SAMPLED else f"{p:.3f}" for p, v in zip(trajectory.logprobs, versions, strict=True)
        ],
        "loss": map(str, trajectory.loss_mask.astype(int)),
        "trained": map(str, keep.astype(int)) if story.batch else ["-"] * len(keep),
        "advantage": ["" if advantage is None or not kept else _signed(advantage) for kept in keep],
    }
    align = ">" * len(columns)
    if not isinstance(tokenizer, str):
        columns["text"] = map(repr, pieces(tokenizer, trajectory.ids.tolist()))
        align += "<"
    return [title, Sheet(align, tuple(columns), list(zip(*columns.values(), strict=True)))]


def _head(what: str, name: str, story: Story) -> list[tuple[str, str]]:
    return [
        (what, name),
        ("task", f"{story.begin.task_id!r}, position {story.begin.position} of the data"),
        ("admitted", _at(story.admitted)),
        *([("complete", _at(story.ready))] if story.ready else []),
        ("outcome", story.outcome),
    ]


def _failures(members: Sequence[Member], first: int = 0) -> Iterator[str]:
    for index, member in enumerate(members, first):
        for number, failed in enumerate(member.failures, 1):
            text = "\n".join(f"    {line}" for line in _visible(failed.message).splitlines())
            yield f"member {index}, try {number} failed ({failed.kind}):\n{text or '    (no message)'}"


# -- tokens to text


def _tokenizer(folder: RunFolder, config: Config) -> Any:
    """The tokenizer of the run's model, or of a checkpoint if the model has moved; else a string that says why not."""
    saved = folder.checkpoints().values() if (folder.path / "checkpoints").is_dir() else ()
    why = "model.path is empty"
    for path in filter(None, [config.model.path, *(str(path) for path in saved)]):
        from transformers import AutoTokenizer  # takes seconds

        try:
            return AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as error:  # transformers raises OSError, ValueError, ImportError and errors of its own
            why = f"no tokenizer could be loaded from model.path={path} ({type(error).__name__})"
    return why


def _visible(text: str) -> str:
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def _numbers(option: str, form: str, pattern: str, text: str) -> tuple[int, ...]:
    found = re.fullmatch(pattern, text, re.ASCII)
    if not found:
        raise ConfigError(f"{option} {text}: write {form}")
    return tuple(map(int, found.groups()))


def _at(versions: tuple[int, int]) -> str:
    return f"at version {versions[0]}, servers at {versions[1]}"


def _list(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))


def _by_version(tokens: Iterable[tuple[int, int]], oldest: int = 0) -> str:
    return _list(f"v{version}: {count}{' masked' * (version < oldest)}" for version, count in sorted(tokens))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.2f}"


# -- drawing


def show(page: Page, console: Console | None = None) -> None:
    """Print a page. Raises OSError if the output was closed."""
    console = console or Console()
    is_terminal = console.is_terminal and not console.is_dumb_terminal
    for number, part in enumerate(page):
        if number and not (isinstance(part, str) and isinstance(page[number - 1], str)):
            print(file=console.file)
        if isinstance(part, str):
            print(part, file=console.file)
        elif is_terminal:
            console.print(_table(part))
        else:
            print("\n".join(_lines(part)), file=console.file)
    console.file.flush()


def _table(sheet: Sheet) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_header=bool(sheet.columns), show_edge=False, pad_edge=False)
    for i, align in enumerate(sheet.align):
        name = sheet.columns[i] if sheet.columns else ""
        table.add_column(name, justify="right" if align == ">" else "left", overflow="fold")
    for row in sheet.rows:
        table.add_row(*map(Text, row))
    return table


def _lines(sheet: Sheet) -> Iterator[str]:
    rows = [sheet.columns, *sheet.rows] if sheet.columns else list(sheet.rows)
    widths = [max(cell_len(row[i]) for row in rows) for i in range(len(sheet.align))]
    for row in rows:
        cells = []
        for align, width, cell in zip(sheet.align, widths, row, strict=True):
            space = " " * (width - cell_len(cell))
            cells.append(space + cell if align == ">" else cell + space)
        yield "  ".join(cells).rstrip()
