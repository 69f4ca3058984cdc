"""Agents' recorded conversations, sent again through the proxy."""

import pytest

from testkit.proxy import Proxy
from testkit.replay import Replayer, Reply
from testkit.scripted import Switch
from testkit.traces import TRACES, Exchange, ReplayScript, load_trace

# All there are: parallel calls, sub-agents, compaction, two sessions in one file.
RUNS = sorted(path.name.removesuffix(".jsonl.gz") for path in TRACES.glob("*.gz"))


def test_there_are_runs_of_each_agent() -> None:
    """The fixtures are there."""
    assert {name.split("-")[0] for name in RUNS} >= {"pi", "claude", "openclaw"}


@pytest.mark.parametrize("name", RUNS)
def test_every_request_of_a_run_gets_its_answer(
    proxy: Proxy, switch: Switch, name: str
) -> None:
    """Reasoning, text and calls as recorded, complete, in order, in its dialect."""
    exchanges = load_trace(name)
    script = switch.script = ReplayScript(exchanges)
    replayer = Replayer(proxy.http, "local")
    for exchange in exchanges:
        check_reply(exchange, replayer.send(exchange))
        assert script.find(switch.prompts[-1]) is exchange


def check_reply(exchange: Exchange, reply: Reply) -> None:
    """The reply says what was recorded, but for white space at the edges."""
    wanted, where = exchange.answer, f"request {exchange.seq}"
    # `claude -p` asks not to be shown the thinking: its token is all that comes.
    reasoning = "" if exchange.hides_thinking else wanted.reasoning.strip()
    assert reply.reasoning.strip() == reasoning, where
    assert reply.text == wanted.text.strip(), where
    assert tuple(reply.calls) == wanted.calls, where
    assert len(set(reply.call_ids)) == len(wanted.calls), where
    parts = [("reasoning", reasoning), ("text", wanted.text)]
    order = [kind for kind, text in parts if text.strip()]
    assert reply.kinds == order + ["call"] * bool(wanted.calls), where
    names = {True: ("tool_use", "end_turn"), False: ("tool_calls", "stop")}
    called, said = names[exchange.is_anthropic]
    assert reply.finish == (called if wanted.calls else said), where
    count = "input_tokens" if exchange.is_anthropic else "prompt_tokens"
    assert reply.usage[count] > 0, where
