"""
The oracle fuzzer with images: no picture is ever taken for another, or elsewhere.

Beside what `testkit.oracle` checks, each request's pictures are held against what the
model was given for them; and what it computed against mlx-vlm alone, on the pictures
that the client sent (testkit/image_rig.py).
"""

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from sidecar.core.prompt import MADE
from testkit import image_talk as seeing
from testkit import oracle_talk as talking
from testkit.image_rig import SeeingRig
from testkit.image_talk import Look, Shown
from testkit.oracle import Answered, Player, Request, Totals, can_be_asked
from testkit.oracle_play import Script
from testkit.oracle_rig import Seen, Trap
from testkit.oracle_talk import Op, Say, Spoken, Talk
from testkit.oracle_texts import Memory

_BESIDE = 0.7  # of messages of users and of tools hold pictures


@dataclass
class SeeingTotals(Totals):
    """
    What a run has seen so far.

    Args:
        images: in all prompts. reused_images: whose KV was stored. anthropic: requests
            in that form. mixed: steps of rows with images beside rows without.
        retreats: matches that would have ended within an image.
    """

    seeing: int = 0  # requests with images
    images: int = 0
    reused_images: int = 0
    anthropic: int = 0
    mixed: int = 0
    swapped: int = 0
    cleared: int = 0
    retreats: int = 0


class SeeingPlayer(Player):
    """Plays one sequence of ops, images among them."""

    totals: SeeingTotals
    _rig: SeeingRig

    def __init__(self, rig: SeeingRig) -> None:
        super().__init__(rig)
        self.totals = SeeingTotals()

    def play(self, ops: Sequence[Op]) -> list[Any]:
        """All ops in order; what was violated."""
        before = self._rig.num_mixed, self._rig.num_retreats
        found = super().play(ops)
        self.totals.mixed += self._rig.num_mixed - before[0]
        self.totals.retreats += self._rig.num_retreats - before[1]
        return found

    def _act(self, op: Op, chance: random.Random) -> None:
        if op.name == "clear":
            self._rig.settle()
            self._rig.clear()
            self._prefixes.clear()
            self._memory = Memory()
            self.totals.cleared += 1
        if op.name == "beside":
            with self._rig.together():
                self._send(self._beside(op, chance))
            return
        if op.name in seeing.ALTERING:
            talk = self._cast.pick(chance)
            others = [t for t in self._cast.talks if seeing.looks(t.messages)]
            if others and talk not in others:
                talk = chance.choice(others)
            before = seeing.looks(talk.messages)
            seeing.alter(talk, op.name, chance)
            if not can_be_asked(talk):
                self._ask(talk, chance)
            self.totals.swapped += op.name == "swap" and bool(before)
            self._send([self._request(talk, op, chance)])
            return
        super()._act(op, chance)
        if op.name.startswith("cancel") and not self.found:
            self._again(op, chance)

    def _again(self, op: Op, chance: random.Random) -> None:
        """What was cancelled is asked at once again, as clients do it; mostly so."""
        talk = self._latest
        if op.name != "cancel_within" and chance.random() < 0.5:
            seeing.alter(talk, "swap", chance)
        if can_be_asked(talk):
            self._send([self._request(talk, Op("retry", f"{op.seed}/again"), chance)])

    def _beside(self, op: Op, chance: random.Random) -> list[Request]:
        """Rows with images and rows without, some of them of one beginning."""
        first = self._cast.pick(chance)
        talks = [first, self._cast.fork(first, chance)]
        for talk in talks:
            self._ask(talk, chance)
        blind = self._cast.open(chance)
        talking.ask(blind, chance)
        requests = [self._request(talk, op, chance) for talk in (*talks, blind)]
        for request in requests:
            request.max_tokens = chance.randint(8, 16)
        return requests

    def _request(self, talk: Talk, op: Op, chance: random.Random) -> Request:
        request, self._latest = super()._request(talk, op, chance), talk
        nth = chance.randint(1, 2)
        if op.name == "cancel_look":
            request.trap = Trap("look", nth, "cancel")
        elif op.name == "cancel_within":
            request.trap = Trap("within", 1, "cancel")
        elif op.name == "crash_look":
            request.trap = Trap("look", nth, "fail")
        return request

    def _ask(self, talk: Talk, chance: random.Random) -> None:
        talking.ask(talk, chance)
        last = talk.messages[-1]
        assert isinstance(last, Say)
        if chance.random() < _BESIDE or self._op.name == "cancel_within":
            last = seeing.with_pictures(last, chance)
        if chance.random() < 0.1:
            last = seeing.with_markup(last, chance)
        talk.messages[-1] = last

    def _call(self, chance: random.Random) -> list[Spoken]:
        call, result = talking.foreign_call(chance)
        assert isinstance(result, Say)
        if chance.random() < _BESIDE:
            result = seeing.with_pictures(result, chance)
        return [call, result]

    def _rearrange(self, talk: Talk, name: str, chance: random.Random) -> None:
        talking.rearrange(talk, name, chance)
        seeing.tamed(talk.messages, chance)

    def _post(self, request: Request) -> Answered:
        body = request.body
        told = seeing.as_anthropic(body) if _is_anthropics(request) else None
        if told is None:
            return self._rig.post(body, request.trap)
        response, seen = self._rig.post(told, request.trap, "/v1/messages")
        self.totals.anthropic += 1
        if response.status_code != 200:
            return response, seen
        return httpx.Response(200, json=seeing.from_anthropic(response.json())), seen

    def _post_at_once(self, requests: Sequence[Request]) -> list[Answered]:
        with (
            self._rig.at_once(len(requests)),
            ThreadPoolExecutor(len(requests)) as pool,
        ):
            return list(pool.map(self._post, requests))

    # Checks

    def _check_text(self, request: Request, seen: Seen) -> None:
        super()._check_text(request, seen)
        shown = seeing.looks(request.messages)
        self.totals.seeing += bool(shown)
        self.totals.images += len(shown)
        for wrong in self._unlike(shown, seen):
            self._expect(False, "II", wrong)

    def _unlike(self, shown: Sequence[Look], seen: Seen) -> list[str]:
        """What the model was given that is not the client's pictures, in order."""
        prompt, library = seen.prompt.model, self._rig.library
        placed = prompt.images
        if len(placed) != len(shown):
            return [f"{len(placed)} images stand for {len(shown)}"]
        wrong, at, told = [], 0, prompt.read_ids
        for number, (one, look) in enumerate(zip(placed, shown, strict=True)):
            ids, _ = library.given(look)
            if told[one.start : one.end] != ids or one.start < at:
                wrong.append(f"image {number} is not given as the library gives it")
            if library.pad in told[at : one.start]:
                wrong.append(f"a pad before image {number} is of no image")
            if one.start < seen.cached_len < one.end:
                wrong.append(f"half of image {number} is reused")
            if one.image.digest != seeing.digest_of(look):
                wrong.append(f"image {number} is another one")
            if min(prompt.ids[one.start : one.end]) < MADE:
                wrong.append(f"image {number} has a plain id in the key")
            self.totals.reused_images += seen.cached_len >= one.end
            at = one.end
        if library.pad in told[at:] or max(prompt.ids[at:], default=0) >= MADE:
            wrong.append("something behind the last image is of no image")
        return wrong

    def _key(self, request: Request, seen: Seen) -> Sequence[int]:
        """With the client's own pictures in place of pads."""
        shown = seeing.looks(request.messages)
        prompt = seen.prompt.model
        key = list(prompt.read_ids)
        for placed, look in zip(prompt.images, shown, strict=False):
            name = int(seeing.digest_of(look)[:12], 16) + MADE
            size = placed.end - placed.start
            key[placed.start : placed.end] = range(name, name + size)
        return key

    def _text_of_ids(self, request: Request, seen: Seen) -> str:
        """With the client's own pictures as people are told of them."""
        prompt, text, at = seen.prompt.model, "", 0
        shown = seeing.looks(request.messages)
        for placed, look in zip(prompt.images, shown, strict=False):
            text += self._rig.text(list(prompt.read_ids[at : placed.start]))
            text += Shown(look)
            at = placed.end
        return text + self._rig.text(list(prompt.read_ids[at:]))

    def _wanted(self, request: Request, seen: Seen, sampled: list[int]) -> np.ndarray:
        shown = seeing.looks(request.messages)
        return self._rig.wanted(seen.prompt.model.read_ids, shown, sampled)


def _is_anthropics(request: Request) -> bool:
    """A third of requests, the same ones each time."""
    return (len(request.messages) + request.max_tokens) % 3 == 0


SEEING = Script(SeeingPlayer, seeing.plan_seeing, SeeingTotals)
