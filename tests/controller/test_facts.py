import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.controller import facts
from areal.controller.facts import BatchFormed, Fact, Finished

_KINDS = Fact.__args__
_FIELDS = {
    "int": st.integers(0, 2**53),
    "str": st.text(st.characters(exclude_categories=["Cs"])),
    "float": st.floats(allow_nan=False, allow_infinity=False),
    "tuple[int, ...]": st.lists(st.integers(0, 2**53)).map(tuple),
    "tuple[tuple[int, int], ...]": st.lists(st.tuples(st.integers(0, 2**31), st.integers(1, 2**31))).map(tuple),
}


def _any_of(kind):
    types = {name: field.type for name, field in kind.__dataclass_fields__.items()}
    return st.builds(kind, **{name: _FIELDS[kind] for name, kind in types.items()})


@pytest.mark.parametrize("kind", _KINDS, ids=lambda kind: kind.__name__)
def test_every_fact_survives_its_encoding(kind):
    @given(_any_of(kind))
    def check(fact):
        again = facts.decode(facts.encode(fact))
        assert again == fact
        assert type(again) is kind
        hash(again)  # tuples came back as tuples

    check()


def test_the_encoding_is_pinned():
    """A ledger of today is read by the areal of tomorrow: this must not change."""
    assert facts.encode(Finished(3, 1, 0.5, ((2, 7), (3, 9)))) == (
        b'["Finished",{"group":3,"member":1,"reward":0.5,"tokens":[[2,7],[3,9]]}]'
    )
    assert facts.encode(BatchFormed(4, 4, (1, 2), 2, 10, 0.5)) == (
        b'["BatchFormed",{"batch":4,"from_version":4,"groups":[1,2],"oldest_version":2,"masked_tokens":10,"learning_rate":0.5}]'
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'["Vanished",{"group":1}]', "unknown fact 'Vanished'"),
        (b'["Dropped",{"group":1,"reason":"stale","mood":"bad"}]', "mood"),
        (b'["Dropped",{"group":1}]', "reason"),
        (b'["Dropped",{"gro', "unexpected end"),
    ],
)
def test_what_is_not_a_fact_is_refused(body, message):
    with pytest.raises(ValueError, match=message):
        facts.decode(body)
