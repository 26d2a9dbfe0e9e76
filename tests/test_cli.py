import asyncio
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from areal.cli import describe, exit_code, main, markdown, supervise
from areal.config import Config
from areal.errors import ConfigError, DataError, ServerLost, Stalled, TooManyFailures, TrainerError
from areal.folder import RunFolder


class Program:
    """A program of its own, whose lines of output can be waited for."""

    def __init__(self, folder: Path, text: str, *arguments: str):
        file = folder / "program.py"
        file.write_text('"""A program for a test."""\n' + textwrap.dedent(text))
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(file), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
        )
        self.output = ""

    def wait_for(self, text: str) -> None:
        while text not in self.output:
            line = self.process.stdout.readline()
            assert line, f"ended without {text!r}: {self.output}"
            self.output += line

    def end(self) -> int:
        try:
            rest, _ = self.process.communicate(timeout=30)
        finally:
            self.process.kill()
        self.output += rest
        return self.process.returncode


STOPPABLE = """
import asyncio, sys
from areal.cli import launch
if "plain" in sys.argv:
    sys.argv.remove("plain")
    sys.modules["uvloop"] = None
async def main(config):
    print("running on", type(asyncio.get_running_loop()).__module__, config.seed)
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError as error:
        await asyncio.sleep(0.05)
        error.add_note("resume with: model.path=checkpoints/step-40")
        raise
launch(main, {"seed": 3})
"""


@pytest.mark.parametrize(("loop", "module"), [([], "uvloop"), (["plain"], "asyncio.unix_events")])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_cleanly_and_shows_how_to_resume(tmp_path, loop, module, number):
    program = Program(tmp_path, STOPPABLE, *loop)
    program.wait_for(f"running on {module} 3\n")
    program.process.send_signal(number)
    assert program.end() == 128 + number
    _, stopping, hint = program.output.splitlines()
    assert stopping == "stopping within 10 s; a second signal exits immediately"
    assert hint == "resume with: model.path=checkpoints/step-40"


@pytest.mark.parametrize("teardown", ["await asyncio.sleep(60)", "import time; time.sleep(60)"])
def test_the_second_signal_exits_at_once_and_leaves_no_child(tmp_path, teardown):
    """Also where the teardown blocks the event loop."""
    program = Program(
        tmp_path,
        f"""
        import asyncio
        from areal.cli import launch
        from areal.workers.process import Child
        async def main(config):
            child = Child.start("sleeper", ["sh", "-c", "echo $$; exec sleep 1000"], log="log")
            while not child.tail():
                await asyncio.sleep(0.01)
            print("child", child.tail())
            try:
                await asyncio.Event().wait()
            finally:
                print("teardown")
                {teardown}
        launch(main)
        """,
    )
    program.wait_for("child ")
    child = Path("/proc", program.output.split()[-1])
    assert child.exists()
    program.process.send_signal(signal.SIGINT)
    program.wait_for("teardown")
    start = time.monotonic()
    program.process.send_signal(signal.SIGINT)
    assert program.end() == 130
    assert time.monotonic() - start < 2
    assert "exited immediately" in program.output
    while child.exists():
        assert time.monotonic() - start < 5
        time.sleep(0.01)


def test_a_teardown_that_hangs_is_ended_by_the_deadline_and_named(tmp_path):
    """I7."""
    program = Program(
        tmp_path,
        """
        import asyncio, sys
        from areal.cli import supervise
        async def main():
            print("running")
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.create_task(asyncio.sleep(60), name="farewell")
        sys.exit(supervise(main, stop_s=0.3))
        """,
    )
    program.wait_for("running")
    program.process.send_signal(signal.SIGINT)
    assert program.end() == 130
    assert "not stopped within 0.3 s: tasks " in program.output
    assert "farewell" in program.output


def test_a_thread_that_hangs_at_the_end_does_not_keep_the_process(tmp_path):
    """I7."""
    program = Program(
        tmp_path,
        """
        import asyncio, sys, time
        from areal.cli import supervise
        async def main():
            asyncio.get_running_loop().run_in_executor(None, time.sleep, 60)
            raise RuntimeError("the real cause")
        sys.exit(supervise(main, stop_s=0.3))
        """,
    )
    assert program.end() == 1
    assert "RuntimeError: the real cause" in program.output
    assert "not stopped within 0.3 s" in program.output


def test_a_wrong_setting_is_one_line_and_code_2(tmp_path):
    program = Program(tmp_path, STOPPABLE, "train.step=3")
    assert program.end() == 2
    assert program.output.startswith("ConfigError: unknown setting 'train.step' (argument): did you mean train.steps")
    assert len(program.output.splitlines()) == 1


def test_help_shows_the_program_and_its_own_defaults(tmp_path):
    program = Program(tmp_path, STOPPABLE, "--help")
    assert program.end() == 0
    assert program.output.startswith("usage: python program.py [FILE.toml ...] [key=value ...]")
    assert "A program for a test." in program.output
    assert "  seed=3\n" in program.output


def test_the_agents_own_traceback_is_shown_through_groups_and_wrappers(tmp_path):
    program = Program(
        tmp_path,
        """
        import asyncio
        from areal.cli import launch
        from areal.errors import TooManyFailures
        def agents_own_function():
            return {}["missing key"]
        async def rollout():
            try:
                agents_own_function()
            except KeyError as error:
                raise TooManyFailures("3 episodes failed") from error
        async def main(config):
            async with asyncio.TaskGroup() as outer:
                outer.create_task(asyncio.sleep(60))
                async with asyncio.TaskGroup() as inner:
                    inner.create_task(rollout())
                    await asyncio.sleep(60)
        launch(main)
        """,
    )
    assert program.end() == 1
    assert program.output.startswith("TooManyFailures: 3 episodes failed\n\nTraceback")
    assert "in agents_own_function\n" in program.output
    assert program.output.endswith("KeyError: 'missing key'\n")
    assert "ExceptionGroup" not in program.output


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def test_an_error_of_areal_is_its_message_its_notes_and_its_cause():
    error = raised(
        TrainerError("rank 0 failed"), raised(ServerLost("no server"), ConnectionRefusedError(111, "refused"))
    )
    error.add_note("resume with: x")
    assert describe(ExceptionGroup("g", [error])).splitlines() == [
        "TrainerError: rank 0 failed",
        "resume with: x",
        "because of ServerLost: no server",
        "because of ConnectionRefusedError: [Errno 111] refused",
    ]


def test_a_traceback_that_the_message_has_is_not_shown_twice():
    message = "3 failed; the last:\nTraceback (most recent call last):\n  ...\nKeyError: 1"
    assert describe(raised(TooManyFailures(message), raised(KeyError(1)))) == f"TooManyFailures: {message}"


def test_a_bug_has_its_traceback():
    shown = describe(ExceptionGroup("g", [raised(ZeroDivisionError("a bug"))]))
    assert shown.startswith("Traceback (most recent call last):")
    assert shown.endswith("ZeroDivisionError: a bug")


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("x"), 2), (DataError("x"), 2), (Stalled("x"), 3), (TrainerError("x"), 1), (ValueError("x"), 1)],
)
def test_exit_codes(error, code, capsys):
    async def fails() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(asyncio.sleep(60))
            raise error

    assert exit_code(error) == code
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert supervise(fails) == code
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert f"{type(error).__name__}: x" in capsys.readouterr().err


def test_success_is_code_0():
    assert supervise(lambda: asyncio.sleep(0)) == 0


def test_config_prints_the_tree_as_toml_that_it_reads_back(tmp_path, capsys):
    assert main(["config", "seed=4", "train.steps=6"]) == 0
    printed = capsys.readouterr().out
    steps, groups = (line for line in printed.splitlines() if line.startswith(("steps", "batch_groups")))
    assert steps.split() == ["steps", "=", "6", "#", "argument"]
    assert groups.split() == ["batch_groups", "=", "16", "#", "default"]
    file = tmp_path / "printed.toml"
    file.write_text(printed)
    assert Config.load([str(file)]) == Config.load(["seed=4", "train.steps=6"])
    assert main(["config", str(file), "seed=5"]) == 0
    assert f"# {file}" in capsys.readouterr().out


def test_config_names_what_is_wrong(capsys):
    assert main(["config", "train.step=6"]) == 2
    assert "did you mean train.steps" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["config", "--markdown", "seed=2"])


def test_the_module_can_be_run():
    done = subprocess.run([sys.executable, "-m", "areal", "--help"], capture_output=True, text=True, check=True)
    assert "config" in done.stdout


def test_docs_settings_md_is_current():
    page = Path(__file__).parents[1] / "docs" / "settings.md"
    assert page.read_text() == markdown(), "run: python -m areal config --markdown > docs/settings.md"


def test_an_error_that_was_raised_from_its_own_group_is_shown_once() -> None:
    error = TooManyFailures("3 episodes failed")
    error.__cause__ = ExceptionGroup("unhandled errors in a TaskGroup", [error])
    assert describe(error) == "TooManyFailures: 3 episodes failed"


@pytest.mark.parametrize(
    ("saved", "word"),
    [
        (None, "No such file"),
        ('{"command": ["/nowhere/bin/python"], "folder": "/"}', "No such file"),
        ('{"command": ["/nowhere/bin/py', "Unterminated string"),
        ('{"folder": "/"}', "command"),
        ('{"command": [], "folder": "/"}', "index out of range"),
        ('{"command": ["x"], "folder": "/nowhere"}', "/nowhere"),
    ],
)
def test_a_run_whose_program_cannot_be_started_says_so(tmp_path, monkeypatch, capsys, saved, word):
    monkeypatch.chdir(tmp_path)
    run = RunFolder.create(Config.load([f"folder={tmp_path}"]))
    (run.ledger / "ledger.db").touch()
    if saved is not None:
        (run.path / "command.json").write_text(saved)
    assert main(["resume", str(run.path)]) == 2
    said = capsys.readouterr().err
    assert "command.json names no program that can be started" in said
    assert word in said
    assert f"--resume {run.path}" in said


@pytest.mark.parametrize("command", [["status"], ["stop"], ["servers", "count=2"]])
def test_a_run_that_is_not_in_progress_is_said_to_be(tmp_path, capsys, command):
    assert main([command[0], str(tmp_path), *command[1:]]) == 1
    assert "is not a run in progress: it has no endpoint.json" in capsys.readouterr().err


@pytest.mark.parametrize("wanted", ["count", "count=", "count=[", "urls=http://x"])
def test_servers_that_cannot_be_read_are_refused_with_an_example(tmp_path, capsys, wanted):
    assert main(["servers", str(tmp_path), wanted]) == 2
    assert "give count=3 or urls=" in capsys.readouterr().err
