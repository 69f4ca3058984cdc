"""What has ended lately, why it was not warm, and what reuse has saved."""

import threading
from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import Any

from sidecar.core.conversation import Conversation, ForgetFilter
from sidecar.core.warmth import Warmth
from sidecar.infra.metrics import ReuseMetrics
from sidecar.service.earlier_sessions import EarlierSessions
from sidecar.service.recurring_values import RecurringValues

_MAX_ENDED = 50


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
        earlier_sessions: of the runs before this one.
    """

    def __init__(
        self, metrics: ReuseMetrics, earlier_sessions: EarlierSessions
    ) -> None:
        self.recurring = RecurringValues()
        self.earlier_sessions = earlier_sessions
        self._metrics = metrics
        self._ended: deque[EndedRequest] = deque(maxlen=_MAX_ENDED)
        self._work = Work()
        self._times: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._lost_s: dict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def note(self, ended: EndedRequest) -> None:
        """Count a chat."""
        work, warmth = ended.work, ended.warmth
        with self._lock:
            self._ended.append(ended)
            self._work += work
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

    def close(self) -> None:
        """Write which conversations were answered; repeatable."""
        self.earlier_sessions.close()

    def forget(self, forget_filter: ForgetFilter | None) -> None:
        """Forget all chats, or those of some conversations; the sums stay."""
        self.recurring.forget()
        self.earlier_sessions.forget(forget_filter)
        with self._lock:
            left = [
                each
                for each in self._ended
                if forget_filter is not None
                and not forget_filter.covers(each.conversation)
            ]
            self._ended = deque(left, maxlen=_MAX_ENDED)
