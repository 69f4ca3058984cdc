"""
Conversations with images for the oracle fuzzer: what agents and people do with them.

Pictures are few and of few sizes, so that many a prompt differs from another by
nothing but what stands in an image.
"""

import base64
import functools
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from PIL.Image import Image

from testkit.oracle_talk import OPS, Op, Say, Slot, Spoken, Talk, words
from testkit.pictures import encoded, picture

Json = dict[str, Any]
# The first two give as many pads in another shape, so do the next two, of which chunks
# of the rig end within.
SIZES = ((96, 64), (64, 96), (160, 96), (96, 160), (48, 80))
SEEDS = 4  # pictures of each size
FORMS = ("PNG", "PNG", "BMP")  # files of the same pixels
# What stands for images in the prompts of the families, in marks, and in what people
# are told; typed, it is text.
TYPED = (
    "<|image_pad|>", "<|vision_start|><|image_pad|><|vision_end|>", "<|vision_end|>",
    "<start_of_image>", "<image_soft_token>", "<end_of_image>", "zqimageabcdefgh",
    "[image 0123abcd 96x64]", "[image]",
)  # fmt: skip


class Look(NamedTuple):
    """A picture: noise, the upper half of it as of each odd seed before it."""

    seed: int
    width: int
    height: int


@functools.cache
def pixels_of(look: Look) -> Image:
    """The picture itself."""
    made = picture(look.seed, look.width, look.height)
    if look.seed % 2:  # it begins as the one before
        upper = (0, 0, look.width, look.height // 2)
        before = picture(look.seed - 1, look.width, look.height)
        made.paste(before.crop(upper), upper)
    return made


@functools.cache
def digest_of(look: Look) -> str:
    """SHA-256 of its pixels and size, in hex."""
    pixels = pixels_of(look)
    named = f"{pixels.mode} {pixels.size}".encode()
    return hashlib.sha256(named + pixels.tobytes()).hexdigest()


@functools.cache
def _data(look: Look, form: str) -> str:
    return base64.b64encode(encoded(pixels_of(look), form)).decode()


class Shown(str):
    """A picture in a message; as text, what people are told of it."""

    __slots__ = ("form", "look")
    look: Look
    form: str

    def __new__(cls, look: Look, form: str = "PNG") -> "Shown":
        """Of a picture, in a kind of file."""
        label = f"[image {digest_of(look)[:8]} {look.width}x{look.height}]"
        made = super().__new__(cls, label)
        made.look, made.form = look, form
        return made

    def part(self) -> Json:
        """The wire form, in a chat."""
        data = _data(self.look, self.form)
        url = f"data:image/{self.form.lower()};base64,{data}"
        return {"type": "image_url", "image_url": {"url": url}}


@dataclass(frozen=True, slots=True)
class Seeing(Say):
    """A message of the client's with pictures among its parts."""

    def entry(self) -> Json:
        """The wire form."""
        return {**Say.entry(self), "content": list(self._content())}

    def _content(self) -> Iterator[Json]:
        text = ""
        for part in (self.lead, *self.parts, self.trail):
            if isinstance(part, Shown):
                if text:
                    yield {"type": "text", "text": text}
                yield part.part()
                text = ""
            else:
                text += part if isinstance(part, str) else part.value
        if text:
            yield {"type": "text", "text": text}


def looks(messages: Sequence[Spoken]) -> list[Look]:
    """The pictures of a conversation, in order."""
    return [messages[i].parts[k].look for i, k in places(messages)]  # type: ignore[union-attr]


def places(messages: Sequence[Spoken]) -> list[tuple[int, int]]:
    """Message and part of all pictures."""
    return [
        (i, k)
        for i, message in enumerate(messages)
        if isinstance(message, Seeing)
        for k, part in enumerate(message.parts)
        if isinstance(part, Shown)
    ]


def some_picture(chance: random.Random) -> Shown:
    """One of the few."""
    look = Look(chance.randrange(SEEDS), *chance.choice(SIZES))
    return Shown(look, chance.choice(FORMS))


def with_pictures(message: Say, chance: random.Random) -> Say:
    """A message with one to three pictures: before, behind and within its words."""
    if message.is_hostile:  # it is read by the rules for what looks volatile
        return message
    parts = list(message.parts)
    for _ in range(chance.choice([1, 1, 1, 2, 3])):
        plain = [
            at
            for at, part in enumerate(parts)
            if type(part) is str
            and part[:1].isalpha()
            and " " in part.strip()
            # Within `Current time: ` it would leave no clock that any rule finds.
            and not any(isinstance(behind, Slot) for behind in parts[at + 1 : at + 2])
        ]
        at = chance.choice([0, len(parts), *plain])
        if at in plain:
            before, _, behind = str(parts[at]).partition(" ")
            parts[at : at + 1] = [before + " ", some_picture(chance), behind]
        else:
            parts.insert(at, some_picture(chance))
    return Seeing(
        message.role, tuple(parts), message.lead, message.trail, message.call_id
    )


def with_markup(message: Say, chance: random.Random) -> Say:
    """A message in which someone typed what stands for an image."""
    typed = f" {chance.choice(TYPED)} "
    at = chance.choice([0, len(message.parts)])
    parts = (*message.parts[:at], typed, *message.parts[at:])
    return replace(message, parts=parts)


def alter(talk: Talk, name: str, chance: random.Random) -> None:
    """Swap a picture for one of its size, take it out, exchange it, double it."""
    found = places(talk.messages)
    if not found:
        return
    at, part = chance.choice(found)
    message = talk.messages[at]
    assert isinstance(message, Seeing)
    parts = list(message.parts)
    shown = parts[part]
    assert isinstance(shown, Shown)
    if name == "swap":
        seed = (shown.look.seed + chance.randrange(1, SEEDS)) % SEEDS
        parts[part] = Shown(shown.look._replace(seed=seed), shown.form)
    elif name == "resize":
        _, *turned = shown.look
        size = chance.choice([turned[::-1], *SIZES])
        parts[part] = Shown(Look(shown.look.seed, *size), shown.form)
    elif name == "unsee":
        del parts[part]
    elif name == "double":
        parts.insert(part, shown)
    elif name == "move":
        parts.insert(chance.randrange(len(parts)), parts.pop(part))
    talk.messages[at] = replace(message, parts=tuple(parts))
    if chance.random() < 0.5:  # and go on from there
        del talk.messages[at + 1 :]


def tamed(messages: list[Spoken], chance: random.Random) -> None:
    """No text that looks volatile beside a picture: see `with_pictures`."""
    for at, message in enumerate(messages):
        if isinstance(message, Seeing) and message.is_hostile:
            parts = (*message.parts[:-1], f" {words(chance, 4)}")
            messages[at] = replace(message, parts=parts, is_hostile=False)


ALTERING = ("swap", "resize", "unsee", "double", "move")
SEEING_OPS = {
    **OPS, "append": 24, "volatile": 6, "session": 3, "new": 7, "tool": 10, "evict": 8,
    "swap": 16, "resize": 4, "unsee": 5, "double": 3, "move": 4, "beside": 8,
    "clear": 3, "cancel_look": 4, "cancel_within": 8, "crash_look": 2,
}  # fmt: skip
# Two of each sequence's, in turn: so few sequences hold all that images are about.
_DUE = (
    ("swap", "beside"), ("cancel_within", "clear"), ("tool", "swap"),
    ("cancel_look", "move"), ("beside", "unsee"), ("branch", "swap"),
    ("resize", "double"),
)  # fmt: skip


def plan_seeing(seed: str, length: int) -> list[Op]:
    """The ops of one sequence; its number is behind the last slash of the seed."""
    chance = random.Random(seed)
    names = chance.choices(list(SEEING_OPS), list(SEEING_OPS.values()), k=length)
    names[-2:] = _DUE[int(seed.rpartition("/")[2]) % len(_DUE)]
    return [Op(name, f"{seed}/{number}") for number, name in enumerate(names)]


# In Anthropic's form


def as_anthropic(body: Json) -> Json | None:
    """A chat request as one for the Messages API; None: it cannot be said there."""
    if body.get("n"):
        return None
    entries = list(body["messages"])
    found = {name: body[name] for name in body if name not in ("messages", "stop")}
    if entries[0]["role"] == "system":
        found["system"] = entries.pop(0)["content"]
    if body.get("stop"):
        found["stop_sequences"] = body["stop"]
    told = [_told(entry) for entry in entries]
    return None if None in told else {**found, "model": "local", "messages": told}


def _told(entry: Json) -> Json | None:
    content = entry["content"]
    if entry["role"] == "user":
        return {"role": "user", "content": _blocks(content)}
    if entry["role"] == "tool":
        result = {"type": "tool_result", "tool_use_id": entry["tool_call_id"]}
        return {"role": "user", "content": [{**result, "content": _blocks(content)}]}
    if entry["role"] != "assistant" or entry.get("reasoning_content"):
        return None
    blocks: list[Json] = [{"type": "text", "text": content}] if content else []
    for call in entry.get("tool_calls", ()):
        said = call["function"]["arguments"]
        try:
            value = json.loads(said)
        except ValueError:
            return None
        if not isinstance(value, dict) or json.dumps(value, ensure_ascii=False) != said:
            return None
        name = call["function"]["name"]
        use = {"type": "tool_use", "id": call["id"], "name": name, "input": value}
        blocks.append(use)
    return {"role": "assistant", "content": blocks}


def _blocks(content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [_block(part) for part in content]


def _block(part: Json) -> Json:
    if part["type"] == "text":
        return part
    head, _, data = part["image_url"]["url"].partition(";base64,")
    media = head.removeprefix("data:")
    source = {"type": "base64", "media_type": media, "data": data}
    return {"type": "image", "source": source}


def from_anthropic(body: Json) -> Json:
    """A message object as a chat's answer."""
    text = "".join(b["text"] for b in body["content"] if b["type"] == "text")
    thought = "".join(b["thinking"] for b in body["content"] if b["type"] == "thinking")
    usage, message = body["usage"], {"content": text, "reasoning_content": thought}
    return {
        "choices": [{"message": message}],
        "usage": {
            "completion_tokens": usage["output_tokens"],
            "prompt_tokens_details": {
                "cached_tokens": usage["cache_read_input_tokens"]
            },
        },
    }
