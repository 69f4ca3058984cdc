"""OpenAI's legacy completions: a raw prompt, no template, no tools."""

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from sidecar.core.errors import BadRequest
from sidecar.core.events import ChoiceFinished, Event, Finished, TextDelta, TokenLogprob
from sidecar.core.requests import CompletionRequest
from sidecar.dialects.fields import Fields, ignored_fields
from sidecar.dialects.generation_fields import (
    read_client,
    read_options,
)
from sidecar.dialects.known_fields import COMPLETION_FIELDS
from sidecar.dialects.openai_chat.request import (
    StreamOptions,
    new_id,
    read_stream_options,
    usage_dict,
)

Frame = dict[str, Any]


def parse_completion(
    body: Any, request_id: str, user_agent: str | None
) -> tuple[CompletionRequest, StreamOptions]:
    """
    Check a request body.

    Raises:
        BadRequest, ValidationFailed: naming the field.
    """
    fields = Fields(body)
    _refuse_unserved(fields)
    prompts = read_prompts(fields, "prompt")
    wants_metrics = fields.boolean("include_metrics", False)
    if len(prompts) > 1 and wants_metrics:
        raise BadRequest(
            "include_metrics must be left out with several prompts: they share time",
            param="include_metrics",
        )
    options = read_options(fields, fields.integer("logprobs", 0, 20))
    request = CompletionRequest(
        request_id=request_id,
        model=fields.text("model") or "",
        prompts=prompts,
        echo=fields.boolean("echo", False),
        options=replace(options, wants_metrics=wants_metrics),
        client=read_client(body, user_agent),
        ignored=ignored_fields(body, COMPLETION_FIELDS),
        answer_id=new_id("cmpl-"),
    )
    return request, read_stream_options(fields)


def _refuse_unserved(fields: Fields) -> None:
    """What changes the answer so much that one without it would be another."""
    if fields.text("suffix"):
        raise BadRequest(
            "suffix must be left out: no text is put between two others here",
            param="suffix",
        )
    if fields.boolean("echo", False) and fields.raw("logprobs") is not None:
        raise BadRequest(
            "logprobs must be left out with echo: those of a prompt are not computed",
            param="logprobs",
        )


def read_prompts(fields: Fields, name: str) -> tuple[str | tuple[int, ...], ...]:
    """
    One prompt or several: each a text or token ids.

    Raises:
        BadRequest: it is neither.
    """
    value = fields.raw(name)
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if all(is_id(item) for item in value):
            return (tuple(value),)
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if all(
            isinstance(item, list) and item and all(map(is_id, item)) for item in value
        ):
            return tuple(tuple(item) for item in value)
    raise BadRequest(
        f"{name} must be a string, a list of strings, or a list of token ids",
        param=name,
    )


def is_id(value: Any) -> bool:
    """Whether a value of JSON may be a token's id."""
    # The tokenizer takes 32 bits; the model's own range is checked where it is known.
    is_int = isinstance(value, int) and not isinstance(value, bool)
    return is_int and 0 <= value < 1 << 31


class CompletionFormat:
    """
    Formats one response, whole or in chunks.

    Args:
        echoes: one text for each choice to begin with, "" for none.
    """

    def __init__(
        self,
        model: str,
        echoes: Sequence[str],
        *,
        include_usage: bool,
        answer_id: str = "",
    ) -> None:
        self._base = {
            "id": answer_id or new_id("cmpl-"),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._echoes = echoes
        self._include_usage = include_usage
        self._finishes: list[Frame] = []
        self._offsets: dict[int, int] = {}  # of a choice's next token, in its text

    def opening(self) -> Iterator[Frame]:
        """The prompts that are to be echoed."""
        for index, echo in enumerate(self._echoes):
            if echo:
                yield self._chunk(index, echo, (), None)

    def frames_of(self, event: Event) -> Iterator[Frame]:
        """The chunks of an event; the finish reasons wait for the usage."""
        if isinstance(event, TextDelta):
            yield self._chunk(event.choice, event.text, event.logprobs, None)
        elif isinstance(event, ChoiceFinished):
            self._finishes.append(self._chunk(event.choice, "", (), event.reason))
        elif isinstance(event, Finished):
            if self._include_usage or event.metrics or event.usage.num_rotated:
                usage = usage_dict(event)
                yield {**self._base, "choices": [], "usage": usage}
            yield from self._finishes

    def whole(self, events: Sequence[Event]) -> Frame:
        """The `text_completion` object of a finished generation."""
        n = len(self._echoes)
        texts = [[echo] for echo in self._echoes]
        logprobs: list[list[TokenLogprob]] = [[] for _ in range(n)]
        reasons = ["stop"] * n
        usage = None
        for event in events:
            if isinstance(event, TextDelta):
                texts[event.choice].append(event.text)
                logprobs[event.choice] += event.logprobs
            elif isinstance(event, ChoiceFinished):
                reasons[event.choice] = event.reason
            elif isinstance(event, Finished):
                usage = usage_dict(event)
        choices = [
            _choice(i, "".join(texts[i]), logprobs[i], reasons[i]) for i in range(n)
        ]
        return {**self._base, "choices": choices, "usage": usage}

    def _chunk(
        self,
        index: int,
        text: str,
        logprobs: Sequence[TokenLogprob],
        reason: str | None,
    ) -> Frame:
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + sum(len(item.token) for item in logprobs)
        choice = _choice(index, text, logprobs, reason, offset)
        return {**self._base, "choices": [choice]}


def _choice(
    index: int,
    text: str,
    logprobs: Sequence[TokenLogprob],
    reason: str | None,
    offset: int = 0,
) -> Frame:
    return {
        "index": index,
        "text": text,
        "logprobs": _legacy_logprobs(logprobs, offset),
        "finish_reason": reason,
    }


def _legacy_logprobs(logprobs: Sequence[TokenLogprob], offset: int) -> Frame | None:
    if not logprobs:
        return None
    ends = itertools.accumulate((len(item.token) for item in logprobs), initial=offset)
    return {
        "text_offset": list(ends)[:-1],
        "tokens": [item.token for item in logprobs],
        "token_logprobs": [item.logprob for item in logprobs],
        "top_logprobs": [
            {text: value for text, _, value in item.top} for item in logprobs
        ],
    }
