"""JSON of the `/native/` routes: what they take and what they answer."""

import functools
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sidecar.core.errors import BadRequest, SidecarError
from sidecar.core.native import (
    AskedLimits,
    AttentionRequest,
    BatchAnswer,
    BatchRequest,
    Classified,
    ClassifyRequest,
    LoraJob,
    Prompt,
    TrainRequest,
)
from sidecar.core.ports import RequestFacts
from sidecar.core.requests import (
    ChatRequest,
    ClientInfo,
    CompletionRequest,
    SamplingParams,
)
from sidecar.dialects.fields import Fields
from sidecar.dialects.generation_fields import read_client
from sidecar.dialects.openai_chat.stream import OpenAIChat
from sidecar.dialects.openai_chat.tools import call_dict, custom_names
from sidecar.dialects.openai_completions import (
    is_id,
    parse_completion,
    read_prompts,
)

_MAX_PROMPTS = 10_000
_MAX_LABELS = 1024
_CLIENT = ("model", "session_id", "metadata", "x_mlx")
_OF_CLASSIFY = (
    *_CLIENT, "prompts", "messages", "labels", "return_logits", "temperature", "top_p",
    "top_k", "min_p", "seed",
)  # fmt: skip
_OF_ATTENTION = (*_CLIENT, "prompt", "messages", "layers", "format")
_JOB_FIELDS = tuple(LoraJob.__dataclass_fields__)
_MAX_ROWS = 1_000_000
_NOT_OF_A_BATCH = (  # they say how one answer is sent
    "stream", "stream_options", "include_metrics", "logprobs", "top_logprobs", "echo",
    "prompt",
)  # fmt: skip
_LIMITS = tuple(AskedLimits.__dataclass_fields__)


def parse_classify(body: Any, facts: RequestFacts) -> ClassifyRequest:
    """
    Check a body.

    Raises:
        BadRequest, ValidationFailed: naming the field.
    """
    fields = Fields(body)
    _refuse_others(body, _OF_CLASSIFY)
    labels = fields.items("labels")
    if len(labels) > _MAX_LABELS or len(labels) == 1:
        raise BadRequest(f"labels must be 2..{_MAX_LABELS} texts", param="labels")
    for index, label in enumerate(labels):
        if not _is_label(label) or label in labels[:index]:
            raise BadRequest(
                f"labels[{index}] must be a text that is not empty, each another",
                param=f"labels[{index}]",
            )
    return ClassifyRequest(
        fields.text("model") or "",
        tuple(_prompts(fields, facts)),
        tuple(labels),
        SamplingParams(
            temperature=fields.number("temperature", 0, 100) or 0.0,
            top_p=fields.number("top_p", 0, 1),
            top_k=fields.integer("top_k", -1, 1 << 31),
            min_p=fields.number("min_p", 0, 1),
            seed=fields.integer("seed", -(1 << 63), (1 << 64) - 1),
        ),
        fields.boolean("return_logits", False),
        _client(body, facts),
    )


def _is_label(label: Any) -> bool:
    """A text that can be sent back: no half of a surrogate pair."""
    return isinstance(label, str) and bool(label) and _is_whole(label)


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def classified_list(model: str, found: Sequence[Classified]) -> dict[str, Any]:
    """The body of an answer."""
    return {"model": model, "results": [_classified(one) for one in found]}


def _classified(one: Classified) -> dict[str, Any]:
    if one.error:
        return {"error": one.error}
    said: dict[str, Any] = {"token": {"id": one.token_id, "text": one.text}}
    if one.label is not None:
        said |= {"label": one.label, "scores": dict(one.scores)}
    if one.logits is not None:
        said["logits"] = one.logits
    return said


def parse_batch(body: Any, facts: RequestFacts) -> BatchRequest:
    """
    Check a body: `prompts` as /v1/completions takes one, or `messages` as chat does.

    All other fields are those of that route, and hold for each prompt.

    Raises:
        BadRequest, ValidationFailed: naming the field.
    """
    fields = Fields(body)
    if fields.integer("n", 1, 1 << 31) not in (None, 1):
        raise BadRequest("n must be 1 in a batch: repeat the prompt", param="n")
    for name in _NOT_OF_A_BATCH:
        if (value := fields.raw(name)) is not None and value is not False:
            raise BadRequest(f"{name} must be left out in a batch", param=name)
    shared = {k: v for k, v in body.items() if k not in ("prompts", "messages")}
    if fields.raw("messages") is not None:
        talks = _conversations(fields)
        any_talk = [{"role": "user", "content": "x"}]
        return BatchRequest(
            _chat(shared, any_talk, facts, 0),
            tuple(
                functools.partial(_chat, shared, talk, facts, number)
                for number, talk in enumerate(talks)
            ),
        )
    prompts = read_prompts(fields, "prompts")
    _require_number(len(prompts), "prompts")
    return BatchRequest(
        _completion(shared, "x", facts, 0),
        tuple(
            functools.partial(_completion, shared, prompt, facts, number)
            for number, prompt in enumerate(prompts)
        ),
    )


def _completion(
    shared: Mapping[str, Any],
    prompt: str | tuple[int, ...],
    facts: RequestFacts,
    number: int,
) -> CompletionRequest:
    one = prompt if isinstance(prompt, str) else list(prompt)
    request, _ = parse_completion(
        {**shared, "prompt": one},
        f"{facts.request_id}-{number}",
        facts.headers.get("user-agent"),
    )
    return request.from_key(facts.sender, facts.address)


def batch_list(request: BatchRequest, answers: Sequence[BatchAnswer]) -> dict[str, Any]:
    """The body of an answer."""
    first = request.first
    custom = custom_names(first.tools if isinstance(first, ChatRequest) else ())
    return {"results": [_batch_answer(one, custom) for one in answers]}


def _batch_answer(one: BatchAnswer, custom: frozenset[str]) -> dict[str, Any]:
    said: dict[str, Any] = {
        "tokens": one.token_ids,
        "text": one.text,
        "finish_reason": one.finish_reason,
        "error": one.error or None,
        **one.rotated_field,
    }
    if one.reasoning:
        said["reasoning"] = one.reasoning
    if one.tool_calls:
        said["tool_calls"] = [call_dict(call, custom) for call in one.tool_calls]
    return said


def parse_attention(body: Any, facts: RequestFacts) -> AttentionRequest:
    """
    Check a body.

    Raises:
        BadRequest, ValidationFailed: naming the field.
    """
    fields = Fields(body)
    _refuse_others(body, _OF_ATTENTION)
    form = fields.text("format") or "json"
    if form not in ("json", "npz"):
        raise BadRequest(
            f"format must be json or npz, got {form[:40]!r}", param="format"
        )
    layers = fields.raw("layers")
    if layers is not None and not (
        isinstance(layers, list) and layers and all(type(one) is int for one in layers)
    ):
        raise BadRequest("layers must be a list of numbers", param="layers")
    prompt: Prompt
    if fields.raw("messages") is not None:
        if fields.raw("prompt") is not None:
            raise BadRequest("prompt must be left out beside messages", param="prompt")
        prompt = _chat(_of_client(body), body["messages"], facts, 0)
    else:
        prompts = read_prompts(fields, "prompt")
        if len(prompts) != 1 or not prompts[0]:
            raise BadRequest("prompt must be one text or its token ids", param="prompt")
        prompt = prompts[0]
    return AttentionRequest(
        fields.text("model") or "",
        prompt,
        None if layers is None else tuple(layers),
        form == "npz",
        _client(body, facts),
    )


def attention_object(
    facts: Mapping[str, Any], keys: Mapping[int, np.ndarray | None]
) -> dict[str, Any]:
    """Keys in JSON: [layer][head][position x head dim]."""
    lists = [
        None if one is None else one.reshape(one.shape[0], -1).tolist()
        for one in keys.values()
    ]
    return {**facts, "layers": list(keys), "keys": lists, "queries": None}


def attention_arrays(
    facts: Mapping[str, Any], keys: Mapping[int, np.ndarray | None]
) -> bytes:
    """Keys as an npz file: `layer_N` (heads, positions, head dim), `positions_N`."""
    arrays = {f"layer_{n}": one for n, one in keys.items() if one is not None}
    arrays |= {f"positions_{n}": np.array(facts["positions"][n]) for n in keys}
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]
    return file.getvalue()


_ROW_FORMS = ("text", "prompt", "messages")


def parse_train(body: Any) -> TrainRequest:
    """
    Check a body.

    Raises:
        BadRequest, ValidationFailed: naming the field.
    """
    fields = Fields(body)
    _refuse_others(body, ("model", "name", "data", *_JOB_FIELDS))
    rows = fields.items("data")
    if not 1 <= len(rows) <= _MAX_ROWS:
        raise BadRequest(f"data must be a list of 1..{_MAX_ROWS} rows", param="data")
    for index, row in enumerate(rows):
        if not isinstance(row, dict):
            path = f"data[{index}]"
            raise BadRequest(f"{path} must be an object", param=path)
        forms = [form for form in _ROW_FORMS if row.get(form)]
        if len(forms) > 1:
            message = f"data[{index}] must have one of {', '.join(forms)}, not several"
            raise BadRequest(message, param=f"data[{index}]")
    name = fields.required_text("name")
    return TrainRequest(fields.text("model") or "", name, tuple(rows), _job(fields))


def _job(fields: Fields) -> LoraJob:
    """What is given of how it is trained; the rest is as LoraJob says."""
    keys = fields.items("keys")
    if not all(isinstance(key, str) and key for key in keys):
        raise BadRequest("keys must be a list of names", param="keys")
    given: dict[str, Any] = {
        "keys": tuple(keys) or None,
        "rank": fields.integer("rank", 1, 1024),
        "alpha": fields.number("alpha", 1e-6, 1e6),
        "init": _one_of(fields, "init", ("kaiming_normal", "uniform")),
        "dtype": _one_of(fields, "dtype", ("float32", "bfloat16")),
        "num_layers": fields.integer("num_layers", -1, 4096),
        "learning_rate": fields.number("learning_rate", 1e-9, 10),
        "weight_decay": fields.number("weight_decay", 0, 10),
        "grad_checkpoint": fields.boolean("grad_checkpoint", False),
        "grad_accumulation": fields.integer("grad_accumulation", 1, 4096),
        "mask_prompt": fields.boolean("mask_prompt", False),
        "batch_size": fields.integer("batch_size", 1, 4096),
        "iters": fields.integer("iters", 1, 10_000_000),
        "max_seq_length": fields.integer("max_seq_length", 2, 1 << 20),
        "seed": fields.integer("seed", 0, (1 << 32) - 1),
        "exclusive": fields.boolean("exclusive", False),
    }
    if given["num_layers"] == 0:
        raise BadRequest("num_layers must be 1 at least, or -1", param="num_layers")
    return LoraJob(**{name: one for name, one in given.items() if one is not None})


def _one_of(fields: Fields, name: str, known: Sequence[str]) -> str | None:
    value = fields.text(name)
    if value is not None and value not in known:
        raise BadRequest(f"{name} must be one of {', '.join(known)}", param=name)
    return value


def parse_limits(body: Any) -> AskedLimits:
    """
    Limits of the device's memory; at least one.

    Raises:
        BadRequest, ValidationFailed: naming the field.
    """
    fields = Fields(body)
    _refuse_others(body, _LIMITS)
    read = {name: fields.integer(name, 0, 1 << 62) for name in _LIMITS}
    if not any(value is not None for value in read.values()):
        raise BadRequest(f"one of {', '.join(_LIMITS)} must be given")
    return AskedLimits(**read)


def _prompts(fields: Fields, facts: RequestFacts) -> Sequence[Prompt]:
    """What is to be classified: an empty text is refused on its own, later."""
    if fields.raw("messages") is not None:
        shared, talks = _of_client(fields.whole), _conversations(fields)
        return [_chat(shared, one, facts, number) for number, one in enumerate(talks)]
    listed = fields.items("prompts")
    _require_number(len(listed), "prompts")
    found: list[Prompt] = []
    for index, item in enumerate(listed):
        path = f"prompts[{index}]"
        is_ids = isinstance(item, list) and all(map(is_id, item))
        if not (isinstance(item, str) or is_ids):
            raise BadRequest(
                f"{path} must be a text or a list of token ids", param=path
            )
        found.append(item if isinstance(item, str) else tuple(item))
    return found


def _conversations(fields: Fields) -> list[Any]:
    if fields.raw("prompts") is not None:
        raise BadRequest("prompts must be left out beside messages", param="prompts")
    listed = fields.items("messages")
    _require_number(len(listed), "messages")
    return listed


def _chat(
    shared: Mapping[str, Any], messages: Any, facts: RequestFacts, number: int
) -> ChatRequest:
    """One conversation as chat completions read it; its complaints say which it is."""
    own = RequestFacts(
        f"{facts.request_id}-{number}", facts.path, facts.headers, facts.sender
    )
    try:
        chat = OpenAIChat().parse({**shared, "messages": messages}, own).chat
    except SidecarError as error:
        sent_as = error.param or ""
        if sent_as.startswith("messages"):
            error.param = f"messages[{number}]{sent_as.removeprefix('messages')}"
            error.message = error.message.replace(sent_as, error.param)
        raise
    return chat.sent(facts.path, facts.sender, facts.address)


def _of_client(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that say who asks which model."""
    return {name: body[name] for name in _CLIENT if name in body}


def _client(body: Any, facts: RequestFacts) -> ClientInfo:
    found = read_client(body, facts.headers.get("user-agent"))
    return found.with_key(facts.sender)


def _require_number(count: int, name: str) -> None:
    if not 1 <= count <= _MAX_PROMPTS:
        raise BadRequest(f"{name} must be a list of 1..{_MAX_PROMPTS}", param=name)


def _refuse_others(body: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in body:
        if name not in known:
            raise BadRequest(
                f"{name[:64]} is not one of {', '.join(known)}", param=name[:64]
            )
