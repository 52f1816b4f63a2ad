"""What lies between hosts: how long a message takes, and which host reaches which."""

import random
from collections.abc import Callable, Iterable

from simulation.loop import Host, SimLoop

Delivery = Callable[[], None]


class Network:
    """Carries messages between hosts, by name. A blocked direction holds what is sent until it is open, as TCP does."""

    def __init__(self, loop: SimLoop, seed: int) -> None:
        self.loop = loop
        self._seed = seed
        self._blocked: set[tuple[str, str]] = set()
        self._extra_s: dict[tuple[str, str], float] = {}  # slow directions
        self._held: dict[tuple[str, str], list[Delivery]] = {}
        self.num_held = 0  # messages that a blocked direction has held, so far
        self.watchers: list[Callable[[], None]] = []  # called when a host may have become reachable, or unreachable

    def rng(self, name: str) -> random.Random:
        """A source of chance for one purpose: what one connection draws does not move what another one draws."""
        return random.Random(f"{self._seed} {name}")

    def reaches(self, source: str, target: str) -> bool:
        return (source, target) not in self._blocked

    def delay_s(self, source: str, target: str, rng: random.Random) -> float:
        return rng.uniform(0.0001, 0.0008) + rng.random() * self._extra_s.get((source, target), 0.0)

    def hold(self, source: str, target: str, deliver: Delivery) -> None:
        """Calls `deliver` when the direction is open again."""
        self.num_held += 1
        self._held.setdefault((source, target), []).append(deliver)

    # Faults

    def block(self, pairs: Iterable[tuple[str, str]]) -> None:
        self._blocked.update(pairs)
        self.note_change()

    def slow_down(self, pairs: Iterable[tuple[str, str]], extra_s: float) -> None:
        self._extra_s |= dict.fromkeys(pairs, extra_s)

    def heal(self, pairs: Iterable[tuple[str, str]] | None = None) -> None:
        """Opens these directions, or every one, and brings what was held, in the order in which it was sent."""
        opened = list(self._blocked | set(self._extra_s) if pairs is None else pairs)
        for pair in sorted(opened):
            self._blocked.discard(pair)
            self._extra_s.pop(pair, None)
            for deliver in self._held.pop(pair, ()):
                deliver()
        self.note_change()

    def note_change(self) -> None:
        for watcher in list(self.watchers):
            watcher()


class Pipe:
    """One direction of one connection: messages arrive in the order in which they were sent."""

    def __init__(self, network: Network, source: Host, target: Host, rng: random.Random) -> None:
        self._network = network
        self._names = (source.name, target.name)
        self._target = target
        self._rng = rng
        self._last_arrival = 0.0
        self.closed = False

    def send(self, deliver: Delivery) -> None:
        """Calls `deliver` on the target's host, unless the pipe was closed meanwhile."""
        network = self._network
        arrival = network.loop.time() + network.delay_s(*self._names, self._rng)
        self._last_arrival = max(self._last_arrival, arrival)
        network.loop.call_at(self._last_arrival, self._arrive, deliver, context=self._target.context)

    def _arrive(self, deliver: Delivery) -> None:
        if self._network.reaches(*self._names):
            self._deliver(deliver)
        else:
            self._network.hold(*self._names, lambda: self._target.call_soon(self._deliver, deliver))

    def _deliver(self, deliver: Delivery) -> None:
        if not self.closed:
            deliver()
