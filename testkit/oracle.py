"""
The oracle fuzzer: clients that edit, branch, retry, cancel and change volatile values.

After each request its tokens and logits are compared with a pass over the same ids
without any cache, what it reused with what was really computed before, and what the
model read with what the client said (docs/reuse.md s2).
"""

import random
import unicodedata
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import httpx
import numpy as np

from sidecar.core.requests import Message
from testkit import oracle_talk as talking
from testkit.oracle_prompt import Body
from testkit.oracle_rig import BUDGET, Rig, Seen, Trap
from testkit.oracle_talk import Cast, Echo, Op, Say, Spoken, Talk
from testkit.oracle_texts import Asked, Memory, read

# Rounding differs with the shape of a batch, by about 1e-6 here; other ids under one
# position change logits by 1e-2 and more.
TOLERANCE = 2e-4
TIE = 2e-4  # the oracle's own first two logits this close: a coin toss
_PREFIX_BITS = (1 << 61) - 1
Answered = tuple[httpx.Response, Seen | None]


@dataclass
class Totals:
    """What a run has seen so far; adds up and survives a restart."""

    sequences: int = 0
    requests: int = 0
    checked: int = 0  # answered, and compared with the oracle
    cancelled: int = 0
    failed: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    pinned: int = 0
    restated: int = 0
    spliced: int = 0
    plain: int = 0  # compared with T as a whole
    near_ties: int = 0
    mismatches: int = 0
    max_delta: float = 0.0

    def add(self, other: "Totals") -> None:
        """Take another run's numbers in."""
        for item in fields(self):
            mine, its = getattr(self, item.name), getattr(other, item.name)
            total = max(mine, its) if item.name == "max_delta" else mine + its
            setattr(self, item.name, total)

    def __str__(self) -> str:
        return " ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}"
                        for k, v in asdict(self).items())  # fmt: skip


@dataclass(frozen=True)
class Violation:
    """Something that must never be, and the op that showed it."""

    invariant: str
    op: Op
    detail: str


@dataclass
class Request:
    """One request on its way."""

    talk: Talk
    messages: list[Spoken]
    max_tokens: int
    extra: dict[str, Any] = field(default_factory=dict)
    trap: Trap | None = None
    opening: str | None = None  # of the turn to be written

    @property
    def body(self) -> dict[str, Any]:
        """What is posted."""
        return {
            "messages": [m.entry() for m in self.messages],
            **({"session_id": self.talk.session} if self.talk.session else {}),
            "prompt_cache_key": "team",  # a bucket that all share: it names nobody
            "max_tokens": self.max_tokens,
            "enable_thinking": self.talk.thinking,
            **self.extra,
        }


class Player:
    """Plays one sequence of ops on a server that remembers nothing of others."""

    def __init__(self, rig: Rig) -> None:
        self.totals = Totals()
        self.found: list[Violation] = []
        self._rig = rig
        self._cast = Cast()
        self._memory = Memory()
        self._prefixes: set[int] = set()  # of everything ever submitted
        self._op = Op("begin", "")

    def play(self, ops: Sequence[Op]) -> list[Violation]:
        """All ops in order; what was violated."""
        self._rig.forget()
        self._rig.limit(BUDGET)
        for op in ops:
            self._op = op
            self._act(op, op.chance())
            if self.found:
                break
        self.totals.sequences += 1
        return self.found

    def _act(self, op: Op, chance: random.Random) -> None:  # noqa: C901, PLR0912 - one branch an op
        talk = self._cast.pick(chance)
        if op.name == "new":
            talk = self._cast.open(chance)
        elif op.name in ("branch", "pair"):
            other = self._cast.fork(talk, chance)
        elif op.name in ("edit", "insert", "delete"):
            self._rearrange(talk, op.name, chance)
        elif op.name == "volatile":
            talking.turn_a_value(talk, chance)
        elif op.name == "session":
            talk.session = f"s{chance.randrange(4)}"
        elif op.name == "regenerate":
            talking.regenerate(talk, chance)
        elif op.name == "tool":
            self._ask(talk, chance)
            talk.messages += self._call(chance)
        if op.name == "branch":
            talk = other
        if op.name not in _AS_IT_IS or not can_be_asked(talk):
            self._ask(talk, chance)
        if op.name == "evict":
            budget = chance.choice([1, 50_000, 200_000, 600_000])
            self._rig.limit(budget, chance.choice([1, 2, 24]))
        requests = [self._request(talk, op, chance)]
        if op.name == "pair":
            if chance.random() < 0.8:
                self._ask(other, chance)
            else:
                other.messages = list(talk.messages)  # the same prompt twice at once
            requests.append(self._request(other, op, chance))
        self._send(requests)
        if op.name == "evict":
            self._rig.limit(BUDGET)

    def _request(self, talk: Talk, op: Op, chance: random.Random) -> Request:
        extra: dict[str, Any] = {}
        if chance.random() < 0.08:
            extra["stop"] = [chance.choice("eatn")]
        elif chance.random() < 0.06:
            extra["n"] = 2
        script = self._rig.script
        spare = script.num_tokens if script else 0
        max_tokens = spare + chance.choice([1, 2, 4, 4, 8, 12])
        trap = None
        if op.name == "cancel_prefill":
            trap = Trap("chunk", chance.randint(1, 5), "cancel")
        elif op.name == "cancel_decode":
            max_tokens = spare + 12
            trap = Trap("step", chance.randint(1, 8), "cancel")
        elif op.name == "crash":
            where = chance.choice(["chunk", "step"])
            trap = Trap(where, chance.randint(1, 4), "fail")
        talk.asked += 1
        return Request(talk, list(talk.messages), max_tokens, extra, trap)

    def _send(self, requests: list[Request]) -> None:
        for request in requests:
            self._memory.note_values(request.talk.scope, request.messages)
        if len(requests) == 1:
            answers = [self._post(requests[0])]
        else:
            answers = self._post_at_once(requests)
        if any(response.status_code != 200 for response, _ in answers):
            self._rig.settle()
        # Of two at once either may have been first.
        for request, (_, seen) in zip(requests, answers, strict=True):
            if seen and len(requests) > 1:
                self._note_computed(self._key(request, seen))
        for request, (response, seen) in zip(requests, answers, strict=True):
            self._check(request, response, seen)
        self._expect(not (wrong := self._rig.problems()), "integrity", f"{wrong}")

    def _check(
        self, request: Request, response: httpx.Response, seen: Seen | None
    ) -> None:
        self.totals.requests += 1
        if seen is None:
            self._expect(False, "answer", response.text[:300])
            return
        self._check_reuse(request, seen)
        self._check_text(request, seen)
        if response.status_code == 200:
            self._check_answer(request, response.json(), seen)
            return
        self._note_computed(self._broken_off(request, seen))
        planned = request.trap is not None
        self._expect(planned, "answer", f"{response.status_code} {response.text[:300]}")
        if request.trap and request.trap.action == "cancel":
            self.totals.cancelled += 1
        else:
            self.totals.failed += 1

    def _broken_off(self, request: Request, seen: Seen) -> tuple[int, ...]:
        """What was computed for it; its answer may have ended when it was cancelled."""
        ids, num_steps = self._key(request, seen), len(seen.logits.get(0, ()))
        if not num_steps:
            return ids
        got = self._rig.logits(seen, 0, num_steps)
        return (*ids, *self._rig.sampled(seen, got))

    def _check_reuse(self, request: Request, seen: Seen) -> None:
        """Invariant I: what is reused was computed, by this prompt's own beginning."""
        ids = self._key(request, seen)
        cached = seen.cached_len
        self.totals.prompt_tokens += len(ids)
        self.totals.cached_tokens += cached
        self._expect(cached <= len(ids) - 1, "I", f"{cached} of {len(ids)} reused")
        if cached:
            *_, prefix = _prefix_hashes(ids[:cached])
            known = prefix in self._prefixes
            self._expect(known, "I", f"{cached} reused were never computed")

    def _check_text(self, request: Request, seen: Seen) -> None:
        """Invariant II: the model read what the client said."""
        report = seen.prompt.report
        self.totals.pinned += bool(report.pinned)
        self.totals.restated += bool(report.restated)
        self.totals.spliced += report.num_spliced
        text = seen.prompt.text
        read_ids, told = map(_normal, (self._text_of_ids(request, seen), text))
        self._expect(
            read_ids == told, "II", f"ids {read_ids!r} and text {told!r} differ"
        )
        reading = read(text, self._asked(request), request.messages, self._memory)
        request.opening = reading.opening
        self.totals.plain += reading.is_plain
        for violation in reading.violations:
            self._expect(False, "II", violation)

    def _asked(self, request: Request) -> Asked:
        template = self._rig.pipeline.template
        thinking = request.talk.thinking
        kwargs = {"enable_thinking": thinking}
        if template.traits.preserve_thinking:
            kwargs["preserve_thinking"] = True

        def render(messages: Sequence[Message]) -> str:
            return template.render(messages, (), kwargs)

        return Asked(request.talk.scope, thinking, render)

    def _check_answer(self, request: Request, body: dict[str, Any], seen: Seen) -> None:
        """Invariant III: tokens and logits are those of a pass without any cache."""
        self.totals.checked += 1
        choices = len(body["choices"])
        count = body["usage"]["completion_tokens"] // choices
        self.totals.tokens += count * choices
        message = body["choices"][0]["message"]
        content = message.get("content") or ""
        for choice in range(choices):
            got = self._rig.logits(seen, choice, count)
            sampled = self._rig.sampled(seen, got)
            wanted = self._wanted(request, seen, sampled)
            self._compare(got, wanted)
        told = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        self._expect(told == seen.cached_len, "usage", f"{told}, not {seen.cached_len}")
        # n choices are equal, greedy: the first one's ids are these as well.
        self._note_computed((*self._key(request, seen), *sampled))
        raw = self._rig.text(sampled)
        if "stop" not in request.extra:
            self._check_shown(message, raw, seen)
        self._echo(request, message, content, raw)

    def _check_shown(self, message: dict[str, Any], raw: str, seen: Seen) -> None:
        """The client is given the answer, and the thought apart."""
        raw = raw.replace("\0", "\u0100")  # mlx-lm's detokenizer, of byte 0
        script = self._rig.script
        wanted = script.split(raw, seen.prompt.text) if script else ("", raw)
        names = ("reasoning_content", "content")
        given = tuple((message.get(name) or "").strip() for name in names)
        self._expect(given == tuple(w.strip() for w in wanted), "answer",
                     f"{wanted!r} {given!r}")  # fmt: skip

    def _compare(self, got: np.ndarray, wanted: np.ndarray) -> None:
        delta = float(np.abs(got - wanted).max())
        self.totals.max_delta = max(self.totals.max_delta, delta)
        ranked = np.sort(wanted, axis=-1)
        ties = ranked[:, -1] - ranked[:, -2] < TIE
        differs = np.argmax(got, axis=-1) != np.argmax(wanted, axis=-1)
        self.totals.near_ties += int((differs & ties).sum())
        wrong = int((differs & ~ties).sum())
        if wrong or not delta <= TOLERANCE:  # it may be no number
            self.totals.mismatches += 1
            self._expect(False, "III", f"{wrong} other tokens, delta {delta:.3g}")

    def _echo(
        self, request: Request, message: dict[str, Any], content: str, raw: str
    ) -> None:
        """Put the answer into the conversation, as clients do."""
        if request.opening is not None:
            body = Body(request.opening, raw)
            asked = self._asked(request)
            self._memory.note_turn(asked, request.messages, content, body)
        if len(request.messages) != len(request.talk.messages):
            return
        reasoning = message.get("reasoning_content")
        chance = self._op.chance()
        kept = reasoning if chance.random() < 0.5 else None
        shown = content.rstrip() if chance.random() < 0.3 else content
        request.talk.messages.append(Echo(shown, kept))
        if chance.random() < 0.7:
            talking.without_senders(request.talk)

    # What a player with other eyes does otherwise

    def _ask(self, talk: Talk, chance: random.Random) -> None:
        talking.ask(talk, chance)

    def _call(self, chance: random.Random) -> list[Spoken]:
        return talking.foreign_call(chance)

    def _rearrange(self, talk: Talk, name: str, chance: random.Random) -> None:
        talking.rearrange(talk, name, chance)

    def _post(self, request: Request) -> Answered:
        return self._rig.post(request.body, request.trap)

    def _post_at_once(self, requests: Sequence[Request]) -> list[Answered]:
        with ThreadPoolExecutor(len(requests)) as pool:
            return list(pool.map(self._post, requests))

    def _key(self, request: Request, seen: Seen) -> Sequence[int]:
        """What the prompt is, id by id: prompts of equal beginnings may share KV."""
        return seen.prompt.model_ids

    def _text_of_ids(self, request: Request, seen: Seen) -> str:
        return self._rig.text(seen.prompt.model_ids)

    def _wanted(self, request: Request, seen: Seen, sampled: list[int]) -> np.ndarray:
        """The logits of a pass without any cache."""
        return self._rig.oracle(seen.prompt.model_ids, sampled)

    def _note_computed(self, ids: Sequence[int]) -> None:
        self._prefixes.update(_prefix_hashes(ids))

    def _expect(self, holds: bool, invariant: str, detail: str) -> None:
        if not holds:
            self.found.append(Violation(invariant, self._op, detail))


_AS_IT_IS = ("retry", "regenerate", "tool")


def can_be_asked(talk: Talk) -> bool:
    """Whether its last message is the client's."""
    last = talk.messages[-1]
    return isinstance(last, Say) and last.role != "system"


def _normal(text: str) -> str:
    """As some tokenizers read it: accents joined with their letters."""
    return unicodedata.normalize("NFC", text)


def _prefix_hashes(ids: Sequence[int]) -> Iterator[int]:
    value = 17
    for token in ids:
        value = (value * 1_000_003 + token + 1) & _PREFIX_BITS
        yield value
