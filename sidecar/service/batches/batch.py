"""A batch: requests of a file that are answered when nobody else asks."""

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from sidecar.core.batches import BatchOrder
from sidecar.service.batches.stored_files import is_file_id, new_file_id

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired",
    "cancelling", "cancelled",
]  # fmt: skip
_ENDED = ("failed", "completed", "expired", "cancelled")
_HOUR_S = 3600


@dataclass(eq=False)
class Batch:
    """
    One batch as it stands. Written under its service's lock.

    Args:
        times: when it came to each status, in seconds since 1970.
        output_id, error_id: of the files that its answers are written to.
        errors: of its file, by line; then nothing of it is answered.
    """

    id: str
    owner: str | None
    order: BatchOrder
    status: Status = "validating"
    times: dict[str, int] = field(default_factory=dict)
    output_id: str = field(default_factory=new_file_id)
    error_id: str = field(default_factory=new_file_id)
    num_requests: int = 0
    num_completed: int = 0
    num_failed: int = 0
    errors: list[dict[str, Any]] = field(default_factory=list)

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it is answered any more."""
        return self.status in _ENDED

    @property
    def expires_at(self) -> int:
        """When it ends at the latest."""
        return self.times["created"] + self.order.hours * _HOUR_S

    def become(self, status: Status) -> None:
        """Note its status, and when it came to it."""
        self.status = status
        self.times[status] = int(time.time())

    def as_json(self) -> dict[str, Any]:
        """The batch as the OpenAI API has it."""
        names = ("in_progress", "finalizing", "completed", "failed", "expired",
                 "cancelling", "cancelled")  # fmt: skip
        done = self.has_ended and self.status != "failed"
        errors = {"object": "list", "data": self.errors} if self.errors else None
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.order.endpoint,
            "errors": errors,
            "input_file_id": self.order.input_file_id,
            "completion_window": f"{self.order.hours}h",
            "status": self.status,
            "output_file_id": self.output_id if done and self.num_completed else None,
            "error_file_id": self.error_id if done and self.num_failed else None,
            "created_at": self.times["created"],
            "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(name) for name in names},
            "request_counts": {
                "total": self.num_requests,
                "completed": self.num_completed,
                "failed": self.num_failed,
            },
            "metadata": self.order.metadata,
        }

    def as_file(self) -> bytes:
        """What of it is kept."""
        order = self.order
        kept = {
            "id": self.id,
            "owner": self.owner,
            "order": [order.input_file_id, order.endpoint, order.hours, order.metadata],
            "status": self.status,
            "times": self.times,
            "files": [self.output_id, self.error_id],
            "counts": [self.num_requests, self.num_completed, self.num_failed],
            "errors": self.errors,
        }
        return json.dumps(kept).encode()


def new_batch(owner: str | None, order: BatchOrder) -> Batch:
    """A batch whose file is still to be read."""
    times = {"created": int(time.time())}
    return Batch(f"batch_{secrets.token_hex(12)}", owner, order, times=times)


def batch_from_file(data: bytes) -> Batch:
    """
    A batch that an earlier run kept.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: it is none.
    """
    kept = json.loads(data)
    input_id, endpoint, hours, metadata = kept["order"]
    output_id, error_id = kept["files"]
    num_requests, num_completed, num_failed = counts = kept["counts"]
    if not all(map(is_file_id, (input_id, output_id, error_id))):
        raise ValueError("its files have odd names")
    numbers = (hours, *counts, *kept["times"].values(), kept["times"]["created"])
    if not all(type(number) is int for number in numbers):
        raise TypeError("a count or a time is no number")
    if kept["status"] not in get_args(Status) or not isinstance(endpoint, str):
        raise ValueError("its status or endpoint is none")
    if not (isinstance(kept["owner"], str | None) and isinstance(kept["errors"], list)):
        raise TypeError("its owner or its errors are none")
    return Batch(
        kept["id"],
        kept["owner"],
        BatchOrder(input_id, endpoint, hours, metadata),
        kept["status"],
        kept["times"],
        output_id,
        error_id,
        num_requests,
        num_completed,
        num_failed,
        kept["errors"],
    )
