"""The public names, pinned: adding or removing one is a decision."""

import areal


def test_the_public_names() -> None:
    assert areal.__all__ == [
        "ArealError",
        "Completion",
        "Config",
        "ConfigError",
        "Controller",
        "Episode",
        "EpisodeError",
        "EpisodeRecord",
        "Evaluation",
        "Message",
        "Task",
        "launch",
        "sft",
        "tool",
    ]
    assert all(getattr(areal, name) is not None for name in areal.__all__)


def test_a_public_name_is_never_a_module() -> None:
    """Importing a submodule sets an attribute of the package, which would hide a function of the same name."""
    import importlib
    from types import ModuleType

    for home in areal._HOMES.values():
        importlib.import_module(f"areal.{home}")
    assert not [name for name in areal.__all__ if isinstance(getattr(areal, name), ModuleType)]
