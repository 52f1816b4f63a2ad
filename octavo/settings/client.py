"""The settings of a command that calls routers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from octavo.settings.common import KEY_HELP
from octavo.settings.options import Settings, option


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """How a command that calls routers shows who it is, and knows whom it calls."""

    program: ClassVar[str] = "client"
    started: ClassVar[tuple[type[Settings], ...]] = ()
    headings: ClassVar[Mapping[str, str]] = {}

    tls_cert: str = option("", "file of this caller's certificate, PEM")
    tls_key: str = option("", KEY_HELP)
    tls_ca: str = option("", "file of the authorities, PEM, that sign routers' certificates; it turns TLS on")
    tls_server_name: str = option("", "name in the routers' certificates; empty: the host of the endpoint")
    api_key_file: str = option("", "file with the tenant's API key and nothing else, as `octavo key new` prints it")
