"""The names that `octavo up` gives to the processes of a machine."""

from octavo.local.cluster import role_of
from octavo.settings.up import UpSettings


def test_prefill_workers_come_before_decode_workers():
    up = UpSettings(workers=4, prefill_workers=1, decode_workers=2)
    assert [role_of(index, up) for index in range(4)] == ["prefill", "decode", "decode", "both"]
    assert role_of(0, UpSettings()) == "both"
