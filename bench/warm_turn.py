"""
What the input side costs for one more turn of a long conversation.

    python -m bench.warm_turn [--runs 15] [--profile]

A recorded agent's tools and system text, 100 messages, about 32,000 tokens of the
built-in tokenizer and template. All turns before were prepared and kept; then one
more message comes, and `Pipeline.prepare` is timed (parsed request to model ids, the
prefix search in the real tree included, no GPU). First as it is, then with a clock in
the system text that moves each time and so is pinned. Exit code 1 if a bar failed.
"""

import argparse
import cProfile
import pstats
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sidecar.cache.radix import RadixTree
from sidecar.core.prompt import ModelIds, PreparedPrompt
from sidecar.core.requests import ChatRequest, ClientInfo, Message, Tool, ToolCall
from sidecar.pipeline.prepare import Pipeline
from sidecar.pipeline.rules import load_rules
from sidecar.protocols.chat_messages import read_messages, read_tools
from sidecar.protocols.fields import Fields
from tests.support.chat_templates import tokenizer_of
from tests.support.chats import SETTINGS, Said
from tests.support.traces import load_trace

MOST_MS = 30.0
NUM_MESSAGES = 100
NUM_TOKENS = 32_000
_TRACE = "opencode-1.18.33"


def main(argv: list[str] | None = None) -> int:
    """Measure, print, judge."""
    options = _parser().parse_args(argv)
    passed = True
    for title, has_clock in (("nothing volatile", False), ("a clock, pinned", True)):
        agent = Agent(has_clock=has_clock)
        agent.grow()
        turns = [agent.time_turn() for _ in range(options.runs)]
        prompt, report = turns[-1].prompt, turns[-1].prompt.report
        median = 1000 * statistics.median(turn.cpu_s for turn in turns)
        waited = 1000 * statistics.median(turn.wall_s for turn in turns)
        print(
            f"{title}: {len(agent.messages)} messages, {len(prompt.model_ids)} tokens, "
            f"{report.reused_len} reused ({report.match}), "
            f"{report.num_spliced} turns spliced: median {median:.1f} ms "
            f"(by the clock {waited:.1f} ms) of {options.runs}; "
            f"bar {MOST_MS:.0f} ms {'passed' if median <= MOST_MS else 'FAILED'}",
            flush=True,
        )
        passed = passed and median <= MOST_MS
        if options.profile:
            agent.profile(options.runs)
    return 0 if passed else 1


@dataclass(frozen=True, slots=True)
class Timed:
    """A prepared turn; `cpu_s` of its thread, so that a busy machine counts less."""

    prompt: PreparedPrompt
    cpu_s: float
    wall_s: float


class Store:
    """The prefix tree with ids only."""

    def __init__(self) -> None:
        self._tree = RadixTree()

    def match_len(self, model_ids: ModelIds) -> int:
        """As the KV store says it."""
        return min(self._tree.match(model_ids).depth, len(model_ids) - 1)

    def keep(self, ids: tuple[int, ...]) -> None:
        """Add what a turn left behind."""
        self._tree.grow(ids, buffer=None, lent_to=None)


class Agent:
    """A coding agent's conversation, as its client sends it: thinking is dropped."""

    def __init__(self, *, has_clock: bool) -> None:
        body = next(e.body for e in load_trace(_TRACE) if e.body.get("tools"))
        self._tools = read_tools(Fields({"tools": body["tools"]}))
        self._head = read_messages(Fields({"messages": body["messages"]}))[0]
        self._clock = 0 if has_clock else None
        self._random = random.Random(7)
        self._words = sorted({w for w in self._head.text.split() if w.isalpha()})
        self._store = Store()
        self._tokenizer = tokenizer_of("builtin")
        self._pipeline = Pipeline(
            self._tokenizer, "<think>", "bench", load_rules(), SETTINGS
        )
        self.messages: list[Message] = [self._head]

    def grow(self) -> None:
        """Talk until the conversation is long enough; results fill what is missing."""
        self._ask(f"Fix it. {self._text(60)}")
        while len(self.messages) < NUM_MESSAGES:
            used = len(self._prepare().prompt.model_ids)
            left = (NUM_MESSAGES - len(self.messages)) // 3 + 1
            self._round(max(40, (NUM_TOKENS - used) // left))

    def time_turn(self) -> Timed:
        """Time the same conversation with a new last message."""
        self.messages[-1] = Message("user", (f"And now? {self._text(60)}",))
        return self._prepare()

    def profile(self, runs: int) -> None:
        """Where the time goes."""
        profiler = cProfile.Profile()
        for _ in range(runs):
            self.messages[-1] = Message("user", (f"And now? {self._text(60)}",))
            request = self._request()
            profiler.enable()
            self._pipeline.prepare(request, self._store)
            profiler.disable()
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(30)

    def _round(self, num_tokens: int) -> None:
        """An answer with a call, its result, an answer, the next question."""
        number = len(self.messages)
        tool: Tool = self._random.choice(self._tools)
        call = ToolCall(
            f"call_{number:024x}", tool.name, f'{{"path": "/src/{number}"}}'
        )
        thought = f"I should look. {self._text(20)}"
        self._answer(Said(f"Let me see. {self._text(10)}", thought, (call,)))
        output = self._text(max(1, (num_tokens - 250) * 2 // 5), per_line=9)
        self.messages.append(Message("tool", (output,), tool_call_id=call.id))
        self._answer(Said(f"Done. {self._text(30)}", self._text(20)))
        self._ask(self._text(20))

    def _ask(self, text: str) -> None:
        self.messages.append(Message("user", (text,)))

    def _answer(self, said: Said) -> None:
        prompt = self._prepare().prompt
        ids = tuple(self._tokenizer.encode(said.raw, add_special_tokens=False))
        self._pipeline.commit(prompt, said.text, said.reasoning, said.calls, ids)
        self._store.keep((*prompt.model_ids, *ids))
        self.messages.append(said.echo)

    def _prepare(self) -> Timed:
        request = self._request()
        wall, cpu = time.perf_counter(), time.thread_time()
        prompt = self._pipeline.prepare(request, self._store)
        return Timed(prompt, time.thread_time() - cpu, time.perf_counter() - wall)

    def _request(self) -> ChatRequest:
        messages: Sequence[Message] = self.messages
        if self._clock is not None:
            self._clock += 1
            now = f"{self._clock // 60 % 24:02}:{self._clock % 60:02}"
            clock = f"Current time: 2026-11-20T{now}:00Z"
            head = replace(self._head, parts=(clock, *self._head.parts))
            messages = [head, *self.messages[1:]]
        client = ClientInfo("bench", "bench", "key")
        return ChatRequest("r", "m", tuple(messages), self._tools, client=client)

    def _text(self, count: int, per_line: int = 1000) -> str:
        words = self._random.choices(self._words, k=count)
        lines = [words[i : i + per_line] for i in range(0, count, per_line)]
        return "\n".join(" ".join(line) for line in lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.warm_turn", description=__doc__.split("\n\n")[0].strip()
    )
    parser.add_argument("--runs", type=int, default=15, help="timed turns (15)")
    parser.add_argument(
        "--profile", action="store_true", help="also print where the time goes"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
