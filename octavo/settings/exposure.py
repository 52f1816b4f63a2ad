"""May a program listen where other machines reach it?"""

from collections.abc import Iterable
from dataclasses import fields

from octavo.process.listen_address import exposed_addresses
from octavo.settings.options import Settings, SettingsError
from octavo.settings.router import RouterSettings
from octavo.settings.worker import WorkerSettings

INCOMPLETE_TLS = "--tls-cert, --tls-key and --tls-ca belong together: give all three, or none of them"


def require_protected(settings: Settings) -> None:
    """Raises SettingsError if a router or worker would let other machines in without TLS, unless it is to be insecure.

    Also if settings of TLS and of API keys lack others that they need.
    """
    if not isinstance(settings, RouterSettings | WorkerSettings):
        return
    files = (settings.tls_cert, settings.tls_key, settings.tls_ca)
    if any(files) and not all(files):
        raise SettingsError(INCOMPLETE_TLS)
    router = settings if isinstance(settings, RouterSettings) else None
    if router and not router.client_certificates and not (all(files) and router.api_keys):
        raise SettingsError("--no-client-certificates needs --api-keys, and --tls-cert, --tls-key and --tls-ca")
    refusal = exposure_refusal(listen_addresses(settings), "give --tls-cert, --tls-key and --tls-ca")
    if refusal and not any(files) and not settings.insecure:
        raise SettingsError(refusal)


def listen_addresses(settings: RouterSettings | WorkerSettings) -> list[str]:
    """The addresses HOST:PORT on which a program listens, for whatever protocol. Empty ones are nowhere."""
    names = (field.name for field in fields(settings))
    others = [str(getattr(settings, name)) for name in names if name.endswith("_listen") and name != "http_listen"]
    http = [settings.http_address] if isinstance(settings, RouterSettings) else []
    return [settings.address, *http, *others]


def exposure_refusal(addresses: Iterable[str], remedy: str) -> str:
    """Why a program must not listen on these addresses without TLS; empty where only this machine can call them."""
    what = "other machines could use it and read what passes, without TLS and authorization"
    return _said(addresses, f"{what}: {remedy}, or --insecure where a network that you trust keeps others out")


def exposure_warning(addresses: Iterable[str]) -> str:
    """What to log at a start with --insecure on these addresses; empty where only this machine can call them."""
    what = "no TLS and no authorization, by --insecure. Whoever reaches it can use it and read what passes"
    return _said(addresses, f"{what}: let only trusted machines reach it")


def _said(addresses: Iterable[str], text: str) -> str:
    exposed = exposed_addresses(addresses)
    return f"{' and '.join(exposed)}: {text}" if exposed else ""


def program_warning(settings: RouterSettings | WorkerSettings) -> str:
    """What to log at the start of a program that lets other machines in without TLS; empty if it does not."""
    return "" if settings.tls_cert else exposure_warning(listen_addresses(settings))
