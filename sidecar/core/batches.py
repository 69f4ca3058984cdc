"""What a client asks for when it makes a batch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """
    The requests of a file, to be answered while nobody else asks.

    Args:
        endpoint: the path that all requests of the file go to.
        hours: how long they may take in all.
    """

    input_file_id: str
    endpoint: str
    hours: int
    metadata: dict[str, str] | None = None
