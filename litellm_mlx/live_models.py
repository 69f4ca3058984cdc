"""
Models that come and go while LiteLLM runs.

LiteLLM can only learn of models through a database, or from inside: so the sidecar's
list is asked for every few seconds, and its model list follows. Only entries that were
made of that list are ever changed, here or by the launcher: what the user wrote, or
asked something more of, stays the user's.
"""

import asyncio
import logging
import sys
from typing import Any

import httpx
from litellm import Router
from litellm.types.router import Deployment, LiteLLM_Params, ModelInfo

from litellm_mlx.served_models import (
    NET,
    OURS,
    Upstream,
    entries,
    is_taken,
    parse_models,
)
from litellm_mlx.settings import Settings

logger = logging.getLogger(__name__)

_SERVER = "litellm.proxy.proxy_server"
_EVERY_S = 10.0
_TIMEOUT_S = 10.0


class LiveModels:
    """Keeps a router's list in step with the sidecars; on the event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._task: asyncio.Task[None] | None = None
        self._tags: dict[str, str] = {}

    def start(self) -> None:
        """Begin, once; from a coroutine."""
        if self._task is None:
            self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        async with httpx.AsyncClient(trust_env=False, timeout=_TIMEOUT_S) as client:
            while True:
                try:
                    await self._look_at_all(client)
                except Exception:  # of a list that is none; the next may be one
                    logger.debug("the sidecar's models are not known", exc_info=True)
                await asyncio.sleep(_EVERY_S)

    async def _look_at_all(self, client: httpx.AsyncClient) -> None:
        router = getattr(sys.modules.get(_SERVER), "llm_router", None)
        for upstream in self._upstreams(router):
            await self._look(client, router, upstream)

    def _upstreams(self, router: Router | None) -> list[Upstream]:
        """The sidecars that the list has a net for, whatever they serve."""
        if router is None:
            return []
        found: dict[str, Upstream] = {}
        for entry in router.model_list:
            params = entry["litellm_params"]
            if params.get("model") == NET:
                base = str(params.get("api_base") or self._settings.api_base)
                timeout_s = float(
                    params.get("timeout") or self._settings.request_timeout_s
                )
                has_key = self._settings.api_key is not None
                found[base] = Upstream(base, timeout_s, has_key=has_key)
        return list(found.values())

    async def _look(
        self, client: httpx.AsyncClient, router: Router, upstream: Upstream
    ) -> None:
        base, key = upstream.api_base, self._settings.api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        if base in self._tags:
            headers["If-None-Match"] = self._tags[base]
        answer = await client.get(f"{base}/models", headers=headers)
        if answer.status_code == httpx.codes.NOT_MODIFIED:
            return
        wanted = entries(parse_models(answer.raise_for_status().json()), upstream)
        self._settle(router, base, list(wanted))
        self._tags[base] = answer.headers.get("etag", "")

    def _settle(self, router: Router, base: str, wanted: list[dict[str, Any]]) -> None:
        """Add, change and take away what is ours."""
        ours = {
            entry["model_info"]["id"]
            for entry in router.model_list
            if str(entry["model_info"]["id"]).startswith(OURS)
            and entry["litellm_params"].get("api_base") == base
        }
        others = {
            entry["model_name"]
            for entry in router.model_list
            if entry["model_info"]["id"] not in ours
        }
        kept = set()
        for entry in wanted:
            if is_taken(entry["model_name"], others):
                continue
            router.upsert_deployment(
                Deployment(
                    model_name=entry["model_name"],
                    litellm_params=LiteLLM_Params(**self._keyed(entry)),
                    model_info=ModelInfo(**entry["model_info"]),
                )
            )
            kept.add(entry["model_info"]["id"])
        for gone in ours - kept:
            router.delete_deployment(gone)

    def _keyed(self, entry: dict[str, Any]) -> dict[str, Any]:
        """Only in a config's entries LiteLLM replaces os.environ/NAME by its value."""
        params: dict[str, Any] = entry["litellm_params"]
        key = self._settings.api_key
        return {**params, "api_key": key} if key and "api_key" in params else params
