"""The service as a model: its first state, the calls to the store, the passing of time, and the rules."""

from collections.abc import Callable, Iterator
from typing import Any

from modelcheck import clients, faults, routers, rules, workers
from modelcheck.explorer import Step
from modelcheck.stored import StoreModel
from modelcheck.world import (
    CLAIM_MS,
    GRACE_MS,
    LEASE_MS,
    PROMPT,
    PROMPT_CHAIN,
    SEQ,
    TICK_MS,
    Client,
    Configuration,
    Router,
    Tokens,
    Truth,
    Worker,
    World,
    dealt,
    gathered,
    router_name,
    worker_name,
)

from octavo.request.ids import Incarnation, RequestId
from octavo.request.record import NewSequence, Record
from octavo.request.sampling import FinishReason
from octavo.store.calls import AppendItem, Finish, Member, QueueLimits, TakeReason, TakeRequest
from octavo.store.memory import MemoryState

Call = tuple[Any, ...]


class System:
    """A modelcheck.explorer.Model of a configuration."""

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.tokens = Tokens()
        self.stores = StoreModel()
        self._judged: dict[tuple[int, int], str] = {}
        self._wrong_stores: dict[int, str] = {}

    # What the explorer asks

    def initial(self) -> World:
        setup, c = 0, self.configuration
        for index in range(2):
            setup, _ = self.stores.call(setup, "heartbeat", router_member(router_name(index, 0)), LEASE_MS)
            setup, _ = self.stores.call(setup, "heartbeat", worker_member(worker_name(index, 0)), LEASE_MS)
        world = World(
            store=setup,
            workers=(Worker(), Worker()),
            routers=(Router(), Router()),
            client=Client(router=0 if c.client else -1, gone=not c.client, generation=self.stores.view(0).generation),
            late=frozenset(),
            backup=-1,
            budget=c.budget,
            truth=Truth(),
        )
        if c.begins == "new":
            return world.with_client(router=-1, end="to call")
        world, _, _ = self.perform(world, ("accept",))
        if not c.client:
            world, _, _ = self.perform(world, ("detach", router_name(0, 0)))
        if c.begins == "running":
            world, _, _ = self.perform(world, ("take", 0, worker_name(0, 0), "first", TakeReason.QUEUED))
            world, _ = workers.admit(self, world, 0, 0, 1, 0, ())
            world = world.with_truth(admitted=1)
        return world

    def steps(self, world: Any) -> Iterator[Step]:
        if self.is_end(world) and not self.configuration.endless:
            yield from faults.late_calls(self, world)
            return
        for index in range(2):
            yield from workers.steps(self, world, index)
            yield from routers.steps(self, world, index)
        yield from clients.steps(self, world)
        yield from faults.steps(self, world)
        later = self.tick(world)
        yield Step("time passes", later)

    def wrong(self, world: Any) -> str:
        number = world.store
        if number not in self._wrong_stores:
            self._wrong_stores[number] = rules.wrong_store(self, number)
        return self._wrong_stores[number] or rules.wrong_world(self, world)

    def is_end(self, world: Any) -> bool:
        client, record = world.client, self.record(world)
        if self.configuration.endless:
            return not client.gone or record is None or record.state.ended or record.cancel
        return (record is None or record.state.ended) and (client.gone or client.end not in ("", "to call"))

    # What processes do

    def record(self, world: World) -> Record | None:
        stored = self.stores.view(world.store).get(SEQ)
        return None if stored is None else stored.record

    def journal(self, world: World) -> tuple[int, ...]:
        stored = self.stores.view(world.store).get(SEQ)
        return () if stored is None else gathered(stored.journals)

    def is_late(self, world: World) -> bool:
        """Whether the deadline has passed."""
        record, state = self.record(world), self.stores.view(world.store)
        return record is not None and state.past_deadline(record)

    def keeps(self, rule: str) -> bool:
        """Whether processes keep this rule. A weakening leaves it out."""
        return rule not in self.configuration.without

    def issue(
        self, world: World, who: str, call: Call, react: Callable[[World, Any], World], progress: bool = True
    ) -> Iterator[Step]:
        """A process makes a call and hears the reply; or the call is late."""
        yield from self.delay(world, who, call)
        after, reply, wrong = self.perform(world, call)
        status = getattr(reply, "status", reply)
        what = f"{who}: {self.text(call)} → {status if isinstance(status, str | bool) else 'done'}"
        yield Step(what, after if wrong else react(after, reply), progress, wrong)

    def delay(self, world: World, who: str, call: Call, fault: str = "late") -> Iterator[Step]:
        if call[0] in self.configuration.late | {"item"} and world.has(fault) and call not in world.late:
            later = world.spend(fault)._replace(late=world.late | {call})
            yield Step(f"{who}: {self.text(call)} is late", later, progress=False)

    def perform(self, world: World, call: Call) -> tuple[World, Any, str]:
        """Does a call: the world after it, its reply, and the rule that it broke."""
        kind, *args = call
        if kind == "schedule":
            after, reply = workers.admit(self, world, *args)
            return after, reply, ""
        if kind == "item":
            after, wrong = clients.receive(self, world, *args)
            return after, "", wrong
        number, reply = self._store_call(world.store, kind, args)
        if kind == "take" and call not in world.late:  # nobody can make this call again
            number = self.stores.apply(number, "forget take", forget_take)
        after = world._replace(store=number)
        after, wrong = rules.note_verdict(after, kind, args, reply)
        return after, reply, wrong or self.judge(world, after, call)

    def judge(self, before: World, after: World, call: Call) -> str:
        """What rule the change from one state of the store to the next breaks."""
        if before.store == after.store:
            return ""
        pair = (before.store, after.store)
        if pair not in self._judged:
            self._judged[pair] = rules.wrong_change(self, *pair)
        return self._judged[pair] or rules.wrong_call(self, before, after, call)

    def _store_call(self, number: int, kind: str, args: list[Any]) -> tuple[int, Any]:
        call, c = self.stores.call, self.configuration
        match kind:
            case "accept":
                return call(number, "accept", new_sequence(c), QueueLimits())
            case "pop":
                return call(number, "pop", "model", 1, CLAIM_MS)
            case "sweep":
                return call(number, "sweep", 8, GRACE_MS)
            case "take":
                return call(number, "take_ownership", TakeRequest(SEQ, *args))
            case "append":
                owner, epoch, first, tokens, finish = args
                item = self._append_item(epoch, first, tokens, finish)
                number, replies = call(number, "append_batch", owner, (item,))
                return number, replies[0]
            case "finish":
                reason, failure, epoch = args
                return call(number, "finish", Finish(SEQ, reason, failure=failure, epoch=epoch))
            case "leave" | "heartbeat":
                member = worker_member(args[0])
                return call(number, "leave", member) if kind == "leave" else call(number, kind, member, LEASE_MS)
            case "begin":
                epoch, migration, target = args
                return call(number, "mig_begin", SEQ, epoch, migration, target)
            case "commit":
                epoch, migration, target, length = args
                return call(number, "mig_commit", SEQ, epoch, migration, target, dealt(length, c.num_branches))
            case "abort":
                epoch, migration = args
                return call(number, "mig_abort", SEQ, epoch, migration)
            case _:  # requeue, cancel, attach, detach
                return call(number, kind, SEQ, *args)

    def _append_item(self, epoch: int, first: int, tokens: tuple[int, ...], finish: FinishReason) -> AppendItem:
        """An append of the whole sequence, as one of a branch. The last token of each branch ends that branch."""
        c, count = self.configuration, self.configuration.num_branches
        if count == 1:
            return AppendItem(SEQ, epoch, 0, first, tokens, finish)
        if len(tokens) != 1:
            raise NotImplementedError("with several branches, one token at a time is modelled, and no cancel")
        ends = first >= c.num_tokens - count and not c.endless
        last = FinishReason.LENGTH if ends else FinishReason.NONE
        return AppendItem(SEQ, epoch, first % count, first // count, tokens, last)

    def text(self, call: Call) -> str:
        return f"{call[0]}({', '.join(str(arg) for arg in call[1:])})"

    # Time

    def tick(self, world: World, ms: int = TICK_MS, *, store_away: bool = False) -> World:
        """Half a lease passes. Every process that goes round renews its lease, unless the store is away meanwhile."""
        number = self.stores.advance(world.store, ms)
        if store_away:
            return world._replace(store=number)
        for index, worker in enumerate(world.workers):
            if worker.state in ("up", "leaving"):
                member = worker_member(worker_name(index, worker.number))
                number, _ = self.stores.call(number, "heartbeat", member, LEASE_MS)
        world = world._replace(store=number)
        for index, router in enumerate(world.routers):
            if router.state == "up":
                world = self._renew_router(world, index, router_name(index, router.number))
        return world

    def _renew_router(self, world: World, index: int, name: Incarnation) -> World:
        """Within the grace a router also tells the store again whether it is attached, if the store may not know."""
        number, renewal = self.stores.call(world.store, "heartbeat", router_member(name), LEASE_MS)
        world = world._replace(store=number)
        lapsed = renewal.lapsed and self.keeps("a lapsed lease attaches again")
        late = any(self._attaches(call, name) for call in world.late) and self.keeps("attachments are told again")
        if lapsed or late or world.routers[index].telling:
            world, _, _ = self.perform(world, routers.attachment_call(world, index))
        return world

    def _attaches(self, call: Call, name: Incarnation) -> bool:
        return call[0] == "accept" or (call[0] in ("attach", "detach") and call[1] == name)


def forget_take(state: MemoryState) -> None:
    for stored in state._entries.values():
        stored.record.take_id = ""


def worker_member(name: Incarnation) -> Member:
    return Member("worker", name, b"")


def router_member(name: Incarnation) -> Member:
    return Member("router", name, b"")


def new_sequence(c: Configuration) -> NewSequence:
    return NewSequence(
        seq_id=SEQ,
        request_id=RequestId("a"),
        body_hash=b"body",
        tenant="tenant",
        salt="",
        model="model",
        layout="layout",
        sampling=b"",
        prompt=PROMPT,
        prompt_chain=PROMPT_CHAIN,
        num_branches=c.num_branches,
        max_tokens=dealt(c.num_tokens, c.num_branches)[0],
        priority=3,
        deadline_in_ms=c.deadline_ms,
        keep_on_disconnect=c.keep,
        router=router_name(0, 0),
    )
