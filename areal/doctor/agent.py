"""Loads the agent of `areal doctor --agent` from the user's program."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from operator import attrgetter
from pathlib import Path
from types import ModuleType

from areal.controller.rollout import Agent
from areal.errors import ConfigError


def load_agent(where: str) -> Agent:
    """The async function that `where` names: FILE.py:NAME or MODULE:NAME.

    Its module is imported, so code under `if __name__ == "__main__":` does not run. The file's folder, or for a module
    the current one, becomes `sys.path[0]`, as Python does for a program. Raises ConfigError, from the import's error.
    """
    source, _, name = where.rpartition(":")
    if not source or not name:
        raise ConfigError(f"--agent {where!r}: give FILE.py:NAME or MODULE:NAME, such as program.py:agent")
    is_file = source.endswith(".py") or os.sep in source
    if is_file and not Path(source).is_file():
        raise ConfigError(f"--agent {where!r}: there is no file {Path(source).absolute()}")
    try:
        module = _load_file(Path(source).resolve()) if is_file else _import(source)
    except SystemExit as error:
        raise ConfigError(
            f"--agent {where!r}: importing {source} exited the program (SystemExit: {error}); put the code that starts "
            'it under `if __name__ == "__main__":`'
        ) from None
    except Exception as error:
        if not is_file and isinstance(error, ModuleNotFoundError) and f"{source}.".startswith(f"{error.name}."):
            raise ConfigError(f"--agent {where!r}: no module {error.name}; for a file, write FILE.py:NAME") from None
        raise ConfigError(f"--agent {where!r}: importing {source} raised {type(error).__name__}: {error}") from error
    try:
        agent = attrgetter(name)(module)
    except AttributeError:
        own = [key for key, value in vars(module).items() if inspect.iscoroutinefunction(value)]
        has = f"its async functions are: {', '.join(own)}" if own else "it has no async function"
        raise ConfigError(f"--agent {where!r}: {source} has no {name}; {has}") from None
    written = inspect.unwrap(agent)  # a decorator may return a plain function that only delegates
    if not (inspect.iscoroutinefunction(written) or inspect.iscoroutinefunction(type(agent).__call__)):
        raise ConfigError(
            f"--agent {where!r}: {name} is {_kind(agent)}, not an async function; write "
            f"`async def {name.rpartition('.')[2]}(episode, task)`"
        )
    try:
        inspect.signature(agent).bind("episode", "task")
    except TypeError as error:
        raise ConfigError(
            f"--agent {where!r}: it cannot be called as {name}(episode, task): {error}; bind its other parameters, for "
            "example with functools.partial"
        ) from None
    return agent


def _load_file(file: Path) -> ModuleType:
    sys.path.insert(0, str(file.parent))
    # The file's own name lets child processes import it; another module may already have that name.
    name = file.stem if file.stem not in sys.modules else f"agent of {file}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _import(name: str) -> ModuleType:
    sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _kind(value: object) -> str:
    if inspect.isclass(value):
        return "a class"
    return "a function" if inspect.isfunction(value) else f"of type {type(value).__name__}"
