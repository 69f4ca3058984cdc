"""The recorded agents' requests against the sidecar, and the same against its peer."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from bench.exact import template_kwargs
from bench.servers import Setup, mlx_lm_server
from testkit.proxy import running_proxy
from testkit.reuse import Hand, Served, recording_sidecar, serve_trace
from testkit.traces import Exchange, load_trace

_REQUEST_S = 600.0
_PEER_TOKENS = 4  # it cannot be made to say what was recorded


def serve_all(
    names: Sequence[str],
    model: Path,
    scratch: Path,
    hand: Hand,
    alter: Callable[[Sequence[Exchange]], Sequence[Exchange]] = list,
) -> Iterator[tuple[str, list[Served]]]:
    """
    Each trace on a sidecar of its own: Chat straight, Messages through LiteLLM.

    Args:
        alter: changes what is asked for.
    """
    traces = {name: alter(load_trace(name)) for name in names}
    messages = {name: t for name, t in traces.items() if t[0].is_anthropic}
    for name in traces.keys() - messages.keys():
        yield name, _serve_chat(traces[name], model, hand)
    if messages:
        yield from _serve_messages(messages, model, scratch, hand)


def ask_peer(served: Sequence[Served], setup: Setup) -> list[int]:
    """
    Send what the sidecar got to an mlx_lm.server of its own; prefilled tokens.

    Its answers are its own, a few random tokens; the histories are the recorded ones.
    """
    with mlx_lm_server(setup) as port, _client(f"http://127.0.0.1:{port}") as http:
        return [_prefilled_by_peer(http, turn) for turn in served]


def _serve_chat(trace: Sequence[Exchange], model: Path, hand: Hand) -> list[Served]:
    with (
        recording_sidecar(model, trace, hand) as recorder,
        _client(recorder.url) as http,
    ):
        return serve_trace(trace, recorder, http, "local")


def _serve_messages(
    traces: dict[str, Sequence[Exchange]], model: Path, scratch: Path, hand: Hand
) -> Iterator[tuple[str, list[Served]]]:
    with contextlib.ExitStack() as running:
        recorders = {
            name: running.enter_context(recording_sidecar(model, trace, hand))
            for name, trace in traces.items()
        }
        urls = {name: recorder.url for name, recorder in recorders.items()}
        first = next(iter(urls.values()))
        proxy = running.enter_context(running_proxy(first, scratch, more=urls))
        for name, trace in traces.items():
            yield name, serve_trace(trace, recorders[name], proxy.http, name)


def _prefilled_by_peer(http: httpx.Client, turn: Served) -> int:
    body: dict[str, Any] = {
        "messages": turn.body["messages"],
        "tools": turn.body.get("tools"),
        "chat_template_kwargs": template_kwargs(turn),
        "max_tokens": _PEER_TOKENS,
        "temperature": 0.0,
    }
    response = http.post("/v1/chat/completions", json=body)
    if response.status_code != httpx.codes.OK:
        raise ValueError(f"request {turn.seq}: {response.text[:500]}")
    usage = response.json()["usage"]
    return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


def _client(url: str) -> httpx.Client:
    return httpx.Client(base_url=url, timeout=_REQUEST_S, trust_env=False)
