"""One call of Step: the requests that its reader sends, and the messages that the reader gets."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import Future

from gpu_worker.engine.command_port import Grant, LoopControl
from gpu_worker.journal.step_publisher import StepPublisher
from gpu_worker.journal.step_subscription import MAX_PENDING_MESSAGES, StepSubscription
from gpu_worker.serving.calls.messages import step_to_wire
from octavo.internal.v1 import worker_pb2
from octavo.request import limits
from octavo.request.errors import InvalidArgument, TooManyStreams
from octavo.request.ids import Incarnation, SequenceId

MAX_STREAMS = 256
MAX_GRANT_STEPS = MAX_PENDING_MESSAGES // 2  # steps of finite grants that a stream may await at once


class StepHandler:
    """Serves one Step stream from its first request to its end.

    A reader whose first request is Open is a router: it gets the sequences that it schedules or follows. Any other
    first request makes the reader an observer, which gets every sequence, until it sends Open.
    """

    def __init__(self, publisher: StepPublisher, control: LoopControl, incarnation: Incarnation) -> None:
        """Raises TooManyStreams if this worker has as many open streams as it serves."""
        self._publisher = publisher
        self._control = control
        self._incarnation = incarnation
        if len(self._publisher.subscriptions) >= MAX_STREAMS:
            raise TooManyStreams(f"{MAX_STREAMS} Step streams are open: close one, or retry", retry_after_ms=1000)
        self._subscription = StepSubscription()

    async def messages(
        self, requests: AsyncIterator[worker_pb2.StepRequest]
    ) -> AsyncGenerator[worker_pb2.StepResult, None]:
        """The messages of the stream, in order.

        The stream ends when its reader sends no more requests and has been told of every step of its finite grants,
        when this worker stops, or when the same router opens another stream. A bad request, or a reader that is too
        slow, ends the stream with an error.
        """
        subscription = self._subscription
        self._publisher.add_subscription(subscription)
        obeying = asyncio.create_task(self._obey(requests))
        try:
            while True:
                while subscription.ready:
                    yield step_to_wire(subscription.next_message(), self._incarnation)
                if subscription.overflowed:
                    raise TooManyStreams("this stream reads too slowly: read the journal and follow again")
                if obeying.done():
                    obeying.result()  # raises the error of a bad request
                if (subscription.closing or obeying.done()) and not subscription.num_awaited:
                    return
                await subscription.wake.wait()
                subscription.wake.clear()
        finally:
            self._publisher.remove_subscription(subscription)
            obeying.cancel()
            await asyncio.gather(obeying, return_exceptions=True)

    async def _obey(self, requests: AsyncIterator[worker_pb2.StepRequest]) -> None:
        try:
            async for request in requests:
                self._obey_request(request)
        finally:
            self._subscription.wake.set()

    def _obey_request(self, request: worker_pb2.StepRequest) -> None:
        subscription, publisher = self._subscription, self._publisher
        if not request.HasField("open"):
            publisher.add_observer(subscription)
        match request.WhichOneof("command"):
            case "open":
                self._check_router_id(request.open.router_id)
                publisher.assign_router(subscription, request.open.router_id)
            case "grant":
                self._grant_steps(request.grant.steps)
            case "pause":
                self._pause()
            case "follow":
                follow = request.follow
                publisher.follow(subscription, SequenceId(follow.seq_id), list(follow.next_indexes))
            case "unfollow":
                publisher.unfollow(subscription, SequenceId(request.unfollow.seq_id))
            case _:
                raise InvalidArgument("command", "send one of open, grant, pause, follow, unfollow")

    def _grant_steps(self, steps: int) -> None:
        """Lets the engine run `steps` steps, of each of which this stream is told. 0 is the unlimited grant."""
        subscription = self._subscription
        if not steps <= MAX_GRANT_STEPS - subscription.num_awaited:
            raise InvalidArgument(
                "grant.steps",
                f"{steps} beside the {subscription.num_awaited} still to come are more than {MAX_GRANT_STEPS}; "
                "grant 0 to let the worker run until Pause",
            )
        subscription.num_awaited += steps
        self._control.grant_steps(steps, subscription.subscription_id)

    def _pause(self) -> None:
        """Takes back all grants, and tells each stream not to await the steps that will not run."""
        publisher, soon = self._publisher, asyncio.get_running_loop().call_soon_threadsafe

        def revoke(future: "Future[list[Grant]]") -> None:
            for grant in future.result() if not future.exception() else ():
                if grant.subscription_id is not None:
                    soon(publisher.revoke_steps, grant.subscription_id, grant.steps)

        self._control.pause().add_done_callback(revoke)

    def _check_router_id(self, router_id: str) -> None:
        field, longest = "open.router_id", limits.MAX_ROUTER_ID_CHARS
        if not (1 <= len(router_id) <= longest and router_id.isascii() and router_id.isprintable()):
            raise InvalidArgument(field, f"must be 1 to {longest} printable ASCII characters")
        if self._subscription.router_id not in ("", router_id):
            raise InvalidArgument(field, "this stream has another one; open a second stream")
