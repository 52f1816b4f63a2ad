"""The check of `octavo doctor` and `octavo up` of the store: whether it answers, and what to do where it does not."""

import asyncio

from octavo.cli.doctor import CheckReport
from octavo.local.embedded import find_server
from octavo.request.errors import Mismatch, StoreUnavailable
from octavo.settings.options import masked
from octavo.store import connected_store

STORE_TIMEOUT_S = 3.0
START_IT = "start it, or correct --store"
STORE_FIXES = (
    (("WRONGPASS", "NOAUTH", "AuthenticationError", "invalid username"), "correct user and password in --store"),
    (("NOPERM", "NoPermission", "no permissions"), "give this user the rights that docs/store.md lists"),
    (("CERTIFICATE_VERIFY_FAILED",), "name the authority in --store: rediss://...?ssl_ca_certs=/path/to/ca.pem"),
    (("No such file",), "correct the path in --store"),
    (("SSL", "Connection closed by server"), "redis:// is without TLS, rediss:// with it: correct --store"),
    (("Name or service not known", "name resolution", "No address"), "correct the host in --store"),
    (("pip install",), "install that package"),
    (("LOADING",), "wait until it has loaded its data"),
    (("MISCONF", "OOM", "READONLY"), "make it writable: see docs/store.md"),
)


async def store(url: str) -> CheckReport:
    """Calls the store at `url`; without a URL, looks for the server that `octavo up` would start."""
    if not url:
        try:
            return CheckReport("store", "ok", f"private, {find_server()}")
        except StoreUnavailable as error:
            fix = "pip install 'octavo[embedded]', or give --store redis://..."
            return CheckReport("store", "bad", error.message, fix)
    shown = masked(url)
    if url.startswith("memory:"):
        return CheckReport("store", "bad", f"{shown} is within one process", "give --store redis://..., or no --store")
    try:
        async with asyncio.timeout(STORE_TIMEOUT_S), connected_store(url):
            return CheckReport("store", "ok", f"{shown} answers")
    except TimeoutError:
        return CheckReport("store", "bad", f"{shown} gives no answer within {STORE_TIMEOUT_S:.0f} s", START_IT)
    except StoreUnavailable as error:
        return CheckReport("store", "bad", f"{shown}: {error.message}", fix_of(error.message))
    except Mismatch as error:
        return CheckReport("store", "bad", f"{shown}: {error.message}", "give --store a server that is in no cluster")


def fix_of(message: str) -> str:
    """What to do about an error of the store, by the words that Redis, Valkey and OpenSSL use."""
    for words, fix in STORE_FIXES:
        if any(word in message for word in words):
            return fix
    return f"{START_IT}; redis:// is without TLS" if "TimeoutError" in message else START_IT
