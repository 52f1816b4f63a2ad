"""The API keys of tenants: a file with one line per key, which holds the key's SHA-256 and never the key.

    # tenant:sha256 of the key
    acme:6a1f0c...
    bolt:90d2aa... expires=2027-01-31T00:00:00Z max-streams=8 tokens-per-minute=100000

A key has 32 random bytes, so a plain hash is enough: nobody can try them all, however fast the hash is. Lines that are
added or removed count within a second, without a restart. Limits are the tenant's, whichever of its lines has them.
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
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from octavo.metrics.value import MetricValue
from octavo.request.limits import MAX_STREAMS, MAX_TOKENS_PER_MINUTE, NO_QUOTA, TenantQuota
from octavo.wire.tls import stamp_of

log = logging.getLogger(__name__)

CHECK_S = 1.0
EXPIRING_S = 7 * 24 * 3600.0  # so long before its end a key is warned of
WARN_S = 60.0  # how often the ends of keys are looked at
KEY_PREFIX = "octavo-"  # so that scanners of repositories and logs can find a key that got there
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_INDEX_BYTES = 4
_NO_DIGEST = bytes(32)
_LIMITS = {"max-streams": MAX_STREAMS, "tokens-per-minute": MAX_TOKENS_PER_MINUTE}  # in the order of TenantQuota


class ApiKeyError(ValueError):
    """The file of keys cannot be used. The message names the file and the line, and never what a line holds."""


def require_tenant(name: str) -> str:
    """The name, if it is one of a tenant. Raises ApiKeyError."""
    if not _TENANT.fullmatch(name):
        raise ApiKeyError("a tenant's name has up to 64 letters, digits, dots, hyphens and underscores")
    return name


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What a line of the file says of one key."""

    tenant: str
    digest: bytes
    expires_at: float = 0.0  # seconds since 1970; 0: never

    @property
    def id(self) -> str:
        """The text by which people find the key's line in the file. It does not reveal the key."""
        return f"key:{self.digest.hex()[:8]}"

    @property
    def expired(self) -> bool:
        return 0 < self.expires_at <= time.time()

    @property
    def state(self) -> str:
        """One of STATES."""
        if self.expired:
            return "expired"
        return "expiring" if 0 < self.expires_at <= time.time() + EXPIRING_S else "valid"


STATES = ("valid", "expiring", "expired")


def key_id(key: str) -> str:
    """The id of whatever a client has sent as its key. What does not look like one of ours gets none: it may be short
    enough to be found from its hash."""
    if len(key) < len(KEY_PREFIX) + 43 or not key.startswith(KEY_PREFIX):
        return "key of another form"
    return ApiKey("", _digest_of(key)).id


def new_key() -> str:
    """A key that has not been before."""
    return KEY_PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip("=")


def line_of(tenant: str, key: str, expires_at: float = 0.0, quota: TenantQuota = NO_QUOTA) -> str:
    """The line of the file that lets a key in, until that time if there is one."""
    words = [f"{require_tenant(tenant)}:{_digest_of(key).hex()}"]
    if expires_at:
        words.append(f"expires={time_text(expires_at)}")
    words += [f"{name}={value}" for name, value in zip(_LIMITS, quota, strict=True) if value]
    return " ".join(words)


def time_text(seconds: float) -> str:
    """A time as lines have it, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse_time(text: str) -> float:
    """The seconds since 1970 of a day, which begins in UTC, or of a time with its zone. Raises ValueError."""
    found = datetime.fromisoformat(text)
    if found.tzinfo is None and len(text) > len("2027-01-31"):
        raise ValueError("without a zone")
    return found.replace(tzinfo=found.tzinfo or UTC).timestamp()


def _digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def salt_of(tenant: str) -> str:
    """What a tenant's block hashes are salted with; it does not tell the name. Empty for the only tenant."""
    if not tenant:
        return ""
    return hashlib.blake2b(tenant.encode(), digest_size=16, person=b"octavo.salt.v1").hexdigest()


@dataclass(slots=True)
class KeyTable:
    """What a file of keys says."""

    by_index: dict[bytes, list[ApiKey]] = field(default_factory=dict)
    quotas: dict[str, dict[str, int]] = field(default_factory=dict)  # by tenant: the limits that its lines have

    def all_keys(self) -> Iterator[ApiKey]:
        return (key for keys in self.by_index.values() for key in keys)


class ApiKeys:
    """The keys in a file, as they are now. A file that cannot be read leaves the last keys in force. Thread-safe."""

    def __init__(self, file: str) -> None:
        """Raises ApiKeyError."""
        self._file = Path(file)
        self._lock = threading.Lock()
        self._stamp = stamp_of(str(self._file))
        self._looked_at = time.monotonic()
        self._warned: set[ApiKey] = set()
        self._table = _parse(self._file)
        self._warn_of_ends()

    def find(self, key: str) -> ApiKey | None:
        """What the file says of this key; None if it is nobody's. It may have expired.

        How long that takes says nothing about any key: what is looked up is a hash, and hashes are compared whole.
        """
        digest = _digest_of(key)
        found: list[ApiKey] = []
        for known in self._current().by_index.get(digest[:_INDEX_BYTES], [ApiKey("", _NO_DIGEST)]):
            if hmac.compare_digest(known.digest, digest) and known.tenant:
                found.append(known)
        return max(found, key=lambda each: each.expires_at or float("inf"), default=None)

    def quota_of(self, tenant: str, default: TenantQuota) -> TenantQuota:
        """The tenant's limits: those in its lines, and else the default's."""
        said = self._current().quotas.get(tenant, {})
        return TenantQuota(*(said.get(name, limit) for name, limit in zip(_LIMITS, default, strict=True)))

    @property
    def tenants(self) -> set[str]:
        """Those that have a key, be it one that has expired."""
        return {key.tenant for key in self._current().all_keys()}

    def values(self) -> Iterator[MetricValue]:
        """A source of metric values."""
        states = Counter(key.state for key in self._current().all_keys())
        for state in STATES:
            yield MetricValue("octavo_api_keys", states[state], (state,))

    def _current(self) -> KeyTable:
        with self._lock:
            if time.monotonic() - self._looked_at >= CHECK_S:
                self._look_again()
            return self._table

    def _look_again(self) -> None:
        self._looked_at = time.monotonic()
        stamp = stamp_of(str(self._file))
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                self._table = _parse(self._file)
            except ApiKeyError as error:
                log.warning("the last API keys stay in force: %s", error)
            else:
                self._warn_at = self._looked_at
                log.info("%d API keys are in force", sum(not key.expired for key in self._table.all_keys()))
        if self._looked_at >= self._warn_at:
            self._warn_of_ends()

    def _warn_of_ends(self) -> None:
        """Says once of each key that its end is near, or is past when the key is first seen."""
        self._warn_at = self._looked_at + WARN_S
        for key in self._table.all_keys():
            if key.expires_at and key not in self._warned and key.state != "valid":
                self._warned.add(key)
                said = "has expired" if key.expired else "ends"
                when = time_text(key.expires_at)
                log.warning("an API key %s: tenant %s, %s, %s; make another one", said, key.tenant, key.id, when)


def _parse(file: Path) -> KeyTable:
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # not splitlines: an editor counts no other ends
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8"
        raise ApiKeyError(f"--api-keys {file}: {reason}") from error
    found = KeyTable()
    seen: dict[bytes, tuple[int, str]] = {}  # line and tenant of each hash
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            key, limits = _parse_line(text)
            first, known = seen.setdefault(key.digest, (number, key.tenant))
            if known != key.tenant:
                raise ValueError(f"has the key of line {first}, which is another tenant's")
            quota = found.quotas.setdefault(key.tenant, {})
            for name, limit in limits.items():
                if quota.setdefault(name, limit) != limit:
                    raise ValueError(f"has another {name} than an earlier line of its tenant: write it once")
        except ValueError as error:
            raise ApiKeyError(f"--api-keys {file}, line {number}: {error}") from None
        found.by_index.setdefault(key.digest[:_INDEX_BYTES], []).append(key)
    return found


def _parse_line(text: str) -> tuple[ApiKey, dict[str, int]]:
    """What a line says, and the limits of the tenant in it. The texts of its ValueErrors hold nothing of the line."""
    tenant, colon, rest = text.partition(":")
    if not colon:
        raise ValueError("must be TENANT:SHA256, as `octavo key new TENANT` prints it")
    written, *words = rest.split() or [""]
    try:
        digest = binascii.unhexlify(written)
    except (binascii.Error, ValueError):
        digest = b""
    if len(digest) != hashlib.sha256().digest_size:
        raise ValueError("what follows the tenant must be a SHA-256 in 64 hex digits")
    expires_at, limits = 0.0, {}
    for word in words:
        name, _, value = word.partition("=")
        if name == "expires":
            expires_at = _parse_end(value)
        elif name in _LIMITS and name not in limits:
            limits[name] = _parse_limit(name, value)
        else:
            raise ValueError(
                "after the SHA-256 may come expires=TIME, max-streams=N and tokens-per-minute=N, once each"
            )
    return ApiKey(require_tenant(tenant.strip()), digest, expires_at), limits


def _parse_end(text: str) -> float:
    try:
        seconds = parse_time(text)
        if seconds > 0:
            return seconds
    except (ValueError, OverflowError):
        pass
    raise ValueError("expires= must be a day, 2027-01-31, or a time with its zone, 2027-01-31T12:00:00Z")


def _parse_limit(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= _LIMITS[name]):
        raise ValueError(f"{name}= must be a number from 0, which is no limit, to {_LIMITS[name]}")
    return int(text)
