"""What a person sees in the terminal while a run goes on: a live panel, or one plain line a step.

    with open_view(config.view, title="search-0001") as view:
        view.step(report)

Messages of the logger "areal" appear in the view as long as it is open. The event loop never waits for the terminal of
a live panel: a thread draws it, from records that are replaced and never changed. The cursor is not hidden and the
screen is not switched, so that there is nothing to restore, however the process ends.
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
from areal.metrics import StepReport

MESSAGES = 6
"""Messages that the live panel shows."""
SECONDS_WINDOW = 10
"""Steps whose mean duration predicts the time left."""


class View:
    """Shows nothing (`view=off`), and is what the other two have in common."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, report: StepReport) -> None:
        """Show one training step; returns at once."""


def open_view(
    mode: Literal["auto", "live", "plain", "off"], title: str = "areal", console: Console | None = None
) -> View:
    """The view for `view=mode`, to be used as a context manager. ConfigError for `live` where there is no terminal."""
    if mode == "off":
        return View()
    console = console or Console()
    is_terminal = console.is_terminal and not console.is_dumb_terminal
    if mode == "live" and not is_terminal:
        raise ConfigError("view=live needs a terminal, and standard output is none; use view=plain or view=auto")
    if is_terminal and mode != "plain":
        return LiveView(title, console)
    return PlainView(console.file)


class PlainView(View):
    """One line a step, one a message. An output that was closed (`| head`) ends the lines, not the run."""

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
    """A panel that is drawn again four times a second below whatever else is printed."""

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
        """The panel as it stands now."""
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
            "reward": f"{_fixed(report.reward_mean)}  {sparkline(self._rewards, 32)}",
            "evaluated": f"success {_fixed(report.success)}",
            "staleness": _bars(report.staleness),
            "tokens/s": f"generated {_si(report.generated_tokens_per_s)}, trained {_si(report.trained_tokens_per_s)}",
            "weights": f"servers stood still {_percent(report.still_share)} of the time",
            "log-prob gap": _gap(report.logprob_gap),
            "running": f"{report.episodes_running} episodes, {report.groups_open} groups open",
            "last step": f"{_seconds(report.seconds)}, {report.groups} groups; this one {_duration(now)}",
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
    """Hands the messages of "areal" from INFO on to a view; attached and taken away again with it. Of several open
    views the last one shows them."""

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
    """`step 12/60  v12  reward 0.43  groups 16  staleness 0:61% 1:39%  gen 3.1k tok/s  ...`; "-" for what is not
    known."""
    total = sum(report.staleness.values())
    parts = [
        f"step {report.step}/{report.steps}",
        f"v{report.version}",
        f"reward {_fixed(report.reward_mean)}",
        *([] if math.isnan(report.success) else [f"evaluated {_fixed(report.success)}"]),
        f"groups {report.groups}",
        "staleness " + (" ".join(f"{s}:{n / total:.0%}" for s, n in sorted(report.staleness.items())) or "-"),
        *([f"masked {_percent(report.masked_share)}"] if report.masked_share > 0 else []),
        f"gen {_si(report.generated_tokens_per_s)} tok/s",
        f"train {_si(report.trained_tokens_per_s)} tok/s",
        f"still {_percent(report.still_share)}",
        f"gap {_gap(report.logprob_gap)}",
        _seconds(report.seconds),
    ]
    return "  ".join(parts)


def sparkline(values: Sequence[float], width: int) -> str:
    """The whole course of `values` in at most `width` characters; each is the mean of its share of them."""
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
    """Two digits at least and a unit: 940, 3.1k, 18k, 1.2M."""
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


def _fixed(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def _gap(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.0e}"


def _seconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1f} s"
