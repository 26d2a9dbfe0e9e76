import json
import os
import stat
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from areal.config import Config
from areal.errors import ConfigError
from areal.folder import SUMMARY_KEYS, RunFolder, take_folder


def make(tmp_path, **settings) -> RunFolder:
    return RunFolder.create(Config(folder=str(tmp_path / "runs"), **settings))


def test_numbers_go_up_per_name_and_latest_points_at_the_last(tmp_path):
    names = [make(tmp_path, name=name).path.name for name in ("a", "a", "b", "a.b")]
    assert names == ["a-0001", "a-0002", "b-0001", "a.b-0001"]
    (tmp_path / "runs" / "a-0041").mkdir()
    (tmp_path / "runs" / "a-b").mkdir()
    folder = make(tmp_path, name="a")
    assert folder.path.name == "a-0042"
    assert (tmp_path / "runs" / "latest").resolve() == folder.path.resolve()
    assert os.readlink(tmp_path / "runs" / "latest") == "a-0042"


def test_runs_that_start_together_get_different_folders(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: make(tmp_path).path, range(16)))
    assert sorted(path.name for path in paths) == [f"run-{i:04d}" for i in range(1, 17)]
    assert (tmp_path / "runs" / "latest").resolve() in [path.resolve() for path in paths]


def test_only_the_owner_can_read_it_and_the_parts_are_there(tmp_path):
    folder = make(tmp_path)
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert {path.name for path in folder.path.iterdir()} == {"logs", "ledger", "checkpoints", "config.toml"}


def test_config_toml_reads_back_to_the_same_tree(tmp_path):
    config = Config.load([f"folder={tmp_path}/runs", "train.steps=7", "model.template_args={enable_thinking=false}"])
    folder = RunFolder.create(config)
    assert Config.load([str(folder.config_file)]) == config
    assert "steps = 7" in folder.config_file.read_text()


def test_a_latest_of_the_users_own_is_left_alone(tmp_path):
    (tmp_path / "runs" / "latest").mkdir(parents=True)
    (tmp_path / "runs" / "latest" / "mine").touch()
    folder = make(tmp_path)
    assert (tmp_path / "runs" / "latest" / "mine").exists()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["latest", folder.path.name]


def test_a_place_that_cannot_hold_a_run_is_a_config_error(tmp_path):
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(ConfigError, match="cannot create a run folder in folder="):
        make(tmp_path)


def test_prune_keeps_the_newest_by_step_and_clears_leftovers(tmp_path):
    folder = make(tmp_path, checkpoint={"keep": 2})
    assert folder.checkpointed is None
    for step in (100, 20, 9):
        folder.checkpoint(step).mkdir()
        (folder.checkpoint(step) / "model.safetensors").touch()
    leftover = folder.path / "checkpoints" / ".deleted-5-x"
    leftover.mkdir()
    (folder.path / "checkpoints" / "step-30.partial").mkdir()
    assert list(folder.checkpoints()) == [9, 20, 100]
    assert folder.prune() == [9]
    assert folder.prune() == []
    assert folder.checkpointed == 100
    assert sorted(path.name for path in (folder.path / "checkpoints").iterdir()) == [
        "step-100",
        "step-20",
        "step-30.partial",
    ]


def test_prune_leaves_what_cannot_be_deleted_for_the_next_time(tmp_path):
    """The checkpoint that came before is on disk, and the run goes on."""
    folder = make(tmp_path, checkpoint={"keep": 1})
    (folder.path / "checkpoints" / ".deleted-5-x").touch()  # as a file that NFS keeps for a reader: no rmtree
    for step in (9, 20):
        folder.checkpoint(step).mkdir()
    assert folder.prune() == [9]
    assert list(folder.checkpoints()) == [20]


def test_summary_has_every_key_and_is_replaced_whole(tmp_path):
    folder = make(tmp_path)
    folder.write_summary({"steps": 3})
    groups = {"admitted": 5, "trained": 3, "dropped": {"stale": 1}, "open": 1}
    folder.write_summary({"steps": 4, "logprob_gap_max": float("nan"), "wall_s": np.float32(1.5), "groups": groups})
    summary = json.loads(folder.summary_file.read_text())
    assert tuple(summary) == SUMMARY_KEYS
    assert (summary["steps"], summary["wall_s"], summary["logprob_gap_max"]) == (4, 1.5, None)
    assert summary["groups"] == groups
    with pytest.raises(TypeError):
        folder.write_summary({"steps": object()})
    assert json.loads(folder.summary_file.read_text()) == summary


def test_the_curve_shows_the_rewards_of_the_file(tmp_path):
    folder = make(tmp_path)
    assert folder.draw_curve() is None
    with (folder.path / "metrics.jsonl").open("w") as file:
        for step in [1, 2, 3, 2, 3, 4]:
            file.write(json.dumps({"step": step, "reward": step / 4}) + "\n")
        file.write('{"step": 5, "reward": null}\n{"step": 6, "rew')
    empty = folder.draw_curve()
    folder.write_summary({"success_before": 0.25, "success_after": 0.95})
    with Image.open(empty) as image:
        before = np.asarray(image.convert("RGB"))
    with Image.open(folder.draw_curve()) as image:
        after = np.asarray(image.convert("RGB"))
    assert before.shape == (540, 960, 3)
    blue = np.abs(before.astype(int) - (0x1F, 0x6F, 0xEB)).sum(-1) < 30
    green = np.abs(after.astype(int) - (0x2D, 0xA4, 0x4E)).sum(-1) < 60
    assert np.ptp(np.nonzero(blue)[1]) > 400
    assert green.sum() > 200
    assert folder._rewards() == {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0}


HOLDER = """
    import sys, time
    from pathlib import Path
    from areal.folder import take_folder

    lock = take_folder(Path(sys.argv[1]))
    Path(sys.argv[1], "version-3").mkdir()
    print("taken", flush=True)
    time.sleep(60)
"""


def test_folders_of_weights_that_killed_processes_left_are_deleted(tmp_path: Path) -> None:
    """Those of processes that live stay, and so does all that is not such a folder."""
    (tmp_path / "somebody" / "version-1").mkdir(parents=True)
    (tmp_path / "trap").mkdir()
    os.mkfifo(tmp_path / "trap" / ".areal-lock")  # to open it would wait for ever
    holders = []
    for name in ("run-0001.0-1", "run-0002.0-2"):
        command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path / name)]
        holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        holders.append(holder)
        assert holder.stdout
        assert holder.stdout.readline() == "taken\n"
    try:
        holders[0].kill()
        holders[0].wait()
        with pytest.raises(ConfigError, match="is used by a running process"):
            take_folder(tmp_path / "run-0002.0-2")
        names = ["run-0001.1-3", "run-0002.0-2", "somebody"]
        os.close(take_folder(tmp_path / "run-0001.1-3"))
        assert sorted(path.name for path in tmp_path.iterdir()) == names
        assert (tmp_path / "run-0001.1-3").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "run-0002.0-2" / "version-3").is_dir()
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def test_a_folder_of_weights_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot create .*: File exists; set weights.folder to another"):
        take_folder(tmp_path / "file" / "run")


def test_summaries_of_two_threads_are_both_whole(tmp_path, monkeypatch):
    """A thread goes on when whoever waited for it is cancelled, and the last summary comes next."""
    folder = make(tmp_path)
    fsync, slow = os.fsync, threading.Event()

    def slowly(descriptor):
        slow.wait(0.2)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", slowly)
    threads = [threading.Thread(target=folder.write_summary, args=({"steps": number},)) for number in (1, 2)]
    errors = []
    monkeypatch.setattr(threading, "excepthook", errors.append)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert json.loads(folder.summary_file.read_text())["steps"] == 2


def test_settings_that_conflict_by_newer_rules_can_be_read(tmp_path):
    """`areal inspect` and `areal replay` look at runs of older code, too."""
    folder = make(tmp_path)
    text = folder.config_file.read_text()
    folder.config_file.write_text(text.replace("\nargs = []", '\nargs = ["--max-total-tokens=9"]'))
    assert folder.configs()[0].servers.args == ["--max-total-tokens=9"]
