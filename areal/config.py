"""One typed, frozen tree of settings.

    Config.load(["run.toml", "seed=2", "train.steps=60"], defaults={"group.size": 8})

Later sources win: the defaults below, the program's own defaults, TOML files, `key.sub=value` arguments.
`config.origins` says for each setting where its value came from. An unknown key, a value of the wrong type and a
combination that cannot be honoured are a ConfigError before anything starts (I10). Nothing is converted: "60" is not
a number, 1 is not true.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, ValidationInfo, model_validator
from pydantic.fields import FieldInfo

from areal.errors import ConfigError


class Section(BaseModel):
    model_config = ConfigDict(
        strict=True, frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class Model(Section):
    path: str = ""
    """Folder of the model in Hugging Face format (or a hub name, where a hub can be reached)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights on servers and ranks (optimizer state is always float32)."""
    context_length: int = Field(default=0, ge=0)
    """Longest sequence in tokens, prompt and answer; 0 takes the model's own limit. SGLang keeps 6 of them free."""
    template_args: dict[str, Any] = {}
    """Extra arguments of the chat template, such as {enable_thinking = false}."""


class Data(Section):
    train: str = ""
    """Tasks to train on: a .jsonl or .parquet file, a folder saved by `datasets`, or a Hugging Face data set
    ("name", "name:split" or "name:config:split"). Empty when the program passes tasks itself."""
    evaluation: str = ""
    """Tasks to evaluate on; empty takes `evaluation_size` rows away from the training tasks."""
    evaluation_size: int = Field(default=0, ge=0)
    """Rows held out of the training tasks for evaluation; 0 holds out none."""
    epochs: int = Field(default=0, ge=0)
    """Times that the training tasks are gone through; 0 is without end."""
    shuffle: bool = True
    """Whether each epoch has its own order, drawn from the seed. A stream without a length is taken as it comes."""


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


class Failures(Section):
    """Failed tries of episodes, since the last that finished, after which the run ends with the last traceback (I9)."""

    agent: int = Field(default=32, ge=0)
    """Tries in a row that the agent or one of its tools failed."""
    reward: int = Field(default=32, ge=0)
    """Tries in a row without a usable reward (RewardError, or no finite number)."""
    infrastructure: int = Field(default=128, ge=0)
    """Tries in a row that a server failed, or that ran out of time."""
    data: int = Field(default=32, ge=0)
    """Tries in a row that failed of their task (DataError)."""


class Staleness(Section):
    max: int = Field(default=2, ge=0)
    """Largest staleness, in steps, that may enter a loss (eta). 0 is synchronous RL."""
    late: Literal["mask", "drop", "wait"] = "mask"
    """What happens to a group with older tokens: `mask` takes those tokens out of the loss, `drop` drops it. `wait`
    lets none come to be: a batch is the oldest open groups, waited for."""


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
    rollout: Literal["all", "rolling"] = "all"
    """Whether `all` servers take a version at once, or one after the other while the others generate (`rolling`)."""
    interrupt: Literal["abort", "retract"] = "abort"
    """What new weights do to running requests: `abort` brings their tokens back, and they go on at any server;
    `retract` leaves them in their server, which computes their prompts again (`transport=disk` only)."""
    verify: bool = True
    """Whether each publication is checked by the log-probs of a fixed prompt."""


class Servers(Section):
    count: int = Field(default=1, ge=1)
    """SGLang servers to start."""
    urls: list[str] = []
    """Servers that run already, such as ["http://127.0.0.1:30000"]; none is started then, and `count`, `port`,
    `max_total_tokens`, `args` and `restarts` are refused. Their API key is in the variable AREAL_SERVER_KEY."""
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
    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds one training step may take."""
    restarts: int = Field(default=3, ge=0)
    """Times that the ranks are started again from the last checkpoint before the run ends."""


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
    name: str = Field(default="run", pattern=r"^\w[\w.-]*$")
    """Name of the run; its folder is `folder`/`name`-0001, the next one -0002."""
    folder: str = "runs"
    """Where run folders are made."""
    seed: int = Field(default=0, ge=0)
    """Seed of data order, held-out tasks, episodes and ranks, and of sampling on servers with
    --enable-deterministic-inference. Which weights sample a token depends on timing too."""
    view: Literal["auto", "live", "plain", "off"] = "auto"
    """What the terminal shows: `live` panel, `plain` lines, nothing; `auto` is live on a terminal, else plain."""
    watchdog_s: float = Field(default=900.0, gt=0)
    """Seconds without progress after which the run names what it waits for and ends (I7). Longer than
    `episode.timeout_s`, `weights.timeout_s`, `servers.start_timeout_s` and `trainer.timeout_s`."""
    model: Model = Model()
    data: Data = Data()
    group: GroupSettings = GroupSettings()
    sampling: SamplingSettings = SamplingSettings()
    episode: EpisodeSettings = EpisodeSettings()
    failures: Failures = Failures()
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
    _run: Path | None = PrivateAttr(default=None)
    _command: tuple[str, ...] = PrivateAttr(default=())

    @property
    def origins(self) -> Mapping[str, str]:
        """Dotted key -> where the value came from ("default" is left out)."""
        return self._origins

    @property
    def run(self) -> Path | None:
        """The folder of the run that goes on with these settings; None for a new run."""
        return self._run

    @property
    def command(self) -> tuple[str, ...]:
        """The program that was started with these settings; () when areal does not know."""
        return self._command

    @model_validator(mode="wrap")
    @classmethod
    def _checked(cls, data: Any, handler: Any, info: ValidationInfo) -> Config:
        """Type errors and conflicts become one ConfigError, however the tree is built."""
        origins = (info.context or {}).get("origins", {})
        try:
            config: Config = handler(data)
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(e, origins) for e in error.errors())) from None
        config._origins.update(origins or dict.fromkeys(_given(config), "code"))
        from areal.conflicts import conflicts  # which needs the tree

        if found := list(conflicts(config)):
            raise ConfigError("\n".join(found))
        return config

    @classmethod
    def load(
        cls,
        arguments: Sequence[str] = (),
        defaults: Mapping[str, Any] | None = None,
        command: Sequence[str] = (),
    ) -> Config:
        """Build a Config from `[FILE.toml ...] key.sub=value ...`.

        defaults: the program's own values by dotted key; files and arguments override them. command: the program, for
        `areal resume`.
        Raises ConfigError for an unknown key, a wrong type, a conflict or an unreadable file.
        """
        values: dict[str, tuple[Any, str]] = {}
        files = {argument for argument in arguments if argument.endswith(".toml") and Path(argument).is_file()}
        pairs = [(a, "", "") if a in files else a.partition("=") for a in arguments]  # a path may have a "=" in it
        for key, value in _flatten(defaults or {}):
            values[_known(key, "program")] = value, "program"
        for path in (key for key, equals, _ in pairs if not equals):
            for key, value in _flatten(_read_toml(path)):
                values[_known(key, path)] = value, path
        for key, text in ((key.strip(), text) for key, equals, text in pairs if equals):
            known = _known(key, "argument")
            values[known] = _parse(text, SETTINGS[known].annotation), "argument"
        tree: dict[str, Any] = {}
        for key, (value, _) in values.items():
            section, _, leaf = key.rpartition(".")
            (tree.setdefault(section, {}) if section else tree)[leaf] = value
        config = cls.model_validate(tree, context={"origins": {key: origin for key, (_, origin) in values.items()}})
        config._command = tuple(command)
        return config

    @classmethod
    def resume(cls, folder: Path | str, changes: Sequence[str] = (), command: Sequence[str] = ()) -> Config:
        """The settings of the run in `folder`, with `key=value` changes, for a Controller that goes on with it.

        Raises ConfigError when the folder has no run, and for a setting that shaped what has happened already (see
        CHANGEABLE).
        """
        path = Path(folder).resolve()  # `latest` is a link that moves
        if not (path / "ledger" / "ledger.db").exists():
            raise ConfigError(f"{folder} is not the folder of a run that began: it has no ledger; look into runs/")
        saved = _flatten(_read_toml(str(path / "config.toml")))
        chosen = {key: value for key, value in saved if key not in SETTINGS or value != SETTINGS[key].default}
        old, new = cls.load((), chosen), cls.load(changes, chosen)
        for key in SETTINGS:
            if old[key] != new[key] and not key.startswith(CHANGEABLE):
                raise ConfigError(
                    f"{key}={to_text(new[key], key)}: the run in {folder} has {to_text(old[key], key)}, and what "
                    f"happened in it depends on that; start a new run with model.path=<its checkpoint>, or change only "
                    f"{', '.join(CHANGEABLE)}"
                )
        new._run = path
        new._command = tuple(command)
        return new

    def changed(self, changes: Mapping[str, Any], origin: str) -> Config:
        """These settings with others by dotted key, from `origin`. Raises ConfigError."""
        tree = self.model_dump()
        for key, value in changes.items():
            section, _, leaf = key.rpartition(".")
            (tree[section] if section else tree)[leaf] = value
        origins = {**self.origins, **dict.fromkeys(changes, origin)}
        config = Config.model_validate(tree, context={"origins": origins})
        config._run, config._command = self._run, self._command
        return config

    def __eq__(self, other: object) -> bool:
        """Equal values; where they came from does not count."""
        return isinstance(other, Config) and self.model_dump() == other.model_dump()

    def __getitem__(self, key: str) -> Any:
        """The value of a dotted key."""
        section, _, leaf = key.rpartition(".")
        return getattr(getattr(self, section) if section else self, leaf)

    def to_toml(self) -> str:
        """Every setting as TOML that `load` reads back to an equal tree; a comment says where each value came from."""
        lines: list[str] = []
        section = ""
        for key, field in SETTINGS.items():
            head, _, leaf = key.rpartition(".")
            if head != section:
                section = head
                lines.append(f"\n[{section}]")
            line = f"{leaf} = {to_text(self[key], key)}"
            origin = self.origins.get(key, "default" if self[key] == field.default else "program")
            lines.append(f"{line:40}  # {origin}")
        return "\n".join(lines) + "\n"


def _settings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from _settings(field.annotation, f"{name}.")
        else:
            yield prefix + name, field


SETTINGS: Mapping[str, FieldInfo] = dict(_settings(Config))
"""Dotted key -> pydantic's field (default, description, annotation), in the order of this file."""

CHANGEABLE = (
    "checkpoint.",
    "data.epochs",
    "episode.",
    "failures.",
    "metrics.",
    "model.context_length",
    "placement.servers",
    "sampling.max_new_tokens",
    "servers.",
    "train.microbatch_tokens",
    "train.steps",
    "trainer.restarts",
    "trainer.start_timeout_s",
    "trainer.timeout_s",
    "view",
    "watchdog_s",
    "weights.",
)
"""The settings, or sections, that may change when a run goes on."""

_NOT_SAMPLABLE = {"top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"}


def _given(config: Config) -> Iterator[str]:
    for key in SETTINGS:
        section, _, leaf = key.rpartition(".")
        if leaf in (getattr(config, section) if section else config).model_fields_set:
            yield key


def _known(key: str, origin: str) -> str:
    if key in SETTINGS:
        return key
    leaf = key.rpartition(".")[2]
    if leaf in _NOT_SAMPLABLE:
        hint = "the trainer could not reproduce the log-probs of such tokens; sampling.temperature is what there is"
    else:
        same_leaf = [known for known in SETTINGS if known.rpartition(".")[2] == leaf]
        near = same_leaf or difflib.get_close_matches(key, SETTINGS, n=3)
        hint = f"did you mean {' or '.join(near[:3])}?" if near else "`python -m areal config` lists all"
    raise ConfigError(f"unknown setting {key!r} ({origin}): {hint}")


def _parse(text: str, annotation: Any) -> Any:
    """A TOML value if it is one, else the text itself; text settings need no quotes (`name=7`)."""
    if annotation is str and not text.startswith(('"', "'")):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _read_toml(path: str) -> dict[str, Any]:
    if not path.endswith(".toml"):
        raise ConfigError(f"argument {path!r} is neither key=value nor a .toml file")
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and prefix + key not in SETTINGS:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


_REMEDIES = {"bool_type": "true or false", "list_type": '["a", "b"]', "dict_type": "{name = value}"}


def _explain(error: Any, origins: Mapping[str, str]) -> str:
    path = ".".join(str(part) for part in error["loc"] if isinstance(part, str))
    key = next((known for known in SETTINGS if path == known or path.startswith(known + ".")), path)
    index = "".join(f"[{part}]" for part in error["loc"] if isinstance(part, int))
    remedy = f", such as {_REMEDIES[error['type']]}" if error["type"] in _REMEDIES else ""
    return f"{key}{index}={error['input']!r} ({origins.get(key, 'code')}): {error['msg']}{remedy}"


def to_text(value: Any, key: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(to_text(item, key) for item in value) + "]"
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{to_text(str(name), key)} = {to_text(item, key)}" for name, item in value.items()) + "}"
        )
    raise ConfigError(f"{key}: {value!r} cannot be written as TOML; use text, numbers, true/false, lists and tables")
