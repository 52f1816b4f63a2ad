"""What settings come to."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from gpu_worker.engine import configuration
from gpu_worker.engine.configuration import build_draft_model, build_runner, scheduler_config
from gpu_worker.running import loading
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.errors import InvalidArgument
from octavo.settings.worker import WorkerSettings
from octavo.text.encoded_prompt import EncoderSupport


def test_the_budget_of_a_step_suits_the_device():
    info = build_runner(WorkerSettings(runner="fake")).info
    cpu, gpu = replace(info, device="cpu"), replace(info, device="cuda:0")

    def budget(info, **settings):
        config = scheduler_config(WorkerSettings(**settings), info)
        return config.max_batch_tokens, config.step_s

    assert budget(cpu) == (2048, 0.25)  # a step ends well within a lease of 3 s, whatever the model
    assert budget(cpu, lease_ms=6000) == (2048, 0.5)
    assert budget(gpu) == (2048, 0.0)
    assert budget(cpu, runner="fake") == (2048, 0.0)
    assert budget(cpu, max_batch_tokens=77) == (77, 0.0)
    assert budget(cpu, max_batch_sequences=3000) == (3000, 0.25)


def test_settings_reach_runner_and_scheduler():
    settings = WorkerSettings(runner="witness", step_delay_ms=3, policy="priority", host_tier=False, watermark=0.25)
    runner = build_runner(settings)
    config = scheduler_config(settings, runner.info)
    assert (runner.info.model, runner.step_s) == ("witness", 0.003)
    assert (config.policy, config.host_tier, config.watermark) == ("priority", False, 0.25)


@pytest.mark.parametrize("invariant", [True, False])
def test_drafts_are_made_by_themselves_only_where_they_change_no_bit(invariant: bool) -> None:
    info = replace(FakeRunner().info, piece_invariant=invariant)
    for mode, meant in [("auto", "recent" if invariant else "off"), ("forced", "forced"), ("off", "off")]:
        assert scheduler_config(WorkerSettings(speculation=mode), info).speculation == meant


@pytest.mark.parametrize(("given", "meant"), [({}, None), ({"swap_bytes": 0}, 0), ({"swap_bytes": 4096}, 4096)])
def test_memory_that_settings_leave_open_is_left_to_loading(monkeypatch, given, meant):
    seen = {}
    monkeypatch.setattr(loading, "load_runner", lambda model, **options: seen.update(options))
    build_runner(WorkerSettings(device="cpu", gpu_memory_utilization=0.7, **given))
    assert (seen["swap_bytes"], seen["kv_cache_bytes"], seen["gpu_memory_utilization"]) == (meant, None, 0.7)


def test_a_group_needs_ranks_and_ranks_a_model():
    for settings, field in (
        ({"runner": "fake", "tensor_parallel": 2}, "tensor_parallel"),
        ({"launcher": "ray"}, "launcher"),
    ):
        with pytest.raises(InvalidArgument, match=f"^{field}: "):
            build_runner(WorkerSettings(**settings))


@pytest.mark.parametrize("mode", ["forced", "lookup", "recent"])
def test_a_model_with_states_takes_no_drafts(mode):
    """Its state would have gone on past a guess that is wrong."""
    info = replace(FakeRunner().info, keeps_state=True)
    with pytest.raises(InvalidArgument, match="state cannot go back behind a wrong guess: say off"):
        scheduler_config(WorkerSettings(speculation=mode), info)
    assert scheduler_config(WorkerSettings(), info).speculation == "off"


@pytest.mark.parametrize(
    ("settings", "changes", "message"),
    [
        ({}, {"encoder": EncoderSupport(start=(1,))}, "models with an encoder"),
        ({}, {"tokenizer": "states"}, "other has recurrent layers"),
        ({}, {"device": "cuda:0"}, "on a CPU alone, not on cuda:0"),
        ({"speculation": "forced"}, {}, "speculation is forced here"),
        ({}, {"piece_invariant": False}, "speculation is off here"),
        ({}, {}, "other has another tokenizer than fake"),
    ],
)
def test_a_draft_model_that_cannot_guess_is_refused_by_name(monkeypatch, settings, changes, message):
    guesser = replace(FakeRunner().info, keeps_state=changes.get("tokenizer") == "states")
    monkeypatch.setattr(loading, "load_runner", lambda model, **options: SimpleNamespace(info=guesser))
    monkeypatch.setattr(configuration, "open_tokenizer", lambda source: object())
    info = replace(FakeRunner().info, **{"device": "cpu", "piece_invariant": True, "tokenizer": "large", **changes})
    with pytest.raises(InvalidArgument, match=message) as caught:
        build_draft_model(WorkerSettings(draft_model="other", **settings), info)
    assert "draft_model" in str(caught.value)


def test_what_is_wrong_with_the_files_of_a_draft_model_is_told_of_it(tmp_path):
    info = replace(FakeRunner().info, device="cpu", piece_invariant=True)
    with pytest.raises(InvalidArgument, match=r"^draft_model: model .*nowhere"):
        build_draft_model(WorkerSettings(draft_model=str(tmp_path / "nowhere")), info)
