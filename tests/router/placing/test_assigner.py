"""Which worker gets a sequence that may kill its worker."""

from octavo.ids import Incarnation
from router.fleet.worker_view import WorkerView
from router.placing.assigner import quietest_worker
from router.placing.placement import choose_worker


def view(name: str, num_running: int, cached: int) -> WorkerView:
    return WorkerView(
        incarnation=Incarnation(name),
        worker_id=name,
        available=True,
        reason_unavailable="",
        queued_tokens=0,
        num_running=num_running,
        num_waiting=0,
        dispatched_tokens=0,
        num_dispatched=0,
        num_free_blocks=1000,
        num_cached_blocks=cached,
        num_blocks=2000,
        block_size=16,
        max_batch_sequences=64,
        context_tokens=8192,
    )


def test_a_suspect_goes_where_it_disturbs_the_fewest():
    """Whatever that place has cached."""
    busy, quiet = view("busy", 5, 0), view("quiet", 1, 0)
    decision = choose_worker(4000, {Incarnation("busy"): (3968, 0)}, [busy, quiet])
    assert decision.worker is busy
    assert quietest_worker(decision) is quiet
    assert quietest_worker(choose_worker(9000, {}, [busy])) is None
