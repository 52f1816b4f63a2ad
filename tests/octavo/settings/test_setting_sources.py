"""Where a setting comes from, and that no misspelt one is silently dropped."""

import argparse
import dataclasses
import json
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.settings import setting_sources
from octavo.settings.options import SettingsError, options_of
from octavo.settings.router import RouterSettings
from octavo.settings.up import UpSettings
from octavo.settings.worker import WorkerSettings

CLASSES = [RouterSettings, WorkerSettings, UpSettings]
NO_ARGS = argparse.Namespace()
VALID = {  # values of settings that have a form
    "store": "redis://x",
    "store_memory_bytes": 77_777_777,
    "device": "cuda:1",
    "tensor_parallel": 3,
    "pipeline_parallel": 2,
    "launcher": "torchrun",
    "hosts": 3,
    "host_rank": 1,
    "meeting_at": "[::1]:29500",
    "model_aliases": ("a=b", "c=d"),
    "listen": "localhost:7",
    "admin_listen": "[::1]:7",
    "web_listen": "[::1]:7",
    "http_listen": "[::1]:7",
    "http_origins": ("https://a.example", "http://localhost:3000"),
    "picture_count": 7,
    "picture_hosts": ("https://images.example", "http://localhost:3000"),
    "sound_bytes": 7_777_777,
    "gpu_memory_utilization": 0.5,
    "watermark": 0.5,
    "traces_share": 0.5,
    "failpoints": ("source.begun=kill", "target.held=hang"),
}


def load(cls, argv=(), environ=None, file=None):
    parser = argparse.ArgumentParser()
    setting_sources.add_arguments(parser, cls)
    return setting_sources.load(cls, parser.parse_args(list(argv)), environ or {}, file)


def test_flags_beat_environment_file_and_default(config):
    file = config("[worker]\nthreads = 1\nblock_size = 32\nmax_batch_tokens = 100\n")
    environ = {"OCTAVO_WORKER_THREADS": "2", "OCTAVO_WORKER_BLOCK_SIZE": "64"}
    loaded = load(WorkerSettings, ["--threads", "3"], environ, file)
    assert loaded == WorkerSettings(threads=3, block_size=64, max_batch_tokens=100)
    values = setting_sources.effective_values(WorkerSettings, argparse.Namespace(threads="3"), environ, file)
    origins = [values[name].origin for name in ("threads", "block_size", "max_batch_tokens", "policy")]
    assert origins == ["--threads", "OCTAVO_WORKER_BLOCK_SIZE", f"{file} [worker]", "default"]


@pytest.mark.parametrize("cls", CLASSES)
def test_every_field_has_flag_variable_and_key(cls, config):
    for item in options_of(cls).values():
        default = item.default
        value = {bool: not default, int: 777, float: 7.5, str: "x", tuple: ("a", "b")}.get(type(default))
        value = next((choice for choice in item.choices or () if choice != default), VALID.get(item.name, value))
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
        ("[worker]\nblock_size = 17\n", "8, 16, 32, 64, 128"),
        ("[worker]\nkv_cache_bytes = '12 parsec'\n", "512MiB"),
        ("[worker]\nmax_batch_sequences = 0\n", "at least 1"),
        ("[worker]\nstep_delay_ms = nan\n", "step_delay_ms"),
        ("worker = 3\n", "table"),
        ("[worker\n", "TOML"),
        (f"[worker]\nthreads = {'[' * 5000}", "TOML: .*recursion"),
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


@given(at=st.integers(0, 10_000), junk=st.binary(max_size=4), cut=st.integers(0, 4))
def test_any_changed_file_is_taken_or_refused(at, junk, cut, tmp_path_factory):
    values = [(cls, setting_sources.effective_values(cls, NO_ARGS, {}, None)) for cls in CLASSES]
    whole = b"\n".join(setting_sources.describe(*each).encode() for each in values)
    at %= len(whole)
    file = tmp_path_factory.getbasetemp() / "changed.toml"
    file.write_bytes(whole[:at] + junk + whole[at + cut :])
    for cls in CLASSES:
        try:
            load(cls, file=file)
        except SettingsError as error:
            assert str(file) in str(error)  # noqa: PT017 - any other outcome is the failure


@pytest.mark.parametrize("cls", CLASSES)
def test_what_is_printed_gives_the_same_settings_again(cls, config):
    values = setting_sources.effective_values(cls, NO_ARGS, {}, None)
    text = setting_sources.describe(cls, values)
    shown = {item.name for item in options_of(cls).values() if not item.hidden}
    assert tomllib.loads(text)[cls.program].keys() == shown
    assert load(cls, file=config(text)) == cls()


@pytest.mark.parametrize("cls", CLASSES)
@given(data=st.data())
def test_children_get_the_same_settings_in_any_environment(cls, data):
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


@pytest.mark.parametrize("name", ["WORKER_TREADS", "WROKER_THREADS", "THREADS"])
def test_unknown_variables_are_refused(name):
    with pytest.raises(SettingsError, match="OCTAVO_THREADS" if name == "THREADS" else "OCTAVO_WORKER_THREADS"):
        load(WorkerSettings, environ={f"OCTAVO_{name}": "1"})


def test_python_values_are_checked_too():
    assert setting_sources.from_values(WorkerSettings, {"threads": 2, "swap_bytes": "1KiB"}) == WorkerSettings(
        threads=2, swap_bytes=1024
    )
    assert setting_sources.from_values(RouterSettings, {"model_aliases": ("a=b",)}).model_aliases == ("a=b",)
    for values, says in (({"thread": 2}, "threads"), ({"threads": "2"}, "type int"), ({"threads": -1}, "at least 0")):
        with pytest.raises(SettingsError, match=says):
            setting_sources.from_values(WorkerSettings, values)
