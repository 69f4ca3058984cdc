"""What one answer is speculated with: its drafter, and how far that is believed."""

from collections.abc import Collection

from sidecar.engine.speculation.draft_length import LENGTHS, DraftLength, DraftPrices
from sidecar.engine.speculation.lookup_drafter import LookupDrafter


class RowSpeculation:
    """
    Drafts for one row. GPU thread only.

    Args:
        call_ids: tokens that begin a call: within one the place in a source is kept.
    """

    def __init__(
        self, drafter: LookupDrafter, prices: DraftPrices, call_ids: Collection[int]
    ) -> None:
        self._drafter = drafter
        self._length = DraftLength(prices)
        self._call_ids = call_ids

    def take(self, token: int) -> None:
        """Go on behind a token of the answer."""
        if token in self._call_ids:
            self._drafter.is_in_call = True
        self._drafter.take(token)

    def draft(self) -> list[int]:
        """What may come next, the token that is drawn already first; or nothing."""
        length = self._length.choose()
        found = self._drafter.propose(length + 1) if length else []
        # Of few lengths: for each one kernels are compiled.
        fitting = [each for each in LENGTHS if each < len(found)]
        return found[: fitting[-1] + 1] if fitting else []

    def note(self, num_drafted: int, num_taken: int) -> None:
        """A call had so many drafted tokens, of which so many were taken."""
        self._length.note(num_drafted, num_taken)
