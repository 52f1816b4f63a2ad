"""Which cell a request belongs to: every client computes it from the request id (docs/cells.md)."""

import hashlib


def cell_number(request_id: str, num_cells: int) -> int:
    """The number of the request's cell, from 0. The greatest SHA-256 over the id, "#" and the cell's number wins."""
    digests = [hashlib.sha256(f"{request_id}#{cell}".encode()).digest() for cell in range(num_cells)]
    return digests.index(max(digests))
