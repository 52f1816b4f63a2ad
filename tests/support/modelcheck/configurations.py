"""What is explored: which faults may happen together, in bounds small enough to visit every state."""

from typing import Any

from modelcheck.world import Configuration

CALLS = frozenset({"append", "take", "requeue", "schedule", "finish", "pop"})
ATTACHMENTS = frozenset({"accept", "attach", "detach"})
MIGRATIONS = frozenset({"begin", "commit", "abort"})


def alone(**changes: Any) -> Configuration:
    """One router looks for work, and no client is there: the request is kept."""
    return Configuration(**{"client": False, "keep": True, "num_routers": 1} | changes)


# By name. `make modelcheck` explores all of them, and `make test` those of SMALL.
CONFIGURATIONS = {
    "two calls are late": Configuration(begins="queued", faults={"late": 2}, late=CALLS),
    "a worker crashes, a call is late": Configuration(faults={"crash": 1, "late": 1}, late=CALLS),
    "workers crash twice": Configuration(faults={"crash": 2}),
    "a worker stands still": Configuration(faults={"stall": 1}),
    "a worker stands still, a call is late": alone(faults={"stall": 1, "late": 1}, late=CALLS),
    "a router crashes": Configuration(begins="queued", faults={"router crash": 1}),
    "a router crashes, and no client is there": Configuration(
        begins="queued", client=False, keep=True, faults={"router crash": 1}
    ),
    "a worker is told to stop, a call is late": alone(
        faults={"leave": 1, "late": 1}, late=CALLS | {"leave", "heartbeat"}
    ),
    "workers are told to stop": alone(faults={"leave": 2}),
    "a worker is told to stop, one crashes": alone(faults={"leave": 1, "crash": 1}),
    "a router has a bad link, a call is late": alone(faults={"bad link": 1, "late": 1}, late=CALLS),
    "a router has a bad link, a worker crashes": alone(faults={"bad link": 1, "crash": 1}),
    "the store restarts, a worker crashes": alone(faults={"restart": 1, "crash": 1}),
    "the store restarts, a call is late": alone(faults={"restart": 1, "late": 1}, late=CALLS),
    "an item is late, the client moves": Configuration(most_at_once=2, faults={"item": 1, "reconnect": 1}),
    "the client moves, its attachments are late": Configuration(
        num_tokens=1, num_routers=1, faults={"reconnect": 1, "late": 1}, late=ATTACHMENTS
    ),
    "a client leaves while its request is accepted": Configuration(
        num_tokens=1, num_routers=1, begins="new", endless=True, faults={"walk away": 1, "late": 1}, late=ATTACHMENTS
    ),
    "two clients on two routers": Configuration(
        num_tokens=1, num_routers=1, endless=True, faults={"guest": 1, "router crash": 1}
    ),
    "two clients, a router stands still": Configuration(
        num_tokens=1, num_routers=1, endless=True, faults={"guest": 1, "router stall": 1}
    ),
    "migrations, their calls late": alone(faults={"migrate": 2, "late": 1}, late=MIGRATIONS),
    "a migration, a worker crashes": alone(faults={"migrate": 2, "crash": 1}),
    "a migration whose commit is late, a worker crashes": alone(
        faults={"migrate": 1, "late": 1, "crash": 1}, late=frozenset({"commit"})
    ),
    "migrations of two branches, their calls late": alone(
        num_branches=2, faults={"migrate": 1, "late": 1}, late=MIGRATIONS | {"append"}
    ),
    "a migration, its target cannot run it": alone(
        faults={"migrate": 1, "refuse": 1, "late": 1}, late=MIGRATIONS | {"requeue"}
    ),
    "a target gives back what it cannot run, and nobody else does": alone(
        faults={"migrate": 1, "refuse": 1}, without=frozenset({"reconcile"})
    ),
    "a worker is told to stop while it moves a sequence": alone(
        faults={"migrate": 1, "leave": 1, "late": 1}, late=frozenset({"commit", "requeue"})
    ),
    "a migration, a failover": alone(faults={"migrate": 1, "failover": 1}),
    "a failover, an item is late": Configuration(faults={"failover": 1, "item": 1}),
    "a failover, a call is late": Configuration(client=False, keep=True, faults={"failover": 1, "late": 1}, late=CALLS),
    "a failover, a worker crashes": Configuration(client=False, keep=True, faults={"failover": 1, "crash": 1}),
    "workers refuse": Configuration(
        begins="queued", num_routers=1, faults={"refuse": 1, "reject": 1, "late": 1}, late=CALLS
    ),
    "the client cancels": Configuration(faults={"cancel": 1, "crash": 1}),
    "a deadline": alone(begins="queued", deadline_ms=3000, faults={"stall": 1}),
}

# Those that `make test` explores: some seconds in all.
SMALL = (
    "a worker stands still",
    "workers are told to stop",
    "an item is late, the client moves",
    "a failover, an item is late",
)
