"""The interfaces through which the controller uses servers and the trainer, and starts both (`Workers`).

The real clients are `workers.sglang.client.SGLangClient` and `workers.megatron.client.HttpTrainer`. A simulation
replaces these interfaces and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from areal.agents.template import Template
from areal.config import Config
from areal.types import Floats, Generation, Ints, Sampling, TensorSpec, TrainRequest, TrainStats


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """`label` names the weights on a server: "<run>.<life>:<version>", or anything else if areal did not load them."""

    label: str
    model_path: str
    context_length: int


@dataclass(frozen=True, slots=True)
class WeightGroup:
    """A torch.distributed group for broadcasting weights: rank 0 is the trainer's sender, ranks 1.. are servers."""

    name: str
    host: str
    port: int
    world_size: int
    backend: str


class ServerClient(Protocol):
    """One SGLang server. Every method raises ServerLost (unreachable) or ServerRefused (error or malformed answer)."""

    url: str

    async def info(self) -> ServerInfo: ...

    async def healthy(self) -> bool:
        """Whether the server answers its health check; False instead of ServerLost."""

    async def generate(self, rid: str, input_ids: Ints, sampling: Sampling) -> Generation:
        """Sample. An aborted request returns partial output with `finish == "abort"`. The server's answer gives the
        version of each token (I6)."""

    async def abort(self, rid: str) -> None:
        """Abort all requests whose id starts with `rid` ("" aborts all). No error for an unknown one."""

    async def pause(self) -> None:
        """Stop sampling at once. Requests in flight keep their tokens and connections; new ones wait."""

    async def resume(self) -> None:
        """End a pause; no error if there is none."""

    async def load_disk(self, folder: str, label: str, *, abort: bool = True) -> None:
        """Load the Hugging Face folder and set `label`. Requests in flight are aborted, unless the server is paused
        and `abort` is False."""

    async def join_group(self, group: WeightGroup, rank: int) -> None:
        """Join a broadcast group; returns when all ranks have joined."""

    async def load_group(self, group: str, specs: Sequence[TensorSpec], label: str) -> None:
        """Receive `specs` in order from rank 0 of the group and set `label`."""

    async def leave_group(self, group: str) -> None: ...

    async def flush(self) -> None:
        """Empty the KV cache; returns when the server confirms it."""

    async def score(self, ids: Ints) -> Floats:
        """Log-probs [L] of the tokens themselves at temperature 1; entry 0 is 0."""

    async def checksums(self) -> dict[str, str]:
        """A checksum of each weight tensor under the server's own name. Comparable for one server only, because servers
        merge, pad and split tensors."""

    async def scramble(self) -> None:
        """Overwrite all weights with random numbers, so that a tensor missed by a load becomes visible."""

    async def close(self) -> None: ...


class TrainerClient(Protocol):
    """All trainer ranks together. Every method raises TrainerError, which names the rank."""

    data_parallel: int

    @property
    def lost(self) -> str:
        """Why a rank has ended; "" while all are running."""

    async def train(self, request: TrainRequest) -> TrainStats:
        """Take one step. Raises VersionConflict if the ranks are at another version; repeating the last step returns
        its stored answer."""

    async def logprobs(self, sequences: Sequence[Ints]) -> list[Floats]:
        """Log-probs [L] of each sequence's tokens at temperature 1; entry 0 is 0."""

    async def export(self, folder: str) -> None:
        """Atomically write the weights in Hugging Face format (config, tokenizer and safetensors)."""

    async def stage(self, folder: str) -> None:
        """Copy weights and optimizer state of the current version for a checkpoint at `folder`. The next step may start
        once this returns. Replaces a checkpoint that was staged but not written."""

    async def write(self) -> None:
        """Write the staged checkpoint while training continues. Its folder appears atomically; it is a model folder
        from which training can also resume exactly. Whether it succeeds or fails, nothing is staged afterwards."""

    async def specs(self) -> list[TensorSpec]:
        """The tensors that `broadcast` sends, in the same order."""

    async def join_group(self, group: WeightGroup) -> None:
        """Join a broadcast group as rank 0; returns when all ranks have joined."""

    async def broadcast(self, group: str) -> None:
        """Send the current weights to the group, tensor by tensor. A failure also leaves the group."""

    async def leave_group(self, group: str) -> None:
        """No error if the group is not joined."""

    async def close(self) -> None: ...


class Workers(Protocol):
    """Starts and stops the servers and ranks of one run. The real ones are `workers.local.LocalWorkers`.

    inline: the whole run uses one thread (a simulation). can_restart: False for external servers. The others are set by
    `start`: group_backend is the torch.distributed backend of weight groups; context_length is the maximum number of
    tokens of a prompt with its answer.
    """

    inline: bool
    can_restart: bool
    group_backend: str
    vocab_size: int
    context_length: int
    stop_ids: set[int]
    template: Template | None

    def check(self) -> None:
        """Check model, placement and ports before anything starts. Blocks. Raises ConfigError."""

    async def start(
        self, folder: Path, life: int, version: int, checkpoint: Path | None
    ) -> tuple[TrainerClient, list[ServerClient]]:
        """Start everything concurrently, at `version`, with the weights of `checkpoint`, or of `model.path` if None.
        folder: of the run. Raises ProcessError or TrainerError if something does not start."""

    async def restart_trainer(self, version: int, checkpoint: Path | None) -> TrainerClient:
        """Stop what is left of the ranks and restart them, as `start` does. Raises TrainerError."""

    def grow(self, config: Config) -> None:
        """Place additional servers. Blocks. Raises ConfigError if they do not fit."""

    async def start_server(self, index: int) -> ServerClient:
        """Stop what is left of this server, start it, and return once it is ready. Raises ProcessError."""

    async def connect(self, url: str) -> ServerClient:
        """Connect to an external server. Raises ConfigError if it is unreachable or unsuitable."""

    async def stop_server(self, index: int) -> None:
        """Stop the process of a server; does nothing for an external one. Raises ProcessError."""

    async def server_exited(self, index: int) -> str:
        """Wait for the process of a server to end, and return why it did."""

    async def close(self) -> None:
        """Stop all servers and ranks."""


def make_label(origin: str, version: int) -> str:
    """The label of weights on a server: "<run>.<life>:<version>", where `origin` is "<run>.<life>"."""
    return f"{origin}:{version}"


def version_of(label: str, origin: str) -> int | None:
    """The version that `label` names, or None if it is not a label of `origin`."""
    head, _, tail = label.rpartition(":")
    return int(tail) if head == origin and tail.isascii() and tail.isdigit() else None
