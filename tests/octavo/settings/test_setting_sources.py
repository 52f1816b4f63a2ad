"""Where a setting comes from, and that no misspelt one is silently dropped."""

import argparse
import dataclasses
import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.settings import setting_sources
from octavo.settings.options import SettingsError, masked, options_of
from octavo.settings.router import RouterSettings
from octavo.settings.up import UP_DECIDES, UpSettings
from octavo.settings.worker import WorkerSettings

CLASSES = [RouterSettings, WorkerSettings, UpSettings]
NO_ARGS = argparse.Namespace()
VALID = {  # values of settings that have a form
    "store_memory_bytes": 77_777_777,
    "device": "cuda:1",
    "model_aliases": ("a=b", "c=d"),
    "listen": "localhost:7",
    "admin_listen": "[::1]:7",
    "web_listen": "[::1]:7",
    "http_listen": "[::1]:7",
    "http_origins": ("https://a.example", "http://localhost:3000"),
    "gpu_memory_utilization": 0.5,
    "watermark": 0.5,
    "traces_share": 0.5,
    "failpoints": ("source.begun=kill", "target.held=hang"),
}


def load(cls, argv=(), environ=None, file=None):
    parser = argparse.ArgumentParser()
    setting_sources.add_arguments(parser, cls)
    return setting_sources.load(cls, parser.parse_args(list(argv)), environ or {}, file)


def refusal(cls, file):
    """Why the file is refused; empty if it is not."""
    try:
        load(cls, file=file)
    except SettingsError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("cls", CLASSES)
def test_nothing_given_is_the_defaults(cls):
    assert load(cls) == cls()


def test_a_flag_goes_before_the_environment_before_the_file_before_the_default(config):
    file = config("[worker]\nthreads = 1\nblock_size = 32\nmax_batch_tokens = 100\n")
    environ = {"OCTAVO_WORKER_THREADS": "2", "OCTAVO_WORKER_BLOCK_SIZE": "64"}
    loaded = load(WorkerSettings, ["--threads", "3"], environ, file)
    assert (loaded.threads, loaded.block_size, loaded.max_batch_tokens) == (3, 64, 100)
    assert loaded.stream_interval == WorkerSettings().stream_interval
    values = setting_sources.effective_values(WorkerSettings, argparse.Namespace(threads="3"), environ, file)
    origins = {name: values[name].origin for name in ("threads", "block_size", "max_batch_tokens", "policy")}
    assert origins == {
        "threads": "--threads",
        "block_size": "OCTAVO_WORKER_BLOCK_SIZE",
        "max_batch_tokens": f"{file} [worker]",
        "policy": "default",
    }


@pytest.mark.parametrize("cls", CLASSES)
def test_every_field_has_a_flag_a_variable_and_a_key(cls, config):
    for item in options_of(cls).values():
        default = item.default
        if item.choices:
            value = next(choice for choice in item.choices if choice != default)
        elif item.name in VALID:
            value = VALID[item.name]
        else:
            word = "redis://x" if item.name == "store" else "x"
            value = {bool: not default, int: 777, float: 7.5, str: word, tuple: ("a", "b")}[type(default)]
        text = ",".join(value) if isinstance(value, tuple) else str(value).lower()
        argv = [f"--{'no-' if value is False else ''}{item.name.replace('_', '-')}"]
        argv = argv if isinstance(value, bool) else [f"{argv[0]}={text}"]
        quoted = json.dumps(value)
        for loaded in (
            load(cls, argv),
            load(cls, environ={options_of(cls)[item.name].variable: text}),
            load(cls, file=config(f"[{cls.program}]\n{item.name} = {quoted}\n")),
        ):
            assert getattr(loaded, item.name) == value
            assert dataclasses.replace(loaded, **{item.name: default}) == cls()


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
        ("[worker]\nthreads = 1\nthreads = 2\n", "TOML"),
        (f"[worker]\nthreads = {'[' * 5000}", "TOML: .*recursion"),
        (f"[worker]\nthreads = {'{a=' * 5000}", "TOML: .*recursion"),
        (f"[worker]\nthreads = {'9' * 5000}", "TOML: .*digits"),
        (f"[worker]\nthreads = 0x{'f' * 5000}", "^threads of too many digits .*at most 1024"),
        (f"[worker]\nthreads = '{'x' * 5000}'", r"^threads 'x{199}… \(.*type int"),
        ('[worker]\nmodel = "a\\u0000"', "^model .*no NUL"),
        ('[worker]\nfailpoints = ["a\\u0000"]', "^failpoints .*no NUL"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(text, says, config):
    with pytest.raises(SettingsError, match=says):
        load(WorkerSettings, file=config(text))


@pytest.mark.parametrize("cls", CLASSES)
@given(data=st.data())
def test_any_value_of_a_file_is_taken_or_refused_by_its_name(cls, data, tmp_path_factory):
    """Of whatever type it is, and never by another exception."""
    name = data.draw(st.sampled_from(sorted(options_of(cls))))
    text = st.text(st.characters(exclude_categories=["Cs"]))
    whole, anything = st.integers(), st.integers() | st.floats() | st.booleans() | text | st.lists(text)
    written = data.draw(anything.map(lambda value: json.dumps(value, ensure_ascii=True)) | whole.map(hex) | text)
    file = tmp_path_factory.getbasetemp() / "drawn.toml"
    file.write_text(f"[{cls.program}]\n{name} = {written}\n")
    said = refusal(cls, file)
    assert not said or (str(file) in said and (name in said or "TOML" in said or "has no setting" in said))


@given(at=st.integers(0, 10_000), junk=st.binary(max_size=4), cut=st.integers(0, 4))
def test_any_change_of_a_file_is_taken_or_refused(at, junk, cut, tmp_path_factory):
    whole = b"\n".join(
        setting_sources.describe(cls, setting_sources.effective_values(cls, NO_ARGS, {}, None)).encode()
        for cls in CLASSES
    )
    at %= len(whole)
    file = tmp_path_factory.getbasetemp() / "changed.toml"
    file.write_bytes(whole[:at] + junk + whole[at + cut :])
    for cls in CLASSES:
        said = refusal(cls, file)
        assert not said or str(file) in said


def test_a_file_may_begin_with_the_mark_that_windows_writes(config):
    assert load(WorkerSettings, file=config("\ufeff[worker]\nthreads = 3\n")).threads == 3


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


@pytest.mark.parametrize("cls", CLASSES)
def test_what_is_printed_gives_the_same_settings_again(cls, config):
    values = setting_sources.effective_values(cls, NO_ARGS, {}, None)
    text = setting_sources.describe(cls, values)
    assert tomllib.loads(text)[cls.program].keys() == {
        item.name for item in options_of(cls).values() if not item.hidden
    }
    assert load(cls, file=config(text)) == cls()


@pytest.mark.parametrize("secret", ["hunter2", "p@ss:word", "***"])
def test_secrets_are_masked_and_never_in_argv(secret):
    url = f"redis://user:{secret}@store:6379/0"
    loaded = load(RouterSettings, environ={"OCTAVO_ROUTER_STORE": url})
    assert loaded.store == url
    text = setting_sources.describe(
        RouterSettings, setting_sources.effective_values(RouterSettings, NO_ARGS, {"OCTAVO_ROUTER_STORE": url}, None)
    )
    assert "redis://user:***@store:6379/0" in text
    argv = setting_sources.arguments_of(loaded)
    assert not any(argument.startswith("--store=") or "store:6379" in argument for argument in argv)
    if secret != "***":
        assert secret not in text
        assert masked(f"redis://h/0?password={secret}&x=1") == "redis://h/0?password=***&x=1"


@pytest.mark.parametrize("cls", CLASSES)
@given(data=st.data())
def test_a_child_gets_the_same_settings_whatever_its_environment(cls, data):
    changed = {}
    for item in options_of(cls).values():
        if isinstance(item.default, bool) and data.draw(st.booleans()):
            changed[item.name] = not item.default
        elif type(item.default) is int and not item.choices and data.draw(st.booleans()):
            changed[item.name] = data.draw(st.integers(max(item.low or 0, 0), item.high or 10**9))
    sent = cls(**changed)
    hostile = {
        options_of(cls)[name].variable: "1" for name in ("lease_ms", "threads", "workers") if hasattr(sent, name)
    }
    assert load(cls, setting_sources.arguments_of(sent), hostile | setting_sources.environment_of(sent)) == sent


def test_one_command_line_can_serve_two_classes():
    parser = argparse.ArgumentParser()
    setting_sources.add_arguments(parser, UpSettings)
    setting_sources.add_arguments(parser, WorkerSettings, skip=UP_DECIDES)
    args = parser.parse_args(["--model", "m", "--threads", "2", "--workers", "3"])
    assert setting_sources.load(UpSettings, args, {}, None) == UpSettings(model="m", workers=3)
    assert setting_sources.load(WorkerSettings, args, {}, None) == WorkerSettings(model="m", threads=2)
    with pytest.raises(SystemExit):
        parser.parse_args(["--worker-id", "w"])


def test_python_values_are_checked_too():
    assert setting_sources.from_values(WorkerSettings, {"threads": 2, "swap_bytes": "1KiB"}) == WorkerSettings(
        threads=2, swap_bytes=1024
    )
    assert setting_sources.from_values(RouterSettings, {"model_aliases": ("a=b",)}).model_aliases == ("a=b",)
    for values, says in (({"thread": 2}, "threads"), ({"threads": "2"}, "type int"), ({"threads": -1}, "at least 0")):
        with pytest.raises(SettingsError, match=says):
            setting_sources.from_values(WorkerSettings, values)
