"""
The secret from which all marks and signatures are made.

Of this process, unless what they mark outlives it: KV that is kept on a disk holds the
marks of notes, and clients keep signatures of turns that are restored with it.
"""

import functools
import hashlib
import hmac
import secrets

_secret = secrets.token_bytes(32)


def use_secret(secret: bytes) -> None:
    """Make marks and signatures as another process did; before the first is made."""
    global _secret
    _secret = secret


def secret_for(purpose: str) -> bytes:
    """32 bytes for one purpose; they tell nothing of the secret."""
    return _derived(_secret, purpose)


@functools.lru_cache(64)
def _derived(secret: bytes, purpose: str) -> bytes:
    return hmac.new(secret, purpose.encode(), hashlib.sha256).digest()
