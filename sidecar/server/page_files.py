"""The files of the admin page, by the paths that they are served under."""

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources

_PREFIX = "/admin/"
_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
# Nothing from elsewhere, nothing inline, in nobody's frame.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file as it is sent; `tag` changes with its body."""

    body: bytes
    content_type: str
    tag: str


@functools.cache
def page_files() -> Mapping[str, PageFile]:
    """All of them; no path is ever joined to find one."""
    found: dict[str, PageFile] = {}
    for file in resources.files("sidecar.server").joinpath("admin_page").iterdir():
        kind = _TYPES.get(file.name.rpartition(".")[2])
        if kind is None:
            continue
        body = file.read_bytes()
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        found[_PREFIX + file.name] = page = PageFile(body, kind, tag)
        if file.name == "index.html":
            found[_PREFIX] = found[_PREFIX.rstrip("/")] = page
    return found
