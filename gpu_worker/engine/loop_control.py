"""Whether the next step may begin: by finite grants, by the unlimited one, and unless the journal writer holds it."""

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from gpu_worker.engine.command_port import CommandPort
from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.state.step import SubscriptionId


@dataclass(slots=True, eq=False)
class Grant:
    """Steps that a subscription allowed. `UNLIMITED` stands for the grant without an end."""

    subscription_id: SubscriptionId | None
    steps: int


UNLIMITED = Grant(None, 0)


class LoopControl:
    """Lets the loop run as many steps as finite grants allow, and under the unlimited grant while there is work."""

    def __init__(self, port: CommandPort) -> None:
        self._port = port
        self._grants: deque[Grant] = deque()  # the engine's thread alone uses these and _unlimited
        self._unlimited = False
        self._held = False

    # What other threads may call

    def grant_steps(self, steps: int, subscription_id: SubscriptionId | None = None) -> None:
        """Allows `steps` more steps; 0 is the unlimited grant, which lasts until `pause`.

        The result of a step under a finite grant names `subscription_id`.
        """

        def command(_: Scheduler) -> None:
            if steps:
                self._grants.append(Grant(subscription_id, steps))
            else:
                self._unlimited = True

        self._port.post(command)

    def pause(self) -> "Future[list[Grant]]":
        """Takes all grants back, whichever subscription gave them; no step begins after that.

        The future has what was left of the finite ones.
        """

        def command(_: Scheduler) -> list[Grant]:
            left = list(self._grants)
            self._grants.clear()
            self._unlimited = False
            return left

        return self._port.post(command)

    def hold_steps(self, held: bool) -> None:
        """Keeps steps from beginning while `held` is true, because the journal writer is too far behind."""
        self._held = held
        self._port.wake.set()

    # What the loop calls

    def next_grant(self, *, has_work: bool) -> Grant | None:
        """The grant that allows the next step; None if there is none. An empty step uses up a finite grant, too."""
        if self._held:
            return None
        if self._grants:
            grant = self._grants[0]
            grant.steps -= 1
            if not grant.steps:
                self._grants.popleft()
            return grant
        return UNLIMITED if self._unlimited and has_work else None
