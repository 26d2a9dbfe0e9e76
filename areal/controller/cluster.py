"""Servers, ranks and what connects them: checked before, started together, ended together.

All of it is the same for a laptop and for GPUs; what differs is where the launchers put the processes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from areal.agents.episode import Episode
from areal.agents.template import Template
from areal.config import Config
from areal.controller.fleet import Fleet
from areal.controller.weights import WeightSync, probe_ids
from areal.errors import ConfigError, root_cause
from areal.types import Sampling
from areal.workers.placement import place
from areal.workers.process import Child, check_port, free_port
from areal.workers.protocols import ServerClient, TrainerClient
from areal.workers.rollout.client import UNUSABLE_TOKENS, SGLangClient, make_label, open_session
from areal.workers.rollout.launcher import check_model, launch_server, wait_ready
from areal.workers.trainer.architecture import Architecture
from areal.workers.trainer.launcher import start_trainer

log = logging.getLogger("areal")

STOP_S = 1.0
"""Seconds that servers have to end by themselves when a run stops; then they are killed."""


def model_folder(path: str) -> Path:
    """The folder of `model.path`; a hub name is downloaded. Blocks. Raises ConfigError."""
    if not path:
        raise ConfigError("model.path is empty: set it to a folder in Hugging Face format, or to a hub name")
    if Path(path).is_dir() or path.count("/") != 1 or path.startswith((".", "/")):
        return Path(path)
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(path))
    except Exception as error:  # its own, and those of the HTTP library below
        raise ConfigError(
            f"model.path={path!r} is no folder, and as a hub name it could not be had ({type(error).__name__}: {error})"
        ) from None


def end_tokens(folder: Path, tokenizer: Any) -> set[int]:
    """The ids that end an answer: those of config.json, generation_config.json and the tokenizer."""
    ends: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            found = json.loads((folder / name).read_text()).get("eos_token_id")
            ends.update(found if isinstance(found, list) else [found])
    ends.add(tokenizer.eos_token_id)
    return {end for end in ends if isinstance(end, int)}


class Cluster:
    """Use as `async with`. on_serving is told the lowest version of any server that takes requests."""

    fleet: Fleet
    trainer: TrainerClient
    held: int | None = 0
    """The version that the ranks hold; None while a step runs."""
    weights: WeightSync

    def __init__(self, config: Config, run_folder: Path, *, attempt: int, on_serving: Callable[[int], None]) -> None:
        self.config = config
        self.folder = run_folder
        self.origin = f"{run_folder.name}.{attempt}"
        self._attempt = attempt
        self._on_serving = on_serving
        self._children: dict[int, Child] = {}
        self._stack = AsyncExitStack()

    @classmethod
    def check(cls, config: Config) -> None:
        """What can be refused before anything starts, ConfigError: model, placement, ports. Blocks."""
        check_model(model_folder(config.model.path), config.model.context_length)
        place(config)
        if config.servers.port and not config.servers.urls:
            for index in range(config.servers.count):
                check_port(config.servers.port + index)

    async def __aenter__(self) -> Self:
        """Raises ProcessError or TrainerError, with the last lines of the log, when something does not come up."""
        try:
            return await self._start()
        except BaseExceptionGroup as failures:  # of the parts that start side by side
            cause = root_cause(failures)
            raise cause from cause.__cause__

    async def _start(self) -> Self:
        async with AsyncExitStack() as stack:
            model = await asyncio.to_thread(model_folder, self.config.model.path)
            self._model = model
            self._architecture = Architecture.read(model)
            self._context = self.config.model.context_length or self._architecture.context
            self._placement = place(self.config)
            self._session = await stack.enter_async_context(open_session())
            stack.push_async_callback(self._stop_children)
            async with asyncio.TaskGroup() as starting:
                tokenizer = starting.create_task(asyncio.to_thread(_load_tokenizer, model))
                trainer = starting.create_task(self._start_trainer(stack))
                servers = [starting.create_task(self._connect(url)) for url in self.config.servers.urls] or [
                    starting.create_task(self._start_server(i)) for i in range(self.config.servers.count)
                ]
            self.tokenizer = tokenizer.result()
            self._template = Template(self.tokenizer, self.config.model.template_args)
            self.trainer = trainer.result()
            own = not self.config.servers.urls
            self.fleet = Fleet(
                self.config,
                [server.result() for server in servers],
                origin=self.origin,
                stop_ids=end_tokens(model, self.tokenizer),
                restart=self._restart if own else None,
                exited=self._exited if own else None,
                on_serving=self._on_serving,
            )
            self.weights = WeightSync(
                self.config,
                self.fleet,
                self.trainer,
                self._weights_folder(),
                origin=self.origin,
                probe=probe_ids(self._architecture.vocab),
                held=lambda: self.held,
                backend="nccl" if self._placement.ranks else "gloo",
            )
            background = await stack.enter_async_context(asyncio.TaskGroup())
            background.create_task(self.fleet.run(), name="fleet")
            stack.push_async_callback(asyncio.to_thread, shutil.rmtree, self._weights_folder(), ignore_errors=True)
            stack.push_async_callback(self.fleet.close)
            if not own:
                stack.push_async_callback(self.weights.close)
                await self.weights.publish(0)  # until then they hold weights of somebody else
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, trace)

    def episode(self, group: int, member: int, task_id: str, sampling: Sampling, agent: str) -> Episode:
        """A fresh handle for an agent."""
        return Episode(
            generate=self.fleet.generate,
            template=self._template,
            sampling=sampling,
            context_length=self._context - UNUSABLE_TOKENS,
            tool_timeout_s=self.config.episode.tool_timeout_s,
            group=group,
            member=member,
            task_id=task_id,
            seed=self.config.seed,
            agent=agent,
        )

    # -- processes

    async def _start_trainer(self, stack: AsyncExitStack) -> TrainerClient:
        trainer = await start_trainer(
            self.config,
            model_path=str(self._model),
            log_folder=self.folder / "logs",
            attempt=self._attempt,
            devices=self._placement.ranks,
        )
        stack.push_async_callback(trainer.close)
        return trainer

    async def _start_server(self, index: int) -> ServerClient:
        config = self.config.servers
        port = config.port + index if config.port else free_port()
        child = self._children[index] = await launch_server(
            self.config,
            index,
            model_path=str(self._model),
            label=make_label(self.origin, 0),  # also after a restart: the fleet brings it up to date before it serves
            log_folder=self.folder / "logs",
            port=port,
            devices=self._placement.servers[index],
        )
        client = self._client(f"http://127.0.0.1:{port}")
        await wait_ready(client, child, config.start_timeout_s)
        return client

    async def _connect(self, url: str) -> ServerClient:
        client = self._client(url)
        if not await client.healthy():
            raise ConfigError(f"servers.urls: {url} does not answer its health check; start it, or correct the address")
        if (length := (await client.info()).context_length) < self._context:
            raise ConfigError(
                f"servers.urls: {url} has a context of {length} tokens, the run one of {self._context}: start it with "
                "--context-length, or lower model.context_length"
            )
        return client

    def _client(self, url: str) -> ServerClient:
        return SGLangClient(
            url,
            origin=self.origin,
            vocab_size=self._architecture.vocab,
            timeout_s=self.config.weights.timeout_s,
            session=self._session,
        )

    async def _restart(self, index: int) -> ServerClient:
        await self._children[index].stop(grace_s=1.0)
        return await self._start_server(index)

    async def _exited(self, index: int) -> str:
        child = self._children[index]
        code = await child.wait()
        return str(child.error(f"ended with code {code}"))

    async def _stop_children(self) -> None:
        stops = (child.stop(STOP_S) for child in self._children.values())
        for result in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(result, Exception):
                log.warning("%s", result)

    def _weights_folder(self) -> Path:
        """Its own for each run and process, absolute: a server that areal did not start has another working folder."""
        chosen = self.config.weights.folder
        return (Path(chosen, f"{self.origin}-{os.getpid()}") if chosen else self.folder / "weights").absolute()


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise ConfigError(f"{folder}: no tokenizer could be loaded ({type(error).__name__}: {error})") from error
