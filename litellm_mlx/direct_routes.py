"""
Requests to this machine go past the proxy that the environment names.

LiteLLM's own clients obey HTTP_PROXY and its like for every address, the sidecar's
included: the prompt and its key would go to that proxy in clear. NO_PROXY is the one
list that all of its clients read. Once it is set, Python no longer asks macOS for its
own settings, so what these say is written beside it.
"""

import importlib
from collections.abc import Callable, Mapping, MutableMapping

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
_SCHEMES = ("http", "https", "all")


def exempt(
    environ: MutableMapping[str, str],
    host: str,
    find_proxies: Callable[[], Mapping[str, str]],
) -> None:
    """
    Have this machine asked directly; nothing where no proxy is set.

    Args:
        environ: changed in place. host: the sidecar's.
        find_proxies: `urllib.request.getproxies`: by scheme, and `no` for exceptions.
    """
    found = find_proxies()
    named = [scheme for scheme in _SCHEMES if scheme in found]
    if not named:
        return
    for scheme in named:
        name = f"{scheme}_proxy"
        if not (environ.get(name) or environ.get(name.upper())):
            environ[name.upper()] = found[scheme]
    given = environ.get("no_proxy") or environ.get("NO_PROXY") or found.get("no", "")
    names = [name.strip() for name in given.split(",") if name.strip()]
    exempted = dict.fromkeys((*names, *_system_exceptions(), *_THIS_MACHINE, host))
    environ["no_proxy"] = environ["NO_PROXY"] = ",".join(exempted)


def _system_exceptions() -> tuple[str, ...]:
    """Hosts that macOS asks directly."""
    try:
        system = importlib.import_module("_scproxy")
    except ImportError:
        return ()
    return tuple(map(str, system._get_proxy_settings().get("exceptions", ())))
