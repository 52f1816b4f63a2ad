"""Writes cells.json: which cell a request belongs to, for clients in any language.

Written from docs/cells.md and not from octavo/request/cells.py, which is tested against it. The rule never changes:
a client that computed another cell would not find its requests.  python tests/golden/make_cells.py
"""

import json
from hashlib import sha256
from pathlib import Path

FILE = Path(__file__).with_name("cells.json")
IDS = ["r-0", "r-1", "r-2", "r-00112233445566778899aabbccddeeff", "", "a b/c?#;,", "Grüße, 世界 🙂"]


def cell(request_id: str, num_cells: int) -> int:
    best, found = b"", 0
    for number in range(num_cells):
        digest = sha256(request_id.encode("utf-8") + b"#" + str(number).encode("ascii")).digest()
        if digest > best:
            best, found = digest, number
    return found


def text() -> str:
    vectors = [{"request_id": each, "cells": {str(n): cell(each, n) for n in (1, 2, 3, 10, 15)}} for each in IDS]
    return json.dumps({"vectors": vectors}, indent=1, ensure_ascii=True) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
