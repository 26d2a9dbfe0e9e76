import pytest

from areal.config import SETTINGS, Config
from areal.config.schema import GroupSettings, Train
from areal.errors import ConfigError


def refused(*arguments: str, **defaults: object) -> str:
    with pytest.raises(ConfigError) as caught:
        Config.load(arguments, defaults)
    return str(caught.value)


def test_later_sources_win_and_origins_say_which(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("seed = 2\n[train]\nsteps = 20\nbatch_groups = 4\n")
    config = Config.load(["train.steps=60", str(file)], {"seed": 1, "train.steps": 10, "group": {"size": 4}})
    assert (config.seed, config.train.steps, config.train.batch_groups, config.group.size) == (2, 60, 4, 4)
    assert config.origins == {
        "seed": str(file),
        "train.steps": "argument",
        "train.batch_groups": str(file),
        "group.size": "program",
    }
    assert Config(train=Train(steps=3)).origins == {"train.steps": "code"}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("train.step=6", "unknown setting 'train.step' (argument): did you mean train.steps"),
        ("batch_groups=6", "unknown setting 'batch_groups' (argument): did you mean train.batch_groups?"),
        ("xyzzy=6", "unknown setting 'xyzzy' (argument): `python -m areal config` lists all"),
        ("sampling.top_p=0.9", "sampling.top_p' (argument): the trainer could not reproduce the log-probs"),
        ("sampling.repetition_penalty=1.1", "could not reproduce the log-probs"),
        ("train.steps=many", "train.steps='many' (argument): Input should be a valid integer"),
        ("train.steps=6.0", "train.steps=6.0 (argument)"),
        ('train.steps="6"', "train.steps='6' (argument)"),
        ("seed=true", "seed=True (argument): Input should be a valid integer"),
        ("seed=-1", "seed=-1 (argument): Input should be greater than or equal to 0"),
        ("data.shuffle=yes", "data.shuffle='yes' (argument): Input should be a valid boolean, such as true or false"),
        ("sampling.temperature=nan", "sampling.temperature=nan (argument): Input should be a finite number"),
        ("episode.timeout_s=inf", "episode.timeout_s=inf (argument): Input should be a finite number"),
        ("servers.urls=http://a:1", "servers.urls='http://a:1' (argument): Input should be a valid list, such as"),
        ("placement.servers=[[0], ['x']]", "placement.servers[1][0]='x' (argument)"),
        ("model.template_args=1", "model.template_args=1 (argument)"),
        ("view=fancy", "view='fancy' (argument): Input should be 'auto', 'live', 'plain' or 'off'"),
        ("name=a/b", "name='a/b' (argument): String should match pattern"),
        ("train", "argument 'train' is neither key=value nor a .toml file"),
        ("no.toml", "cannot read no.toml: No such file or directory"),
    ],
)
def test_a_wrong_setting_names_key_value_and_origin(argument, message):
    """I10."""
    assert message in refused(argument)


def test_a_broken_file_names_the_file_and_the_line(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("seed = 1\ntrain = [\n")
    assert f"{file} is not TOML" in refused(str(file))
    file.write_bytes(b"name = '\xff'\n")
    assert f"{file} is not TOML" in refused(str(file))
    file.write_text("[train]\nstep = 3\n")
    assert f"unknown setting 'train.step' ({file})" in refused(str(file))


def test_all_wrong_values_are_named_at_once():
    lines = refused("train.steps=x", "group.size=y").splitlines()
    assert [line.partition("=")[0] for line in lines] == ["group.size", "train.steps"]


def test_the_tree_built_in_code_raises_the_same_error():
    with pytest.raises(ConfigError, match=r"group.size=0 \(code\)"):
        Config(group={"size": 0})
    with pytest.raises(ConfigError, match=r"group.min_members=9 \(code\) is more than group.size=8"):
        Config(group=GroupSettings(min_members=9))


CONFLICTS = [
    (["group.min_members=9"], "group.min_members=9 (argument) is more than group.size=8"),
    (["group.size=1", 'group.uniform="replace"'], "would replace them all for ever"),
    (["train.batch_groups=1", "group.size=2", "train.minibatches=3"], "train.minibatches=3 (argument) is more than"),
    (["optimizer.warmup_steps=9", "train.steps=8"], "the warm-up would never end"),
    (["optimizer.min_lr=1e-7"], 'optimizer.min_lr=1e-07 (argument) has no effect with optimizer.schedule="constant"'),
    (
        ["optimizer.schedule=cosine", "optimizer.min_lr=1.0"],
        "optimizer.min_lr=1.0 (argument) is more than optimizer.lr",
    ),
    (["model.context_length=1024"], "leaves no room for a prompt in model.context_length=1024 (argument)"),
    (["data.evaluation=a.jsonl", "data.evaluation_size=8"], "data.evaluation_size=8 (argument) has no effect"),
    (["weights.transport=group", "weights.folder=/dev/shm"], 'weights.folder="/dev/shm" (argument) has no effect'),
    (["metrics.project=mine"], 'metrics.project="mine" (argument) has no effect with metrics.sinks=[]'),
    (['servers.urls=["http://a:1"]', "servers.count=2"], "servers.count=2 (argument) has no effect with servers.urls"),
    (['servers.urls=["http://a:1"]', "servers.args=['--tp']"], 'servers.args=["--tp"] (argument) has no effect'),
    (
        ["servers.max_total_tokens=600", "servers.args=['--max-total-tokens=900']"],
        "servers.args: set servers.max_total_tokens instead of --max-total-tokens",
    ),
    (["servers.args=['--context-length', '512']"], "set model.context_length instead of --context-length"),
    (["servers.args=['--model', '/x']"], "set model.path instead of --model"),
    (["servers.args=['--max-total-token', '512']"], "set servers.max_total_tokens instead of --max-total-token"),
    (['servers.urls=["http://a:1"]', "placement.servers=[[0]]"], "placement.servers=[[0]] (argument) has no effect"),
    (["servers.port=65535", "servers.count=2"], "exceeds the last port"),
    (["placement.servers=[[0]]", "servers.count=2"], "places 1 servers, servers.count=2"),
    (["placement.servers=[[]]"], "each server needs one or more distinct device indices"),
    (["placement.servers=[[1, 1]]"], "each server needs one or more distinct device indices"),
    (["placement.ranks=[0, 1]"], "places 2 ranks, trainer.ranks=1"),
    (["placement.ranks=[0, 0]", "trainer.ranks=2"], "each rank needs its own device index"),
    (["placement.ranks=[0]", "placement.servers=[[0]]", "weights.transport=group"], "share device 0"),
    (["watchdog_s=600"], "watchdog_s=600.0 (argument) must be greater than episode.timeout_s=600.0"),
    (
        ["trainer.start_timeout_s=1800"],
        "watchdog_s=900.0 must be greater than trainer.start_timeout_s=1800.0 (argument)",
    ),
    (
        ["servers.request_timeout_s=900"],
        "watchdog_s=900.0 must be greater than servers.request_timeout_s=900.0 (argument)",
    ),
    (["trainer.timeout_s=1000"], "watchdog_s=900.0 must be greater than trainer.timeout_s=1000.0 (argument)"),
]


@pytest.mark.parametrize(("arguments", "message"), CONFLICTS, ids=[" ".join(arguments) for arguments, _ in CONFLICTS])
def test_what_cannot_be_honoured_together_is_refused(arguments, message):
    """I10."""
    assert message in refused(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ["optimizer.schedule=cosine", "optimizer.min_lr=1e-7"],
        ["placement.ranks=[0]", "placement.servers=[[0]]"],
        ["servers.port=65535"],
        ['servers.urls=["http://a:1"]', "servers.count=1", "servers.start_timeout_s=5"],
        ['metrics.sinks=["wandb"]', "metrics.project=mine"],
        ["trainer.timeout_s=1000", "watchdog_s=1001"],
        ["train.steps=0", "optimizer.warmup_steps=9"],
    ],
)
def test_neighbours_of_the_conflicts_are_accepted(arguments):
    Config.load(arguments)


def test_text_needs_no_quotes():
    config = Config.load(["name=7", "model.path=1.5", 'data.train="a b"', "view=off", "metrics.project=areal"])
    assert (config.name, config.model.path, config.data.train, config.view) == ("7", "1.5", "a b", "off")


def test_toml_reads_back_to_an_equal_tree(tmp_path):
    config = Config.load(
        [
            'model.path=quote " back \\ tab \t bell \x07 del \x7f 😀',
            "model.template_args={enable_thinking = false, deep = {'a b' = [1, 2.5, 'x']}}",
            "optimizer.lr=3e-4",
            "placement.servers=[[0, 1], [2]]",
            "servers.count=2",
            'metrics.sinks=["tensorboard"]',
        ]
    )
    file = tmp_path / "config.toml"
    file.write_text(config.to_toml())
    again = Config.load([str(file)])
    assert again == config
    assert again != Config()
    assert set(again.origins) == set(SETTINGS)


def test_toml_has_no_null():
    with pytest.raises(ConfigError, match=r"model.template_args: None cannot be written as TOML"):
        Config(model={"template_args": {"tools": None}}).to_toml()


def test_frozen():
    with pytest.raises(Exception, match="frozen"):
        Config().seed = 2


def test_fewer_than_80_settings_and_each_has_a_docstring():
    assert len(SETTINGS) < 80
    assert [key for key, field in SETTINGS.items() if len(field.description or "") < 10] == []


def test_a_resume_may_mend_what_conflicts_by_the_rules_of_today(tmp_path):
    """Rules come with newer code, and what an older one had saved must not lock the run up."""
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / "ledger.db").touch()
    saved = Config.load(["trainer.timeout_s=500", "watchdog_s=650"]).to_toml()
    (tmp_path / "config.toml").write_text(saved.replace("timeout_s = 500.0", "timeout_s = 700.0"))
    with pytest.raises(ConfigError, match=r"watchdog_s=650\.0 .* must be greater than trainer\.timeout_s=700\.0"):
        Config.resume(tmp_path)
    assert Config.resume(tmp_path, ["watchdog_s=800"]).trainer.timeout_s == 700
    with pytest.raises(ConfigError, match=r"optimizer\.lr=0\.5: the run in .* has 1e-06"):
        Config.resume(tmp_path, ["watchdog_s=800", "optimizer.lr=0.5"])
