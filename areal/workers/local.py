"""The workers of a run as child processes on this machine, or external servers. The same with and without GPUs."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from areal.agents.template import Template
from areal.config import Config
from areal.errors import ConfigError, ServerRefused
from areal.folder import weights_folder
from areal.workers.megatron.launcher import start_trainer
from areal.workers.models.architecture import Architecture
from areal.workers.placement import place
from areal.workers.process import Child, check_owner, check_port, free_port
from areal.workers.protocols import ServerClient, TrainerClient, make_label
from areal.workers.sglang.client import UNUSABLE_TOKENS, SGLangClient, open_session
from areal.workers.sglang.launcher import check_model, context_of, launch_server, wait_ready
from areal.workers.sglang.server import SERVER_KEY
from areal.workers.store import remove_stores

log = logging.getLogger("areal")

STOP_S = 1.0
"""Seconds that servers have to exit when a run stops, before they are killed."""


def model_folder(path: str) -> Path:
    """The folder of `model.path`; downloads a hub name. Blocks. Raises ConfigError."""
    if not path:
        raise ConfigError("model.path is empty: set it to a folder in Hugging Face format, or to a hub name")
    if Path(path).is_dir() or path.count("/") != 1 or path.startswith((".", "/")):
        return Path(path)
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(path))
    except Exception as error:  # of huggingface_hub or of its HTTP library
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"model.path={path!r} is not a folder, and could not be downloaded ({reason})") from None


def end_tokens(folder: Path, tokenizer: Any) -> set[int]:
    """The end-of-sequence ids of config.json, generation_config.json and the tokenizer."""
    ends: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            found = json.loads((folder / name).read_text()).get("eos_token_id")
            ends.update(found if isinstance(found, list) else [found])
    ends.add(tokenizer.eos_token_id)
    return {end for end in ends if isinstance(end, int)}


class LocalWorkers:
    """See `Workers`."""

    inline = False
    group_backend: str
    vocab_size: int
    context_length: int
    stop_ids: set[int]
    template: Template | None

    def __init__(self, config: Config) -> None:
        self._config = config
        self._children: dict[int, Child] = {}
        self._stack = AsyncExitStack()
        self.can_restart = not config.servers.urls

    def check(self) -> None:
        config = self._config
        self._model = model_folder(config.model.path)
        check_model(self._model, config.model.context_length)
        self._placement = place(config)
        context_of(config, Architecture.read(self._model), bool(self._placement.ranks))
        self.group_backend = "nccl" if self._placement.ranks else "gloo"
        if config.servers.port and not config.servers.urls:
            for index in range(config.servers.count):
                check_port(config.servers.port + index)

    async def start(
        self, folder: Path, life: int, version: int, checkpoint: Path | None
    ) -> tuple[TrainerClient, list[ServerClient]]:
        self._folder, self._life, self._version = folder, life, version
        self._weights = checkpoint or self._model
        self._origin = f"{folder.name}.{life}"
        self._stack.callback(remove_stores, folder / "logs")  # runs last, after all their users
        architecture = await asyncio.to_thread(Architecture.read, self._model)
        self.vocab_size = architecture.vocab
        self._context = context_of(self._config, architecture, bool(self._placement.ranks))
        self.context_length = self._context - UNUSABLE_TOKENS
        self._session = await self._stack.enter_async_context(open_session())
        self._stack.push_async_callback(self._stop_servers)
        async with asyncio.TaskGroup() as starting:
            tokenizer = starting.create_task(asyncio.to_thread(load_tokenizer, self._model))
            trainer = starting.create_task(self._start_trainer(checkpoint))
            servers = [starting.create_task(self.connect(url)) for url in self._config.servers.urls] or [
                starting.create_task(self.start_server(i)) for i in range(self._config.servers.count)
            ]
        self.template = Template(tokenizer.result(), self._config.model.template_args)
        self.stop_ids = end_tokens(self._model, tokenizer.result())
        return trainer.result(), [server.result() for server in servers]

    async def close(self) -> None:
        await self._stack.aclose()

    async def restart_trainer(self, version: int, checkpoint: Path | None) -> TrainerClient:
        await self._trainer.close()
        self._version = version
        return await self._start_trainer(checkpoint)

    def grow(self, config: Config) -> None:
        self._placement = place(config)

    async def stop_server(self, index: int) -> None:
        if child := self._children.get(index):
            await child.stop(STOP_S)
            del self._children[index]

    async def server_exited(self, index: int) -> str:
        child = self._children[index]
        code = await child.wait()
        return str(child.error(f"ended with code {code}"))

    async def _start_trainer(self, checkpoint: Path | None) -> TrainerClient:
        self._trainer = trainer = await start_trainer(
            self._config,
            model_path=str(self._model),
            checkpoint=str(checkpoint or ""),
            version=self._version,
            log_folder=self._folder / "logs",
            life=self._life,
            devices=self._placement.ranks,
            roots=[self._folder / "checkpoints", weights_folder(self._config, self._folder, self._origin)],
        )
        self._stack.push_async_callback(trainer.close)
        return trainer

    async def start_server(self, index: int) -> ServerClient:
        await self.stop_server(index)
        config = self._config.servers
        port = config.port + index if config.port else free_port()
        key = secrets.token_urlsafe(32)  # a new one each time, because another process may be listening on the port
        child = self._children[index] = await launch_server(
            self._config,
            index,
            key=key,
            # The checkpoint may have been pruned; any weights do, since the fleet brings the server up to date.
            model_path=str(self._weights if self._weights.exists() else self._model),
            label=make_label(self._origin, self._version),
            log_folder=self._folder / "logs",
            port=port,
            devices=self._placement.servers[index],
        )
        client = self._client(f"http://127.0.0.1:{port}", key)
        await wait_ready(client, child, config.start_timeout_s)
        await asyncio.to_thread(check_owner, port)
        return client

    async def connect(self, url: str) -> ServerClient:
        client = self._client(url, os.environ.get(SERVER_KEY, ""))
        if not await client.healthy():
            raise ConfigError(
                f"servers.urls: {url} does not answer its health check; start it, correct the address, or set "
                f"{SERVER_KEY} to its API key"
            )
        try:
            length = (await client.info()).context_length
        except ServerRefused as error:
            raise ConfigError(f"servers.urls: {error}; if it has an API key, set {SERVER_KEY} to it") from None
        if length < self._context:
            raise ConfigError(
                f"servers.urls: {url} has a context of {length} tokens, but the run needs {self._context}; start it "
                "with --context-length, or lower model.context_length"
            )
        return client

    def _client(self, url: str, key: str) -> ServerClient:
        return SGLangClient(
            url,
            origin=self._origin,
            vocab_size=self.vocab_size,
            key=key,
            timeout_s=self._config.weights.timeout_s,
            session=self._session,
        )

    async def _stop_servers(self) -> None:
        stops = (child.stop(STOP_S) for child in self._children.values())
        for result in await asyncio.gather(*stops, return_exceptions=True):
            if isinstance(result, Exception):
                log.warning("%s", result)


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder. Blocks for seconds. Raises ConfigError."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise ConfigError(f"{folder}: no tokenizer could be loaded ({type(error).__name__}: {error})") from error
