"""
Why a prompt was not warm: what of its conversation's last prompt was computed again.

Lost are the tokens that the last prompt of the conversation had and that this one, as
far as it is long, did not reuse; new text is not lost. The cause is what the records of
the conversation say, not a guess from the figures (docs/reuse.md s13).
"""

import json
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from sidecar.core.conversation import Conversation, is_implicit
from sidecar.core.events import Usage
from sidecar.core.prompt import LOST_SLACK, CacheReport, Divergence, EarlierTurn
from sidecar.core.requests import ChatRequest
from sidecar.core.warmth import WARM, Warmth
from sidecar.kv.drops import Drop
from sidecar.memory.conversation_memory import ConversationMemory
from sidecar.pipeline.prepare import PreparedPrompt
from sidecar.service.earlier_sessions import EarlierSessions
from sidecar.service.request_history import RequestHistory

if TYPE_CHECKING:
    from sidecar.residents.resident import Resident

_WINDOW_CHARS = 40
_NEARLY_ALL = 0.9  # of a prompt: nothing is to be explained
_BEGAN = time.time()  # of this process, Unix seconds
_CUTS = {"edited", "branched", "compacted"}


class Store(Protocol):
    """The KV store, as far as it says why KV is not there."""

    switched_off: set[str]

    @property
    def may_restore(self) -> bool:
        """Whether what is stored is used at all."""

    @property
    def needs_checkpoints(self) -> bool:
        """Whether some layers cannot be cut."""

    def find_drop(self, conversation: Conversation, depth: int) -> Drop | None:
        """The last time that a session's KV behind a depth was let go."""


@dataclass(frozen=True, slots=True)
class _Reason:
    cause: str
    detail: str
    remedy: str = ""


_UNKNOWN = _Reason("unknown", "the records do not say")
_NO_CHECKPOINT = _Reason(
    "no_checkpoint",
    "layers of this model cannot be cut, and there was no checkpoint",
    "SNAPSHOT_STORE_MAX_ENTRIES_GLOBAL",
)


def explain(
    request: ChatRequest,
    prepared: PreparedPrompt,
    usage: Usage,
    resident: "Resident",
    history: RequestHistory,
) -> Warmth:
    """
    What a prompt lost, why, and the rule that mends it, if there is one.

    Args:
        usage: what of it was reused.
        history: what is not known of its conversation yet is noted there.
    """
    found = _explain(request, prepared, usage, resident, history.earlier_sessions)
    found = replace(found, lost_s=round(found.lost * resident.engine.token_s, 3))
    if found.cause != "text":
        return found
    conversation, place = prepared.pending_turn.conversation, prepared.report.divergence
    rule = history.recurring.rule_for(request, conversation, place, found.lost)
    return replace(found, rule=rule)


def _explain(
    request: ChatRequest,
    prepared: PreparedPrompt,
    usage: Usage,
    resident: "Resident",
    earlier_sessions: EarlierSessions,
) -> Warmth:
    memory, engine, cached_len = resident.memory, resident.engine, usage.cached_tokens
    window = engine.window(request.options) if usage.num_rotated else None
    report, conversation = prepared.report, prepared.pending_turn.conversation
    lost = report.lost_tokens(prepared.num_tokens, cached_len)
    if report.earlier is None:
        words = _first_words(request, prepared)
        earlier_len = earlier_sessions.earlier_len(conversation, words)
        earlier_sessions.note(conversation, words)
        if not any(message.role == "assistant" for message in request.messages):
            reason = _why_new(report)
        elif cached_len >= _NEARLY_ALL * prepared.num_tokens:
            return WARM
        elif earlier_len is not None:
            reason = _restarted(is_on_disk=memory.unwritten_turns is not None)
            lost = _lost_of(earlier_len, prepared, cached_len)
        elif (cleared := memory.turns.cleared(conversation)) is not None:
            reason = _Reason("cleared", f"it was cleared at {_clock(cleared.at)}")
            lost = _lost_of(cleared.num_tokens, prepared, cached_len)
        else:
            reason = _why_unknown(memory, conversation)
    elif not lost:
        return WARM
    elif window and min(prepared.num_tokens, cached_len + LOST_SLACK) >= window:
        reason = _rotated(window)
    else:
        drop = engine.store.find_drop(conversation, cached_len)
        reason = _why_lost(report, report.earlier, engine.store, drop, cached_len)
    place = _place(request, report) if _is_of_text(reason.cause) else None
    return Warmth(
        reason.cause,
        lost,
        0.0,
        reason.detail,
        reason.remedy,
        reason.cause.partition(": ")[2] or None,
        *((place.message, place.role, place.before, place.now) if place else ()),
    )


def _lost_of(earlier_len: int, prepared: PreparedPrompt, cached_len: int) -> int:
    """Tokens of an earlier prompt, of which the length alone is known."""
    return max(0, min(earlier_len, prepared.num_tokens) - cached_len)


def _place(request: ChatRequest, report: CacheReport) -> Divergence | None:
    """Where it parts from the last prompt; of what parts early, the message alone."""
    if report.earlier is None:
        return None
    # What another conversation says there is nobody's to read here.
    if report.divergence is not None and report.divergence.is_own:
        return report.divergence
    at = report.earlier.num_stable
    if at >= len(request.messages):
        return None
    message = request.messages[at]
    return Divergence(0, at, message.role, "", message.text[:_WINDOW_CHARS])


def _is_of_text(cause: str) -> bool:
    return cause == "text" or cause.startswith("field") or cause in _CUTS


def _first_words(request: ChatRequest, prepared: PreparedPrompt) -> str:
    """A digest of the first message of a user, without values that change."""
    found = zip(request.messages, prepared.pending_turn.digests, strict=False)
    return next((digest for message, digest in found if message.role == "user"), "")


def _why_new(report: CacheReport) -> _Reason:
    """The prompt has no answers in it yet."""
    if report.shared_len and (kind := report.closest_stop):
        detail = f"its beginning is another's, but for a value of the kind {kind}"
        return _Reason("not_lent", detail)
    if report.shared_len:
        detail = "a new conversation; its beginning is another's"
        return _Reason("other_prefix", detail)
    return _Reason("first_seen", "a new conversation")


def _rotated(window: int) -> _Reason:
    detail = (
        f"its context keeps {window} tokens and forgets its middle: what is behind "
        "them is computed each time"
    )
    return _Reason("rotated", detail, "context_len")


def _restarted(*, is_on_disk: bool) -> _Reason:
    lost = "was not on the disk yet" if is_on_disk else "is gone"
    return _Reason(
        "restarted",
        f"the server was started anew at {_clock(_BEGAN)}, and what it held of this "
        f"conversation {lost}",
        "" if is_on_disk else "KV_DISK_PERSISTENCE=true",
    )


def _why_unknown(memory: ConversationMemory, conversation: Conversation) -> _Reason:
    """Nothing is known of an earlier prompt of this conversation."""
    if memory.turns.has_expired(conversation):
        detail = "nobody went on with this session for too long"
        return _Reason("expired", detail, "PROMPT_CACHE_SESSION_MAX_IDLE_SECONDS")
    detail = f"it was begun elsewhere, or shortly before {_clock(_BEGAN)}, when the "
    detail += "server started, or its KV was cleared"
    if is_implicit(conversation.session):
        detail = f"its client names no session, and has rewritten it; or {detail}"
    return _Reason("unknown_past", f"nothing is known of this conversation: {detail}")


def _why_lost(
    report: CacheReport,
    earlier: EarlierTurn,
    store: Store,
    drop: Drop | None,
    cached_len: int,
) -> _Reason:
    if not store.may_restore:
        ways = ", ".join(sorted(store.switched_off))
        detail = f"the self-test goes on, or failed: {ways} may not be used"
        return _Reason("switched_off", detail, ".venv/bin/mlx-sidecar selftest")
    if earlier.tools:
        return _Reason("tools", "; ".join(earlier.tools))
    is_same = earlier.num_stable >= earlier.num_messages
    is_store = cached_len + LOST_SLACK < (
        earlier.num_tokens if is_same else report.stable_len
    )
    if is_store and drop is None and store.needs_checkpoints:
        return _NO_CHECKPOINT
    differs, dropped = _why_differs(report, earlier), _of_drop(drop)
    if is_store and not (is_same and differs):
        differs, dropped = dropped, differs
    if found := differs or dropped:
        return found
    return _NO_CHECKPOINT if store.needs_checkpoints else _UNKNOWN


def _of_drop(drop: Drop | None) -> _Reason | None:
    if drop is None:
        return None
    detail = f"its KV was let go at {_clock(drop.at)} ({drop.limit})"
    return _Reason(drop.reason, detail, drop.limit)


def _why_differs(report: CacheReport, earlier: EarlierTurn) -> _Reason | None:
    """What of the conversation is not as it was; None: nothing."""
    if report.divergence is not None and report.divergence.is_image:
        return _Reason("image", "an image is another")
    if earlier.num_stable < earlier.num_messages:
        return _why_rewritten(report, earlier)
    if kind := report.stopped_by or report.closest_stop:
        policy = json.dumps({kind: "restate"}, separators=(",", ":"))
        detail = f"a value of the kind {kind} differs"
        return _Reason(f"field: {kind}", detail, f"CACHE_PIN_POLICY={policy}")
    if report.divergence is not None:
        return _Reason("text", "a text differs that no rule knows", "CACHE_RULES_FILE")
    return None


def _why_rewritten(report: CacheReport, earlier: EarlierTurn) -> _Reason:
    """Messages of the conversation are others now."""
    at, now = earlier.num_stable, earlier.num_now
    place = report.divergence
    role = place.role if place else "user"
    if at == now:
        detail = f"the client went back to message {at} of {earlier.num_messages}"
        return _Reason("branched", detail)
    if earlier.is_rest_kept:
        return _Reason("text", "a message differs", "CACHE_RULES_FILE")
    if now < earlier.num_messages and now - at <= 2 and at > 1:
        return _Reason("edited", f"message {at + 1} was edited, what followed is gone")
    if now < earlier.num_messages:
        detail = f"the client made {now} messages of {earlier.num_messages}"
        return _Reason("compacted", detail)
    if at + 1 == now or role == "user":
        return _Reason("edited", f"message {at + 1} was edited")
    return _Reason("text", f"message {at + 1} differs", "CACHE_RULES_FILE")


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))
