"""The settings of a run: `schema` says what there is, `load` reads it, `rules` refuses what conflicts."""

from areal.config.load import SETTINGS, Config, to_text

__all__ = ["SETTINGS", "Config", "to_text"]
