"""Agents' recorded conversations, sent again through the proxy."""

import pytest

from tests.support.proxy import Proxy
from tests.support.replay import Replayer, Reply
from tests.support.scripted import Switch
from tests.support.traces import Exchange, ReplayScript, load_trace

# One run of each agent; long enough to hold parallel calls, and for Claude Code a
# sub-agent that works while the main thread goes on.
RUNS = ["pi-0.73.1", "pi-0.87.1", "claude-2.1.328-print", "openclaw-2026.9.6-local"]


@pytest.mark.parametrize("name", RUNS)
def test_every_request_of_a_run_gets_its_answer(
    proxy: Proxy, switch: Switch, name: str
) -> None:
    """Reasoning, text and calls as recorded, complete, in order, in its dialect."""
    exchanges = load_trace(name)
    switch.script = ReplayScript(exchanges)
    replayer = Replayer(proxy.http, "local")
    for exchange in exchanges:
        check_reply(exchange, replayer.send(exchange))


def check_reply(exchange: Exchange, reply: Reply) -> None:
    """The reply says what was recorded, but for white space at the edges."""
    wanted, where = exchange.answer, f"request {exchange.seq}"
    assert reply.reasoning.strip() == wanted.reasoning.strip(), where
    assert reply.text == wanted.text.strip(), where
    assert tuple(reply.calls) == wanted.calls, where
    assert len(set(reply.call_ids)) == len(wanted.calls), where
    parts = [("reasoning", wanted.reasoning), ("text", wanted.text)]
    order = [kind for kind, text in parts if text.strip()]
    assert reply.kinds == order + ["call"] * bool(wanted.calls), where
    names = {True: ("tool_use", "end_turn"), False: ("tool_calls", "stop")}
    called, said = names[exchange.is_anthropic]
    assert reply.finish == (called if wanted.calls else said), where
    count = "input_tokens" if exchange.is_anthropic else "prompt_tokens"
    assert reply.usage[count] > 0, where
