"""
Line breaks of Unicode within event streams, escaped.

JSON lets U+2028, U+2029 and U+0085 stand in a text as they are, and server-sent events
end their lines at CR and LF alone. But readers that split lines as Python's
`str.splitlines` does (httpx, and so google-genai and litellm itself) break an event
there, and drop its parts without a word.
"""

from litellm_mlx.asgi import Message, Send

_EVENTS = b"text/event-stream"
_ESCAPES = {
    "\u2028".encode(): rb"\u2028",
    "\u2029".encode(): rb"\u2029",
    "\u0085".encode(): rb"\u0085",
}


def escaped(send: Send) -> Send:
    """What sends an answer whose events, if it has any, break at their ends only."""
    has_events = False

    async def sending(message: Message) -> None:
        nonlocal has_events
        if message["type"] == "http.response.start":
            headers = dict(message.get("headers", ()))
            has_events = headers.get(b"content-type", b"").startswith(_EVENTS)
        elif has_events and message.get("body"):
            message = {**message, "body": _escape(message["body"])}
        await send(message)

    return sending


def _escape(body: bytes) -> bytes:
    for sign, escape in _ESCAPES.items():
        body = body.replace(sign, escape)
    return body
