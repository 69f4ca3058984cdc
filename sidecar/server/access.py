"""
Who may come in: a request's host, its origin and its API key are checked.

A web page in the user's browser must not reach a local model: a foreign Origin is
refused, and so is a Host that is no address of this machine (a rebound DNS name).
"""

import hashlib
import hmac
import ipaddress
import re
from collections.abc import Mapping

from sidecar.config.settings import ServerConfig
from sidecar.core.errors import Forbidden, Unauthorized
from sidecar.server.page_files import page_files

_EXCHANGE = "/admin/exchange"  # a code is its key
_OPEN_PATHS = ("/health", "/ready", _EXCHANGE)
# This machine's name in its own containers. No page has it: a browser on this machine
# asks the network's resolver for it, which may be anybody's.
_NAME_IN_CONTAINERS = "host.docker.internal"
# Images, scripts and links of a page bring no Origin; browsers say this of them.
_OTHER_PAGES = ("cross-site", "same-site")
# What is not for clients, but for who runs the server.
ADMIN_PATHS = ("/admin", "/native/memory", "/native/device", "/native/train")
_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[^\[\]:]+))(?::\d*)?")


def check(
    config: ServerConfig, method: str, path: str, headers: Mapping[str, str]
) -> None:
    """
    Let a request in or not; a browser's preflight question never brings a key.

    Raises:
        Forbidden: foreign origin or host name. Unauthorized: no key or a wrong one.
    """
    origin, is_admin = headers.get("origin"), path.startswith(ADMIN_PATHS)
    is_own = is_admin and origin == f"http://{headers.get('host', '')}"
    is_allowed = is_own or (origin in config.cors_allow_origins and not is_admin)
    if origin is not None and not is_allowed:
        raise Forbidden("this origin is not in CORS_ALLOW_ORIGINS")
    is_page = is_admin and path in page_files()
    is_others = headers.get("sec-fetch-site", "").lower() in _OTHER_PAGES
    if is_others and not is_page and (origin is None or is_admin):
        raise Forbidden("a page of another site asks")
    if is_own and method != "GET" and headers.get("x-admin") != "1":
        raise Forbidden("a page changes something with the header X-Admin: 1 alone")
    if not _is_own_host(headers, config.allowed_hosts):
        raise Forbidden("this host name is not in ALLOWED_HOSTS")
    if not config.api_key and _may_be_a_page(headers):
        raise Forbidden("from a browser ask for 127.0.0.1 or localhost")
    if is_admin and config.admin_token:
        return  # those routes have a token of their own
    is_open = (
        path in _OPEN_PATHS or is_page or (method == "OPTIONS" and origin is not None)
    )
    if config.api_key and not is_open and not _has_key(config, headers):
        raise Unauthorized("a valid key is needed: Authorization: Bearer MLX_API_KEY")


def needs_key(host: str) -> bool:
    """Whether an address lets others than this machine in."""
    if host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


def given_key(headers: Mapping[str, str]) -> str:
    """The key that a request came with; "": none."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return headers.get("x-api-key", "")


def key_id(headers: Mapping[str, str]) -> str | None:
    """A name for the key a request came with; not the key."""
    given = given_key(headers)
    return hashlib.sha256(given.encode()).hexdigest()[:16] if given else None


def proof(secret: str | None, headers: Mapping[str, str]) -> dict[str, str]:
    """
    The header by which a launcher knows that it is its own sidecar that answers.

    It gave the secret in the environment; who else has the port does not know it.
    """
    asked = headers.get("x-mlx-challenge")
    if secret is None or asked is None:
        return {}
    mac = hmac.new(secret.encode(), asked.encode(), hashlib.sha256)
    return {"x-mlx-proof": mac.hexdigest()}


def check_admin(config: ServerConfig, headers: Mapping[str, str]) -> None:
    """
    Let a request look behind the scenes: with ADMIN_TOKEN, else on loopback only.

    Raises:
        Unauthorized: no token. Forbidden: a wrong one, or not on loopback.
    """
    if config.admin_token:
        given = given_key(headers)
        if not given:
            raise Unauthorized("admin routes need Authorization: Bearer ADMIN_TOKEN")
        if not hmac.compare_digest(given.encode(), config.admin_token.encode()):
            raise Forbidden("this is not the ADMIN_TOKEN")
    elif needs_key(config.host):
        raise Forbidden("admin routes need ADMIN_TOKEN beyond loopback")


def _has_key(config: ServerConfig, headers: Mapping[str, str]) -> bool:
    expected = (config.api_key or "").encode()
    return hmac.compare_digest(given_key(headers).encode(), expected)


def _may_be_a_page(headers: Mapping[str, str]) -> bool:
    """
    Whether a browser asks and does not say for whom.

    It says so to addresses that it trusts only, and 0.0.0.0, which leads here as well,
    is none; nor is an address of the network.
    """
    if "origin" in headers or "sec-fetch-site" in headers:
        return False
    match = _HOST.fullmatch(headers.get("host", "").lower())
    name = match["v6"] or match["name"] if match else ""
    try:
        address = ipaddress.ip_address(name)
        # Not in IPv6's form of an IPv4 address.
        is_mapped = getattr(address, "ipv4_mapped", None) is not None
        is_trusted = address.is_loopback and not is_mapped
    except ValueError:
        is_trusted = name == "localhost"
    return not is_trusted and headers.get("user-agent", "").startswith("Mozilla/")


def _is_own_host(headers: Mapping[str, str], allowed: tuple[str, ...]) -> bool:
    header = headers.get("host", "")
    if not header:
        return True  # HTTP/1.0; a browser always sends one
    match = _HOST.fullmatch(header.lower())
    if match is None:
        return False
    name = match["v6"] or match["name"]
    if name == "localhost" or name in allowed:
        return True
    if name == _NAME_IN_CONTAINERS:
        return not ("origin" in headers or "sec-fetch-site" in headers)
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
