"""May a program listen where other machines reach it?"""

from dataclasses import fields

from octavo.process import listen_address
from octavo.settings.options import Settings, SettingsError
from octavo.settings.router import RouterSettings
from octavo.settings.worker import WorkerSettings


def require_protected(settings: Settings) -> None:
    """Raises SettingsError if a router or worker would let other machines in without TLS, unless it is to be insecure.

    Also if settings of TLS and of API keys lack others that they need.
    """
    if not isinstance(settings, RouterSettings | WorkerSettings):
        return
    files = (settings.tls_cert, settings.tls_key, settings.tls_ca)
    if any(files) and not all(files):
        raise SettingsError("--tls-cert, --tls-key and --tls-ca belong together: give all three, or none of them")
    router = settings if isinstance(settings, RouterSettings) else None
    if router and not router.client_certificates and not (all(files) and router.api_keys):
        raise SettingsError("--no-client-certificates needs --api-keys, and --tls-cert, --tls-key and --tls-ca")
    if not any(files) and not settings.insecure:
        refusal = listen_address.exposure_refusal(listen_addresses(settings))
        if refusal:
            raise SettingsError(refusal)


def exposure_warning(settings: "RouterSettings | WorkerSettings") -> str:
    """What to log at the start of a program that lets other machines in without TLS; empty if it does not."""
    return "" if settings.tls_cert else listen_address.exposure_warning(listen_addresses(settings))


def listen_addresses(settings: "RouterSettings | WorkerSettings") -> list[str]:
    """The addresses HOST:PORT on which a program listens, for whatever protocol. Empty ones are nowhere."""
    names = (field.name for field in fields(settings))
    others = [str(getattr(settings, name)) for name in names if name.endswith("_listen") and name != "http_listen"]
    http = [settings.http_address] if isinstance(settings, RouterSettings) else []
    return [settings.address, *http, *others]
