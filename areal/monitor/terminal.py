"""Terminal output of a run: a live panel, or one plain line per step.

    with open_view(config.view, title="search-0001") as view:
        view.step(report)

An open view shows the messages of the logger "areal". A thread draws the live panel, so that a blocked terminal does
not block the event loop; it shares only values that are replaced, never modified. The cursor stays visible and the
screen is not switched, so that a killed process leaves nothing to restore.
"""

from __future__ import annotations

import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import IO, Literal, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal.errors import ConfigError
from areal.monitor.metrics import StepReport

MESSAGES = 6
"""Messages that the live panel shows."""
SECONDS_WINDOW = 10
"""Steps over which the step duration is averaged to estimate the time left."""


class View:
    """Shows nothing (`view=off`); base class of the other views."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, report: StepReport) -> None:
        """Show one training step."""


def open_view(
    mode: Literal["auto", "live", "plain", "off"], title: str = "areal", console: Console | None = None
) -> View:
    """The view for `view=mode`, a context manager. Raises ConfigError for `live` without a terminal."""
    if mode == "off":
        return View()
    console = console or Console()
    is_terminal = console.is_terminal and not console.is_dumb_terminal
    if mode == "live" and not is_terminal:
        raise ConfigError("view=live needs a terminal, and standard output is not one; use view=plain or view=auto")
    if is_terminal and mode != "plain":
        return LiveView(title, console)
    return PlainView(console.file)


class PlainView(View):
    """One line per step and per message. A closed output (`| head`) does not end the run."""

    def __init__(self, file: IO[str] | None = None):
        self._file = file or sys.stdout
        self._handler = _Handler(self._message)

    def __enter__(self) -> Self:
        self._handler.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self._handler.detach()

    def step(self, report: StepReport) -> None:
        self._print("\n".join((plain_line(report), *(f"  {note}" for note in report.notes))))

    def _message(self, record: logging.LogRecord, text: str) -> None:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        self._print(level + text)

    def _print(self, text: str) -> None:
        with suppress(OSError):
            print(text, file=self._file, flush=True)


class LiveView(View):
    """A panel below the other output, redrawn four times a second."""

    def __init__(self, title: str, console: Console, clock: Callable[[], float] = time.monotonic):
        self._title = title
        self._clock = clock
        self._since = clock()
        self._report: StepReport | None = None
        self._rewards: tuple[float, ...] = ()
        self._seconds: tuple[float, ...] = ()
        self._messages: deque[Text] = deque(maxlen=MESSAGES)
        self._handler = _Handler(self._message)
        self._live = Live(get_renderable=self.render, console=console, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._handler.attach()
        self._live.start()
        self._live.console.show_cursor(True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()
        self._handler.detach()

    def step(self, report: StepReport) -> None:
        if not math.isnan(report.reward_mean):
            self._rewards += (report.reward_mean,)
        if not math.isnan(report.seconds):
            self._seconds = (*self._seconds, report.seconds)[-SECONDS_WINDOW:]
        self._since = self._clock()
        self._messages.extend(Text(note, no_wrap=True, overflow="ellipsis") for note in report.notes)
        self._report = report

    def render(self) -> RenderableType:
        """The current panel."""
        report = self._report
        if report is None:
            title = self._title
            lines: list[RenderableType] = [Text(f"starting, {_duration(self._clock() - self._since)}")]
        else:
            title = f"{self._title}  v{report.version}"
            lines = [self._progress(report), self._table(report)]
        if messages := list(self._messages):
            lines += [Text(), *messages]
        return Panel(Group(*lines), title=Text(title), title_align="left", border_style="dim")

    def _progress(self, report: StepReport) -> RenderableType:
        mean = sum(self._seconds) / len(self._seconds) if self._seconds else math.nan
        left = max(0.0, (report.steps - report.step) * mean - (self._clock() - self._since))
        row = Table.grid(padding=(0, 2, 0, 0), expand=True)
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(no_wrap=True)
        row.add_row(
            f"step {report.step}/{report.steps}",
            ProgressBar(total=max(1, report.steps), completed=report.step),
            f"ETA {_duration(left)}",
        )
        return row

    def _table(self, report: StepReport) -> RenderableType:
        now = self._clock() - self._since
        rows = {
            "reward": f"{_shown(report.reward_mean, '.2f')}  {sparkline(self._rewards, 32)}",
            "evaluated": f"success {_shown(report.success, '.2f')}",
            "staleness": _bars(report.staleness),
            "tokens/s": f"generated {_si(report.generated_tokens_per_s)}, trained {_si(report.trained_tokens_per_s)}",
            "weights": f"servers paused {_shown(report.paused_share, '.1%')} of the time",
            "log-prob gap": _shown(report.logprob_gap, ".0e"),
            "running": f"{report.episodes_running} episodes, {report.groups_open} groups open",
            "last step": f"{_shown(report.seconds, '.1f', ' s')}, {report.groups} groups; this one {_duration(now)}",
        }
        if math.isnan(report.success):
            del rows["evaluated"]
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        table.add_column(style="bold", no_wrap=True, min_width=max(map(len, rows)))
        table.add_column(no_wrap=True, ratio=1)
        for name, value in rows.items():
            table.add_row(name, Text(value, no_wrap=True, overflow="ellipsis"))
        return table

    def _message(self, record: logging.LogRecord, text: str) -> None:
        style = "red" if record.levelno >= logging.ERROR else "yellow" if record.levelno >= logging.WARNING else ""
        when = time.strftime("%H:%M:%S", time.localtime(record.created))
        first, *more = text.splitlines() or [""]
        line = f"{when}  {first}" + (" ..." if more else "")
        self._messages.append(Text(line, style=style, no_wrap=True, overflow="ellipsis"))


class _Handler(logging.Handler):
    """Passes messages of the logger "areal", from level INFO, to the view opened last."""

    def __init__(self, show: Callable[[logging.LogRecord, str], None]):
        super().__init__(logging.INFO)
        self._show = show
        self._logger = logging.getLogger("areal")
        self._level_before = self._logger.level
        self._outer: list[logging.Handler] = []

    def attach(self) -> None:
        self._outer = [handler for handler in self._logger.handlers if isinstance(handler, _Handler)]
        for handler in self._outer:
            self._logger.removeHandler(handler)
        self._level_before = self._logger.level
        if self._logger.getEffectiveLevel() > logging.INFO:
            self._logger.setLevel(logging.INFO)
        self._logger.addHandler(self)

    def detach(self) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level_before)
        for handler in self._outer:
            self._logger.addHandler(handler)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._show(record, self.format(record))
        except Exception:
            self.handleError(record)


def plain_line(report: StepReport) -> str:
    """`step 12/60  v12  reward 0.43  groups 16  staleness 0:61% 1:39%  gen 3.1k tok/s  ...`; "-" means unknown."""
    total = sum(report.staleness.values())
    parts = [
        f"step {report.step}/{report.steps}",
        f"v{report.version}",
        f"reward {_shown(report.reward_mean, '.2f')}",
        *([] if math.isnan(report.success) else [f"evaluated {report.success:.2f}"]),
        f"groups {report.groups}",
        "staleness " + (" ".join(f"{s}:{n / total:.0%}" for s, n in sorted(report.staleness.items())) or "-"),
        *([f"masked {report.masked_share:.1%}"] if report.masked_share > 0 else []),
        f"gen {_si(report.generated_tokens_per_s)} tok/s",
        f"train {_si(report.trained_tokens_per_s)} tok/s",
        f"paused {_shown(report.paused_share, '.1%')}",
        f"gap {_shown(report.logprob_gap, '.0e')}",
        _shown(report.seconds, ".1f", " s"),
    ]
    return "  ".join(parts)


def sparkline(values: Sequence[float], width: int) -> str:
    """All `values` in at most `width` characters, each showing the mean of an equal share of them."""
    if not values:
        return ""
    width = min(width, len(values))
    cuts = [len(values) * i // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
    low, high = min(means), max(means)
    blocks = "▁▂▃▄▅▆▇█"
    return "".join(blocks[round((mean - low) / (high - low) * 7) if high > low else 3] for mean in means)


def _bars(histogram: Mapping[int, int]) -> str:
    total = sum(histogram.values())
    if not total:
        return "-"
    return "  ".join(f"{s} {'█' * round(12 * n / total)} {n / total:.0%}" for s, n in sorted(histogram.items()))


def _si(value: float) -> str:
    """At least two digits and a unit: 940, 3.1k, 18k, 1.2M."""
    if math.isnan(value):
        return "-"
    for unit in ("", "k", "M"):
        if value < 999.5:
            return f"{value:.1f}{unit}" if unit and value < 9.95 else f"{value:.0f}{unit}"
        value /= 1000
    return f"{value:.1f}G"


def _duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _shown(value: float, form: str, unit: str = "") -> str:
    return "-" if math.isnan(value) else f"{value:{form}}{unit}"
