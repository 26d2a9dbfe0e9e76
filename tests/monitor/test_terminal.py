import io
import logging
import math
import os
import pty
import signal
import subprocess
import sys
import threading

import pytest
from rich.console import Console

from areal.errors import ConfigError
from areal.monitor.metrics import StepReport
from areal.monitor.terminal import LiveView, PlainView, View, open_view, plain_line, sparkline

log = logging.getLogger("areal.test")
REPORT = StepReport(
    step=12,
    steps=60,
    version=12,
    reward_mean=0.43,
    groups=16,
    staleness={1: 390, 0: 610},
    generated_tokens_per_s=3100,
    trained_tokens_per_s=18000,
    paused_share=0.012,
    logprob_gap=3e-5,
    episodes_running=96,
    groups_open=14,
    seconds=2.1,
)


def terminal(width: int, file: object = None) -> Console:
    return Console(width=width, height=40, force_terminal=True, file=file or io.StringIO(), record=True)


def test_the_plain_line():
    assert plain_line(REPORT) == (
        "step 12/60  v12  reward 0.43  groups 16  staleness 0:61% 1:39%  gen 3.1k tok/s  train 18k tok/s  paused 1.2%  "
        "gap 3e-05  2.1 s"
    )
    assert plain_line(StepReport(step=1, steps=2, version=1, success=0.5, generated_tokens_per_s=12)) == (
        "step 1/2  v1  reward -  evaluated 0.50  groups 0  staleness -  gen 12 tok/s  train - tok/s  paused -  gap -  -"
    )


@pytest.mark.parametrize(
    ("rate", "shown"),
    [(0, "0"), (999.4, "999"), (999.5, "1.0k"), (9949, "9.9k"), (9950, "10k"), (999_600, "1.0M"), (2e9, "2.0G")],
)
def test_rates_have_two_digits_and_a_unit(rate, shown):
    line = plain_line(StepReport(step=1, steps=1, version=1, generated_tokens_per_s=rate))
    assert f"gen {shown} tok/s" in line


def test_plain_shows_steps_notes_and_the_messages_of_the_library():
    out = io.StringIO()
    with PlainView(out) as view:
        log.info("server 0 is ready")
        view.step(StepReport(step=1, steps=2, version=1, notes=("checkpoint step-1",)))
        log.warning("server 0 died\nlast line")
        logging.getLogger("other").warning("not ours")
    log.warning("after the end")
    lines = out.getvalue().splitlines()
    assert [lines[0], *lines[2:]] == ["server 0 is ready", "  checkpoint step-1", "warning: server 0 died", "last line"]
    assert lines[1].startswith("step 1/2  v1")
    assert logging.getLogger("areal").level == logging.NOTSET


def test_a_closed_pipe_ends_the_lines_and_not_the_run():
    read_end, write_end = os.pipe()
    os.close(read_end)
    pipe = open(write_end, "w", buffering=1)  # noqa: SIM115
    with PlainView(pipe) as view:
        view.step(REPORT)
        log.warning("a message")
    with pytest.raises(BrokenPipeError):
        pipe.close()


def test_the_mode_decides_what_is_shown():
    not_a_terminal = Console(file=io.StringIO())
    assert type(open_view("auto", console=not_a_terminal)) is PlainView
    assert type(open_view("auto", console=terminal(80))) is LiveView
    assert type(open_view("plain", console=terminal(80))) is PlainView
    assert type(open_view("off", console=terminal(80))) is View
    with pytest.raises(ConfigError, match="view=live needs a terminal"):
        open_view("live", console=not_a_terminal)


def test_a_dumb_terminal_gets_plain_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert type(open_view("auto", console=terminal(80))) is PlainView


def drawn(width: int) -> list[str]:
    now = [0.0]
    console = terminal(width)
    view = LiveView("search-0001", console, clock=lambda: now[0])
    for step in range(1, 13):
        view.step(StepReport(step=step, steps=60, version=step, reward_mean=step / 100, seconds=2.1))
    view.step(REPORT)
    now[0] = 1.5
    console.print(view.render())
    return console.export_text().splitlines()


def test_the_live_panel():
    assert drawn(72) == [
        "╭─ search-0001  v12 ───────────────────────────────────────────────────╮",
        "│ step 12/60  ━━━━━━━━━╺━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━  ETA 1:39 │",
        "│ reward        0.43  ▁▁▁▁▂▂▂▂▂▃▃▃█                                    │",
        "│ staleness     0 ███████ 61%  1 █████ 39%                             │",
        "│ tokens/s      generated 3.1k, trained 18k                            │",
        "│ weights       servers paused 1.2% of the time                        │",
        "│ log-prob gap  3e-05                                                  │",
        "│ running       96 episodes, 14 groups open                            │",
        "│ last step     2.1 s, 16 groups; this one 0:01                        │",
        "╰──────────────────────────────────────────────────────────────────────╯",
    ]


@pytest.mark.parametrize("width", [44, 24, 12])
def test_a_narrow_terminal_cuts_lines_and_wraps_none(width):
    lines = drawn(width)
    assert len(lines) == 10
    assert {len(line) for line in lines} == {width}
    if width == 44:
        assert lines[5] == "│ weights       servers paused 1.2% of th… │"


def test_before_the_first_step_the_panel_says_what_starts():
    console = terminal(60)
    with LiveView("run-0001", console, clock=lambda: 5.0) as view:
        log.info("server 0 starts [not markup]")
        log.error("no such model\nits log")
        console.print(view.render())
    text = console.export_text()
    assert "starting, 0:00" in text
    assert "server 0 starts [not markup]" in text
    assert "no such model ..." in text


def test_other_prints_go_above_the_panel(capsys):
    console = terminal(60)
    with LiveView("run-0001", console):
        print("from the agent")
    text = console.export_text()
    assert text.index("from the agent") < text.rindex("╭─ run-0001")


def test_the_event_loop_does_not_wait_for_a_terminal_that_is_blocked():
    """I7: a terminal stopped by Ctrl-S must not stop the run."""
    blocked, released, stand_still = threading.Event(), threading.Event(), threading.Event()

    class Terminal(io.StringIO):
        def write(self, text):
            if stand_still.is_set():
                blocked.set()
                assert released.wait(10)
            return super().write(text)

    with LiveView("run-0001", terminal(60, Terminal())) as view:
        stand_still.set()
        assert blocked.wait(10)
        caller = threading.Thread(target=lambda: (view.step(REPORT), log.warning("a message")))
        caller.start()
        caller.join(5)
        was_free = not caller.is_alive()
        released.set()
    assert was_free


def test_a_killed_live_view_leaves_a_visible_cursor():
    program = """
import sys, threading
from rich.console import Console
from areal.monitor.terminal import open_view
with open_view("live"):
    print("shown", flush=True)
    threading.Event().wait()
"""
    master, slave = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", program], stdout=slave, env={**os.environ, "TERM": "xterm"})
    os.close(slave)
    output = b""
    while b"starting" not in output:
        output += os.read(master, 4096)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    try:
        while more := os.read(master, 4096):
            output += more
    except OSError:  # the other end is gone
        pass
    os.close(master)
    assert output.rindex(b"\x1b[?25h") > output.find(b"\x1b[?25l")
    assert b"\x1b[?1049h" not in output


def test_the_sparkline_shows_the_whole_course():
    assert sparkline([], 8) == ""
    assert sparkline([1.0, 1.0], 8) == "▄▄"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 0, 0, 1, 1, 1, 1], 2) == "▁█"
    assert len(sparkline([math.sin(i) for i in range(1000)], 32)) == 32
