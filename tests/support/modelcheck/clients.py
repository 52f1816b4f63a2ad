"""What the client and its session do: calls, reads the journal, gets items, leaves, and comes back elsewhere.

The session reads runs of tokens as a router does: with router.streaming.branch_reader.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from modelcheck.explorer import Step
from modelcheck.world import PROMPT_CHAIN, World, chain_of, router_name

from octavo.request.errors import HistoryLost
from octavo.request.sampling import FinishReason
from octavo.store.calls import AcceptStatus
from octavo.text.stop import TextDelta
from router.streaming.branch_reader import BranchReader

if TYPE_CHECKING:
    from modelcheck.system import System

LOST = "HISTORY_LOST"


class NoText:
    """The text of a request that wants none: no stop string ever ends it."""

    def push(self, token_ids: Any) -> TextDelta:
        return TextDelta("", 0, False)

    def resume(self, token_ids: Any, num_bytes: int) -> TextDelta:
        return TextDelta("", 0, False)

    def finish(self) -> TextDelta:
        return TextDelta("", 0, False)


def steps(system: "System", world: World) -> Iterator[Step]:
    client = world.client
    if client.gone:
        return
    if world.has("cancel"):
        asked = world.spend("cancel").with_truth(cancelled=True)
        after, _, wrong = system.perform(asked, ("cancel",))
        yield Step("the client cancels", after, False, wrong)
    if client.end == "to call":
        yield from _call(system, world)
        return
    if client.end:
        return
    if world.has("walk away"):
        yield Step("the client leaves for good", _hang_up(world.spend("walk away")).with_client(gone=True), False)
    if client.router >= 0:
        yield from _read(system, world)
        if world.has("reconnect"):
            yield Step("the client's stream breaks", _hang_up(world.spend("reconnect")), progress=False)
        return
    for index, router in enumerate(world.routers):
        if router.state == "up":
            name = router_name(index, router.number)
            yield from system.issue(
                world, name, ("attach", name), lambda after, record, index=index: _attached(after, index, record)
            )


def _hang_up(world: World) -> World:
    index = world.client.router
    if index >= 0:
        world = world.with_router(index, telling=True)
    return world.with_client(router=-1)


def _call(system: "System", world: World) -> Iterator[Step]:
    """A new request. The client may leave while the router waits for the reply, which may never come."""
    for index, router in enumerate(world.routers[:1]):
        if router.state != "up":
            continue
        name = router_name(index, router.number)

        def accepted(after: World, reply: Any, index: int = index, name: Any = name) -> World:
            if reply.status is AcceptStatus.EXISTS:  # by an earlier call
                after, record, _ = system.perform(after, ("attach", name))
                return _attached(after.with_client(end=""), index, record)
            generation = system.stores.view(after.store).generation
            return after.with_client(router=index, end="", generation=generation)

        yield from system.issue(world, name, ("accept",), accepted)
        if world.has("walk away"):
            left = world.spend("walk away").with_client(gone=True, end="")
            for what, after in (
                ("before it is accepted", left),
                ("while it is accepted", system.perform(left, ("accept",))[0]),
            ):
                if system.keeps("accept is shielded"):
                    after = after.with_router(index, telling=True)
                yield Step(f"the client of {name} leaves {what}", after, progress=False)


def _attached(world: World, index: int, record: Any) -> World:
    if record is None:
        return world.with_client(end="NOT_FOUND")
    return world.with_client(router=index, generation=-1, confirmed=0)


def _read(system: "System", world: World) -> Iterator[Step]:
    client, record, journal = world.client, system.record(world), system.journal(world)
    if world.routers[client.router].state != "up":
        return
    name = router_name(client.router, world.routers[client.router].number)
    if record is None:
        yield Step(f"{name}: the record is gone", world.with_client(end="NOT_FOUND"))
        return
    generation = system.stores.view(world.store).generation
    known = len(client.tokens)
    whole = client.generation == -1 or (client.generation != generation and system.keeps("new generation: read from 0"))
    if whole and len(journal) < known and not record.state.ended:
        # The worker may still bring what the journal has lost.
        yield Step(f"{name}: the journal stays too short", world.with_client(end=LOST))
        return
    reader = _reader(client.tokens, client.confirmed)
    first = known if not system.keeps("readings begin where the last one ended") else client.confirmed
    finish = record.finishes[0]
    try:
        if whole:
            if not reader.find_history(journal):
                raise HistoryLost("the journal ends before what was delivered")
            first = known
        confirmed = reader.confirm(first, journal[first:])
        piece = reader.read_run(first, journal[first:], None, finish)
        if confirmed:
            reader.note_confirmed()
    except HistoryLost:
        yield Step(f"{name}: another history", world.with_client(end=LOST))
        return
    tokens = client.tokens + (tuple(piece.token_ids) if piece else ())
    yield Step(
        f"{name} reads {tokens} {_end_of(reader.finish)}",
        world.with_client(
            tokens=tokens, confirmed=reader.confirmed_index, end=_end_of(reader.finish), generation=generation
        ),
    )


def _reader(tokens: tuple[int, ...], confirmed: int) -> BranchReader:
    """The reader of a session that has delivered these tokens."""
    reader = BranchReader(0, PROMPT_CHAIN, NoText())  # type: ignore[arg-type]  # it has what a reader calls
    reader.next_index, reader.chain = confirmed, chain_of(tokens[:confirmed])
    reader.note_confirmed()
    reader.next_index, reader.chain = len(tokens), chain_of(tokens)
    return reader


def _end_of(finish: FinishReason) -> str:
    return finish.name if finish else ""


def receive(system: "System", world: World, first: int, tokens: tuple[int, ...]) -> tuple[World, str]:
    """An item of a worker's stream arrives, perhaps for the second time."""
    client = world.client
    if client.end or client.router < 0 or client.gone or client.generation == -1:
        return world, ""
    if not system.keeps("each index once"):
        return world.with_client(tokens=client.tokens + tokens), ""
    if first > len(client.tokens):
        return world, ""  # a gap: the session reads the journal
    reader = _reader(client.tokens, client.confirmed)
    # Every item carries the chain after it, which the worker computed over all tokens before.
    chain = chain_of(system.tokens.contexts[tokens[-1]] + tokens[-1:]) if system.keeps("chain of items") else None
    try:
        piece = reader.read_run(first, tokens, chain, FinishReason.NONE)
    except HistoryLost:
        return world.with_client(end=LOST), ""
    return world.with_client(tokens=client.tokens + (tuple(piece.token_ids) if piece else ())), ""
