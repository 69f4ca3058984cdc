"""What one answer is speculated with: its drafters, and how far each is believed."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from sidecar.engine.constrained_row import ConstrainedRow
from sidecar.engine.speculation.draft_length import LENGTHS, DraftLength, DraftPrices
from sidecar.engine.speculation.lookup_drafter import LookupDrafter

DrafterName = Literal["forced", "lookup"]


@dataclass(slots=True)
class DraftCount:
    """How often one drafter was tried, with how many tokens, and how many were said."""

    calls: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Proposal:
    """What may come next: the token that is drawn already, then at least two more."""

    ids: list[int]
    drafter: DrafterName

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
    """

    def __init__(
        self,
        lookup: LookupDrafter,
        prices: DraftPrices,
        call_ids: Collection[int],
        constrained: ConstrainedRow | None = None,
    ) -> None:
        self._lookup, self._constrained = lookup, constrained
        self._call_ids = call_ids
        self._lengths: Mapping[DrafterName, DraftLength] = MappingProxyType(
            {"forced": DraftLength(prices), "lookup": DraftLength(prices)}
        )
        self.counts: Mapping[DrafterName, DraftCount] = MappingProxyType(
            {"forced": DraftCount(), "lookup": DraftCount()}
        )

    def take(self, token: int) -> None:
        """Go on behind a token of the answer."""
        if token in self._call_ids:
            self._lookup.is_in_call = True
        self._lookup.take(token)

    def draft(self) -> Proposal | None:
        """The first drafter's that has something; None: nothing is known."""
        constrained = self._constrained
        if constrained is None:
            return self._drafted("lookup", self._lookup.propose)
        if not constrained.may_go_ahead:
            return None
        return self._drafted("forced", lambda most: constrained.forced()) or (
            self._drafted("lookup", self._lookup.propose)
        )

    def note(self, draft: Proposal, num_accepted: int) -> None:
        """So many tokens of a draft were said."""
        self._lengths[draft.drafter].note(draft.num_drafted, num_accepted)
        count = self.counts[draft.drafter]
        count.calls += 1
        count.drafted += draft.num_drafted
        count.accepted += num_accepted

    def _drafted(
        self, drafter: DrafterName, propose: Callable[[int], list[int]]
    ) -> Proposal | None:
        if not (length := self._lengths[drafter].choose()):
            return None
        known = propose(length + 1)
        # Of few lengths: for each one kernels are compiled.
        fitting = [each for each in LENGTHS if each < len(known) and each <= length]
        return Proposal(known[: fitting[-1] + 1], drafter) if fitting else None
