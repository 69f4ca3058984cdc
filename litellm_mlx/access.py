"""
Who may come in at LiteLLM's port: rules for hosts, origins, keys and routes.

LiteLLM answers any web page (`access-control-allow-origin: *`) and, without a master
key, anybody who reaches the port, on all of its 600 routes: those that pass a body on
to a cloud with the user's keys among them. So before it sees a request:

- a page of another origin is refused, however it asks; browsers say so by `Origin`
  or, where they send none (images, links), by `Sec-Fetch-Site`;
- the host name must be this machine's, on every route (a rebound name is not);
- without a master key, the route must be one that a local user needs;
- with one, and no other place that keys could come from, the key is checked here:
  LiteLLM answers a missing one with 500 and a wrong one with 400.
"""

import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["forbidden", "unauthorized"]

# This machine's name in its own containers. No page has it: a browser on this machine
# asks the network's resolver for it, which may be anybody's.
_NAME_IN_CONTAINERS = "host.docker.internal"
_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[^\[\]:]+))(?::\d*)?")
_OWN_FETCHES = ("same-origin", "none")  # none: typed, or from no page at all
_KEY_HEADERS = ("x-api-key", "x-goog-api-key", "api-key")
# Answered without a key, as LiteLLM does: they hold nothing.
_PUBLIC = re.compile(r"/|/health/(liveliness|liveness|readiness)")
_PAGES = re.compile(  # of its interface: files, and a form for another password
    r"/(ui|_next|litellm-asset-prefix|swagger|docs|redoc)(/.*)?"
    r"|/openapi\.json|/favicon\.ico|/get_(favicon|image|logo_url)|/(fallback/)?login"
)
_MODEL_ROUTES = re.compile(
    r"(/v1)?/(chat/completions|completions|embeddings|rerank"
    r"|messages|messages/count_tokens|responses|responses/[^/]+"
    r"|responses/[^/]+/(cancel|input_items)|models|models/.+"
    r"|audio/(speech|transcriptions|translations)|images/(generations|edits)"
    r"|model/info|model_group/info)"
    r"|/v2/rerank|/utils/token_counter|/metrics/?"
    r"|/(engines|openai/deployments)/[^/,]+/(chat/completions|completions|embeddings)"
    r"|(/v1beta)?/models/[^/]+:(generateContent|streamGenerateContent|countTokens)"
    r"|/v1beta/models(/[^/]+)?"
)
# Asked otherwise, LiteLLM passes it on to a cloud, or fails on it.
_POSTED = re.compile(r"/(engines|openai/deployments)/.*")


@dataclass(frozen=True, slots=True)
class Asked:
    """The head of a request; header names in lower case, the path decoded."""

    method: str
    path: str
    headers: Mapping[str, str]
    key_in_query: str = ""
    models_in_query: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """
    What is let in.

    Args:
        master_key: None if LiteLLM asks for none.
        has_other_keys: a database or another authority knows further keys.
        origins, hosts: that the user lets in beside this machine's own.
    """

    master_key: str | None
    has_other_keys: bool = False
    origins: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not let in."""

    kind: Kind
    message: str


def refusal(asked: Asked, policy: AdmissionPolicy) -> Refusal | None:
    """Why a request is refused, None if it may go on to LiteLLM."""
    if _is_foreign(asked.headers, policy):
        return Refusal(
            "forbidden", "a web page of this origin is not in CORS_ALLOW_ORIGINS"
        )
    if not _is_own_host(asked, policy):
        return Refusal("forbidden", "this host name is not in ALLOWED_HOSTS")
    if policy.master_key is None:
        return _keyless(asked)
    is_open = _PUBLIC.fullmatch(asked.path) or _PAGES.fullmatch(asked.path)
    if policy.has_other_keys or is_open or _is_preflight(asked):
        return None
    if hmac.compare_digest(given_key(asked).encode(), policy.master_key.encode()):
        return None
    said = "the key is wrong" if given_key(asked) else "a key is needed"
    return Refusal(
        "unauthorized",
        f"{said}: give your client the value of LITELLM_MASTER_KEY as its API key",
    )


def is_model_route(path: str) -> bool:
    """Whether clients ask models there."""
    return bool(_MODEL_ROUTES.fullmatch(path))


def given_key(asked: Asked) -> str:
    """The key of a request, in whatever way its client sends one."""
    scheme, _, token = asked.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    litellm_key = asked.headers.get("x-litellm-api-key", "").removeprefix("Bearer ")
    sent = (asked.headers.get(name, "") for name in _KEY_HEADERS)
    return litellm_key or next(filter(None, sent), asked.key_in_query)


def _is_foreign(headers: Mapping[str, str], policy: AdmissionPolicy) -> bool:
    origin, host = headers.get("origin"), headers.get("host", "")
    if origin is not None:
        own = (f"http://{host}", f"https://{host}")
        return origin not in own and origin not in policy.origins
    return headers.get("sec-fetch-site", "none") not in _OWN_FETCHES


def _is_preflight(asked: Asked) -> bool:
    """Whether a browser asks if its page may ask; it has no key to give then."""
    is_asked = "access-control-request-method" in asked.headers
    return asked.method == "OPTIONS" and "origin" in asked.headers and is_asked


def _keyless(asked: Asked) -> Refusal | None:
    if _may_be_a_page(asked.headers):
        return Refusal("forbidden", "from a browser ask for 127.0.0.1 or localhost")
    is_posted = asked.method in ("POST", "OPTIONS")
    if _POSTED.fullmatch(asked.path) and not is_posted:
        return Refusal("forbidden", "this route is asked by POST")
    if _PUBLIC.fullmatch(asked.path) or _MODEL_ROUTES.fullmatch(asked.path):
        return None
    return Refusal(
        "forbidden",
        "this route is shut while LiteLLM has no key: put a LITELLM_MASTER_KEY into "
        ".env to open it",
    )


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


def _is_own_host(asked: Asked, policy: AdmissionPolicy) -> bool:
    is_page = "origin" in asked.headers or "sec-fetch-site" in asked.headers
    allowed = policy.hosts if is_page else (*policy.hosts, _NAME_IN_CONTAINERS)
    match = _HOST.fullmatch(asked.headers.get("host", "").lower())
    if match is None:
        return False
    name = match["v6"] or match["name"]
    if name == "localhost" or name in allowed:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
