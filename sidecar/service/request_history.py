"""What has ended lately, why it was not warm, and what reuse has saved."""

import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sidecar.core.conversation import Conversation, ForgetFilter
from sidecar.core.warmth import Warmth
from sidecar.infra.metrics import ReuseMetrics
from sidecar.service.earlier_sessions import EarlierSessions
from sidecar.service.recurring_values import RecurringValues

_MAX_ENDED = 50
_MAX_LENGTHS = 4096


@dataclass(frozen=True, slots=True)
class Work:
    """
    Tokens of prompts, and how many were reused.

    Args:
        saved_s: seconds that computing those would have taken, by the measured rate.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    saved_s: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        """Both."""
        return Work(
            self.prompt_tokens + other.prompt_tokens,
            self.reused_tokens + other.reused_tokens,
            self.saved_s + other.saved_s,
        )

    def __sub__(self, other: "Work") -> "Work":
        """What came since."""
        return Work(
            self.prompt_tokens - other.prompt_tokens,
            self.reused_tokens - other.reused_tokens,
            self.saved_s - other.saved_s,
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with what was computed."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "computed_tokens": self.prompt_tokens - self.reused_tokens,
            "saved_s": round(self.saved_s, 3),
        }


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """
    A chat that has ended, in whatever way.

    Args:
        at: Unix seconds of its end. client: the program that asked.
        warmth: what of its conversation was computed again.
    """

    request_id: str
    at: float
    client: str | None
    model: str
    conversation: Conversation
    outcome: str
    work: Work
    output_tokens: int
    ttft_s: float | None
    seconds: float
    warmth: Warmth

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "request_id": self.request_id,
            "at": self.at,
            "client": self.client,
            "model": self.model,
            "session": self.conversation.session,
            "outcome": self.outcome,
            "prompt_tokens": self.work.prompt_tokens,
            "cached_tokens": self.work.reused_tokens,
            "output_tokens": self.output_tokens,
            "ttft_s": self.ttft_s,
            "seconds": self.seconds,
            "warmth": self.warmth.as_dict(),
        }


class RequestHistory:
    """
    The last 50 chats, and sums over all. Any thread.

    Args:
        sessions_file: what conversations were answered, for the runs behind this one.
    """

    def __init__(self, metrics: ReuseMetrics, sessions_file: Path) -> None:
        self.recurring = RecurringValues()
        self._metrics = metrics
        self._ended: deque[EndedRequest] = deque(maxlen=_MAX_ENDED)
        self._work = Work()
        self._times: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._lost_s: dict[str, float] = defaultdict(float)
        self._lengths: OrderedDict[Conversation, int] = OrderedDict()  # of prompts
        self._firsts: OrderedDict[Conversation, Conversation] = OrderedDict()
        self._lock = threading.Lock()
        self.earlier_sessions = EarlierSessions(sessions_file, self._last_lengths)

    def note(self, ended: EndedRequest) -> None:
        """Count a chat."""
        work, warmth = ended.work, ended.warmth
        with self._lock:
            self._ended.append(ended)
            self._work += work
            self._note_length(ended.conversation, work.prompt_tokens)
            if warmth.cause:
                self._times[warmth.cause] += 1
                self._lost[warmth.cause] += warmth.lost
                self._lost_s[warmth.cause] += warmth.lost_s
        if warmth.cause:
            label = warmth.cause.partition(":")[0]
            self._metrics.warmth.labels(label).inc()
            self._metrics.lost_tokens.labels(label).inc(warmth.lost)
        self._metrics.saved_s.inc(work.saved_s)

    @property
    def work(self) -> Work:
        """The sum since the start."""
        with self._lock:
            return self._work

    def ended(self) -> list[dict[str, Any]]:
        """The last chats, the newest first."""
        with self._lock:
            found = tuple(self._ended)
        return [each.as_dict() for each in reversed(found)]

    def causes(self) -> list[dict[str, Any]]:
        """Why prompts were not warm, the dearest cause first."""
        with self._lock:
            rows = [
                {
                    "cause": cause,
                    "times": times,
                    "lost": self._lost[cause],
                    "lost_s": round(self._lost_s[cause], 3),
                }
                for cause, times in self._times.items()
            ]
        return sorted(rows, key=lambda row: (row["lost"], row["times"]), reverse=True)

    def _note_length(self, conversation: Conversation, num_tokens: int) -> None:
        """Of one that goes on under a new name, as that of its first turn here."""
        other = conversation.resembles
        first = self._firsts.get(other, other) if other else conversation
        self._firsts[conversation], self._lengths[first] = first, num_tokens
        self._lengths.move_to_end(first)
        for kept in (self._firsts, self._lengths):
            if len(kept) > _MAX_LENGTHS:
                kept.popitem(last=False)

    def _last_lengths(self) -> Mapping[Conversation, int]:
        with self._lock:
            return dict(self._lengths)

    def close(self) -> None:
        """Write which conversations were answered; repeatable."""
        self.earlier_sessions.close()

    def forget(self, forget_filter: ForgetFilter | None) -> None:
        """Forget all chats, or those of some conversations; the sums stay."""
        self.recurring.forget()
        self.earlier_sessions.forget(forget_filter)
        with self._lock:
            left = [
                e for e in self._ended if not _covers(forget_filter, e.conversation)
            ]
            self._ended = deque(left, maxlen=_MAX_ENDED)
            for kept in (self._lengths, self._firsts):
                for gone in [c for c in kept if _covers(forget_filter, c)]:
                    del kept[gone]


def _covers(forget_filter: ForgetFilter | None, conversation: Conversation) -> bool:
    return forget_filter is None or forget_filter.covers(conversation)
