"""The model and optimizer of one rank, and the operations on them.

I2 is asserted again here. For I4, a step is named (life, from_version, batch_id), and the answer of the last one is
stored. The ranks of a data-parallel group exchange their failures in all-reduces at fixed points, so that a rank that
fails does not leave the others waiting in a collective.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from areal.algorithms.losses import ppo_loss, sft_loss
from areal.errors import TrainerError, VersionConflict
from areal.types import NOT_SAMPLED, Floats, Ints, MiniBatch, TensorSpec, TrainRequest, TrainStats
from areal.workers.megatron import checkpoint, convert
from areal.workers.megatron.checkpoint import Checkpoint, OptimizerState
from areal.workers.megatron.model import Scorer, build
from areal.workers.megatron.wire import RankSettings
from areal.workers.models.architecture import Architecture, Saved

T = TypeVar("T")
NAN = math.nan
NO_PARTS: Mapping[str, Tensor] = {}


class PeerFailed(TrainerError):
    """Another rank failed; its answer has the cause."""


@dataclass(slots=True)
class _Micro:
    """The sequences of one forward pass, T tokens. Tensors have shape [T]. `proximal` is None until computed."""

    lengths: list[int]
    ids: Tensor
    weights: Tensor
    behaviour: Tensor
    advantages: Tensor
    own_version: Tensor
    proximal: Tensor | None = None


class Engine:
    """Builds the rank's model from `settings.model_path`, or model and optimizer from `settings.checkpoint`.

    torch.distributed must be initialised.
    """

    def __init__(self, settings: RankSettings) -> None:
        self.life, self.version = settings.life, settings.version
        self._settings = settings
        self._torn = ""
        self._last: tuple[tuple[int, int, int], TrainStats] | None = None
        self._staged: Checkpoint | None = None
        parallel_state.initialize_model_parallel(
            create_gloo_process_groups=False, distributed_timeout_minutes=settings.timeout_s / 60
        )
        self._group = parallel_state.get_data_parallel_group()
        self._device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
        self._dtype = getattr(torch, settings.dtype)
        source = settings.checkpoint or settings.model_path
        self._architecture = Architecture.read(source)
        self._companions = convert.companions(source)
        model = build(self._architecture, self._dtype)
        convert.load(model, source, self._architecture)
        self._model = DistributedDataParallel(
            model.config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model
        )
        self._score = Scorer(self._model, self._architecture, self._dtype)
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                lr=0.0,  # each request brings its own
                min_lr=0.0,
                adam_beta1=settings.beta1,
                adam_beta2=settings.beta2,
                adam_eps=settings.eps,
                weight_decay=settings.weight_decay,
                bf16=self._dtype == torch.bfloat16,
                params_dtype=self._dtype,
            ),
            [self._model],
            use_gloo_process_groups=False,
        )
        if settings.checkpoint:
            checkpoint.load(settings.checkpoint, model, self._optimizer)

    # ------------------------------------------------------------------ training

    def train(self, request: TrainRequest) -> TrainStats:
        """Take this rank's part of the step of `request`, together with the other ranks.

        Repeating the last step returns its stored answer. Raises VersionConflict for a step of another life or version;
        TrainerError for a batch that breaks an invariant and for a non-finite gradient.
        """
        key = (request.life, request.from_version, request.batch_id)
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        if (request.life, request.from_version) != (self.life, self.version):
            raise VersionConflict(
                f"asked for batch {request.batch_id} from version {request.from_version} of life "
                f"{request.life}, but the rank is at version {self.version} of life {self.life}"
            )
        self._check_whole()
        stats = self._step(request)
        self.version += 1
        self._last = (key, stats)
        return stats

    def _step(self, request: TrainRequest) -> TrainStats:
        started = time.monotonic()
        sums = _Sums(self._device)
        updates = self._agreed(request, self._prepare, request)
        norms: list[float] = []
        for _ in range(request.passes):
            for mini, micros in zip(request.minibatches, updates, strict=True):
                self._agreed(request, self._accumulate, request, mini, micros, sums)
                norms.append(self._update(request))
                self._torn = f"the step from version {self.version} failed after {len(norms)} of its updates"
        for micro in chain.from_iterable(updates):
            sums.add_batch(micro)
        stats = sums.stats(request, self._group, norms, time.monotonic() - started)
        self._torn = ""
        return stats

    @torch.no_grad()
    def _prepare(self, request: TrainRequest) -> list[list[_Micro]]:
        """The micro-batches of each update, with proximal log-probs: those under the weights before the step."""
        _check(request, self._architecture.vocab)
        updates = [list(self._micros(request, mini.shards[0])) for mini in request.minibatches]
        if request.kind == "ppo":
            for micro in chain.from_iterable(updates[1:]):  # the first update's own forward pass computes its log-probs
                micro.proximal, _ = self._score(micro.ids, micro.lengths, request.temperature)
        return updates

    def _accumulate(self, request: TrainRequest, mini: MiniBatch, micros: Sequence[_Micro], sums: _Sums) -> None:
        """Sum the gradient of one update over this rank's micro-batches."""
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()  # drops the aliases of that buffer in the parameters' `grad`
        for micro in micros:
            logprobs, entropy = self._score(micro.ids, micro.lengths, request.temperature)
            if micro.proximal is None:
                micro.proximal = logprobs.detach()
            if request.kind == "sft":
                loss, parts = sft_loss(logprobs, micro.weights), NO_PARTS
            else:
                loss, parts = ppo_loss(
                    logprobs,
                    micro.proximal,
                    micro.behaviour,
                    micro.advantages,
                    micro.weights,
                    clip=request.clip,
                    importance_cap=request.importance_cap,
                )
            (loss / mini.loss_tokens).backward()
            sums.add_update(micro, loss.detach(), entropy, parts)

    def _update(self, request: TrainRequest) -> float:
        """Sum the gradients over ranks, clip, and take Adam's step. Returns the norm before clipping."""
        finalize_model_grads([self._model])
        self._optimizer.prepare_grads()
        norm = float(self._optimizer.get_grad_norm())
        if not math.isfinite(norm):  # the norm of the summed gradient is the same on every rank
            raise TrainerError(
                f"the gradient norm of batch {request.batch_id} is {norm}: the update was not applied; check the "
                f"batch's log-probs and advantages, or lower optimizer.lr"
            )
        if self._settings.clip_grad > 0:
            clip_grad_by_total_norm_fp32(self._optimizer.get_parameters(), self._settings.clip_grad, norm)
        for group in self._optimizer.param_groups:  # replaces Megatron's scheduler
            group["lr"] = request.learning_rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = self._settings.weight_decay * group.get("wd_mult", 1.0)  # 0 for norms and biases
        self._torn = f"an update of the step from version {self.version} failed midway"
        self._optimizer.step_with_ready_grads()
        return norm

    def _micros(self, request: TrainRequest, plan: Sequence[Sequence[int]]) -> Iterator[_Micro]:
        batch = request.batch
        ends = np.cumsum(batch.lengths)
        for sequences in plan:
            where = np.concatenate([np.arange(ends[s] - batch.lengths[s], ends[s]) for s in sequences])
            lengths = batch.lengths[list(sequences)]
            yield _Micro(
                lengths=lengths.tolist(),
                ids=self._tensor(batch.ids[where].astype(np.int64)),
                weights=self._tensor(batch.loss_weights[where]),
                behaviour=self._tensor(batch.logprobs[where]),
                advantages=self._tensor(np.repeat(batch.advantages[list(sequences)], lengths)),
                own_version=self._tensor(batch.versions[where] == request.from_version),
            )

    def _agreed(self, request: TrainRequest, work: Callable[..., T], *args: Any) -> T:
        """Do this rank's work, then raise on every rank if any of them failed or is working on another batch (because
        an earlier call timed out before all ranks had started it)."""
        error: Exception | None = None
        try:
            result = work(*args)
        except Exception as caught:
            error = caught
        votes = torch.zeros(dist.get_world_size(self._group), 2, dtype=torch.int64, device=self._device)
        votes[dist.get_rank(self._group)] = torch.tensor([error is not None, request.batch_id])
        dist.all_reduce(votes, group=self._group)
        if error is not None:
            raise error
        failed, batches = votes.T.tolist()
        if any(failed):
            raise PeerFailed(f"data-parallel rank {failed.index(1)} failed")
        if len(set(batches)) > 1:
            raise TrainerError(f"the data-parallel ranks were asked for batches {batches} at the same time; retry")
        return result

    def _check_whole(self) -> None:
        if self._torn:
            raise TrainerError(f"{self._torn}: its weights are of no version; restart the ranks from a checkpoint")

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)

    # ------------------------------------------------------------------ the weights

    @torch.no_grad()
    def logprobs(self, sequences: Sequence[Ints]) -> list[Floats]:
        """Log-probs [L] of each sequence's tokens at temperature 1; entry 0 is 0."""
        self._check_whole()
        results: list[Floats] = []
        for chunk in self._packed(sequences):
            ids = self._tensor(np.concatenate(chunk).astype(np.int64))
            _check_ids(ids, self._architecture.vocab)
            lengths = [len(s) for s in chunk]
            flat = self._score(ids, lengths, 1.0)[0].cpu().numpy()
            results += np.split(flat, np.cumsum(lengths)[:-1])
        return results

    def _packed(self, sequences: Sequence[Ints]) -> Iterator[list[Ints]]:
        chunk: list[Ints] = []
        tokens = 0
        for sequence in sequences:
            if chunk and tokens + len(sequence) > self._settings.microbatch_tokens:
                yield chunk
                chunk, tokens = [], 0
            chunk.append(sequence)
            tokens += len(sequence)
        if chunk:
            yield chunk

    def export(self, folder: str) -> None:
        """Write a Hugging Face folder atomically. Raises TrainerError if it cannot be written."""
        self._check_whole()
        convert.write_folder(Path(folder), self.tensors(), self._companions, self._settings.dtype)

    def stage(self, folder: str) -> None:
        """Copy weights and optimizer state for a checkpoint at `folder`, which `write` writes."""
        self._check_whole()
        self._staged = None  # free its memory first
        self._staged = Checkpoint(
            Path(folder),
            Saved(self.version, self._settings.dtype),
            self._companions,
            {name: checkpoint.copy(tensor) for name, tensor in self.tensors()},
            OptimizerState.of(self._model.module, self._optimizer),
        )

    def write(self, folder: str) -> None:
        """Write what was staged for `folder` atomically; may run on another thread. Raises TrainerError."""
        staged, self._staged = self._staged, None
        if staged is None or staged.folder != Path(folder):
            raise TrainerError(f"no checkpoint is staged for {folder!r}: call stage, then write, for each checkpoint")
        staged.write()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, tensor) of all weights, in the order of `specs`."""
        self._check_whole()
        return convert.export(self._model.module, self._architecture)

    def specs(self) -> list[TensorSpec]:
        return convert.specs(self._model.module, self._architecture)


class _Sums:
    """Statistics of a step, summed on the device."""

    NAMES = ("loss", "weight", "entropy", "importance", "capped", "clipped", "tokens", "loss_tokens", "gap", "own")

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(self.NAMES), dtype=torch.float64, device=device)
        self._gap_max = torch.full((1,), -math.inf, device=device)

    def add_update(self, micro: _Micro, loss: Tensor, entropy: Tensor, parts: Mapping[str, Tensor]) -> None:
        """Call it once per optimizer update that includes the micro-batch."""
        self._add(loss=loss, weight=micro.weights.sum(), entropy=(micro.weights * entropy).sum(), **parts)

    def add_batch(self, micro: _Micro) -> None:
        """Call it once per step."""
        assert micro.proximal is not None
        active = micro.weights != 0
        gap = (micro.proximal - micro.behaviour).abs()[active & micro.own_version]
        if len(gap):
            self._gap_max = torch.maximum(self._gap_max, gap.max())
        self._add(tokens=len(micro.ids), loss_tokens=active.sum(), gap=gap.sum(), own=len(gap))

    def _add(self, **values: Tensor | int) -> None:
        for name, value in values.items():
            self._sums[self.NAMES.index(name)] += value

    def stats(
        self, request: TrainRequest, group: dist.ProcessGroup, norms: Sequence[float], seconds: float
    ) -> TrainStats:
        """Statistics over all ranks of the group, the same on each."""
        maxima = torch.cat((self._gap_max, torch.tensor([seconds], device=self._gap_max.device)))
        dist.all_reduce(self._sums, group=group)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        total = dict(zip(self.NAMES, self._sums.tolist(), strict=True))
        gap_max, seconds = maxima.tolist()
        ppo = request.kind == "ppo"

        def mean(name: str, by: str = "weight") -> float:
            return total[name] / total[by] if total[by] else NAN

        return TrainStats(
            version=request.from_version + 1,
            loss=mean("loss"),
            grad_norm=sum(norms) / len(norms),
            entropy=mean("entropy"),
            clip_fraction=mean("clipped") if ppo else NAN,
            importance_mean=mean("importance") if ppo else NAN,
            importance_capped=mean("capped") if ppo else NAN,
            logprob_gap_max=gap_max if total["own"] else NAN,
            logprob_gap_mean=mean("gap", "own"),
            tokens=round(total["tokens"]),
            loss_tokens=round(total["loss_tokens"]),
            seconds=seconds,
        )


def _check(request: TrainRequest, vocab: int) -> None:
    """Raise TrainerError for a batch that must not be trained on."""
    batch = request.batch
    tokens = int(batch.lengths.sum())
    for name in ("ids", "loss_weights", "logprobs", "versions"):
        if len(getattr(batch, name)) != tokens:
            raise TrainerError(f"batch {request.batch_id}: {name} does not have the length of its {tokens} tokens")
    if request.passes < 1 or not request.minibatches:
        raise TrainerError(f"batch {request.batch_id} has no update: {request.passes} passes")
    if any(mini.loss_tokens <= 0 for mini in request.minibatches):
        raise TrainerError(f"batch {request.batch_id} has a mini-batch without a loss token")
    if not tokens:
        return
    if batch.lengths.min() < 1:
        raise TrainerError(f"batch {request.batch_id} has an empty sequence")
    if batch.ids.min() < 0 or batch.ids.max() >= vocab:
        raise TrainerError(f"batch {request.batch_id} has a token id outside the vocabulary of {vocab}")
    active = batch.loss_weights != 0
    if active[np.cumsum(batch.lengths) - batch.lengths].any():
        raise TrainerError(f"batch {request.batch_id} has a loss on the first token of a sequence")
    if request.kind == "sft":
        return
    versions = batch.versions[active]
    if (versions == NOT_SAMPLED).any():
        raise TrainerError(f"batch {request.batch_id} has a loss on a token that no server sampled")
    if len(versions) and versions.max() > request.from_version:
        raise TrainerError(
            f"batch {request.batch_id} from version {request.from_version} has a token of version {versions.max()}"
        )
    if len(versions) and request.from_version - versions.min() > request.max_staleness:
        raise TrainerError(
            f"batch {request.batch_id} from version {request.from_version} has a loss on a token of version "
            f"{versions.min()}, which is stale: staleness.max is {request.max_staleness}"
        )


def _check_ids(ids: Tensor, vocab: int) -> None:
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab:
        raise TrainerError(f"a token id is outside the vocabulary of {vocab}")
