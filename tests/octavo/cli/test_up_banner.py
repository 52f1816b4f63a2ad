"""What `octavo up` shows when everything runs."""

from octavo.cli.up import _banner
from octavo.local.cluster import ClusterSettings
from octavo.local.state import ClusterState, RouterState, StoreState
from octavo.settings.router import RouterSettings
from octavo.settings.up import UpSettings
from octavo.settings.worker import WorkerSettings


def test_calls_are_shown_if_it_is_known_which_the_model_takes(tmp_path):
    settings = ClusterSettings(UpSettings(), RouterSettings(), WorkerSettings(), tmp_path)
    routers = [RouterState("r", 1, "127.0.0.1:1", "127.0.0.1:2", "http://127.0.0.1:3", "http://127.0.0.1:4")]
    state = ClusterState(1, "m", str(tmp_path), StoreState("u", 1, True), routers)
    for hears, known, shown in ((False, True, (1, 0)), (True, True, (0, 1)), (False, False, (0, 0))):
        text = _banner(state, True, hears, settings, known)
        assert (text.count("/v1/completions"), text.count("/v1/audio/transcriptions")) == shown
        assert ("Complete" in text) == (shown == (1, 0)) and "127.0.0.1:4/v1" in text
