"""What one answer is speculated with: its drafters, and how far each is believed."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from sidecar.engine.constrained_row import ConstrainedRow
from sidecar.engine.speculation.draft_length import LENGTHS, DraftLength, DraftPrices
from sidecar.engine.speculation.draft_model import ModelDrafter
from sidecar.engine.speculation.lookup_drafter import LookupDrafter

DrafterName = Literal["forced", "lookup", "model"]


@dataclass(slots=True)
class DraftCount:
    """How often one drafter was tried, with how many tokens, and how many were said."""

    calls: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Proposal:
    """
    What may come next: the token that is drawn already, then at least two more.

    Args:
        drafted_s: seconds that the device took for it.
    """

    ids: list[int]
    drafter: DrafterName
    drafted_s: float = 0.0

    @property
    def num_drafted(self) -> int:
        """Without the token that is drawn already."""
        return len(self.ids) - 1


class RowSpeculation:
    """
    Drafts for one row. GPU thread only.

    Args:
        call_ids: tokens that begin a call: within one the place in a source is kept.
        constrained: what the answer is held to; None: nothing.
        model: the drafter with a model of its own; None: there is none.
    """

    def __init__(
        self,
        lookup: LookupDrafter,
        prices: DraftPrices,
        call_ids: Collection[int],
        constrained: ConstrainedRow | None = None,
        model: ModelDrafter | None = None,
    ) -> None:
        self._lookup, self._constrained, self._model = lookup, constrained, model
        self._call_ids, self._last = call_ids, DraftCount()
        self._lengths: dict[DrafterName, DraftLength] = {
            "forced": DraftLength(prices),
            "lookup": DraftLength(prices),
        }
        if model is not None:
            self._lengths["model"] = DraftLength(model.prices)
        self.counts: Mapping[DrafterName, DraftCount] = MappingProxyType(
            {name: DraftCount() for name in self._lengths}
        )

    def take(self, token: int) -> None:
        """Go on behind a token of the answer."""
        if token in self._call_ids:
            self._lookup.is_in_call = True
        self._lookup.take(token)
        if self._model is not None:
            self._model.take(token)

    def draft(self, drawn: Callable[[], int]) -> Proposal | None:
        """
        The first drafter's that has something; None: nothing is known.

        Args:
            drawn: waits for the next token, which is drawn already.
        """
        constrained = self._constrained
        found: Proposal | None = None
        if constrained is not None:
            if not constrained.may_go_ahead:
                return None
            found = self._drafted("forced", lambda most: constrained.forced())
        found = found or self._drafted("lookup", self._lookup.propose)
        if found is None and (model := self._model) is not None:
            found = self._drafted("model", lambda most: model.propose(drawn(), most))
            return found and replace(found, drafted_s=model.drafted_s)
        return found

    def note(self, draft: Proposal, num_accepted: int) -> None:
        """So many tokens of a draft were said."""
        self._lengths[draft.drafter].note(draft.num_drafted, num_accepted)
        count = self._last = self.counts[draft.drafter]
        count.calls += 1
        count.drafted += draft.num_drafted
        count.accepted += num_accepted

    def unsay(self, num_tokens: int) -> None:
        """So many of the last draft's tokens stood behind the answer's end."""
        self._last.accepted = max(0, self._last.accepted - num_tokens)

    def end(self) -> None:
        """Hold nothing for the row any more."""
        if self._model is not None:
            self._model.end()

    def _drafted(
        self, drafter: DrafterName, propose: Callable[[int], list[int]]
    ) -> Proposal | None:
        if not (length := self._lengths[drafter].choose()):
            return None
        known = propose(length + 1)
        # Of few lengths: for each one kernels are compiled.
        fitting = [each for each in LENGTHS if each < len(known) and each <= length]
        return Proposal(known[: fitting[-1] + 1], drafter) if fitting else None
