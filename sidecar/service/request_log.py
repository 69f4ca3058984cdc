"""What is logged of a chat: a line at its start and end, all in the session's file."""

import logging
from collections.abc import Mapping
from typing import Any

from sidecar.core.prompt import Divergence, Hit
from sidecar.core.requests import ChatRequest, ClientInfo, join_names
from sidecar.engine.sampling import Sampling
from sidecar.infra.session_log import SessionLog
from sidecar.memory.conversation_memory import AssistantOutput
from sidecar.pipeline.prepare import PreparedPrompt

logger = logging.getLogger(__name__)


def light(cached: int, total: int, *, is_new: bool = False) -> str:
    """
    green from 85 % of the prompt reused, yellow from 50 %, else red.

    A conversation that nothing was stored for yet is new: nothing has been lost.
    """
    share = cached / total if total else 0.0
    if share >= 0.85:
        return "green"
    return "new" if is_new else "yellow" if share >= 0.5 else "red"


class RequestLog:
    """
    Tells one chat request. One thread.

    Args:
        family: the model family whose markers its answer is read by.
    """

    def __init__(
        self,
        log: SessionLog,
        request: ChatRequest,
        prepared: PreparedPrompt,
        sampling: Sampling,
        family: str = "",
    ) -> None:
        self._log = log
        self._family = family
        self._request = request
        self._prepared = prepared
        self._sampling = sampling

    @property
    def _ignored(self) -> str:
        return join_names((*self._request.ignored, *self._prepared.unseen))

    def started(self, max_tokens: int) -> None:
        """Before the first token: what is reused, and why not more."""
        prepared, report = self._prepared, self._prepared.report
        total, reused = prepared.num_tokens, report.reused_len
        ignored = self._ignored
        logger.info(
            "request started light=%s match=%s reused=%d of %d rest=%d thinking=%s "
            "pinned=%s spliced=%d%s%s%s",
            light(reused, total, is_new=report.is_new),
            report.match,
            reused,
            total,
            total - reused,
            "on" if prepared.thinking else "off",
            ",".join(report.pinned) or "-",
            report.num_spliced,
            f" stopped_by={report.stopped_by}" if report.stopped_by else "",
            "".join(f" {name}={num}" for name, num in _retreat(prepared.hit).items()),
            f" ignored={ignored!r}" if ignored else "",
        )
        self._write("prompt", self._meta(max_tokens), self._content())
        sampling = self._sampling
        sampler = {name: getattr(sampling, name) for name in sampling.__slots__}
        self._write("sampler", sampler, {})

    def ended(self, numbers: Mapping[str, Any], said: AssistantOutput) -> None:
        """At the end: what it cost, what was said."""
        text = {
            "reasoning": said.reasoning,
            "text": said.text,
            "calls": [(call.name, call.arguments) for call in said.calls],
        }
        self._write("generation", numbers, text)

    def _write(
        self, direction: Any, meta: Mapping[str, Any], content: Mapping[str, Any]
    ) -> None:
        session = self._prepared.model.session
        self._log.write(session, self._request.request_id, direction, meta, content)

    def _meta(self, max_tokens: int) -> dict[str, Any]:
        request, prompt, report = self._request, self._prepared, self._prepared.report
        return {
            "path": request.path,
            "stream": request.is_streamed,
            "model": request.model,
            "family": self._family,
            "max_tokens": max_tokens,
            "temperature": self._sampling.temperature,
            "thinking": prompt.thinking,
            "thinking_source": request.thinking.source,
            "thinking_raw": request.thinking.raw,
            "match_type": report.match,
            "prompt_tokens": prompt.num_tokens,
            "matched_prefix_len": report.reused_len,
            "strict_prefix_len": report.strict_len,
            **_retreat(prompt.hit),
            "cache_key_delta_chars": report.key_delta_chars,
            "pinned": report.pinned,
            "restated": report.restated,
            "stopped_by": report.stopped_by,
            "spliced_turns": report.num_spliced,
            "substitution_proved": report.is_proved,
            **_place(request.client),
            "session": prompt.model.session,
            "is_subagent": prompt.model.is_subagent,
            "stable_messages": report.stable_messages,
            "changes": report.changes,
            "user_agent": request.client.user_agent,
            "ignored": self._ignored,
            "divergence": _place_fields(report.divergence),
            "counters": prompt.counted,
        }

    def _content(self) -> dict[str, Any]:
        place = self._prepared.report.divergence
        windows = [place.before, place.now] if place else None
        return {"divergence_windows": windows, "prompt": self._prepared.text}


def _retreat(hit: Hit) -> dict[str, int]:
    """Tokens that are in memory and computed again all the same, by the cause."""
    if hit.retreat is None:
        return {}
    num_tokens = hit.memory_len + hit.retreat.num_tokens - hit.cached_len
    return {hit.retreat.cause: num_tokens} if num_tokens > 0 else {}


def _place(client: ClientInfo) -> dict[str, Any]:
    """Where a session stands among others, and which field said so."""
    return {
        "session_source": client.session_source or "implicit",
        "parent_sessions": client.parents,
        "parent_sources": client.parent_sources,
        "branch": client.branch,
        "branch_source": client.branch_source,
    }


def _place_fields(place: Divergence | None) -> dict[str, Any] | None:
    """A divergence without its texts."""
    if place is None:
        return None
    fields = {"canonical_depth": place.depth, "message": place.message}
    return {**fields, "role": place.role}
