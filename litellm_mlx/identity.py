"""
How a server that the launcher started proves that it is the one.

On a shared machine anybody can take a port before the server listens on it. So the
launcher gives each child a secret in its environment, which only this user can read,
and asks with a challenge: the answer carries their HMAC. Each child has a secret of its
own: else who has one's port could have the other answer. The sidecar answers likewise
(`sidecar.server.router`).
"""

import hashlib
import hmac
import secrets

import httpx

SECRET_NAME = "MLX_INSTANCE_SECRET"
CHALLENGE, PROOF = "x-mlx-challenge", "x-mlx-proof"


def new_secret() -> str:
    """A secret for the children of one launcher."""
    return secrets.token_hex(32)


def secret_of(secret: str, name: str) -> str:
    """A child's own secret: what one child proves, it cannot prove for another."""
    return proof_of(secret, f"secret of {name}")


def challenge() -> dict[str, str]:
    """The header of a question that an answer must prove itself by."""
    return {CHALLENGE: secrets.token_hex(16)}


def proof_of(secret: str, asked: str) -> str:
    """What only who knows the secret can answer."""
    return hmac.new(secret.encode(), asked.encode(), hashlib.sha256).hexdigest()


def is_proven(secret: str, answer: httpx.Response) -> bool:
    """Whether an answer comes from a process that knows the secret."""
    expected = proof_of(secret, answer.request.headers[CHALLENGE])
    return hmac.compare_digest(answer.headers.get(PROOF, ""), expected)
