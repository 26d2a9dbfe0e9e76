"""Checkpoints from which training resumes bit for bit: a model folder that contains the optimizer state.

    config.json, model.safetensors, tokenizer ...    as `export` writes them
    trainer/                                         Megatron-core's distributed checkpoint of the optimizer; saved.json

Every data-parallel rank holds all weights and all of Adam's state, so the first one saves alone: without collectives, a
full disk cannot leave another rank waiting. Tensors are saved in the shape of the model's parameters, so that another
number or layout of ranks can load them.

The format is Megatron-core's, but not its asynchronous save, which forks a process with many threads, leaves a server
process behind, and needs collectives of all ranks to complete a file. Here a thread writes with torch's writer.
"""

from __future__ import annotations

import io
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer import ChainedOptimizer
from torch import Tensor

from areal.errors import TrainerError
from areal.workers.megatron import convert
from areal.workers.models.architecture import TRAINER, Saved

LAYOUT = {"distrib_optim_sharding_type": "fully_reshardable"}
"""Saves a distributed optimizer, too, in the shape of the model's parameters. Other optimizers always do."""


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """A copy in CPU memory. shards: name in the file -> the parts of the tensor that this rank saves; common: the rest
    of the state, serialised."""

    shards: dict[str, list[ShardedTensor]]
    common: bytes

    @classmethod
    def of(cls, model: torch.nn.Module, optimizer: ChainedOptimizer) -> OptimizerState:
        """Copy the state of `optimizer`, which trains the GPTModel `model`."""
        parts, rest = save_preprocess(_sharded(model, optimizer), validate_access_integrity=False)
        shards = defaultdict(list)
        for part in nested_values(parts):
            if is_main_replica(part.replica_id):
                part.data = copy(part.data)
                shards[part.key].append(part)
        common = io.BytesIO()
        torch.save(rest, common)
        return cls(dict(shards), common.getvalue())

    def write(self, folder: Path) -> None:
        """Write Megatron-core's format into a new folder. Raises OSError."""
        folder.mkdir()
        (folder / "common.pt").write_bytes(self.common)
        failed = None
        try:
            torch_checkpoint.save(
                mcore_to_pyt_state_dict(self.shards),
                storage_writer=torch_checkpoint.FileSystemWriter(folder),
                planner=MCoreSavePlanner(flatten_state_dict=False),
                no_dist=True,
            )
        except torch_checkpoint.CheckpointException as failure:  # not a subclass of Exception
            failed = _reason(failure)
        if failed is not None:  # raised outside of `except`, because that traceback keeps the tensors alive
            raise OSError(failed)
        save_config(CheckpointingConfig("torch_dist", 1), str(folder))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A copy of the training state at one version, to be written to `folder`. It shares no memory with the model."""

    folder: Path
    saved: Saved
    files: dict[str, bytes]
    weights: dict[str, Tensor]
    optimizer: OptimizerState

    def write(self) -> None:
        """Write it to disk atomically, and free the memory. Raises TrainerError."""
        try:
            with convert.whole(self.folder, "checkpoint") as partial:
                convert.fill(partial, self.weights.items(), self.files, self.saved.dtype)
                self.optimizer.write(partial / TRAINER)
                self.saved.write(partial)
        finally:  # else the traceback of a failure keeps them alive
            self.weights.clear()
            self.optimizer.shards.clear()


def load(folder: Path | str, model: torch.nn.Module, optimizer: ChainedOptimizer) -> None:
    """Load the state of `optimizer`, which trains the GPTModel `model`, from a checkpoint. A collective of all ranks.

    Adam's betas and eps stay as the settings have them. Raises TrainerError if the checkpoint is damaged or unsuitable.
    """
    settings = [(group["betas"], group["eps"]) for group in optimizer.param_groups]
    try:
        state = dist_checkpointing.load(
            _sharded(model, optimizer, is_loading=True), str(Path(folder) / TRAINER), strict=StrictHandling.RAISE_ALL
        )
        optimizer.load_state_dict(state)
    except (Exception, torch_checkpoint.CheckpointException) as error:
        raise TrainerError(f"cannot go on from {folder}: {_reason(error)}; name another checkpoint") from error
    for group, (betas, eps) in zip(optimizer.param_groups, settings, strict=True):
        group["betas"], group["eps"] = betas, eps


def copy(tensor: Tensor) -> Tensor:
    """A copy in CPU memory."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _reason(error: BaseException) -> str:
    """torch wraps the errors of all ranks in one, and reports a full disk only as the context of a failed assertion."""
    if isinstance(error, torch_checkpoint.CheckpointException):
        (error, _), *_ = error.failures.values()
    return str(error.__context__ if isinstance(error.__context__, OSError) else error)


def _sharded(model: torch.nn.Module, optimizer: ChainedOptimizer, is_loading: bool = False) -> dict[str, Any]:
    """The optimizer state as Megatron-core describes it, plus what is missing before the first step: Adam's moments,
    and the step count of torch's AdamW."""
    (part,) = optimizer.chained_optimizers
    part.init_state_fn(part.optimizer, part.config)
    counts = isinstance(part.optimizer, torch.optim.AdamW)
    if counts:
        for moments in part.optimizer.state.values():
            moments.setdefault("step", torch.tensor(0.0))
    layout = dict(LAYOUT)  # Megatron-core adds to it
    state = optimizer.sharded_state_dict(model.sharded_state_dict(metadata=layout), is_loading, metadata=layout)
    parameters = state.get("optimizer", state).get("state")  # a distributed optimizer has the count in its groups
    if counts and parameters:  # Megatron-core omits a count of 0
        parameters.setdefault("common_step", torch.tensor(0.0))
    return state
