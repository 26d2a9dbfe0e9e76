"""areal/workers/placement.py: what does not fit is refused before anything starts."""

from __future__ import annotations

import pytest

from areal.config import Config
from areal.errors import ConfigError
from areal.workers.placement import Plan, place, visible


@pytest.mark.parametrize(
    ("settings", "devices", "plan"),
    [
        (["servers.count=3", "trainer.ranks=2"], 0, Plan(((), (), ()), ())),
        ([], 2, Plan(((1,),), (0,))),
        (["servers.count=3", "trainer.ranks=2"], 8, Plan(((2,), (3,), (4,)), (0, 1))),
        (["servers.urls=['http://a']", "trainer.ranks=2"], 2, Plan((), (0, 1))),
        (["servers.urls=['http://a']"], 0, Plan((), ())),
        (["placement.servers=[[0, 1], [2]]", "servers.count=2", "trainer.ranks=2"], 5, Plan(((0, 1), (2,)), (3, 4))),
        (["placement.ranks=[2, 0]", "trainer.ranks=2"], 3, Plan(((1,),), (2, 0))),
        (["placement.ranks=[0]", "placement.servers=[[0]]"], 1, Plan(((0,),), (0,))),
    ],
)
def test_placed(settings: list[str], devices: int, plan: Plan) -> None:
    """CPU; ranks first, then servers; servers elsewhere; tensor parallel; gaps are used; a device shared on purpose."""
    assert place(Config.load(settings), devices) == plan


@pytest.mark.parametrize(
    ("settings", "devices", "message"),
    [
        ([], 1, "trainer.ranks=1 and servers.count=1 need 2 .* 1 of 1 device are free"),
        (
            ["servers.count=7", "trainer.ranks=2"],
            8,
            "trainer.ranks=2 and servers.count=7 need 9 .* 8 of 8 devices are free",
        ),
        (["placement.servers=[[0, 1]]", "trainer.ranks=2"], 3, "need 2 .* 1 of 3 devices are free"),
        (["placement.ranks=[0, 1]", "trainer.ranks=2", "servers.count=2"], 3, "need 2 .* 1 of 3 devices are free"),
        (["placement.ranks=[4]"], 4, "device 4 .from 0., but this machine has 4 devices"),
        (["placement.servers=[[1]]"], 1, "device 1 .from 0., but this machine has 1 device$"),
        (["placement.servers=[[0]]"], 0, "device 0 .from 0., but this machine has 0 devices"),
    ],
)
def test_refused(settings: list[str], devices: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place(Config.load(settings), devices)


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("spare", [0, 2])
def test_automatic_placement_gives_every_device_once(ranks: int, servers: int, spare: int) -> None:
    plan = place(Config.load([f"trainer.ranks={ranks}", f"servers.count={servers}"]), ranks + servers + spare)
    given = [*plan.ranks, *(device for server in plan.servers for device in server)]
    assert len(set(given)) == len(given) == ranks + servers
    assert set(given) <= set(range(ranks + servers + spare))


def test_devices_count_from_those_that_are_visible() -> None:
    assert visible([0, 2], {}) == "0,2"
    assert visible([0, 2], {"CUDA_VISIBLE_DEVICES": "4,5,7"}) == "4,7"
    assert visible([1], {"CUDA_VISIBLE_DEVICES": "GPU-aa,GPU-bb"}) == "GPU-bb"
