"""What is explored: which calls and faults may happen together, in bounds small enough to visit every state."""

from modelcheck.callers import ATTACHMENTS, MIGRATIONS, Configuration

from octavo.store.calls import TakeReason

MOVES = frozenset({"take", "append", "requeue"}) | MIGRATIONS

# By name. `make modelcheck` explores all of them, and `make test` those of SMALL.
CONFIGURATIONS = {
    "members fall silent": Configuration(faults={"silent": 1}),
    "workers are told to stop": Configuration(num_tokens=1, faults={"leave": 1, "silent": 1}),
    "the store restarts": Configuration(num_tokens=1, faults={"restart": 1, "silent": 1}),
    "a failover": Configuration(
        calls=frozenset({"take", "append", "requeue"}), max_epoch=2, faults={"failover": 1, "silent": 1}
    ),
    "two clients": Configuration(
        calls=ATTACHMENTS | {"take"}, max_epoch=1, keep=False, reasons=(TakeReason.QUEUED,), faults={"silent": 1}
    ),
    "a deadline": Configuration(num_tokens=1, deadline_ms=3000, faults={"silent": 1}),
    "migrations": Configuration(calls=MOVES, max_migration=2, reasons=(TakeReason.QUEUED, TakeReason.LEASE)),
    "a migration, members fall silent": Configuration(
        calls=MOVES, max_migration=1, num_tokens=1, faults={"silent": 1, "leave": 1}
    ),
    "migrations of two branches": Configuration(
        calls=MOVES, max_epoch=2, num_branches=2, num_tokens=1, reasons=(TakeReason.QUEUED,)
    ),
    "a standby": Configuration(
        calls=MOVES,
        max_epoch=2,
        max_migration=1,
        standby=True,
        reasons=(TakeReason.QUEUED, TakeReason.LEASE),
        faults={"silent": 1},
    ),
    "a standby, a failover": Configuration(
        calls=frozenset({"take", "append"}),
        max_epoch=2,
        standby=True,
        reasons=(TakeReason.QUEUED, TakeReason.LEASE),
        faults={"failover": 1, "silent": 1},
    ),
}

# Those that `make test` explores: some seconds in all.
SMALL = ("two clients", "migrations of two branches")
