import inspect
import re

from areal import errors


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes():
    drawn: dict[str, str] = {}
    parents = ["Exception"]
    for line in errors.__doc__.splitlines():
        if match := re.match(r"    ([│├└─ ]*)(\w+)", line):
            depth = len(match[1]) // 4
            drawn[match[2]] = parents[depth]
            parents[depth + 1 :] = [match[2]]
    classes = {name: cls.__base__.__name__ for name, cls in inspect.getmembers(errors, inspect.isclass)}
    assert drawn == classes


def test_every_error_says_what_it_is():
    for name, cls in inspect.getmembers(errors, inspect.isclass):
        assert cls.__doc__, name
        assert cls.__bases__ == (cls.__base__,), name


def test_the_root_cause_of_nested_groups_is_an_error_of_areal_or_else_the_first():
    bug, lost = ValueError("bug"), errors.ServerLost("lost")
    assert errors.root_cause(bug) is bug
    assert errors.root_cause(ExceptionGroup("g", [ExceptionGroup("h", [bug, KeyError(1)])])) is bug
    assert errors.root_cause(ExceptionGroup("g", [bug, ExceptionGroup("h", [KeyError(1), lost])])) is lost
