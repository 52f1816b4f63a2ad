"""What settings come to."""

from dataclasses import replace

import pytest

from gpu_worker.engine import configuration
from gpu_worker.engine.configuration import build_draft_model, build_runner, scheduler_config
from gpu_worker.running import loading
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.errors import InvalidArgument
from octavo.settings.worker import WorkerSettings


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


@pytest.mark.parametrize("name", ["fake", "witness"])
def test_settings_reach_runner_and_scheduler(name):
    settings = WorkerSettings(
        runner=name, block_size=32, step_delay_ms=3, max_batch_tokens=100, max_batch_sequences=200, policy="priority",
        preemption="swap", chunked_prefill=False, prefix_caching=False, host_tier=False, long_prefill_threshold=7,
        watermark=0.25,
    )  # fmt: skip
    runner = build_runner(settings)
    assert (runner.info.block_size, runner.step_s, runner.info.model) == (32, 0.003, name)
    config = scheduler_config(settings, runner.info)
    assert (config.max_batch_tokens, config.max_batch_sequences) == (100, 100)
    assert (config.policy, config.preemption, config.long_prefill_threshold) == ("priority", "swap", 7)
    assert config.watermark == 0.25
    assert not config.chunked_prefill
    assert not config.prefix_caching
    assert not config.host_tier


@pytest.mark.parametrize("invariant", [True, False])
def test_drafts_are_made_by_themselves_only_where_they_change_no_bit(invariant: bool) -> None:
    info = replace(FakeRunner().info, piece_invariant=invariant)
    modes = {
        mode: scheduler_config(WorkerSettings(speculation=mode), info).speculation for mode in ("auto", "forced", "off")
    }
    assert modes == {"auto": "recent" if invariant else "off", "forced": "forced", "off": "off"}


@pytest.mark.parametrize(("given", "meant"), [({}, None), ({"swap_bytes": 0}, 0), ({"swap_bytes": 4096}, 4096)])
def test_memory_that_settings_leave_open_is_left_to_loading(monkeypatch, given, meant):
    seen = {}
    monkeypatch.setattr(loading, "load_runner", lambda model, **options: seen.update(options))
    build_runner(WorkerSettings(device="cpu", gpu_memory_utilization=0.7, **given))
    assert (seen["swap_bytes"], seen["kv_cache_bytes"], seen["gpu_memory_utilization"]) == (meant, None, 0.7)


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
        ({}, {"device": "cuda:0"}, "on a CPU alone, not on cuda:0"),
        ({"speculation": "forced"}, {}, "speculation is forced here"),
        ({}, {"piece_invariant": False}, "speculation is off here"),
        ({}, {}, "other has another tokenizer than fake"),
    ],
)
def test_a_draft_model_that_cannot_guess_is_refused_by_name(monkeypatch, settings, changes, message):
    monkeypatch.setattr(loading, "load_runner", lambda model, **options: FakeRunner())
    monkeypatch.setattr(configuration, "open_tokenizer", lambda source: object())
    info = replace(FakeRunner().info, **{"device": "cpu", "piece_invariant": True, "tokenizer": "large", **changes})
    with pytest.raises(InvalidArgument, match=message) as caught:
        build_draft_model(WorkerSettings(draft_model="other", **settings), info)
    assert "draft_model" in str(caught.value)
