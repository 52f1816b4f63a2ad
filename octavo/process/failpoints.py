"""Named places in a program at which tests make it fail: between two steps of an exchange with other processes.

    await failpoints.reach("target.committed")        # in the program: nothing, unless that place is armed

    failpoints.arm("target.committed", "kill")        # in a test of one process
    octavo worker --failpoints target.committed=kill  # in a test of real processes

NAMES has every place. An action is one of

    kill         the process ends by SIGKILL
    error        raises StoreUnavailable; `error:3` does so the first three times only
    delay:0.5    goes on after so many seconds
    hang         goes on when the place is disarmed
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field

from octavo.request.errors import StoreUnavailable

# Of each side, in the order in which a migration reaches them there.
NAMES: dict[str, str] = {
    "source.asked": "a migration is to begin, and nothing has been looked at",
    "source.checked": "the sequence can move, and no target has been chosen",
    "source.begun": "the store has noted the migration, and the target has not been called",
    "source.prepared": "the target has given a ticket, and nothing has been sent",
    "source.pinned": "blocks are pinned, and have not been sent",
    "source.opened": "the ticket is open on the connection for blocks",
    "source.sent": "the target has accepted the blocks of a round",
    "source.extended": "the target has said which further blocks it wants",
    "source.frozen": "the sequence has stopped, and its last tokens may not be journalled",
    "source.flushed": "its last tokens are journalled",
    "source.tail_sent": "the target has all full blocks, and the tails",
    "source.finishing": "Finish is about to be sent",
    "source.aborting": "mig_abort is about to be sent",
    "source.aborted": "the sequence stays, and runs on",
    "source.finished": "the target is the owner, and the blocks here are still taken",
    "source.moved": "the engine is about to free the blocks, and all who follow the sequence have been told",
    "target.prepare": "Prepare has been called, and nothing has been read",
    "target.held": "blocks are held for a sequence, and there is no ticket",
    "target.prepared": "there is a ticket, and the source has not been told",
    "target.seal": "blocks have arrived, and are not known to the prefix cache",
    "target.extend": "Extend has been called, and nothing has been read",
    "target.extended": "more blocks are held, and the source has not been told",
    "target.finish": "Finish has been called, and blocks may still come in",
    "target.verified": "blocks and tokens are all there",
    "target.commit": "mig_commit is about to be sent",
    "target.committed": "the store has answered mig_commit, and the answer has not been read",
    "target.admit": "the target is the owner, and does not run the sequence",
    "target.requeue": "the target is the owner, and gives the sequence up",
    "target.admitted": "the target runs the sequence, and the source has not been told",
    "target.aborted": "the ticket has ended by Abort, and the source has not been told",
}

Action = Callable[[], Awaitable[None]]


@dataclass(slots=True)
class Failpoint:
    """A place that is armed. `num_reached` counts how often the program came by; `reached` is set at the first time."""

    name: str
    action: str | Action
    num_reached: int = 0
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    disarmed: asyncio.Event = field(default_factory=asyncio.Event)

    async def fail(self) -> None:
        """Carries out the action that the place is armed with."""
        self.num_reached += 1
        self.reached.set()
        if not isinstance(self.action, str):
            await self.action()
            return
        kind, _, argument = self.action.partition(":")
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "error" and self.num_reached <= float(argument or "inf"):
            raise StoreUnavailable(f"the failpoint {self.name} is armed")
        elif kind == "delay":
            await asyncio.sleep(float(argument))
        elif kind == "hang":
            await self.disarmed.wait()


_armed: dict[str, Failpoint] = {}


async def reach(name: str) -> None:
    """Says that the program has come to a place, and fails there if a test has armed it."""
    if (failpoint := _armed.get(name)) is not None:
        await failpoint.fail()


def arm(name: str, action: str | Action) -> Failpoint:
    """Makes the program fail at a place from now on, by an action in words or by a function of the test's.

    Raises ValueError if there is no such place or action.
    """
    _require(name, action)
    _armed[name] = Failpoint(name, action)
    return _armed[name]


def arm_all(texts: Iterable[str]) -> None:
    """Arms the places that texts such as `target.committed=kill` name. Raises ValueError."""
    for text in texts:
        name, _, action = text.partition("=")
        arm(name, action)


def require_texts(texts: Iterable[str]) -> None:
    """Raises ValueError if a text names no place and action."""
    for text in texts:
        name, _, action = text.partition("=")
        _require(name, action)


def disarm_all() -> None:
    """Ends every action that hangs, and lets no place fail any more."""
    for failpoint in _armed.values():
        failpoint.disarmed.set()
    _armed.clear()


def _require(name: str, action: str | Action) -> None:
    if name not in NAMES:
        raise ValueError(f"{name}: there is no such failpoint; octavo.process.failpoints.NAMES has them")
    if not isinstance(action, str):
        return
    kind, _, argument = action.partition(":")
    try:
        right = kind in ("kill", "hang", "error") and not argument
        right = right or (kind == "error" and int(argument) > 0) or (kind == "delay" and float(argument) >= 0)
    except ValueError:
        right = False
    if not right:
        raise ValueError(f"{action}: must be kill, hang, error, error:TIMES or delay:SECONDS")
