"""Which places of prompts held another value again and again: a rule for each."""

import threading
from collections import OrderedDict
from dataclasses import dataclass

from sidecar.core.conversation import Conversation
from sidecar.core.prompt import Divergence
from sidecar.core.requests import ChatRequest
from sidecar.volatile.proposed_rule import propose_rule

_MIN_TIMES = 3
_MAX_PLACES = 256
_Place = tuple[str | None, tuple[str, str, str]]


@dataclass(slots=True)
class _Cost:
    times: int = 0
    lost: int = 0


class RecurringValues:
    """Counts what differed, per tenant; any thread. Values are not kept."""

    def __init__(self) -> None:
        self._costs: OrderedDict[_Place, _Cost] = OrderedDict()
        self._lock = threading.Lock()

    def rule_for(
        self,
        request: ChatRequest,
        conversation: Conversation,
        place: Divergence | None,
        lost: int,
    ) -> str:
        """
        Count a text that differed; the rule for it once it did so three times, else "".

        Args:
            place: where the prompt parts from the last one of its conversation.
            lost: tokens that were computed again for it.
        """
        if place is None or not place.is_own:
            return ""
        before, now = place.line_before, place.line_now
        for message in request.messages:
            if message.role != place.role or now not in message.text:
                continue
            if proposed := propose_rule(place.role, message.text, before, now):
                cost = self._count((conversation.tenant, proposed.place), lost)
                if cost.times < _MIN_TIMES:
                    return ""
                return proposed.toml(
                    f"differed {cost.times} times, {cost.lost} tokens computed again"
                )
        return ""

    def forget(self) -> None:
        """Count from the start again."""
        with self._lock:
            self._costs.clear()

    def _count(self, place: _Place, lost: int) -> _Cost:
        with self._lock:
            cost = self._costs.pop(place, None) or _Cost()
            self._costs[place] = cost
            cost.times += 1
            cost.lost += lost
            if len(self._costs) > _MAX_PLACES:
                self._costs.popitem(last=False)
            return _Cost(cost.times, cost.lost)
