import dataclasses
import inspect

import pytest

from areal import types
from areal.monitor.metrics import StepReport
from areal.workers import protocols

RECORDS = [
    cls
    for module in (types, protocols)
    for _, cls in inspect.getmembers(module, dataclasses.is_dataclass)
    if cls.__module__ == module.__name__
] + [StepReport]


def test_there_are_records():
    assert {"Completion", "Trajectory", "Batch", "TrainRequest", "ServerInfo"} <= {cls.__name__ for cls in RECORDS}


@pytest.mark.parametrize("cls", RECORDS, ids=lambda cls: cls.__name__)
def test_records_are_frozen_slotted_and_documented(cls):
    record = cls(**{field.name: None for field in dataclasses.fields(cls)})
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, dataclasses.fields(cls)[0].name, 1)
    assert not hasattr(record, "__dict__")
    assert not cls.__doc__.startswith(f"{cls.__name__}("), "the docstring is the one that dataclass makes"


def test_no_sampled_token_can_have_the_version_of_one_that_was_not():
    assert types.NOT_SAMPLED < 0
