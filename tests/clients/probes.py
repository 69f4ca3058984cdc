"""Wire formats that no client here speaks: what they answer must at least be clear."""

from pathlib import Path

import httpx

from tests.clients.case import Case, Place

_BODY = {"contents": [{"role": "user", "parts": [{"text": "This is remark 5."}]}]}
_CALLS = (
    ("GET", "/v1beta/models"),
    ("POST", "/v1beta/models/local:generateContent"),
    ("POST", "/v1beta/models/local:streamGenerateContent?alt=sse"),
    ("POST", "/v1beta/models/local:countTokens"),
)


def gemini(place: Place) -> list[str]:
    """What Gemini CLI asks for: an answer, or a clear 4xx; never a 500."""
    wrong = []
    log = place.folder / "calls.log"
    for method, path in _CALLS:
        headers = {"x-goog-api-key": "any"}
        body = _BODY if method == "POST" else None
        with httpx.Client(trust_env=False, timeout=60, headers=headers) as http:
            answer = http.request(method, place.url + path, json=body)
        with log.open("a") as file:
            file.write(f"{method} {path}: {answer.status_code}\n{answer.text}\n\n")
        if answer.status_code >= 500:
            wrong.append(f"{path}: {answer.status_code} {answer.text[:300]}")
    return wrong


def _no_version(_clients: Path) -> str:
    return "-"


CASES = [Case("v1beta", "/v1beta", "generateContent", _no_version, gemini)]
