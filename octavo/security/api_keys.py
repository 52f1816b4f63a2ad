"""The API keys of tenants: a file with one line per key, which holds the key's SHA-256 and never the key.

    # tenant:sha256 of the key
    acme:6a1f0c...

A key has 32 random bytes, so a plain hash is enough: nobody can try them all, however fast the hash is. Lines that are
added or removed count within a second, without a restart.
"""

import base64
import binascii
import hashlib
import hmac
import logging
import re
import secrets
import threading
import time
from pathlib import Path

log = logging.getLogger(__name__)

CHECK_S = 1.0
KEY_PREFIX = "octavo-"  # so that scanners of repositories and logs can find a key that got there
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_INDEX_BYTES = 4
_NO_DIGEST = bytes(32)


class ApiKeyError(ValueError):
    """The file of keys cannot be used. The message names the file and the line, and never what a line holds."""


def require_tenant(name: str) -> str:
    """The name, if it is one of a tenant. Raises ApiKeyError."""
    if not _TENANT.fullmatch(name):
        raise ApiKeyError("a tenant's name has up to 64 letters, digits, dots, hyphens and underscores")
    return name


def new_key() -> str:
    """A key that has not been before."""
    return KEY_PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip("=")


def line_of(tenant: str, key: str) -> str:
    """The line of the file that lets a key in."""
    return f"{require_tenant(tenant)}:{hashlib.sha256(key.encode()).hexdigest()}"


def salt_of(tenant: str) -> str:
    """What a tenant's block hashes are salted with; it does not tell the name. Empty for the only tenant."""
    if not tenant:
        return ""
    return hashlib.blake2b(tenant.encode(), digest_size=16, person=b"octavo.salt.v1").hexdigest()


class ApiKeys:
    """The keys in a file, as they are now. A file that cannot be read leaves the last keys in force. Thread-safe."""

    def __init__(self, file: str) -> None:
        """Raises ApiKeyError."""
        self._file = Path(file)
        self._lock = threading.Lock()
        self._stamp = self._current_stamp()
        self._looked_at = time.monotonic()
        self._by_index = _parse(self._file)

    def tenant_of(self, key: str) -> str | None:
        """The tenant whose key this is; None if it is nobody's.

        How long that takes says nothing about any key: what is looked up is a hash, and hashes are compared whole.
        """
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
        with self._lock:
            if time.monotonic() - self._looked_at >= CHECK_S:
                self._look_again()
            candidates = self._by_index.get(digest[:_INDEX_BYTES], [(_NO_DIGEST, "")])
        found = None
        for known, tenant in candidates:
            if hmac.compare_digest(known, digest) and tenant:
                found = tenant
        return found

    def _look_again(self) -> None:
        self._looked_at = time.monotonic()
        stamp = self._current_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._by_index = _parse(self._file)
        except ApiKeyError as error:
            log.warning("the last API keys stay in force: %s", error)
            return
        log.info("%d API keys are in force", sum(map(len, self._by_index.values())))

    def _current_stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self._file.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_ino, found.st_size


def _parse(file: Path) -> dict[bytes, list[tuple[bytes, str]]]:
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: an editor counts no other ends
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise ApiKeyError(f"--api-keys {file}: {reason}") from error
    found: dict[bytes, list[tuple[bytes, str]]] = {}
    seen: dict[bytes, tuple[int, str]] = {}  # line and tenant of each hash
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            tenant, digest = _parse_line(text)
            first, known = seen.setdefault(digest, (number, tenant))
            if known != tenant:
                raise ValueError(f"has the key of line {first}, which is another tenant's")
        except ValueError as error:
            raise ApiKeyError(f"--api-keys {file}, line {number}: {error}") from None
        found.setdefault(digest[:_INDEX_BYTES], []).append((digest, tenant))
    return found


def _parse_line(text: str) -> tuple[str, bytes]:
    tenant, colon, written = text.partition(":")
    if not colon:
        raise ValueError("must be TENANT:SHA256, as `octavo key new TENANT` prints it")
    try:
        digest = binascii.unhexlify(written.strip())
    except (binascii.Error, ValueError):
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise ValueError("what follows the tenant must be a SHA-256 in 64 hex digits")
    return require_tenant(tenant.strip()), digest
