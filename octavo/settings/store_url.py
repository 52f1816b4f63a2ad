"""The forms of a store's URL: redis://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]...][/DATABASE], rediss://, unix:///PATH,
memory://. Of several servers one is the primary, and the others are its replicas.
"""

import re
from urllib.parse import parse_qsl, urlsplit

SCHEMES = ("redis", "rediss", "unix", "memory")
_PARAMETERS = (
    *("db", "username", "password", "client_name", "health_check_interval", "socket_keepalive"),
    *("ssl_ca_certs", "ssl_ca_path", "ssl_ca_data", "ssl_certfile", "ssl_keyfile", "ssl_password"),
    *("ssl_cert_reqs", "ssl_check_hostname", "ssl_min_version", "ssl_ciphers"),
)


def require_store_url(url: str) -> None:
    """Raises ValueError, which shows no part of the URL that may be a secret, if this is no URL of a store."""
    scheme, colon, _ = url.partition("://")
    if not colon or scheme not in SCHEMES:
        raise ValueError(f"must begin with {', '.join(f'{name}://' for name in SCHEMES[:-1])} or {SCHEMES[-1]}://")
    for server in server_urls(url):
        _require_server_url(server)


def server_urls(url: str) -> tuple[str, ...]:
    """The URL of each server that a store's URL names."""
    scheme, _, rest = url.partition("://")
    netloc = re.split(r"[/?#]", rest, maxsplit=1)[0]
    tail = rest[len(netloc) :]
    user, at, hosts = netloc.rpartition("@")
    return tuple(f"{scheme}://{user}{at}{host}{tail}" for host in hosts.split(","))


def _require_server_url(url: str) -> None:
    scheme = url.partition("://")[0]
    parts = urlsplit(url)
    for name, _ in parse_qsl(parts.query):
        if name not in _PARAMETERS:
            raise ValueError(f"has a parameter ?{name}=, which is none of {', '.join(_PARAMETERS)}")
    if scheme == "memory":
        return
    if scheme == "unix":
        if len(parts.path) < 2:
            raise ValueError("must name a socket: unix:///path/to/socket")
        return
    try:
        port_is_right = parts.port != 0
    except ValueError:
        port_is_right = False
    if not port_is_right:
        raise ValueError("must have a port from 1 to 65535; in a password, write : / ? # [ ] @ as %3A %2F and so on")
    if not parts.hostname:
        raise ValueError(f"must name a host: {scheme}://HOST:6379/0")
    if not parts.path.strip("/").isdecimal() and parts.path.strip("/"):
        raise ValueError(f"must end with the number of a database: {scheme}://HOST:6379/0")
