"""What is explored: which faults may happen together, in bounds small enough to visit every state."""

from modelcheck.world import Configuration

CALLS = frozenset({"append", "take", "requeue", "schedule", "finish", "pop"})
ATTACHMENTS = frozenset({"accept", "attach", "detach"})
MIGRATIONS = frozenset({"begin", "commit", "abort"})

# By name. `make modelcheck` explores all of them, and `make test` those of SMALL.
CONFIGURATIONS = {
    "two calls are late": Configuration(begins="queued", faults={"late": 2}, late=CALLS),
    "a worker crashes, a call is late": Configuration(faults={"crash": 1, "late": 1}, late=CALLS),
    "workers crash twice": Configuration(faults={"crash": 2}),
    "a worker stands still, another crashes, an append is late": Configuration(
        client=False, keep=True, num_routers=1, faults={"stall": 1, "crash": 1, "late": 1}, late=frozenset({"append"})
    ),
    "a worker stands still, a call is late": Configuration(faults={"stall": 1, "late": 1}, late=CALLS),
    "routers crash": Configuration(begins="queued", faults={"router crash": 2}),
    "a router crashes, a call is late, and no client is there": Configuration(
        begins="queued", client=False, keep=True, faults={"router crash": 1, "late": 1}, late=CALLS
    ),
    "workers are told to stop": Configuration(faults={"leave": 2, "late": 1}, late=CALLS | {"leave", "heartbeat"}),
    "a worker is told to stop, one crashes": Configuration(faults={"leave": 1, "crash": 1}),
    "a router has bad links": Configuration(faults={"bad link": 2, "late": 1}, late=CALLS),
    "a router has a bad link, a worker crashes": Configuration(faults={"bad link": 1, "crash": 1}),
    "the store restarts, a worker crashes": Configuration(faults={"restart": 1, "crash": 1}),
    "the store restarts twice, a call is late": Configuration(
        client=False, keep=True, faults={"restart": 2, "late": 1}, late=CALLS
    ),
    "items are late, the client moves": Configuration(most_at_once=2, faults={"item": 2, "reconnect": 1}),
    "the client moves, its attachments are late": Configuration(
        num_tokens=1, faults={"reconnect": 2, "late": 2, "router crash": 1}, late=ATTACHMENTS
    ),
    "a client leaves while its request is accepted": Configuration(
        num_tokens=1, begins="new", endless=True, faults={"walk away": 1, "late": 2}, late=ATTACHMENTS
    ),
    "two clients on two routers": Configuration(
        num_tokens=1,
        endless=True,
        faults={"guest": 1, "router crash": 1, "router stall": 1, "late": 1},
        late=ATTACHMENTS,
    ),
    "migrations, their calls late": Configuration(
        client=False, keep=True, faults={"migrate": 3, "late": 2}, late=MIGRATIONS
    ),
    "a migration, a crash, a late call": Configuration(
        client=False, keep=True, num_routers=1, faults={"migrate": 2, "crash": 1, "late": 1}, late=MIGRATIONS | CALLS
    ),
    "a failover": Configuration(faults={"failover": 1, "item": 1, "late": 1}, late=CALLS | {"item"}),
    "a failover, a worker crashes": Configuration(faults={"failover": 1, "crash": 1}),
    "two failovers": Configuration(faults={"failover": 2}),
    "a failover, a migration": Configuration(faults={"failover": 1, "migrate": 2}),
    "workers refuse": Configuration(begins="queued", faults={"refuse": 1, "reject": 1, "late": 1}, late=CALLS),
    "the client cancels": Configuration(faults={"cancel": 1, "crash": 1, "late": 1}, late=CALLS | {"cancel"}),
    "a deadline": Configuration(begins="queued", deadline_ms=3000, faults={"stall": 1, "late": 1}, late=CALLS),
}

# Those that `make test` explores: some seconds in all.
SMALL = (
    "workers are told to stop",
    "a router has bad links",
    "items are late, the client moves",
    "two failovers",
)
