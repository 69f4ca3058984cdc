"""What goes wrong with a model hub, in words: the reason and what to do."""

import httpx
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

_NOT_AGAIN = {400, 401, 403, 404, 410, 451}
_GATED = "its terms must be accepted on its page at the hub, then set HF_TOKEN"


class HubFault(Exception):
    """The model cannot be had; the message says why and what to do."""


def contact_fault(error: Exception) -> str:
    """Why the hub did not list a model that the cache does not hold either."""
    if isinstance(error, OfflineModeIsEnabled):
        return (
            "HF_HUB_OFFLINE is set and the hub's cache does not hold all of it; "
            "start once without HF_HUB_OFFLINE to download it, or give a folder"
        )
    if isinstance(error, HFValidationError):
        return (
            "there is no such folder, and it is no hub id (org/name; mlx-community has "
            "most models)"
        )
    if isinstance(error, GatedRepoError):
        return _GATED
    if isinstance(error, RepositoryNotFoundError):
        return (
            "there is no such folder, and no such model on the hub; check the name "
            "(a private one needs HF_TOKEN)"
        )
    return (
        f"the hub cannot be reached ({reason(error)}) and its cache does not hold "
        "all of the model; check the connection, or give a folder"
    )


def final_fault(error: Exception) -> str | None:
    """What another try would not change; None if it may."""
    if isinstance(error, GatedRepoError):
        return _GATED
    if isinstance(error, HfHubHTTPError) and error.response.status_code in _NOT_AGAIN:
        return f"the hub refused it ({reason(error)}); it may need HF_TOKEN"
    return None


def reason(error: Exception) -> str:
    """An error's own word, short."""
    if isinstance(error, HfHubHTTPError):
        return f"HTTP status {error.response.status_code}"
    cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
    origin = cause or error
    if isinstance(origin, httpx.TimeoutException):
        return "no answer in time"
    lines = str(origin).splitlines()
    return lines[0] if lines and lines[0] else type(origin).__name__
