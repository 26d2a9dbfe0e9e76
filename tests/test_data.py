import asyncio
import subprocess
import sys

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.config import Config
from areal.data import Tasks, check, evaluation_tasks, read
from areal.errors import ConfigError, DataError


def numbered(count: int) -> list[dict]:
    return [{"id": i, "question": f"q{i}"} for i in range(count)]


def make(source: object, seed: int = 0, **settings: object) -> Tasks:
    return Tasks(source, Config(seed=seed, data=settings))


async def take(tasks: Tasks, count: int = 10**9) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        try:
            task, _ = await anext(tasks)
        except StopAsyncIteration:
            break
        found.append(task["id"])
    return found


def data_error(source: object, **settings: object) -> str:
    with pytest.raises(DataError) as caught:
        make(source, **settings)
    return str(caught.value)


async def test_each_epoch_has_every_task_once_in_an_order_of_its_own():
    ids = await take(make(numbered(20), seed=5, epochs=3))
    epochs = [ids[:20], ids[20:40], ids[40:]]
    assert all(sorted(epoch, key=int) == [str(i) for i in range(20)] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


async def test_another_seed_is_another_order():
    assert await take(make(numbered(8), seed=7), 8) != await take(make(numbered(8), seed=8), 8)


async def test_without_shuffle_the_order_is_that_of_the_rows_and_epochs_0_never_ends():
    ids = await take(make(numbered(3), shuffle=False), 10)
    assert ids == list("0120120120")


def test_the_seed_alone_decides_the_order_whatever_pythonhashseed_is():
    program = """
import asyncio
from areal.config import Config
from areal.data import Tasks
async def main():
    tasks = Tasks([{"id": i} for i in range(8)], Config(seed=7, data={"epochs": 2, "evaluation_size": 2}))
    print([t["id"] async for t, _ in tasks], [t["id"] for t in tasks.held_out])
asyncio.run(main())
"""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert outputs == {"['7', '1', '2', '3', '0', '4', '4', '3', '7', '2', '1', '0'] ['5', '6']\n"}


async def test_held_out_rows_never_appear_in_training():
    tasks = make(numbered(10), seed=1, evaluation_size=4, epochs=5)
    evaluation = {task["id"] for task in tasks.held_out}
    training = set(await take(tasks))
    assert len(evaluation) == 4
    assert evaluation | training == {str(i) for i in range(10)}
    assert not evaluation & training
    others = [{t["id"] for t in make(numbered(10), seed=s, evaluation_size=4).held_out} for s in range(5)]
    assert any(other != evaluation for other in others)


def test_holding_out_everything_is_refused():
    assert "data.evaluation_size=3 leaves nothing to train on: there are 3 tasks" in data_error(
        numbered(3), evaluation_size=3
    )


def test_evaluation_tasks_come_from_their_own_file_or_are_the_held_out_ones(tmp_path):
    train, test = tmp_path / "train.jsonl", tmp_path / "test.jsonl"
    train.write_text("".join(f'{{"id": {i}}}\n' for i in range(9)))
    test.write_text('{"id": "a"}\n{"id": "b"}\n')
    split = Config(data={"train": str(train), "evaluation_size": 3}, seed=4)
    assert list(evaluation_tasks(split)) == list(Tasks(None, split).held_out)
    own = evaluation_tasks(Config(data={"train": str(train), "evaluation": str(test)}))
    assert ([task["id"] for task in own], list(own[1:])) == (["a", "b"], [{"id": "b"}])
    with pytest.raises(DataError, match=r"set data.evaluation=FILE"):
        evaluation_tasks(Config(data={"train": str(train)}))


@given(stop=st.integers(0, 14), shuffle=st.booleans(), held_out=st.integers(0, 4))
def test_seek_goes_on_where_the_position_was_taken(stop, shuffle, held_out):
    async def check() -> None:
        settings = {"seed": 3, "epochs": 3, "shuffle": shuffle, "evaluation_size": held_out}
        whole = await take(make(numbered(5), **settings))
        first = make(numbered(5), **settings)
        for expected in range(min(stop, len(whole))):
            task, position = await anext(first)
            assert position == expected
            assert first.at(position) == task
        second = make(numbered(5), **settings)
        second.seek(first.position)
        assert await take(second) == whole[stop:]

    asyncio.run(check())


def test_a_stream_cannot_go_back_and_seek_names_its_end():
    with pytest.raises(DataError, match="position 3 is past the end of the stream, which has 2 tasks"):
        make(iter(numbered(2))).seek(3)
    with pytest.raises(DataError, match="cannot be read again"):
        make(iter(numbered(2))).at(0)


async def test_a_generator_is_consumed_lazily_once_and_in_order():
    pulled = []

    def rows():
        for row in numbered(100):
            pulled.append(row["id"])
            yield row

    tasks = make(rows())
    assert pulled == []
    assert await take(tasks, 3) == ["0", "1", "2"]
    assert pulled == [0, 1, 2]
    again = make(rows())
    again.seek(tasks.position)
    assert await take(again) == [str(i) for i in range(3, 100)]


async def test_an_async_iterable_is_a_live_source():
    queue: asyncio.Queue[dict] = asyncio.Queue()

    async def live():
        while (row := await queue.get()) is not None:
            yield row

    tasks = make(live())
    waiting = asyncio.create_task(take(tasks))
    for row in numbered(3):
        await queue.put(row)
    await queue.put(None)
    assert await waiting == ["0", "1", "2"]
    assert tasks.position == 3


@pytest.mark.parametrize("settings", [{"epochs": 2}, {"evaluation_size": 1}])
def test_a_stream_refuses_what_needs_a_length(settings):
    """I10."""
    key, value = next(iter(settings.items()))
    with pytest.raises(ConfigError, match=f"data.{key}={value}".lower()):
        make(iter(numbered(2)), **settings)


async def test_settings_that_were_printed_go_with_a_stream(tmp_path):
    """They name every setting, data.shuffle=true too."""
    (tmp_path / "run.toml").write_text(Config().to_toml())
    assert await take(Tasks(iter(numbered(2)), Config.load([str(tmp_path / "run.toml")]))) == ["0", "1"]


def test_tasks_from_nowhere_or_from_two_places_are_refused():
    assert "set data.train=FILE" in data_error(None)
    assert "remove one of the two" in data_error(numbered(1), train="a.jsonl")


async def test_an_agent_that_edits_its_task_edits_a_copy():
    rows = [{"id": 1, "question": "q"}]
    assert list(check(rows)) == [{"id": "1", "question": "q"}]
    tasks = make(rows, epochs=2)
    task, _ = await anext(tasks)
    task["question"] = "edited"
    assert (await anext(tasks))[0] == {"id": "1", "question": "q"}
    assert rows == [{"id": 1, "question": "q"}]


def test_a_row_without_id_gets_a_hash_of_its_content():
    rows = [{"question": "a", "n": np.arange(2)}, {"question": "b", "n": np.arange(2)}]
    ids = [task["id"] for task in make(rows, evaluation_size=1).held_out]
    reordered = [dict(reversed(row.items())) for row in rows]
    assert ids == [task["id"] for task in make(reordered, evaluation_size=1).held_out]
    assert len(ids[0]) == 24


def test_jsonl_with_byte_order_mark_blank_lines_and_no_last_newline(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"id": 1}\r\n\r\n{"id": "zwei", "text": "\xc3\xa9"}')
    assert list(read(str(file))) == [{"id": "1"}, {"id": "zwei", "text": "é"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"id": 1}\n\n{"id": 2, "question": "who}\n', "tasks.jsonl line 3 is not JSON: "),
        (b'{"id": 1}\n{"id": 2, "question": "who}\n', """near '{"id": 2, "question": "who}'"""),
        (b'{"id": 1}\n\xff\xfe\n', "tasks.jsonl line 2 is not JSON"),
        (b'{"pad": "' + b"x" * 500 + b'", "a": nope, "pad2": "' + b"y" * 500 + b'"}', """near '...xxxx"""),
        (b'{"id": 1}\n[1, 2]\n', "tasks.jsonl line 2 is a list, not an object"),
        (b'{"id": 1}\n\n{"id": "1"}\n', "tasks.jsonl line 1 and FOLDER/tasks.jsonl line 3 have the same id '1'"),
        (b'{"q": 1}\n{"q": 2}\n{"q": 1}\n', "tasks.jsonl line 1 and FOLDER/tasks.jsonl line 3 are the same task"),
        (b'{"id": null}\n', "tasks.jsonl line 1: id=None must be a non-empty string or an integer"),
        (b'{"id": 1.5}\n', "id=1.5 must be"),
        (b'{"id": true}\n', "id=True must be"),
        (b'{"id": ""}\n', "id='' must be"),
        (b"\n\n", "tasks.jsonl: no tasks"),
        (b"", "tasks.jsonl: no tasks"),
    ],
)
def test_a_bad_line_names_the_file_and_the_line(tmp_path, text, message):
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(text)
    error = data_error(None, train=str(file))
    assert message.replace("FOLDER", str(tmp_path)) in error
    assert len(error) < 400


def test_a_row_that_cannot_be_hashed_asks_for_an_id():
    assert "tasks[0] needs an `id`" in data_error([{"callback": print}])


def test_missing_and_unknown_files(tmp_path):
    assert f"cannot read {tmp_path}/no.jsonl: No such file or directory" in data_error(
        None, train=f"{tmp_path}/no.jsonl"
    )
    assert "cannot read" in data_error(None, train=f"{tmp_path}/no.parquet")
    (tmp_path / "tasks.csv").write_text("id\n1\n")
    assert "use .jsonl (one JSON object per line) or .parquet" in data_error(None, train=f"{tmp_path}/tasks.csv")
    (tmp_path / "broken.parquet").write_text("no parquet at all")
    assert "broken.parquet is not Parquet" in data_error(None, train=f"{tmp_path}/broken.parquet")


@pytest.mark.parametrize(("package", "source"), [("pyarrow", "a.parquet"), ("datasets", "some/name:train")])
def test_a_missing_package_names_the_extra(monkeypatch, package, source):
    monkeypatch.setitem(sys.modules, package, None)
    extra = "parquet" if package == "pyarrow" else package
    assert f'pip install "areal[{extra}]"' in data_error(None, train=source)


async def test_parquet_rows_come_one_at_a_time_from_the_table(tmp_path):
    file = tmp_path / "tasks.parquet"
    table = pyarrow.table(
        {"id": list(range(3000)), "question": [f"q{i}" for i in range(3000)], "tags": [["a", "b"]] * 3000}
    )
    pyarrow.parquet.write_table(table, file, row_group_size=700)
    rows = read(str(file))
    assert (len(rows), rows[2999]) == (3000, {"id": "2999", "question": "q2999", "tags": ["a", "b"]})
    pyarrow.parquet.write_table(table.drop(["id"]).slice(0, 5), file)
    assert len({row["id"] for row in read(str(file))}) == 5
    pyarrow.parquet.write_table(pyarrow.concat_tables([table, table]), file)
    assert "row 0 and" in data_error(None, train=str(file))


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def test_data_sets_saved_on_disk(tmp_path):
    train = datasets.Dataset.from_list(numbered(4))
    train.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": train, "test": train.select([3])}).save_to_disk(tmp_path / "two")
    datasets.DatasetDict({"test": train}).save_to_disk(tmp_path / "three")
    assert [row["id"] for row in read(f"{tmp_path}/one")] == ["0", "1", "2", "3"]
    assert read(f"{tmp_path}/two:test")[0] == {"id": "3", "question": "q3"}
    assert (len(read(f"{tmp_path}/two")), len(read(f"{tmp_path}/three"))) == (4, 4)
    assert "no split 'dev'; it has train, test" in data_error(None, train=f"{tmp_path}/two:dev")
    assert "has no splits; remove 'test'" in data_error(None, train=f"{tmp_path}/one:test")
    assert len(make(train, evaluation_size=1).held_out) == 1


def test_a_folder_of_files_is_loaded_by_datasets(tmp_path, offline):
    folder = tmp_path / "facts"
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2]}), folder / "part.parquet")
    assert [row["id"] for row in read(f"{folder}:train")] == ["1", "2"]


def test_an_unknown_data_set_is_a_data_error(offline):
    assert "cannot load this data set" in data_error(None, train="no/such-set:train")
    assert "write name, name:split or name:config:split" in data_error(None, train="a:b:c:d")
