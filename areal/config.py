"""One typed, frozen tree of settings.

    Config.load(["run.toml", "seed=2", "train.steps=60"], defaults={"group.size": 8})

Later sources win: the defaults below, the script's own defaults, a TOML file, `key.sub=value` arguments.
`config.origins` says for each setting where its value came from. An unknown key, a value of the wrong type and a
combination that cannot be honoured are a ConfigError before anything starts (I10).
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from areal.errors import ConfigError


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, strict=False)


class Model(Section):
    path: str = ""
    """Folder of the model in Hugging Face format (or a hub name, where a hub can be reached)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights on servers and ranks (optimizer state is always float32)."""
    context_length: int = Field(default=0, ge=0)
    """Longest sequence in tokens, prompt and answer; 0 takes the model's own limit."""
    template_args: dict[str, Any] = {}
    """Extra arguments of the chat template, such as {enable_thinking = false}."""


class Data(Section):
    train: str = ""
    """Tasks to train on: a .jsonl or .parquet file, or a Hugging Face data set ("name" or "name:split").
    Empty when the program passes tasks itself."""
    evaluation: str = ""
    """Tasks to evaluate on; empty takes `evaluation_size` rows away from the training tasks."""
    evaluation_size: int = Field(default=0, ge=0)
    """Rows held out of the training tasks for evaluation; 0 holds out none."""
    epochs: int = Field(default=0, ge=0)
    """Times that the training tasks are gone through; 0 is without end."""
    shuffle: bool = True
    """Whether each epoch has its own order, drawn from the seed."""


class GroupSettings(Section):
    size: int = Field(default=8, ge=1)
    """Episodes per task (n)."""
    min_members: int = Field(default=0, ge=0)
    """Episodes that must finish for a group to be usable; 0 means all of them. When fewer can still finish, the
    rest are cancelled and the group is dropped (I8)."""
    uniform: Literal["train", "replace"] = "train"
    """A group whose rewards are all equal teaches nothing: `train` lets it count as trained, `replace` drops it
    (reason `uniform`) and admits another."""


class SamplingSettings(Section):
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of training episodes; the ranks divide logits by it. There is no top_p, top_k or penalty: the
    ranks could not reproduce the log-probs (I10)."""
    max_new_tokens: int = Field(default=1024, ge=1)
    """Most tokens that one model call may sample."""


class EpisodeSettings(Section):
    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds an episode may take from its start."""
    tool_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds one tool call may take; the model is told when it ran out."""
    retries: int = Field(default=2, ge=0)
    """Times a failed episode is started again before its failure is final."""


class Staleness(Section):
    max: int = Field(default=2, ge=0)
    """Largest staleness, in steps, that may enter a loss (eta). 0 is synchronous RL."""
    late: Literal["mask", "drop"] = "mask"
    """What happens to a group with older tokens: `mask` takes those tokens out of the loss, `drop` drops it."""


class Train(Section):
    steps: int = Field(default=100, ge=0)
    """Training steps of this run."""
    batch_groups: int = Field(default=16, ge=1)
    """Groups per step (B)."""
    minibatches: int = Field(default=2, ge=1)
    """Optimizer updates per pass over a batch."""
    passes: int = Field(default=1, ge=1)
    """Times each batch is gone through."""
    microbatch_tokens: int = Field(default=8192, ge=1)
    """Most tokens of one forward and backward pass of a rank (a longer sequence goes alone)."""


class Optimizer(Section):
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate after the warm-up (Adam)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate from the end of the warm-up to the last step."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0 to `lr`."""
    min_lr: float = Field(default=0.0, ge=0)
    """Learning rate at the last step of `linear` and `cosine`."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Adam's decay of the mean."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Adam's decay of the square."""
    eps: float = Field(default=1e-8, gt=0)
    """Adam's term against division by zero."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    clip_grad: float = Field(default=1.0, ge=0)
    """Largest global gradient norm; 0 does not clip."""


class Algorithm(Section):
    advantage: Literal["grpo", "dr_grpo"] = "grpo"
    """`grpo`: reward minus group mean, over group standard deviation; `dr_grpo`: without the division."""
    clip: float = Field(default=0.2, gt=0)
    """PPO's clip of the ratio pi / pi_proximal."""
    importance_cap: float = Field(default=5.0, gt=0)
    """Largest weight pi_proximal / pi_behaviour of a token (decoupled PPO, eq. 5)."""


class Weights(Section):
    transport: Literal["disk", "group"] = "disk"
    """How new weights reach the servers: `disk` (safetensors in `folder`) or `group` (torch.distributed broadcast;
    NCCL on GPUs, gloo elsewhere)."""
    folder: str = ""
    """Where `disk` writes; empty is the run folder. A tmpfs such as /dev/shm is faster."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Seconds a publication may take before the servers that lag are closed."""
    verify: bool = True
    """Whether each publication is checked by the log-probs of a fixed prompt."""


class Servers(Section):
    count: int = Field(default=1, ge=1)
    """SGLang servers to start; not used when `urls` is given."""
    urls: list[str] = []
    """Servers that run already, such as ["http://127.0.0.1:30000"]."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the first server, the next ones follow; 0 takes free ports."""
    max_running: int = Field(default=64, ge=1)
    """Requests that one server runs at the same time."""
    max_total_tokens: int = Field(default=0, ge=0)
    """Size of one server's KV cache in tokens; 0 lets SGLang decide (on a CPU: 32768)."""
    args: list[str] = []
    """Further command-line arguments of SGLang."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds until a server must be ready."""
    request_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds one call may take before it is aborted and tried elsewhere."""
    restarts: int = Field(default=3, ge=0)
    """Times a server that died is started again before the run ends."""


class Trainer(Section):
    ranks: int = Field(default=1, ge=1)
    """Trainer processes (data parallel)."""
    start_timeout_s: float = Field(default=300.0, gt=0)
    """Seconds until all ranks must be ready."""
    timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds one training step may take."""


class Placement(Section):
    servers: list[list[int]] = []
    """Device numbers of each server, such as [[0], [1]]; one list per server. Empty places them automatically:
    ranks first, servers on the devices that remain."""
    ranks: list[int] = []
    """Device number of each trainer rank."""


class Checkpoint(Section):
    every: int = Field(default=50, ge=0)
    """Steps between checkpoints in Hugging Face format; 0 writes only the last one."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints kept; older ones are deleted."""


class Metrics(Section):
    sinks: list[Literal["tensorboard", "wandb"]] = []
    """Where metrics go besides metrics.jsonl (extras `tensorboard`, `wandb`)."""
    project: str = "areal"
    """Project name for W&B."""


class Config(Section):
    name: str = "run"
    """Name of the run; its folder is `folder`/`name`-<number>."""
    folder: str = "runs"
    """Where run folders are made."""
    seed: int = Field(default=0, ge=0)
    """Seed of data order, episodes and ranks. Sampling on the servers is not seeded (see docs/settings.md)."""
    view: Literal["auto", "live", "plain", "off"] = "auto"
    """What the terminal shows: `live` panel, `plain` lines, nothing; `auto` is live on a terminal."""
    watchdog_s: float = Field(default=900.0, gt=0)
    """Seconds without progress after which the run names what it waits for and ends (I7)."""
    max_failures: int = Field(default=32, ge=0)
    """Failed episodes, since the last that finished, after which the run ends with the last traceback (I9)."""
    model: Model = Model()
    data: Data = Data()
    group: GroupSettings = GroupSettings()
    sampling: SamplingSettings = SamplingSettings()
    episode: EpisodeSettings = EpisodeSettings()
    staleness: Staleness = Staleness()
    train: Train = Train()
    optimizer: Optimizer = Optimizer()
    algorithm: Algorithm = Algorithm()
    weights: Weights = Weights()
    servers: Servers = Servers()
    trainer: Trainer = Trainer()
    placement: Placement = Placement()
    checkpoint: Checkpoint = Checkpoint()
    metrics: Metrics = Metrics()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def origins(self) -> Mapping[str, str]:
        """Dotted key -> where the value came from ("default" is left out)."""
        return self._origins

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.group.min_members > self.group.size:
            raise ValueError(f"group.min_members={self.group.min_members} is more than group.size={self.group.size}")
        if self.train.minibatches > self.train.batch_groups * self.group.size:
            raise ValueError(
                f"train.minibatches={self.train.minibatches} is more than the {self.train.batch_groups} x "
                f"{self.group.size} episodes of a batch"
            )
        longest = max(self.episode.timeout_s, self.weights.timeout_s, self.trainer.timeout_s if self.train.steps else 0)
        if "watchdog_s" in self.model_fields_set and self.watchdog_s < self.episode.timeout_s:
            raise ValueError(
                f"watchdog_s={self.watchdog_s:g} is shorter than episode.timeout_s={self.episode.timeout_s:g}: a slow "
                f"episode would look like a hang; set it above {longest:g}"
            )
        if self.servers.urls and self.placement.servers:
            raise ValueError("placement.servers is for servers that areal starts; servers.urls run already")
        return self

    @classmethod
    def load(cls, arguments: Sequence[str] = (), defaults: Mapping[str, Any] | None = None) -> Config:
        """Build a Config from `[FILE.toml] key.sub=value ...`.

        defaults: the program's own values by dotted key; file and arguments override them.
        Raises ConfigError for an unknown key, a wrong type or an unreadable file.
        """
        values: dict[str, Any] = {}
        origins: dict[str, str] = {}

        def put(key: str, value: Any, origin: str) -> None:
            if key not in _KEYS:
                raise ConfigError(f"unknown setting {key!r} ({origin}){_hint(key)}")
            values[key] = value
            origins[key] = origin

        for key, value in (defaults or {}).items():
            put(key, value, "program")
        for argument in arguments:
            key, equals, text = argument.partition("=")
            if equals:
                put(key.strip(), _parse(text, _KEYS.get(key.strip())), "argument")
            else:
                for key, value in _flatten(_read_toml(argument)):
                    put(key, value, argument)
        tree: dict[str, Any] = {}
        for key, value in values.items():
            section, _, leaf = key.rpartition(".")
            (tree.setdefault(section, {}) if section else tree)[leaf] = value
        try:
            config = cls.model_validate(tree)
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(e, origins) for e in error.errors())) from None
        config._origins.update(origins)
        return config

    def items(self) -> Iterator[tuple[str, Any, str, str]]:
        """(dotted key, value, origin, docstring) of every setting, in the order of this file."""
        for key, doc in _KEYS.items():
            section, _, leaf = key.rpartition(".")
            value = getattr(getattr(self, section) if section else self, leaf)
            yield key, value, self._origins.get(key, "default"), doc


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _keys(field.annotation, f"{name}.")
        else:
            yield prefix + name, " ".join((field.description or "").split())


_KEYS = dict(_keys(Config))
"""Dotted key -> docstring of every setting."""

_REFUSED = {"top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"}


def _hint(key: str) -> str:
    if key.rpartition(".")[2] in _REFUSED:
        return ": the trainer could not reproduce the log-probs of such tokens; sampling.temperature is what there is"
    leaf = key.rpartition(".")[2]
    near = difflib.get_close_matches(key, _KEYS, n=3) or [k for k in _KEYS if k.rpartition(".")[2] == leaf][:3]
    return f"; did you mean {' or '.join(near)}?" if near else "; `python -m areal config` lists all"


def _parse(text: str, known: str | None) -> Any:
    """A TOML value if it is one, else the text itself (so `name=first` needs no quotes)."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _read_toml(path: str) -> dict[str, Any]:
    if not path.endswith(".toml"):
        raise ConfigError(f"argument {path!r} is neither key=value nor a .toml file")
    try:
        return tomllib.loads(Path(path).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and prefix + key not in _KEYS:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _explain(error: Any, origins: Mapping[str, str]) -> str:
    key = ".".join(str(part) for part in error["loc"])
    message = error["msg"].removeprefix("Value error, ")
    if not key:
        return message
    setting = next((k for k in origins if key == k or key.startswith(k + ".")), key)
    return f"{setting}={error['input']!r} ({origins.get(setting, 'default')}): {message}"
