"""The cells that a client may call, with a pool of endpoints for each. A request belongs to one of them, by its id."""

import asyncio

from octavo.client.endpoint_pool import EndpointPool
from octavo.net.security.client_credentials import PLAIN, ClientCredentials
from octavo.process.endpoint import Endpoints, parse_cells
from octavo.request import errors
from octavo.request.cells import cell_number


class CellPools:
    """Says which pool a call goes to. They belong to one event loop."""

    def __init__(self, endpoints: Endpoints, credentials: ClientCredentials = PLAIN) -> None:
        """Raises InvalidArgument, which names the cell, if one of the endpoints is none."""
        try:
            cells = parse_cells(endpoints)
        except ValueError as error:
            raise errors.InvalidArgument("endpoints", str(error)) from None
        self._pools = [EndpointPool(cell, credentials) for cell in cells]
        self._turn = 0

    def __len__(self) -> int:
        return len(self._pools)

    def pool_of(self, request_id: str) -> EndpointPool:
        """The pool of the request's cell: always the same one."""
        return self._pools[cell_number(request_id, len(self._pools))]

    def pool_for_resume(self, request_id: str | None) -> EndpointPool:
        """The pool for a resume token. Raises InvalidArgument where only the request's id can tell its cell."""
        if request_id:
            return self.pool_of(request_id)
        if len(self._pools) > 1:
            raise errors.InvalidArgument(
                "request_id", "with several cells, give the request's id beside its resume token: it names the cell"
            )
        return self._pools[0]

    def next_pool(self) -> EndpointPool:
        """The pool for a call that is about no request: each cell in turn."""
        self._turn += 1
        return self._pools[self._turn % len(self._pools)]

    async def connect(self, timeout_s: float) -> None:
        """Returns once a router of any cell is connected. Raises Unreachable, which names the routers of a cell."""
        tries = [asyncio.ensure_future(pool.connect(timeout_s)) for pool in self._pools]
        try:
            for attempt in asyncio.as_completed(tries):
                try:
                    return await attempt
                except errors.Unreachable as error:
                    failed = error
            raise failed
        finally:
            for each in tries:
                each.cancel()
            await asyncio.gather(*tries, return_exceptions=True)

    async def close(self) -> None:
        for pool in self._pools:
            await pool.close()
