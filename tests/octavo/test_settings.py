"""Where a setting comes from, and that no misspelt one is silently dropped."""

import argparse
import dataclasses
import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo import options, settings
from octavo.settings import RouterSettings, SettingsError, UpSettings, WorkerSettings

CLASSES = [RouterSettings, WorkerSettings, UpSettings]
NO_ARGS = argparse.Namespace()


def load(cls, argv=(), environ=None, file=None):
    parser = argparse.ArgumentParser()
    options.add_arguments(parser, cls)
    return options.load(cls, parser.parse_args(list(argv)), environ or {}, file)


@pytest.fixture
def config(tmp_path):
    def write(text):
        path = tmp_path / "octavo.toml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize("cls", CLASSES)
def test_nothing_given_is_the_defaults(cls):
    assert load(cls) == cls()


def test_a_flag_goes_before_the_environment_before_the_file_before_the_default(config):
    file = config("[worker]\nthreads = 1\nblock_size = 32\nmax_batch_tokens = 100\n")
    environ = {"OCTAVO_WORKER_THREADS": "2", "OCTAVO_WORKER_BLOCK_SIZE": "64"}
    loaded = load(WorkerSettings, ["--threads", "3"], environ, file)
    assert (loaded.threads, loaded.block_size, loaded.max_batch_tokens) == (3, 64, 100)
    assert loaded.stream_interval == WorkerSettings().stream_interval
    values = options.effective(WorkerSettings, argparse.Namespace(threads="3"), environ, file)
    origins = {name: values[name].origin for name in ("threads", "block_size", "max_batch_tokens", "policy")}
    assert origins == {
        "threads": "--threads",
        "block_size": "OCTAVO_WORKER_BLOCK_SIZE",
        "max_batch_tokens": f"{file} [worker]",
        "policy": "default",
    }


@pytest.mark.parametrize("cls", CLASSES)
def test_every_field_has_a_flag_a_variable_and_a_key(cls, config):
    for item in dataclasses.fields(cls):
        default = item.default
        if item.metadata["choices"]:
            value = next(choice for choice in item.metadata["choices"] if choice != default)
        else:
            value = {bool: not default, int: 777, float: 7.5, str: "x", tuple: ("a", "b")}[type(default)]
        text = ",".join(value) if isinstance(value, tuple) else str(value).lower()
        argv = [f"--{'no-' if value is False else ''}{item.name.replace('_', '-')}"]
        argv = argv if isinstance(value, bool) else [f"{argv[0]}={text}"]
        quoted = json.dumps(value)
        for loaded in (
            load(cls, argv),
            load(cls, environ={options.variable_name(cls, item.name): text}),
            load(cls, file=config(f"[{cls.program}]\n{item.name} = {quoted}\n")),
        ):
            assert getattr(loaded, item.name) == value
            assert dataclasses.replace(loaded, **{item.name: default}) == cls()


@pytest.mark.parametrize("cls", CLASSES)
def test_no_two_settings_share_a_variable(cls):
    names = [options.variable_name(other, item.name) for other in CLASSES for item in dataclasses.fields(other)]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[worker]\nblok_size = 16\n", "block_size"),
        ("[wroker]\n", "worker"),
        ("[worker]\nthreads = '4'\n", "threads"),
        ("[worker]\nthreads = true\n", "threads"),
        ("[worker]\nprefix_caching = 1\n", "prefix_caching"),
        ("[worker]\npolicy = 'fair'\n", "fcfs, priority"),
        ("[worker]\nblock_size = 17\n", "8, 16, 32, 64, 128"),
        ("[worker]\nkv_cache_bytes = '12 parsec'\n", "512MiB"),
        ("[worker]\nmax_batch_sequences = 0\n", "at least 1"),
        ("[worker]\nstep_delay_ms = nan\n", "step_delay_ms"),
        ("worker = 3\n", "table"),
        ("[worker\n", "TOML"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text, says, config):
    with pytest.raises(SettingsError, match=says):
        load(WorkerSettings, file=config(text))


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(SettingsError, match=r"nowhere\.toml"):
        load(WorkerSettings, file=tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("variable", "says"),
    [
        ("OCTAVO_WORKER_TREADS", "OCTAVO_WORKER_THREADS"),
        ("OCTAVO_WROKER_THREADS", "OCTAVO_WORKER_THREADS"),
        ("OCTAVO_THREADS", "OCTAVO_THREADS"),
    ],
)
def test_unknown_variables_are_refused(variable, says):
    with pytest.raises(SettingsError, match=says):
        load(WorkerSettings, environ={variable: "1"})


def test_variables_of_others_are_left_alone():
    environ = {"OCTAVO_ROUTER_LISTEN": "x", "PATH": "y", "OCTAVO_TEST_SEED": "1"}
    links = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT", "PORT_50061_TCP", "PORT_50061_TCP_ADDR"]
    environ |= {f"OCTAVO_WORKER_{link}": "tcp://10.0.0.1:50061" for link in links}  # Kubernetes adds these
    assert load(WorkerSettings, environ=environ) == WorkerSettings()


@given(
    number=st.integers(0, 10**6), unit=st.sampled_from(["", "B", "KiB", "MiB", "GiB", "TiB", "kB", "MB", "GB", "TB"])
)
def test_sizes(number, unit):
    base = 1024 if "i" in unit else 1000
    power = "bkmgt".index(unit[0].lower()) if unit else 0
    assert (
        options.parse_size(f"{number}{unit}")
        == options.parse_size(f" {number} {unit.lower()} ")
        == number * base**power
    )


@given(st.text(max_size=30))
def test_sizes_are_total(text):
    try:
        assert options.parse_size(text) >= 0
    except ValueError as error:
        assert "512MiB" in str(error)  # noqa: PT017 - any other outcome is the failure


@pytest.mark.parametrize("text", ["-1", "1.5.5", "MiB", "", "1e9", "9" * 400, "1 MiB x"])
def test_what_is_not_a_size(text):
    with pytest.raises(ValueError, match="512MiB"):
        options.parse_size(text)


@pytest.mark.parametrize("cls", CLASSES)
def test_what_is_printed_gives_the_same_settings_again(cls, config):
    values = options.effective(cls, NO_ARGS, {}, None)
    text = options.describe(cls, values)
    assert tomllib.loads(text)[cls.program].keys() == {
        item.name for item in dataclasses.fields(cls) if not item.metadata["hidden"]
    }
    assert load(cls, file=config(text)) == cls()


@pytest.mark.parametrize("secret", ["hunter2", "p@ss:wo/rd", "***"])
def test_secrets_are_masked_and_never_in_argv(secret):
    url = f"redis://user:{secret}@store:6379/0"
    loaded = load(RouterSettings, environ={"OCTAVO_ROUTER_STORE": url})
    assert loaded.store == url
    text = options.describe(
        RouterSettings, options.effective(RouterSettings, NO_ARGS, {"OCTAVO_ROUTER_STORE": url}, None)
    )
    assert "redis://user:***@store:6379/0" in text
    argv = options.arguments_of(loaded)
    assert not any("store" in argument for argument in argv)
    if secret != "***":
        assert secret not in text
        assert options.masked(f"redis://h/0?password={secret}&x=1") == "redis://h/0?password=***&x=1"


@pytest.mark.parametrize("cls", CLASSES)
@given(data=st.data())
def test_a_child_gets_the_same_settings_whatever_its_environment(cls, data):
    changed = {}
    for item in dataclasses.fields(cls):
        if isinstance(item.default, bool) and data.draw(st.booleans()):
            changed[item.name] = not item.default
        elif type(item.default) is int and not item.metadata["choices"] and data.draw(st.booleans()):
            changed[item.name] = data.draw(
                st.integers(max(item.metadata["low"] or 0, 0), item.metadata["high"] or 10**9)
            )
    sent = cls(**changed)
    hostile = {
        options.variable_name(cls, name): "1" for name in ("lease_ms", "threads", "workers") if hasattr(sent, name)
    }
    assert load(cls, options.arguments_of(sent), hostile | options.environment_of(sent)) == sent


def test_one_command_line_can_serve_two_classes():
    parser = argparse.ArgumentParser()
    options.add_arguments(parser, UpSettings)
    options.add_arguments(parser, WorkerSettings, skip=settings.UP_DECIDES)
    args = parser.parse_args(["--model", "m", "--threads", "2", "--workers", "3"])
    assert options.load(UpSettings, args, {}, None) == UpSettings(model="m", workers=3)
    assert options.load(WorkerSettings, args, {}, None) == WorkerSettings(model="m", threads=2)
    with pytest.raises(SystemExit):
        parser.parse_args(["--worker-id", "w"])


def test_parse_ends_with_the_closest_flag(capsys):
    with pytest.raises(SystemExit) as caught:
        settings.parse(WorkerSettings, ["--kv-cach-bytes=1"], environ={})
    assert caught.value.code == 2
    assert "did you mean --kv-cache-bytes?" in capsys.readouterr().err


def test_parse_reads_the_file_named_in_the_environment_and_prints(config, capsys):
    file = config("[router]\nmax_streams = 5\nmodel_aliases = ['a=b', 'c=d']\n")
    environ = {settings.CONFIG_VARIABLE: str(file)}
    assert settings.parse(RouterSettings, [], environ=environ) == RouterSettings(
        max_streams=5, model_aliases=("a=b", "c=d")
    )
    with pytest.raises(SystemExit) as caught:
        settings.parse(RouterSettings, ["--print-config"], environ=environ)
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert tomllib.loads(out)["router"]["max_streams"] == 5
    assert f"{file} [router]" in out


def test_the_environment_is_read_in_one_file(root):
    readers = [
        path.relative_to(root).as_posix()
        for package in ("octavo", "router", "gpu_worker")
        for path in (root / package).rglob("*.py")
        if any(name in path.read_text() for name in ("os.environ", "getenv", "from os import environ"))
    ]
    assert readers == ["octavo/settings.py"]


def test_a_command_with_several_classes_prints_one_file(config, capsys):
    parser = argparse.ArgumentParser()
    settings.add_common_arguments(parser)
    for cls in (UpSettings, RouterSettings, WorkerSettings):
        options.add_arguments(parser, cls, skip=settings.UP_DECIDES)
    args = parser.parse_args(["--print-config", "--threads=3"])
    with pytest.raises(SystemExit):
        settings.from_args(UpSettings, args, environ={}, also_print=(RouterSettings, WorkerSettings))
    tables = tomllib.loads(capsys.readouterr().out)
    assert set(tables) == {"up", "router", "worker"}
    assert tables["worker"]["threads"] == 3


def test_python_values_are_checked_too():
    assert options.from_values(WorkerSettings, {"threads": 2, "swap_bytes": "1KiB"}) == WorkerSettings(
        threads=2, swap_bytes=1024
    )
    assert options.from_values(RouterSettings, {"model_aliases": ("a=b",)}).model_aliases == ("a=b",)
    for values, says in (({"thread": 2}, "threads"), ({"threads": "2"}, "type int"), ({"threads": -1}, "at least 0")):
        with pytest.raises(SettingsError, match=says):
            options.from_values(WorkerSettings, values)


def test_a_hidden_setting_works_and_is_in_no_help(capsys, config):
    with pytest.raises(SystemExit):
        settings.parse(WorkerSettings, ["--help"], environ={})
    helped = capsys.readouterr().out
    assert "--max-batch-tokens" in helped
    for item in dataclasses.fields(WorkerSettings):
        assert (options.flag(item.name) in helped) != item.metadata["hidden"], item.name
    assert [name for name in ("runner", "step_delay_ms", "die_on_token") if options.flag(name) in helped] == []
    assert load(WorkerSettings, ["--runner=fake"]).runner == "fake"


def test_a_hidden_setting_is_printed_only_where_it_is_given(capsys):
    printed = []
    for argv in ([], ["--runner=fake"]):
        with pytest.raises(SystemExit):
            settings.parse(WorkerSettings, [*argv, "--print-config"], environ={})
        printed.append(tomllib.loads(capsys.readouterr().out)["worker"])
    assert "runner" not in printed[0]
    assert printed[1]["runner"] == "fake"
    assert "die_on_token" not in printed[1]
