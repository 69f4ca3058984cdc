"""Which of LiteLLM's routes ask a model: those served here, and those that it lists."""

import functools
import importlib

from litellm_mlx.access import is_model_route

_CHECKS = "litellm.proxy.auth.route_checks"  # of the proxy; an SDK's user lacks it


@functools.lru_cache(maxsize=1024)
def asks_a_model(path: str) -> bool:
    """Whether a body that is sent there becomes arguments of a call."""
    if is_model_route(path):
        return True
    checks = importlib.import_module(_CHECKS).RouteChecks
    return bool(checks.is_llm_api_route(path))
