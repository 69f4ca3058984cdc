"""
A token that a client keeps beside a piece of thinking and sends back with it.

The Messages API calls it the block's signature, the Responses API encrypted_content.
It names the turn that the thinking belongs to, by a random id, and the text by its
digest: so an echoed turn is known for the model's own, or known to be edited. Where
the client is not shown the thinking, the token carries it.

    mlx1.BODY.MAC    BODY = base64url(zlib(JSON {"turn", "digest"[, "text"]}))

The MAC (HMAC-SHA-256, core/lasting_secret) is checked before anything is unpacked:
what a client made up or changed costs a hash, and says nothing.
"""

import base64
import hashlib
import hmac
import json
import zlib
from dataclasses import dataclass

from sidecar.core.lasting_secret import secret_for

_PREFIX = "mlx1."


@dataclass(frozen=True, slots=True)
class TurnToken:
    """
    What a token says.

    Args:
        turn: id of the turn. digest: of the thinking's text.
        text: the thinking itself, None if the client was shown it.
    """

    turn: str
    digest: str
    text: str | None = None

    def is_of(self, thinking: str) -> bool:
        """Whether a text is the thinking it was made for."""
        return _digest(thinking) == self.digest


def make_token(turn: str, thinking: str, *, with_text: bool = False) -> str:
    """A token for a piece of thinking of a turn."""
    fields = {"turn": turn, "digest": _digest(thinking)}
    if with_text:
        fields["text"] = thinking
    packed = zlib.compress(json.dumps(fields).encode())
    body = base64.urlsafe_b64encode(packed).decode().rstrip("=")
    return f"{_PREFIX}{body}.{_mac(body)}"


def read_token(token: str | None) -> TurnToken | None:
    """What a token says; None if this process did not make it as it is."""
    if not token or not token.startswith(_PREFIX):
        return None
    body, _, mac = token.removeprefix(_PREFIX).partition(".")
    given = mac.encode("utf-8", "surrogatepass")
    if not hmac.compare_digest(_mac(body).encode(), given):
        return None
    packed = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
    return TurnToken(**json.loads(zlib.decompress(packed)))


def _mac(body: str) -> str:
    data = body.encode("utf-8", "surrogatepass")
    return hmac.new(secret_for("turn"), data, hashlib.sha256).hexdigest()


def _digest(text: str) -> str:
    # Clients trim line breaks at the ends of thinking (Qwen Code does).
    stripped = text.strip().encode("utf-8", "surrogatepass")
    return hashlib.sha256(stripped).hexdigest()[:32]
