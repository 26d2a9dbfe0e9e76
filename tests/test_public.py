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
