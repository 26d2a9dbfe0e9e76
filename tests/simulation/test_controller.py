"""The real controller on simulated workers, used otherwise than by `async with` and `train` in a row."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from areal.agents.episode import Episode
from areal.config import Config
from areal.controller.controller import Controller
from areal.controller.facts import Checkpointed, Fact, Trained
from areal.controller.reader import LedgerReader
from areal.controller.scheduler import Scheduler
from areal.controller.train import TrainLoop
from areal.errors import ArealError, Stalled, Stopped, TrainerError
from areal.monitor.status import screen
from areal.simulation.campaign import Simulation
from areal.simulation.case import LIVES, draw
from areal.simulation.clock import run
from areal.simulation.trainer import SimulatedTrainer
from areal.types import Task, TrainRequest, TrainStats
from examples.agentic import embedded_service


@pytest.fixture
def calm(tmp_path: Path) -> Simulation:
    """A run without faults, of many steps."""
    case = replace(draw(3), faults=((),) * LIVES, kills=(0.0,) * LIVES, resizes=(), agent_fails=0.0, tasks=0)
    made = Simulation(replace(case, settings=(*case.settings, "train.steps=1000", "data.epochs=0")), tmp_path)
    made._calm = True
    return made


def controller_of(calm: Simulation) -> Controller:
    calm._controller = Controller(calm._config, calm._world.workers)
    return calm._controller


def test_a_train_that_nobody_waits_for_ends_with_its_controller(calm: Simulation) -> None:
    """It would go on against a closed fleet, and fail until its budget is used up."""

    async def main() -> None:
        async with controller_of(calm) as controller:
            training = asyncio.create_task(controller.train(calm._agent, [{"id": str(i)} for i in range(9)]))
            while controller.scheduler.state.version < 2:
                await asyncio.sleep(0.1)
        assert training.cancelled()
        state = controller.scheduler.state
        assert sum(state.failures.values()) == 0
        assert "agent" not in state.dropped

    run(main())


def test_what_is_asked_of_a_controller_outside_its_time(calm: Simulation) -> None:
    async def main() -> None:
        with pytest.raises(ArealError, match="enter `async with controller` first"):
            await controller_of(calm).change_servers(count=2)
        async with controller_of(calm) as controller:
            late = asyncio.create_task(controller.train(calm._agent, [{"id": "1"}]))
        with pytest.raises(ArealError, match="the run is over"):
            await late
        with pytest.raises(ArealError, match="the run is over"):
            await controller.change_servers(count=2)

    run(main())


def test_changes_of_servers_say_what_they_want(calm: Simulation) -> None:
    async def main() -> None:
        async with controller_of(calm) as controller:
            with pytest.raises(ArealError, match=r"count=2 and urls=.* was given"):
                await controller.change_servers(count=2, urls=["http://127.0.0.1:1"])
            with pytest.raises(ArealError, match="nothing was given"):
                await controller.change_servers()
            with pytest.raises(ArealError, match=r"servers\.count=0"):
                await controller.change_servers(count=0)
            await controller.change_servers(count=3)
            assert len(controller.cluster.fleet.servers) == 3

    run(main())


def _facts_of(calm: Simulation) -> list[Fact]:
    assert calm._controller
    with LedgerReader.open(calm._controller.folder.ledger) as ledger:
        return list(ledger.facts())


README = Path(__file__).parents[2] / "README.md"


def test_the_loop_that_readme_shows_gives_the_same_facts_as_train(tmp_path: Path) -> None:
    """`train` is nothing but the public verbs."""
    shown = re.search(r"```python\n(async with controller\.generating.*?)```", README.read_text(), re.DOTALL)
    assert shown
    names: dict[str, Any] = {}
    exec("async def own(controller, agent, tasks):\n" + textwrap.indent(shown[1], "    "), names)

    async def main(calm: Simulation, train: Callable[..., Awaitable[None]]) -> None:
        async with controller_of(calm) as controller:
            await train(controller, calm._agent, ({"id": f"task {i}"} for i in range(10**6)))

    found = []
    for name, train in (("own", names["own"]), ("train", Controller.train)):
        case = replace(draw(3), faults=((),) * LIVES, kills=(0.0,) * LIVES, resizes=(), agent_fails=0.0, tasks=0)
        calm = Simulation(replace(case, settings=(*case.settings, "data.epochs=0")), tmp_path / name)
        run(main(calm, train))
        found.append(_facts_of(calm))
    assert found[0] == found[1]
    assert len([fact for fact in found[0] if isinstance(fact, Trained)]) > 1
    assert isinstance(found[0][-1], Checkpointed)


def test_status_and_stop_of_a_run_in_progress(calm: Simulation) -> None:
    """A stop is a Ctrl-C: a last checkpoint of the last step, and a message that says how to resume."""

    async def main() -> None:
        with pytest.raises(Stopped, match=r"resume with: areal resume .*run-0001"):  # noqa: PT012
            async with controller_of(calm) as controller:
                training = asyncio.create_task(
                    controller.train(calm._agent, ({"id": f"task {i}"} for i in range(10**6)))
                )
                while controller.version < 3:
                    await asyncio.sleep(0.1)
                status = json.loads(json.dumps(controller.status()))
                assert (status["run"], status["life"], status["step"]) == ("run-0001", 0, controller.version)
                assert status["groups"]["trained"] == controller.log.state.trained
                assert [server["state"] for server in status["servers"]] == [
                    server.state for server in controller.cluster.fleet.servers
                ]
                assert any("a batch needs" in line for line in status["waits"])
                text = screen(status)
                assert f"step     {controller.version} of 1000, mean reward" in text
                assert "sim://0 accepting, version" in text
                controller.stop()
                await training
        state = controller.log.state
        assert state.checkpoint is not None
        assert state.checkpoint.version == state.version

    run(main())


def test_a_long_start_and_a_long_evaluation_say_what_they_wait_for(
    calm: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    """Within a minute, although nothing is trained yet."""
    calm.case.speed.start_s = 50.0
    calm._config = calm._config.changed({"episode.timeout_s": 300, "watchdog_s": 10_000}, "test")

    async def agent(episode: Episode, task: Task) -> float:
        await episode.generate([1, 2, 3])
        await asyncio.sleep(200)
        return 1.0

    async def main() -> None:
        async with controller_of(calm) as controller:
            started = len(caplog.records)
            await asyncio.sleep(1000)  # nothing is asked of it
            assert len(caplog.records) == started
            before = asyncio.get_running_loop().time()
            await controller.evaluate(agent, [{"id": "x"}])
            assert 200 <= asyncio.get_running_loop().time() - before < 250

    caplog.set_level(logging.INFO, "areal")
    run(main())
    said = [record.getMessage() for record in caplog.records if "no progress for" in record.getMessage()]
    assert [text.partition(";")[0] for text in said] == [f"no progress for {s} s" for s in (45, 45, 90, 180)]
    assert re.search(r"servers and ranks to start; their output is in .*/logs", said[0])
    assert re.search(r"episode -1\.0 \(task x, turn 2\) awaits its own code, for 4\d\.\d s", said[1])


def test_a_last_checkpoint_that_is_lost_with_its_rank_is_written_again(
    calm: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, lost = SimulatedTrainer.write, []

    async def dies(self: SimulatedTrainer) -> None:
        if self.version == 3 and not lost:
            lost.append(self)
            self.trouble.dead = True
        await write(self)

    monkeypatch.setattr(SimulatedTrainer, "write", dies)
    calm._config = calm._config.changed({"train.steps": 3, "checkpoint.every": 0}, "test")

    async def main() -> None:
        async with controller_of(calm) as controller:
            await controller.train(calm._agent, [{"id": str(i)} for i in range(99)])
        assert lost
        saved = controller.scheduler.state.checkpoint
        assert saved is not None
        assert saved.version == controller.scheduler.state.version == 3

    run(main())


def test_a_stop_while_ranks_start_again_asks_nothing_of_those_that_are_gone(
    calm: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, asked = SimulatedTrainer.train, []

    async def dies(self: SimulatedTrainer, request: TrainRequest) -> TrainStats:
        asked.append(self)
        self.trouble.dead = self.version == 2
        return await train(self, request)

    monkeypatch.setattr(SimulatedTrainer, "train", dies)

    async def main() -> None:
        async with controller_of(calm) as controller:
            training = asyncio.create_task(controller.train(calm._agent, [{"id": str(i)} for i in range(99)]))
            while not (asked and asked[-1].trouble.dead and controller.cluster.ranks.version is None):
                await asyncio.sleep(0.1)
            await asyncio.sleep(0.1)
            before = len(asked)
            training.cancel()
            with pytest.raises(asyncio.CancelledError):
                await training
            assert len(asked) == before == 3

    run(main())


def test_what_ends_a_start_is_no_group_of_errors(calm: Simulation, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(self: TrainLoop) -> None:
        raise TrainerError("rank 0 ended with code 1")

    monkeypatch.setattr(TrainLoop, "recover", broken)

    async def main() -> None:
        with pytest.raises(TrainerError, match="ended with code 1"):
            async with controller_of(calm):
                pass

    run(main())


def test_a_service_whose_users_do_not_rate_goes_on(calm: Simulation) -> None:
    """Three hours of drafts that all run out of time: neither their number nor the lack of progress ends it."""
    changes = {key: value for key, value in embedded_service.DEFAULTS.items() if key not in ("name", "view")}
    calm._config = calm._config.changed(changes, "test")

    async def questions() -> AsyncIterator[Task]:
        for i in count():
            yield {"id": str(i)}
            await asyncio.sleep(30)

    async def agent(episode: Episode, task: Task) -> float:
        await episode.generate([2, 3, 4])
        await asyncio.Event().wait()
        raise AssertionError

    async def main() -> None:
        async with controller_of(calm) as controller:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(3 * 3600):
                    await controller.train(agent, questions())
        assert controller.scheduler.state.failures["timeout"] > 200

    run(main())


def test_i7_complete_groups_that_are_all_dropped_are_no_progress(
    calm: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch seems near each time, and none comes about."""
    monkeypatch.setattr(Scheduler, "_is_stale", lambda *_: True)
    calm._config = calm._config.changed({"group.uniform": "train"}, "test")

    async def main() -> None:
        async with controller_of(calm) as controller:
            with pytest.raises(Stalled, match="no step done"):
                async with asyncio.timeout(2 * calm._config.watchdog_s):
                    await controller.train(calm._agent, [{"id": str(i)} for i in range(99)])
            assert controller.scheduler.state.dropped["stale"] > 100

    run(main())


def test_i7_each_step_is_progress_however_many_groups_there_were(calm: Simulation) -> None:
    async def main() -> None:
        async with controller_of(calm) as controller:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(2 * calm._config.watchdog_s):
                    await controller.train(calm._agent, [{"id": str(i)} for i in range(99)])
            assert controller.scheduler.state.version > 50

    run(main())


def waits_of(calm: Simulation, caplog: pytest.LogCaptureFixture, *, hung: bool) -> tuple[str, str]:
    """What a run with one server is said to wait for, at first and at its end: its agents hang, or the server does."""
    calm._config = calm._config.changed({"servers.count": 1}, "test")

    async def agent(episode: Episode, task: Task) -> float:
        if not hung:
            calm._world.clients[0].server.slow(1e9)  # it says that it is well, and samples nothing
        await episode.generate([2, 3, 4])
        await asyncio.Event().wait()
        raise AssertionError

    async def main() -> str:
        async with controller_of(calm) as controller:
            with pytest.raises(Stalled) as stalled:
                await controller.train(agent, [{"id": f"q{i}"} for i in range(99)])
        return str(stalled.value)

    with caplog.at_level(logging.WARNING, "areal"):
        end = run(main())
    return next(text for text in caplog.messages if text.startswith("no progress for 45 s")), end


def test_i7_of_a_hung_server_it_is_said_which_episodes_wait_for_it(
    calm: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    for text in waits_of(calm, caplog, hung=False):
        waits = r"episode (\d+)\.0 \(task q\d+, turn 1\) awaits the model, for \d\d\.\d s, on sim://0"
        (one, other) = re.findall(rf"^  {waits}$", text, re.MULTILINE)
        assert re.search(rf"^  group {one} \(task 'q\d+'\) waits for member 0, 1, 2$", text, re.MULTILINE)
        assert re.search(rf"^  {other}/2: request [0-9a-f]{{32}} has waited \d\d\.\d s on sim://0$", text, re.MULTILINE)


def test_i7_of_hung_agents_it_is_said_which_they_are(calm: Simulation, caplog: pytest.LogCaptureFixture) -> None:
    for text in waits_of(calm, caplog, hung=True):
        waits = r"  episode \d+\.[012] \(task q\d+, turn 2\) awaits its own code, for \d\d\.\d s"
        assert len(re.findall(f"^{waits}$", text, re.MULTILINE)) == 6
        assert "sim://0" not in text


def test_an_open_batch_is_trained_at_the_rate_that_it_was_formed_with(
    calm: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever settings a resume changes: a repeat takes that rate, too."""
    calm._config = calm._config.changed({"train.steps": 4, "optimizer.schedule": "linear"}, "test")
    train, rates = SimulatedTrainer.train, {}

    async def stuck(self: SimulatedTrainer, request: TrainRequest) -> TrainStats:
        rates[request.from_version] = request.learning_rate
        if request.from_version == 2:
            await asyncio.Event().wait()
        return await train(self, request)

    async def noted(self: SimulatedTrainer, request: TrainRequest) -> TrainStats:
        again[request.from_version] = request.learning_rate
        return await train(self, request)

    async def main() -> Path:
        async with controller_of(calm) as controller:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(500):
                    await controller.train(calm._agent, tasks)
        return controller.folder.path

    async def go_on() -> None:
        async with controller_of(calm) as controller:
            await controller.train(calm._agent, tasks)

    tasks = [{"id": str(i)} for i in range(99)]
    with monkeypatch.context() as patch:
        patch.setattr(SimulatedTrainer, "train", stuck)
        folder = run(main())
    again: dict[int, float] = {}
    calm._config = Config.resume(folder, ["train.steps=8"])
    monkeypatch.setattr(SimulatedTrainer, "train", noted)
    run(go_on())
    assert again[2] == rates[2]
    assert max(again) == 7
