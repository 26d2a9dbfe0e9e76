"""From groups to a request: advantages per episode, the staleness mask (I2), token counts, learning rates."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.algorithms.advantages import grpo
from areal.algorithms.batching import build_request, flatten, learning_rate, sft_request
from areal.config import Config
from areal.errors import ArealError
from areal.types import NOT_SAMPLED, Batch, EpisodeRecord, FlatBatch, Group, TrainRequest, Trajectory


def trajectory(versions: list[int], first_id: int = 0) -> Trajectory:
    """One token per version; -1 is a token that no server sampled."""
    array = np.array(versions, dtype=np.int32)
    sampled = array != NOT_SAMPLED
    ids = np.arange(first_id, first_id + len(array), dtype=np.int32)
    return Trajectory(ids, sampled, np.where(sampled, -0.5, 0).astype(np.float32), array)


def batch(*groups: list[tuple[float, list[list[int]]]], version: int = 5) -> Batch:
    """Groups of (reward, versions of each trajectory)."""
    return Batch(
        id=3,
        from_version=version,
        groups=tuple(
            Group(
                number,
                f"task-{number}",
                tuple(
                    EpisodeRecord(number, member, f"task-{number}", reward, tuple(trajectory(v) for v in versions))
                    for member, (reward, versions) in enumerate(episodes)
                ),
            )
            for number, episodes in enumerate(groups, start=7)
        ),
    )


def flat(of: Batch, max_staleness: int = 2, late: str = "mask") -> FlatBatch:
    return flatten(of, version=of.from_version, max_staleness=max_staleness, advantage="grpo", late=late)


def test_arrays_end_to_end() -> None:
    result = flat(batch([(1.0, [[-1, 4, 5]]), (0.0, [[-1, -1, 5, -1, 3]])]))
    assert result.lengths.tolist() == [3, 5]
    assert result.ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert result.versions.tolist() == [-1, 4, 5, -1, -1, 5, -1, 3]
    assert result.loss_weights.tolist() == [0, 1, 1, 0, 0, 1, 0, 1]
    assert result.logprobs.tolist() == [0, -0.5, -0.5, 0, 0, -0.5, 0, -0.5]
    assert result.advantages.tolist() == grpo([1, 0], std=True).tolist()
    types = {field.name: getattr(result, field.name).dtype for field in fields(result)}
    assert types == {
        "ids": np.int32,
        "lengths": np.int32,
        "loss_weights": np.float32,
        "logprobs": np.float32,
        "versions": np.int32,
        "advantages": np.float32,
    }


def test_every_sequence_of_an_episode_carries_its_advantage() -> None:
    result = flat(
        batch([(1.0, [[-1, 5], [-1, 5, 5], [-1, 5]]), (0.0, [[-1, 5]])], [(0.5, [[-1, 5]]), (0.5, [[-1, 5]])])
    )
    first, second = grpo([1, 0], std=True).tolist()
    assert result.advantages.tolist() == [first, first, first, second, 0, 0]


def test_dr_grpo_does_not_divide_by_the_deviation() -> None:
    of = batch([(1.0, [[-1, 5]]), (0.0, [[-1, 5]])])
    assert flatten(of, version=5, max_staleness=0, advantage="dr_grpo", late="mask").advantages.tolist() == [0.5, -0.5]


def test_late_tokens_leave_the_loss_and_a_sequence_without_loss_leaves_the_batch() -> None:
    """I2. The advantage still counts every member: masking tokens does not change who was better."""
    result = flat(batch([(1.0, [[-1, 2, 3, 5]]), (0.0, [[-1, 1, 2]]), (0.0, [[-1, -1]])]))
    assert result.lengths.tolist() == [4]
    assert result.loss_weights.tolist() == [0, 0, 1, 1]
    assert result.advantages.tolist() == grpo([1, 0, 0], std=True)[:1].tolist()


def test_a_late_token_is_an_error_where_the_scheduler_drops_late_groups() -> None:
    """I2, late="drop"."""
    old = batch([(1.0, [[-1, 5]]), (0.0, [[-1, 2, 5]])])
    with pytest.raises(
        ValueError, match=r"group 7, member 1: a token of version 2 is stale in the step from version 5"
    ):
        flat(old, late="drop")
    assert flat(old, max_staleness=3, late="drop").loss_weights.sum() == 3


versions = st.lists(st.integers(-1, 9), min_size=1, max_size=8).map(lambda tail: [-1, *tail])
episodes = st.tuples(st.sampled_from([0.0, 0.5, 1.0]), st.lists(versions, max_size=3))


@given(st.lists(st.lists(episodes, min_size=1, max_size=4), min_size=1, max_size=4), st.integers(0, 4))
def test_exactly_the_young_sampled_tokens_are_trained(groups: list, max_staleness: int) -> None:
    """I2: no token with a larger staleness has a weight, no other sampled token loses its own, none moves."""
    of = batch(*groups, version=9)
    result = flat(of, max_staleness)
    young = (result.versions != NOT_SAMPLED) & (9 - result.versions <= max_staleness)
    assert ((result.loss_weights == 1) == young).all()
    assert ((result.loss_weights == 0) == ~young).all()
    everything = [t for group in of.groups for episode in group.episodes for t in episode.trajectories]
    assert young.sum() == sum((t.loss_mask & (9 - t.versions <= max_staleness)).sum() for t in everything)
    bounds = np.cumsum(result.lengths)[:-1]
    assert all(part.any() for part in np.split(result.loss_weights, bounds) if len(part))
    assert len(result.ids) == result.lengths.sum()
    assert all(part.tolist() == list(range(len(part))) for part in np.split(result.ids, bounds))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"versions": np.array([-1, 6], dtype=np.int32)}, "version 6 cannot be in the step from version 5"),
        ({"versions": np.array([-1, -1], dtype=np.int32)}, "no server sampled"),
        ({"loss_mask": np.array([True, True])}, "no server sampled"),
        ({"loss_mask": np.array([True, True]), "versions": np.array([5, 5], dtype=np.int32)}, "no server sampled"),
    ],
)
def test_a_trajectory_that_breaks_the_contract_is_named(change: dict, message: str) -> None:
    """I5, I6: such a token cannot be what a server sampled under these weights."""
    bad = replace(trajectory([-1, 5]), **change)
    group = Group(4, "t", (EpisodeRecord(4, 1, "t", 1.0, (bad,)),))
    with pytest.raises(ValueError, match=f"group 4, member 1.*{message}"):
        flat(Batch(0, 5, (group,)))


CONFIG = Config.load(
    [],
    {
        "staleness.max": 1,
        "train.minibatches": 2,
        "train.passes": 3,
        "train.microbatch_tokens": 6,
        "sampling.temperature": 0.7,
        "algorithm.clip": 0.1,
        "algorithm.importance_cap": 2.0,
    },
)


def test_a_request_names_its_step_and_carries_the_settings() -> None:
    of = batch([(1.0, [[-1, 5, 5]]), (0.0, [[-1, 4, 5, 5]])], [(1.0, [[-1, 3, 4]]), (0.0, [[-1, 5, 3]])])
    request = build_request(of, CONFIG, life=2, learning_rate=1e-4, ranks=2, seed=11)
    assert (request.life, request.from_version, request.batch_id, request.kind) == (2, 5, 3, "ppo")
    assert (request.passes, request.temperature, request.clip, request.importance_cap) == (3, 0.7, 0.1, 2.0)
    assert (request.max_staleness, request.learning_rate) == (1, 1e-4)
    assert len(request.minibatches) == 2
    check_token_counts(request)
    assert sum(step.loss_tokens for step in request.minibatches) == 7  # the two of version 3 are late


def check_token_counts(request: TrainRequest) -> None:
    """Each mini-batch's loss_tokens is the sum of the weights of its sequences."""
    per_sequence = [part.sum() for part in np.split(request.batch.loss_weights, np.cumsum(request.batch.lengths)[:-1])]
    for step in request.minibatches:
        members = [i for shard in step.shards for micro in shard for i in micro]
        assert step.loss_tokens == pytest.approx(sum(per_sequence[i] for i in members))


def test_a_request_can_be_made_again() -> None:
    """I4: the same batch and seed give the same plan; another batch gets another one."""
    of = batch(*[[(float(m), [[-1] + [5] * (g + m + 1)]) for m in range(4)] for g in range(8)])

    def minibatches(of: Batch) -> tuple:
        return build_request(of, CONFIG, life=0, learning_rate=1.0, ranks=2, seed=1).minibatches

    assert minibatches(of) == minibatches(of)
    assert minibatches(of) != minibatches(replace(of, id=4))


def test_a_group_without_variance_stays_in_the_token_mean() -> None:
    of = batch([(1.0, [[-1, 5]]), (1.0, [[-1, 5, 5]])])
    request = build_request(of, CONFIG, life=0, learning_rate=1.0, ranks=1, seed=0)
    assert request.batch.advantages.tolist() == [0, 0]
    assert sum(step.loss_tokens for step in request.minibatches) == 3


@pytest.mark.parametrize("versions", [[], [[-1, 1]]])
def test_a_batch_without_a_token_to_train_on_says_why(versions: list) -> None:
    with pytest.raises(ArealError, match=r"batch 3 \(groups 7\) has no token to train on.*staleness\.max=1"):
        build_request(batch([(1.0, versions)]), CONFIG, life=0, learning_rate=1.0, ranks=1, seed=0)


def sft(examples: list, **changes: int) -> TrainRequest:
    arguments = {"life": 0, "from_version": 4, "batch_id": 9, "ranks": 2, "budget": 4} | changes
    return sft_request(examples, learning_rate=0.1, **arguments)


def test_sft_request() -> None:
    request = sft([([5, 6, 7], [0.5, 0.25, 1]), ([8], [1]), (np.array([9, 10]), np.array([0, 1]))])
    assert (request.kind, request.from_version, request.batch_id, request.learning_rate) == ("sft", 4, 9, 0.1)
    assert request.batch.ids.tolist() == [5, 6, 7, 9, 10]
    assert request.batch.loss_weights.tolist() == [0, 0.25, 1, 0, 1]  # nothing predicts a first token
    assert request.batch.lengths.tolist() == [3, 2]
    (step,) = request.minibatches
    assert step.shards == (((0,),), ((1,),))
    check_token_counts(request)


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([([1, 2], [1.0])], r"example 0 has ids of shape \(2,\) and weights of shape \(1,\)"),
        ([([1, 2], [0, 1]), ([1, 2], [0, -1])], "example 1 has a loss weight that is negative"),
        ([([1, 2], [1, 0]), ([1], [1])], "none of the 2 examples"),
        ([], "none of the 0 examples"),
    ],
)
def test_sft_refuses_what_it_cannot_train_on(examples: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sft(examples)


def rates(**settings: object) -> list[float]:
    defaults = {"train.steps": 9, "optimizer.lr": 8.0}
    config = Config.load([], defaults | {f"optimizer.{name}": value for name, value in settings.items()})
    return [learning_rate(step, config) for step in range(11)]


def test_learning_rates_by_hand() -> None:
    assert rates() == [8.0] * 11
    assert rates(warmup_steps=3) == [2, 4, 6, 8, 8, 8, 8, 8, 8, 8, 8]
    linear = rates(schedule="linear", warmup_steps=2, min_lr=2.0)
    assert linear == pytest.approx([8 / 3, 16 / 3, 8, 7, 6, 5, 4, 3, 2, 2, 2])
    cosine = rates(schedule="cosine", min_lr=2.0)
    assert cosine[::4] == pytest.approx([8, 5, 2])
    assert cosine[8:] == [2, 2, 2]
    assert cosine == sorted(cosine, reverse=True)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize(("steps", "warmup"), [(0, 0), (1, 0), (1, 1), (3, 3), (0, 9)])
def test_learning_rates_of_short_runs_are_finite_and_positive(schedule: str, steps: int, warmup: int) -> None:
    defaults = {"train.steps": steps, "optimizer.schedule": schedule, "optimizer.warmup_steps": warmup}
    config = Config.load([], defaults | {"optimizer.lr": 1.0})
    rates = [learning_rate(step, config) for step in range(steps + 3)]
    assert all(0 <= rate <= 1 for rate in rates)
    assert rates[0] > 0
