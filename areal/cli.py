"""The command line: `launch` for programs, and the `areal` command.

    async def main(config: Config) -> None: ...

    if __name__ == "__main__":
        launch(main, {"train.steps": 60})        # python program.py run.toml seed=2

The library installs no signal handlers and owns no event loop; this module does both, for a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
import tomllib
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from pydantic.fields import FieldInfo

from areal.config import SETTINGS, Config
from areal.errors import ArealError, ConfigError, Stalled, Stopped, root_cause
from areal.folder import RunFolder
from areal.monitor.terminal import PlainView, View

STOP_S = 10.0
"""Seconds a program has to stop after the first Ctrl-C, and to close its event loop at the end."""


def launch(
    main: Callable[[Config], Coroutine[Any, Any, object]],
    defaults: Mapping[str, Any] | None = None,
    arguments: Sequence[str] | None = None,
) -> NoReturn:
    """Run `main(config)` as this process's program and exit.

    The config comes from `defaults` (dotted keys) and the command line: `[FILE.toml ...] [key=value ...]`, or
    `--resume RUN [key=value ...]` (used by `areal resume RUN`).
    Exit codes: 0 done; 1 failed; 2 a setting or the data is wrong; 3 stalled; 128 + n stopped by signal n (Ctrl-C and
    `areal stop` 130).
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"-h", "--help"} & set(arguments):
        print(_program_help(defaults or {}))
        sys.exit(0)
    command = (sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1])
    try:
        if arguments[:1] == ["--resume"] and len(arguments) > 1:
            config = Config.resume(arguments[1], arguments[2:], command)
        else:
            config = Config.load(arguments, defaults, command)
    except ArealError as error:
        sys.exit(_report(error))
    with View() if config.view == "off" else PlainView():  # before the run opens its own view, and after it
        code = supervise(partial(main, config))
    sys.exit(code)


def supervise(main: Callable[[], Coroutine[Any, Any, object]], stop_s: float = STOP_S) -> int:
    """Run `main()` on uvloop if installed, and return the exit code. Call it from the main thread.

    The first SIGINT or SIGTERM cancels `main`, which has `stop_s` seconds to end; notes it adds to the CancelledError
    (`error.add_note("resume with: ...")`) are printed. After that time, or on a second signal, the process exits at
    once, and guards kill its child processes. An error is printed as one message, see `describe`.
    """
    process = _Process(stop_s)
    before = {number: signal.signal(number, process.on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(process.run(main))
    finally:
        process.ended()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Process:
    """Stops in two stages: cancel, then exit."""

    def __init__(self, stop_s: float):
        self._stop_s = stop_s
        self._signal: int | None = None
        self._main: asyncio.Task[Any] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deadline: threading.Timer | None = None

    async def run(self, main: Callable[[], Coroutine[Any, Any, object]]) -> int:
        self._loop = asyncio.get_running_loop()
        self._main = asyncio.current_task()
        code = 0
        try:
            await main()
        except asyncio.CancelledError as error:
            if self._signal is None:
                code = 1
                print("".join(traceback.format_exception(error)), file=sys.stderr)
            for note in getattr(error, "__notes__", ()):
                print(note, file=sys.stderr)
        except (Exception, BaseExceptionGroup) as error:
            code = _report(error)
        self._main = None
        if self._signal is not None:
            code = code or 128 + self._signal
        self._end_within(code)
        return code

    def on_signal(self, number: int, frame: object) -> None:
        """May interrupt any instruction, even inside a print, so it must not print."""
        if self._signal is not None or self._main is None or self._loop is None:
            _exit_now(128 + number, "exited immediately")
        self._signal = number
        self._end_within(128 + number)
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self._main is not None:
            message = f"stopping within {self._stop_s:g} s; a second signal exits immediately"
            print(message, file=sys.stderr, flush=True)
            self._main.cancel()

    def _end_within(self, code: int) -> None:
        """Start the deadline in a thread, because the event loop, or closing it, may hang."""
        if self._deadline is None:
            self._deadline = threading.Timer(self._stop_s, self._out_of_time, (code,))
            self._deadline.daemon = True
            self._deadline.start()

    def _out_of_time(self, code: int) -> None:
        assert self._loop is not None
        try:
            waiting = sorted(task.get_name() for task in asyncio.all_tasks(self._loop))
        except RuntimeError:  # the loop's thread changed the set during the iteration
            waiting = []
        threads = [thread.name for thread in threading.enumerate() if not thread.daemon]
        hanging = f"tasks {', '.join(waiting[:8])}; threads {', '.join(threads)}"
        _exit_now(code, f"not stopped within {self._stop_s:g} s: {hanging}")

    def ended(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()


def _exit_now(code: int, message: str) -> NoReturn:
    os.write(2, f"{message}\n".encode())
    os._exit(code)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def exit_code(error: BaseException) -> int:
    match root_cause(error):
        case ConfigError():
            return 2
        case Stalled():
            return 3
        case Stopped():
            return 128 + signal.SIGINT
        case _:
            return 1


def describe(error: BaseException) -> str:
    """The text to show to the user: the root cause, without the exception groups around it.

    An ArealError is shown as its message, its notes and its cause: one line for an ArealError, OSError or TimeoutError,
    a traceback for anything else, such as an agent's error. Other errors are bugs and are shown with their traceback.
    """
    cause = root_cause(error)
    if not isinstance(cause, ArealError):
        return "".join(traceback.format_exception(cause)).rstrip()
    return "\n".join(_explain(cause))


def _report(error: BaseException) -> int:
    print(describe(error), file=sys.stderr)
    return exit_code(error)


def _explain(error: BaseException) -> Iterator[str]:
    message = f"{type(error).__name__}: {error}"
    yield message
    yield from getattr(error, "__notes__", ())
    if error.__cause__ is None:
        return
    cause = root_cause(error.__cause__)
    if cause is error:
        return
    if isinstance(cause, ArealError | OSError | TimeoutError):
        first, *more = _explain(cause)
        yield from (f"because of {first}", *more)
    elif "Traceback (most recent call last)" not in message:
        yield from ("", "".join(traceback.format_exception(cause)).rstrip())


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m areal`, and the console script `areal`."""
    try:
        return _command(arguments)
    except ArealError as error:
        return _report(error)


_COMMANDS = {
    "config": (
        "print the effective settings and where each came from",
        "Print all settings as TOML, each with the origin of its value: default, a file, or argument. The output can "
        "be used as a FILE.toml. Exit code 2 for a wrong setting.",
    ),
    "doctor": (
        "check a configuration before running it",
        "Check the machine, data, chat template and tool calls; then start one server and the ranks, compare their "
        "log-probs, try the agent, and publish weights. Exit code 0: no problem; 1: at least one; 2: a setting or "
        "--agent is wrong.",
    ),
    "resume": (
        "resume a stopped or killed run",
        "Restart the program of a run from its last checkpoint: later steps are repeated with their recorded batches, "
        "finished episodes are kept, and unfinished ones continue. Some settings may change.",
    ),
    "status": (
        "show what a run in progress does now",
        "One screen: step, groups, servers, ranks, and what the run waits for. Exit code 1: it is not in progress.",
    ),
    "servers": (
        "change the servers of a run in progress",
        "Add or remove servers. Returns once new ones accept requests and the others are gone, whose calls continue "
        "elsewhere. `areal resume` starts with the configured servers again.",
    ),
    "stop": (
        "stop a run in progress as Ctrl-C does",
        "The run writes a last checkpoint if there is time, and can be resumed.",
    ),
    "inspect": (
        "show a run, one group, or one episode token by token",
        "Show what the ledger records: counts for the run, or everything about one group or episode. Read-only; the "
        "run may be in progress.",
    ),
    "replay": (
        "re-run the scheduling decisions of a recorded run and report differences",
        "Repeat every decision in the ledger with the current code, and show the first that differs. Exit code 0: no "
        "difference; 1: a difference, or an unreadable ledger. The run may be in progress.",
    ),
}
"""Command -> its line in `areal --help`, and its description."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="areal", description="Asynchronous RL for LLM agents.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    of = {name: commands.add_parser(name, help=line, description=text) for name, (line, text) in _COMMANDS.items()}
    for name, command in of.items():
        if name in ("config", "doctor"):
            settings = "FILE.toml or key=value"
            command.add_argument("settings", nargs="*", metavar=settings, help="key=value overrides files")
        else:
            command.add_argument("run", help="the folder of the run, such as runs/latest")
    of["config"].add_argument("--markdown", action="store_true", help="print the page docs/settings.md instead")
    of["resume"].add_argument("changes", nargs="*", metavar="key=value", help="settings to change")
    of["servers"].add_argument("wanted", metavar="count=N or urls=[...]", help="urls: of a run with servers.urls")
    which = of["inspect"].add_mutually_exclusive_group()
    which.add_argument("--group", metavar="NUMBER", help="one group: members, rewards, advantages, failures, outcome")
    which.add_argument("--episode", metavar="GROUP.MEMBER", help="one episode, token by token")
    of["doctor"].add_argument(
        "--agent",
        metavar="FILE.py:NAME",
        help="(or MODULE:NAME) an async function to try on the first ten tasks of data.train: does it fail, block the "
        "event loop, install signal handlers, or always return the same reward? It is imported, not run as a program",
    )
    return parser


def _command(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if options.command == "doctor" and not any(word.startswith("-") for word in rest):
        return _examine([*options.settings, *rest], options.agent)  # argparse does not take settings after --agent
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command in ("replay", "inspect"):
        return _look(options)
    if options.command in ("status", "servers", "stop"):
        return _ask(options)
    if options.command == "resume":
        _resume(options.run, options.changes)
    if options.markdown and options.settings:
        parser.error("--markdown describes all settings and takes none")
    print(markdown() if options.markdown else Config.load(options.settings).to_toml(), end="")
    return 0


def _ask(options: argparse.Namespace) -> int:
    """`status`, `servers` and `stop`: of a run in progress."""
    from areal.monitor.endpoint import ask
    from areal.monitor.status import screen

    folder = Path(options.run)
    if options.command == "status":
        print(screen(ask(folder, "GET", "/status")))
    elif options.command == "stop":
        print(ask(folder, "POST", "/stop"))
    else:
        key, _, text = options.wanted.partition("=")
        try:
            wanted = {key: tomllib.loads(f"value = {text}")["value"]}
        except tomllib.TOMLDecodeError:
            raise ConfigError(f"{options.wanted!r}: give count=3 or urls='[\"http://127.0.0.1:30000\"]'") from None
        ask(folder, "POST", "/servers", wanted, timeout_s=None)
        print(screen(ask(folder, "GET", "/status")))
    return 0


def _look(options: argparse.Namespace) -> int:
    """`replay` and `inspect`."""
    from areal.history import inspection, replay

    folder = RunFolder(Path(options.run))
    try:
        if options.command == "replay":
            count, difference = replay.replay_run(folder)
            print(difference or f"{count} facts, no difference", flush=True)
            return int(difference is not None)
        inspection.show(inspection.inspect(folder, group=options.group, episode=options.episode))
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _examine(settings: Sequence[str], where: str | None) -> int:
    """`doctor`: prints each finding as it comes."""
    from areal.doctor import doctor
    from areal.doctor.agent import load_agent

    config = Config.load(settings)
    agent = load_agent(where) if where is not None else None
    found = []

    async def run() -> None:
        found.extend(await doctor(config, agent, tell=partial(print, flush=True)))

    return supervise(run) or int(any(finding.level == "problem" for finding in found))


def _resume(run: str, changes: Sequence[str]) -> NoReturn:
    """Replace this process with the run's program."""
    folder = Path(run).resolve()
    Config.resume(folder, changes)  # raises for a wrong change before the program starts
    try:
        saved = json.loads((folder / "command.json").read_bytes())
        os.chdir(saved["folder"])
        os.execv(saved["command"][0], [*saved["command"], "--resume", str(folder), *changes])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{folder / 'command.json'} names no program that can be started ({error}): start it with --resume "
            f"{folder}, or use Controller(Config.resume(RUN)) in it"
        ) from None


def _program_help(defaults: Mapping[str, Any]) -> str:
    program = Path(sys.argv[0]).name
    about = (sys.modules["__main__"].__doc__ or "").strip()
    own = "\n".join(f"  {key}={value}" for key, value in defaults.items())
    parts = (
        f"usage: python {program} [FILE.toml ...] [key=value ...]",
        about,
        f"Defaults of this program:\n{own}" if own else "",
        "`python -m areal config` lists all settings, docs/settings.md explains them.",
    )
    return "\n\n".join(filter(None, parts))


PAGE_HEAD = """# Settings

Generated by `python -m areal config --markdown`; a test keeps it current.

Set a value with `key=value` on the command line, in a TOML file, or in the program, in this order of precedence:
`python program.py run.toml train.steps=60 servers.urls='["http://127.0.0.1:30000"]'`. `python -m areal config` prints
the effective settings and where each value came from. An unknown key, a value of the wrong type and conflicting
settings are refused before anything starts.
"""


def markdown() -> str:
    """docs/settings.md: one table per section."""
    lines = [PAGE_HEAD.rstrip()]
    section: str | None = None
    for key, field in SETTINGS.items():
        head = key.rpartition(".")[0]
        if head != section:
            section = head
            title = f"## {section}" if section else "## The run"
            lines += ["", title, "", "| setting | default | value | meaning |", "|---|---|---|---|"]
        default = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
        meaning = " ".join((field.description or "").split()).replace("|", "\\|")
        lines.append(f"| `{key}` | {f'`{default}`' if default else ''} | {_kind(field)} | {meaning} |")
    return "\n".join(lines) + "\n"


def _kind(field: FieldInfo) -> str:
    """The type of a setting in words: "integer >= 1", "mask or drop"."""
    names: dict[Any, str] = {bool: "true or false", int: "integer", float: "number", str: "string"}
    if field.annotation in names:
        signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
        bounds = [f"{signs[n]} {getattr(m, n)}" for m in field.metadata for n in signs if hasattr(m, n)]
        return " ".join([names[field.annotation], ", ".join(bounds)]).strip()
    text = str(field.annotation).replace("typing.", "").replace("'", "")
    for python, word in {"dict[str, Any]": "table", "list": "list of ", "int": "integers", "str": "strings"}.items():
        text = text.replace(python, word)
    return text.replace("Literal", "").replace("[", "").replace("]", "").replace(", ", " or ")
