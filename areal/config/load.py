"""One typed, frozen tree of settings.

    Config.load(["run.toml", "seed=2", "train.steps=60"], defaults={"group.size": 8})

Later sources win: built-in defaults, the program's defaults, TOML files, `key.sub=value` arguments; `config.origins`
records where each value came from. An unknown key, a wrong type or a conflicting combination raises ConfigError before
anything starts (I10). Values are not converted: "60" is not a number, and 1 is not true.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr, ValidationError, ValidationInfo, model_validator

from areal.config.rules import conflicts
from areal.config.schema import SETTINGS, Tree, to_text
from areal.errors import ConfigError


class Config(Tree):
    """The settings of a run, checked as a whole."""

    _run: Path | None = PrivateAttr(default=None)
    _command: tuple[str, ...] = PrivateAttr(default=())

    @property
    def run(self) -> Path | None:
        """The folder of the run that these settings resume; None for a new run."""
        return self._run

    @property
    def command(self) -> tuple[str, ...]:
        """Command line of the program that was started with these settings; () if unknown."""
        return self._command

    @model_validator(mode="wrap")
    @classmethod
    def _checked(cls, data: Any, handler: Any, info: ValidationInfo) -> Config:
        """Report all type errors, or all conflicts, as one ConfigError, however the tree is built."""
        origins = (info.context or {}).get("origins", {})
        try:
            config: Config = handler(data)
        except ValidationError as error:
            raise ConfigError("\n".join(_explain(e, origins) for e in error.errors())) from None
        config._origins.update(origins or dict.fromkeys(_given(config), "code"))
        if not (info.context or {}).get("recorded") and (found := list(conflicts(config))):
            raise ConfigError("\n".join(found))
        return config

    @classmethod
    def load(
        cls,
        arguments: Sequence[str] = (),
        defaults: Mapping[str, Any] | None = None,
        command: Sequence[str] = (),
        *,
        recorded: bool = False,
    ) -> Config:
        """Build a Config from `[FILE.toml ...] key.sub=value ...`.

        defaults: the program's values by dotted key. command: the program, for `areal resume`. recorded: skip the
        checks for conflicts, because the rules may have changed since a run recorded these settings.
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
        origins = {key: origin for key, (_, origin) in values.items()}
        config = cls.model_validate(tree, context={"origins": origins, "recorded": recorded})
        config._command = tuple(command)
        return config

    @classmethod
    def resume(cls, folder: Path | str, changes: Sequence[str] = (), command: Sequence[str] = ()) -> Config:
        """The settings of the run in `folder`, with `key=value` changes, for a Controller that resumes it.

        Raises ConfigError if the folder has no run to resume, or a change is not CHANGEABLE.
        """
        path = Path(folder).resolve()  # `latest` is a link that moves
        if not (path / "ledger" / "ledger.db").exists():
            raise ConfigError(f"{folder} is not the folder of a run that began: it has no ledger; look into runs/")
        saved = dict(_flatten(_read_toml(str(path / "config.toml"))))
        chosen = {key: value for key, value in saved.items() if key not in SETTINGS or value != SETTINGS[key].default}
        new = cls.load(changes, chosen)
        for key, field in SETTINGS.items():  # only values: the saved settings may violate newer rules
            old = saved.get(key, field.default)
            if old != new[key] and not key.startswith(CHANGEABLE):
                raise ConfigError(
                    f"{key}={to_text(new[key], key)}: the run in {folder} has {to_text(old, key)}, and its recorded "
                    f"steps depend on it; start a new run with model.path=<its checkpoint>, or change only "
                    f"{', '.join(CHANGEABLE)}"
                )
        new._run = path
        new._command = tuple(command)
        return new

    def changed(self, changes: Mapping[str, Any], origin: str) -> Config:
        """These settings with `changes` by dotted key, recorded as coming from `origin`. Raises ConfigError."""
        tree = self.model_dump()
        for key, value in changes.items():
            section, _, leaf = key.rpartition(".")
            (tree[section] if section else tree)[leaf] = value
        origins = {**self.origins, **dict.fromkeys(changes, origin)}
        config = Config.model_validate(tree, context={"origins": origins})
        config._run, config._command = self._run, self._command
        return config

    def __eq__(self, other: object) -> bool:
        """Compares values, not their origins."""
        return isinstance(other, Config) and self.model_dump() == other.model_dump()

    def to_toml(self) -> str:
        """All settings as TOML that `load` reads back to an equal tree, with the origin of each value as a comment."""
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
"""Settings and sections that may change when a run is resumed."""

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
        hint = "the trainer could not reproduce the log-probs of such tokens; only sampling.temperature is supported"
    else:
        same_leaf = [known for known in SETTINGS if known.rpartition(".")[2] == leaf]
        near = same_leaf or difflib.get_close_matches(key, SETTINGS, n=3)
        hint = f"did you mean {' or '.join(near[:3])}?" if near else "`python -m areal config` lists all"
    raise ConfigError(f"unknown setting {key!r} ({origin}): {hint}")


def _parse(text: str, annotation: Any) -> Any:
    """A TOML value if it is one, else the string itself: string settings need no quotes (`name=7`)."""
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
