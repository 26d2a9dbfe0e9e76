"""The fault campaign: random workloads under random faults, on the real controller.

    python -m areal.simulation.campaign --seeds 10000 [--first-seed N] [--json FILE]
    python -m areal.simulation.campaign --seed 4711          # one seed, and what happened in it

A seed draws a workload and faults, and kills or stops the controller now and then; an interrupted or failed run is
resumed until it comes to its end. I1 to I9 are checked at every step (`audit`), and the end must be the right one:
every step done and in a checkpoint, every group in the final weights once, nothing left running. What a seed does
depends on nothing but the seed.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import inspect
import logging
import random
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from areal.agents.episode import Episode
from areal.config import Config
from areal.controller.controller import Controller
from areal.controller.reader import LedgerReader
from areal.controller.watchdog import waits_of
from areal.errors import (
    ArealError,
    ConfigError,
    LedgerError,
    ProcessError,
    PublishError,
    ServerError,
    Stalled,
    TooManyFailures,
    TrainerError,
    VersionConflict,
    root_cause,
)
from areal.simulation.audit import LEAST_REWARD, Audit, Violation, check_request, groups_of, prompt_of
from areal.simulation.case import LIVES, Case, draw
from areal.simulation.clock import Deadlock, OutOfTime, VirtualLoop
from areal.simulation.weights import Weights
from areal.simulation.workers import SERVER_FAULTS, TRAINER_FAULTS, World
from areal.types import Task

LIMIT_S = 50_000.0
"""Virtual seconds in which a life must end: far above every deadline of the drawn settings."""
STOP_S = 10.0
"""From the first Ctrl-C to the end; then a run ends the hard way."""
ABORT_S = 0.1
"""I8: from the cancellation of an episode to the abort of its request."""
COUNTED = "weights.transport", "weights.rollout", "weights.interrupt", "staleness.late"
"""Drawn settings whose values are counted: each is to have been tried."""


@dataclass(slots=True)
class Outcome:
    """ends: how each life ended. happened: kinds of faults, and what the run did about them."""

    seed: int
    violation: str = ""
    ends: list[str] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    episodes: int = 0
    steps: int = 0


class Simulation:
    """One seed, from its first life to its end, in `folder`."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.outcome = Outcome(case.seed)
        self._folder = folder
        self._chance = random.Random(f"{case.seed} agents")
        first = [f"folder={folder}", *case.settings]
        self._config = Config.load(first)
        config = self._config
        self.outcome.happened.update(f"{key}={config[key]}" for key in COUNTED)
        self._audit = Audit(config.train.batch_groups, config.staleness.max, config.staleness.late, config.group.size)
        self._world = World(
            seed=case.seed,
            speed=case.speed,
            kv_tokens=case.kv_tokens,
            mean_length=case.mean_length,
            trained_tokens_per_s=case.trained_tokens_per_s,
            faults=(),
            groups_of=groups_of,
            check=self._check_step,
            happened=self.outcome.happened,
        )
        self._controller: Controller | None = None
        self._late: list[str] = []
        self._log_level = logging.getLogger("areal").level
        self._calm = False

    def run(self) -> Outcome:
        """Attempts until the run is done. A Violation ends it, and is in the outcome."""
        try:
            for number in range(LIVES):
                last = self._calm = number == LIVES - 1
                self._world.faults = () if last else self.case.faults[number]
                if self._life(*(0.0, 0.0) if last else (self.case.kills[number], self.case.stops[number])):
                    self._check_end()
                    return self.outcome
                run = next(iter(sorted(self._folder.glob("run-*"))), None)
                if run is not None and (run / "ledger" / "ledger.db").exists():
                    self._config = Config.resume(run)
            raise Violation("I7: the run did not come to its end, although the last life had no faults")
        except Violation as violation:
            self.outcome.violation = str(violation)
        return self.outcome

    def _life(self, kill_at: float, stop_at: float) -> bool:
        """One controller, until the run is done (True), it fails for an honest reason, or it is killed or stopped."""
        loop = VirtualLoop(kill_at or LIMIT_S)
        asyncio.set_event_loop(loop)
        life = loop.create_task(self._live())
        if stop_at:
            loop.call_at(stop_at, life.cancel)
        try:
            loop.run_until_complete(life)
            if life.cancelling():
                raise Violation("I7: a stop was swallowed")
            self.outcome.ends.append("done")
            return True
        except asyncio.CancelledError:
            if not life.cancelling():
                raise Violation("I7: an unrequested CancelledError") from None
            if loop.time() > stop_at + STOP_S:
                raise Violation(f"I7: the stop took {loop.time() - stop_at:.1f} s") from None
            self.outcome.ends.append("stopped")
            self.outcome.happened["controller stopped"] += 1
            return False
        except OutOfTime:
            if not kill_at:
                raise Violation(f"I7: not at its end after {LIMIT_S:g} s; it waits for {self._waits()}") from None
            self.outcome.ends.append("killed")
            self.outcome.happened["controller killed"] += 1
            return False
        except Deadlock as error:
            raise Violation(f"I7: {error}: {self._waits()}") from None
        except Exception as error:
            self._judge(error)
            return False
        finally:
            self._abandon(loop)

    async def _live(self) -> None:
        self._controller = controller = Controller(self._config, self._world.workers)
        tasks: Any = ({"id": f"task {i}"} for i in range(10**9))
        if self.case.tasks:
            tasks = [{"id": f"task {i}"} for i in range(self.case.tasks)]
        async with controller:
            resizing = asyncio.create_task(self._resize(controller))
            try:
                await controller.train(self._agent, tasks)
            finally:
                resizing.cancel()
                await asyncio.wait((resizing,))
        if not resizing.cancelled() and (error := resizing.exception()):
            raise error
        left = [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if left:
            raise Violation(f"I7: tasks are left when the controller has ended: {left}")
        if self._late:
            raise Violation(self._late[0])

    async def _agent(self, episode: Episode, task: Task) -> float:
        """Turns of a model call and a tool; it fails and hangs by chance."""
        case, chance = self.case, self._chance
        ids = prompt_of(episode.group, episode.member, episode.rng.choice([0, 10, 100]))
        for turn in range(case.turns):
            before = asyncio.get_running_loop().time()
            try:
                completion = await episode.generate(ids)
            except asyncio.CancelledError:
                self._watch_abort(episode)
                raise
            if asyncio.get_running_loop().time() == before:  # no server answers that fast
                self.outcome.happened["call recalled"] += 1
            ids = np.concatenate((completion.input_ids, completion.output_ids, np.array([20 + turn], np.int32)))
            if chance.random() < case.agent_fails and not self._calm:
                self.outcome.happened["agent failed"] += 1
                raise ValueError("an agent's own fault")
            if chance.random() < case.agent_hangs and not self._calm:
                self.outcome.happened["agent hung"] += 1
                await asyncio.sleep(10**6)
            await asyncio.sleep(case.tool_s * chance.expovariate(1.0))
        return LEAST_REWARD + episode.rng.choice([0.0, 0.25, 0.5])

    async def _resize(self, controller: Controller) -> None:
        """An operator who has servers join and leave."""
        started = asyncio.get_running_loop().time()
        for at, count in () if self._calm else self.case.resizes:
            await asyncio.sleep(started + at - asyncio.get_running_loop().time())
            before = len(controller.cluster.fleet.servers)
            try:
                await controller.change_servers(count=count)
                self.outcome.happened["servers joined" if count > before else "servers left"] += count != before
            except ConfigError:
                self.outcome.happened["servers did not fit"] += 1
            except (ProcessError, ServerError):
                self.outcome.happened["servers did not join"] += 1

    def _watch_abort(self, episode: Episode) -> None:
        """I8: the requests of a cancelled episode are aborted at once."""
        prompt = prompt_of(episode.group, episode.member, 0)
        for client in self._world.clients.values():
            for job in client.server.jobs:
                if np.array_equal(job.ids[:3], prompt) and not job.rid.endswith("-again"):
                    asyncio.get_running_loop().call_later(ABORT_S, self._check_abort, client, job)

    def _check_abort(self, client: Any, job: Any) -> None:
        if client.server.alive and job in client.server.jobs and not {job.rid, ""} & client.aborted:
            self._late.append(f"I8: request {job.rid} of a cancelled episode was not aborted within {ABORT_S} s")

    def _check_step(self, request: Any, weights: Weights) -> None:
        check_request(request, weights, self._config.staleness.max)
        self._follow()

    def _follow(self) -> None:
        assert self._controller
        self._audit.follow(self._controller.ledger.facts(after=self._audit.seen))

    def _judge(self, error: Exception) -> None:
        """Whether the faults explain the error that a life ended with."""
        cause = root_cause(error)
        name = type(cause).__name__
        happened = self.outcome.happened
        server_faults = any(happened[kind] for kind in SERVER_FAULTS)
        explained = {
            TrainerError: any(happened[kind] for kind in TRAINER_FAULTS) or server_faults,
            ServerError: server_faults,
            ProcessError: server_faults,
            PublishError: server_faults,
            # Agents that fail so often that hardly a group comes to its end are a livelock, which the watchdog ends.
            Stalled: self.case.agent_fails > 0.1 and bool(happened["agent failed"]),
            TooManyFailures: bool(happened["agent failed"] or happened["agent hung"] or server_faults),
        }
        if isinstance(cause, Violation):
            raise cause
        if isinstance(cause, VersionConflict):
            raise Violation(f"I4: the ranks were asked for a step that they are not at: {cause}") from error
        if not isinstance(cause, ArealError) or isinstance(cause, LedgerError):
            raise Violation(f"I7: ended with {name}: {cause}") from error
        if not any(reason for kind, reason in explained.items() if isinstance(cause, kind)):
            raise Violation(f"I7: ended with {name}, and nothing explains it: {cause}") from error
        self.outcome.ends.append(name)
        self.outcome.happened[f"ended by {name}"] += 1

    def _check_end(self) -> None:
        """I3, I4: the run is whole."""
        assert self._controller
        assert self._world.trainer
        audit, config = self._audit, self._config
        state = self._controller.scheduler.state
        weights = self._world.trainer.weights
        used_up = bool(self.case.tasks and config.data.epochs)
        if audit.version != config.train.steps and (audit.open or not used_up):
            open_groups = f", with groups {list(audit.open)} open" if audit.open else ""
            raise Violation(f"I3: the run ended at version {audit.version} of {config.train.steps}{open_groups}")
        self.outcome.happened["data used up"] += audit.version != config.train.steps
        if list(weights.groups) != list(audit.trained) or self._world.trainer.version != audit.version:
            raise Violation(f"I4: the weights have groups {weights.groups}, trained are {list(audit.trained)}")
        if state.checkpoint is None or state.checkpoint.version != audit.version:
            raise Violation(f"I4: version {audit.version} is the last, and the checkpoint is {state.checkpoint}")
        counts = state.trained, sum(state.dropped.values()), len(state.open)
        if counts != (len(audit.trained), len(audit.dropped), len(audit.open)):
            raise Violation(f"I3: trained, dropped, open: the state has {counts}")
        self.outcome.steps = audit.version
        self.outcome.episodes = state.finished
        for reason, count in state.dropped.items():
            self.outcome.happened[f"dropped: {reason}"] += count

    def _waits(self) -> str:
        return "; ".join(waits_of(self._controller.scheduler)) if self._controller else "its start"

    def _abandon(self, loop: VirtualLoop) -> None:
        """What SIGKILL does: nothing of the life continues, and what the ledger had not written is lost."""
        if self._controller and hasattr(self._controller, "ledger"):
            self._controller.ledger.abandon()
            with LedgerReader.open(self._controller.folder.ledger) as reader:
                self._audit.follow(reader.facts(after=self._audit.seen))
        log = logging.getLogger("areal")
        for handler in tuple(log.handlers):
            if isinstance(handler, logging.FileHandler) and self._folder in Path(handler.baseFilename).parents:
                log.removeHandler(handler)
        log.setLevel(self._log_level)
        asyncio.set_event_loop(None)
        for task in asyncio.all_tasks(loop):
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            # Now, while no loop runs: ended by the garbage collector, its cleanup would run in a later life's loop.
            # Cleanup that awaits makes close() fail, and leaves the rest for the next one.
            coroutine: Any = task.get_coro()
            for _ in range(100):
                if inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED:
                    break
                with suppress(Exception, asyncio.CancelledError, GeneratorExit, BaseExceptionGroup):
                    coroutine.close()
        loop.close()


def simulate(case: int | Case, folder: Path | None = None) -> Outcome:
    """Run one seed, or a case. folder: where the run's folder is kept; else it is deleted."""
    if isinstance(case, int):
        case = draw(case)
    where = folder or Path(tempfile.mkdtemp(prefix="areal-sim-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        return Simulation(case, where).run()
    finally:
        if folder is None:
            shutil.rmtree(where, ignore_errors=True)


def campaign(seeds: Sequence[int], *, say: Any = print) -> tuple[list[Outcome], Counter[str]]:
    """Run seeds one after the other; the outcomes that violate something, and what happened in all."""
    quiet()
    failed: list[Outcome] = []
    happened: Counter[str] = Counter()
    for seed in seeds:
        outcome = simulate(seed)
        happened.update(outcome.happened)
        happened.update(["lives"] * len(outcome.ends))
        happened["episodes"] += outcome.episodes
        happened["steps"] += outcome.steps
        if outcome.violation:
            failed.append(outcome)
            say(f"seed {seed}: {outcome.violation}")
        if seed % 50 == 0:
            gc.collect()
    return failed, happened


def quiet() -> None:
    """An abandoned controller's coroutines end where they stand: what they say of it is of no use."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda *_: None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m areal.simulation.campaign", description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=300, help="how many seeds")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seed", type=int, help="one seed, and what happened in it")
    parser.add_argument("--keep", type=Path, help="with --seed: keep the run's folder here")
    parser.add_argument("--json", type=Path, help="write the record of what happened to this file")
    options = parser.parse_args(arguments)
    seeds = range(options.first_seed, options.first_seed + options.seeds) if options.seed is None else [options.seed]
    started = time.perf_counter()
    if options.seed is not None:
        quiet()
        outcome = simulate(options.seed, options.keep)
        failed, happened = [outcome] if outcome.violation else [], outcome.happened
        print(draw(options.seed))
        print("lives:", ", ".join(outcome.ends))
        if failed:
            print(f"seed {options.seed}: {outcome.violation}")
    else:
        failed, happened = campaign(seeds)
    for name, count in sorted(happened.items()):
        print(f"{name:>28}: {count}")
    print(f"{time.perf_counter() - started:.1f} s")
    if options.json:
        record = {
            "first_seed": seeds[0],
            "seeds": len(seeds),
            "violations": {outcome.seed: outcome.violation for outcome in failed},
            "happened": dict(sorted(happened.items())),
        }
        options.json.write_bytes(orjson.dumps(record, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS))
    print(f"{len(seeds)} seeds, {len(failed)} violations")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
