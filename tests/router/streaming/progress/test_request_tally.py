"""Metrics by tenant: few labels, whoever comes, and nothing counted twice or lost."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from octavo.metrics.table import METRICS
from router.streaming.progress.request_tally import MAX_TENANTS, OTHER, TenantTallies

NAMES = st.lists(st.integers(0, 3 * MAX_TENANTS).map("t{}".format), max_size=300)


@given(NAMES)
def test_labels_are_few_and_sums_are_whole(names):
    tallies = TenantTallies()
    for name in names:
        tallies.of(name).num_accepted += 1
    values = list(tallies.values(Counter(names)))
    for metric in ("octavo_tenant_requests_total", "octavo_tenant_streams"):
        found = {value.labels[0]: value.value for value in values if value.name == metric}
        assert len(found) <= MAX_TENANTS + 1
        assert sum(found.values()) == len(names)
        first = dict.fromkeys(names)
        assert set(found) == {OTHER, *list(first)[:MAX_TENANTS]}
        assert all(found[name] == names.count(name) for name in list(first)[:MAX_TENANTS])
    assert all(len(value.labels) == len(METRICS[value.name].labels) for value in values)
