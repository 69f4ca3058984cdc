"""
The types of what LiteLLM reads of a body itself, and does not check.

It stumbles over a value of another type and answers 500, some of them before it runs
any hook. Others it hands to the deployment, which it then takes for broken and shuts
out for a while. Fields that only the sidecar reads are checked there.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from litellm_mlx import conversation_size, google_body
from litellm_mlx.client_fallbacks import ALLOWED, MAX_FALLBACKS, are_fallbacks
from litellm_mlx.control_fields import (
    MAX_RETRIES,
    MAX_TAGS,
    NEVER,
    are_tags,
    is_not_for_clients,
    is_number_of_retries,
)
from litellm_mlx.head_fields import (
    MODEL_NAME_LEN,
    headers_fit,
    is_model_name,
    is_seconds,
)
from litellm_mlx.nesting import is_deeper

_USER_LEN = 4096
_MAX_LEVELS = 32  # of metadata


@dataclass(frozen=True, slots=True)
class Wrong:
    """A field of a wrong type, and what is wrong with it."""

    param: str | None
    message: str


@dataclass(frozen=True, slots=True)
class FieldType:
    """
    A type, in words.

    Args:
        may_be_null: null is as good as no such field.
    """

    said: str
    fits: Callable[[object], bool]
    may_be_null: bool = True


def _is(*types: type) -> Callable[[object], bool]:
    return lambda value: type(value) in types


def _list_of(type_: type) -> Callable[[object], bool]:
    return lambda value: (
        isinstance(value, list) and all(type(item) is type_ for item in value)
    )


_OBJECT = FieldType("an object", _is(dict))
_OBJECTS = FieldType("a list of objects", _list_of(dict))
_TEXT = FieldType("a string", _is(str))
_TAGS = FieldType(f"a list of at most {MAX_TAGS} short strings", are_tags)
_SECONDS = FieldType("a number of seconds above 0, of at most a day", is_seconds)
_RETRIES = FieldType(f"a whole number from 0 to {MAX_RETRIES}", is_number_of_retries)
_SIZE = f"at most {conversation_size.MAX_ITEMS} messages, parts and calls"
_MESSAGES = FieldType(
    f"a non-empty list of {_SIZE}",
    lambda value: (
        bool(value) and _list_of(dict)(value) and conversation_size.fits(value)
    ),
    may_be_null=False,
)

_MODEL = FieldType(
    f"the name of one model, of at most {MODEL_NAME_LEN} characters", is_model_name
)
_HEADERS = FieldType(
    "an object of texts of one line, without a header that holds a key or an address",
    headers_fit,
)
# They would replace what the body says, for the model alone: LiteLLM does not know.
_NOT_EXTRA = frozenset(("model", "stream", "messages"))
_EXTRA = FieldType(
    "an object without model, stream and messages",
    lambda value: isinstance(value, dict) and value.keys().isdisjoint(_NOT_EXTRA),
)
# Each name costs LiteLLM milliseconds, in which it serves nobody.
_FALLBACKS = FieldType(
    f"a list of at most {MAX_FALLBACKS} models, by their names, or as objects of "
    f"{', '.join(ALLOWED)}",
    are_fallbacks,
)
# LiteLLM keeps each that it has seen, and makes keys of it.
_USER = FieldType(
    f"a text of at most {_USER_LEN} characters",
    lambda value: (
        len(value) <= _USER_LEN
        if isinstance(value, str)
        else not isinstance(value, list | dict)
    ),
)


def _with_short(name: str) -> FieldType:
    """An object, or anything else, whose field of this name is no long text."""
    return FieldType(
        f"without a {name} of more than {_USER_LEN} characters, without more than "
        f"{MAX_TAGS} tags and not deep",
        lambda value: (
            not isinstance(value, dict)
            or (
                _USER.fits(value.get(name))
                and (value.get("tags") is None or are_tags(value["tags"]))
                and not is_deeper(value, _MAX_LEVELS)
            )
        ),
    )


_NOT_TAKEN = FieldType("left out: it is not for clients", lambda value: False)
_ALWAYS: Mapping[str, FieldType] = {
    "model": _MODEL,
    "fallbacks": _FALLBACKS,
    "context_window_fallbacks": _FALLBACKS,
    "content_policy_fallbacks": _FALLBACKS,
    "user": _USER,
    "safety_identifier": _USER,
    "metadata": _with_short("user_id"),
    "litellm_metadata": _with_short("user"),
    **dict.fromkeys(sorted(NEVER), _NOT_TAKEN),
}
# Of bodies that ask a model, whoever serves it.
_ASKING: Mapping[str, FieldType] = {
    **_ALWAYS,
    "num_retries": _RETRIES,
    "max_retries": _RETRIES,
    "headers": _HEADERS,
    "extra_headers": _HEADERS,
}
_EVERYWHERE: Mapping[str, FieldType] = {
    **_ASKING,
    "tools": _OBJECTS,
    "stream_options": _OBJECT,
    "response_format": _OBJECT,
    "extra_body": _EXTRA,
    "tags": _TAGS,
    "timeout": _SECONDS,
    "request_timeout": _SECONDS,
    "api_key": _TEXT,
    "api_version": _TEXT,
    "prompt_id": _TEXT,
    "litellm_trace_id": _TEXT,
    "allowed_openai_params": _TAGS,
    "guardrails": _TAGS,
}
# On LiteLLM's routes that are not served here.
_ELSEWHERE: Mapping[str, FieldType] = {
    **_ASKING,
    **dict.fromkeys(
        ("messages", "input", "contents"), FieldType(_SIZE, conversation_size.fits)
    ),
}
_CHAT: Mapping[str, FieldType] = {
    "messages": _MESSAGES,
    "web_search_options": FieldType("an object", _is(dict), may_be_null=False),
}
_ANTHROPIC: Mapping[str, FieldType] = {
    "messages": _MESSAGES,
    "metadata": FieldType(
        f"an object whose user_id is a text of at most {_USER_LEN} characters",
        lambda value: (
            isinstance(value, dict)
            and isinstance(value.get("user_id"), str | None)
            and _USER.fits(value.get("user_id"))
        ),
    ),
    "tool_choice": _OBJECT,
    "context_management": _OBJECT,
}
_RESPONSES: Mapping[str, FieldType] = {
    "input": FieldType(
        f"a string or a list of {_SIZE}",
        lambda value: _is(str, list)(value) and conversation_size.fits(value),
    ),
    "stream": FieldType("true or false", _is(bool)),
}
# LiteLLM makes messages of the prompt itself, and stumbles over two of them.
_COMPLETIONS: Mapping[str, FieldType] = {
    "stream": FieldType("true or false", _is(bool)),
    "prompt": FieldType(
        f"a text, ids, or a list of at most {conversation_size.MAX_ITEMS} of them",
        lambda value: (
            not isinstance(value, list)
            or len(value) <= conversation_size.MAX_ITEMS
            or {*map(type, value)} == {int}
        ),
    ),
    "messages": FieldType(
        "left out: a prompt is asked for here", lambda value: False, may_be_null=False
    ),
}
_GOOGLE: Mapping[str, FieldType] = {
    "contents": FieldType(
        f"an object, a text, or a list of {_SIZE}",
        lambda value: (
            (
                type(value) in (dict, str)
                or (isinstance(value, list) and {*map(type, value)} <= {dict, str})
            )
            and conversation_size.fits(value)
        ),
        may_be_null=False,
    ),
}
_COUNTED: Mapping[str, FieldType] = {
    "contents": FieldType(
        "an object, a text, or a list of them, with parts that are taken here",
        google_body.can_be_read,
        may_be_null=False,
    ),
}
_EMBEDDINGS: Mapping[str, FieldType] = {
    "input": FieldType(
        "a string, or a list of strings, of token ids, or of non-empty lists of ids",
        lambda value: (
            isinstance(value, str)
            or (
                isinstance(value, list)
                and [] not in value
                and (len({*map(type, value)}) < 2)
            )
        ),
    ),
}
_IMAGES: Mapping[str, FieldType] = {"prompt": _TEXT}
_RERANK: Mapping[str, FieldType] = {
    "query": _TEXT,
    "documents": FieldType(
        "a list of strings, or of objects with a text",
        lambda value: isinstance(value, list) and {*map(type, value)} <= {dict, str},
    ),
}
_BEFORE = r"(/v1|/(engines|openai/deployments)/[^/]+)?"
_PICTURES = re.compile(r"(/v1)?/images/generations")  # which LiteLLM alone refuses
_OTHERS = re.compile(r"(/v1)?/(images/edits|audio/[a-z]+|moderations)")
_ROUTES: tuple[tuple[re.Pattern[str], Mapping[str, FieldType]], ...] = (
    (re.compile(f"{_BEFORE}/chat/completions"), _CHAT),
    (re.compile(f"{_BEFORE}/completions"), _COMPLETIONS),
    (re.compile(f"{_BEFORE}/embeddings"), _EMBEDDINGS),
    (re.compile(r"(/v1|/v2)?/rerank"), _RERANK),
    (re.compile(r"(/v1beta)?/models/[^/]+:countTokens"), _COUNTED),
    (re.compile(r"(/v1)?/messages(/count_tokens)?"), _ANTHROPIC),
    (re.compile(r"(/v1)?/responses"), _RESPONSES),
    (
        re.compile(r"(/v1beta)?/models/[^/]+:\w*[gG]enerateContent"),
        _GOOGLE,
    ),
)


_BATCHES = re.compile(r"(/[^/]+)?(/v1)?/batches")


@dataclass(frozen=True, slots=True)
class BodyRules:
    """
    What the bodies of a route must keep to.

    Args:
        types: of fields by name.
        asks_a_model: LiteLLM's own arguments must be left out; on its other routes
            some of them are fields (a key's budget, a model's price).
        own: names among those arguments that are a field of this route's API.
    """

    types: Mapping[str, FieldType]
    asks_a_model: bool
    own: frozenset[str] = frozenset()


def rules_for(path: str, *, is_known: bool = False) -> BodyRules:
    """
    The rules of a route; of one that we do not serve only those of LiteLLM's.

    Args:
        is_known: to LiteLLM as one that asks a model.
    """
    if _PICTURES.fullmatch(path):
        return BodyRules({**_ASKING, **_IMAGES}, asks_a_model=True)
    for pattern, own in _ROUTES:
        if pattern.fullmatch(path):
            return BodyRules({**_EVERYWHERE, **own}, asks_a_model=True)
    if _OTHERS.fullmatch(path):
        return BodyRules(_ASKING, asks_a_model=True)
    if _BATCHES.fullmatch(path):
        return BodyRules(_ELSEWHERE, asks_a_model=True, own=frozenset({"endpoint"}))
    if is_known:
        return BodyRules(_ELSEWHERE, asks_a_model=True)
    return BodyRules(_ALWAYS, asks_a_model=False)


def is_ours(path: str) -> bool:
    """Whether the sidecar serves it: its bodies are JSON."""
    return any(pattern.fullmatch(path) for pattern, _ in _ROUTES)


def wrong_field(body: Mapping[str, object], rules: BodyRules) -> Wrong | None:
    """The first field that is not for clients, or that LiteLLM would stumble over."""
    if rules.asks_a_model:
        for name, value in body.items():
            is_own = name in rules.own
            if value is not None and not is_own and is_not_for_clients(name):
                return Wrong(name, f"{name} must be {_NOT_TAKEN.said}")
    for name, type_ in rules.types.items():
        if name not in body:
            continue
        value = body[name]
        is_absent = value is None and type_.may_be_null
        if not is_absent and not type_.fits(value):
            return Wrong(name, f"{name} must be {type_.said}, got {_kind(value)}")
    if rules.asks_a_model:
        large = conversation_size.too_large_field(body)
        if large is not None:
            most = f"at most {conversation_size.MAX_FIELD_BYTES} bytes"
            return Wrong(large, f"{large} must have {most}, its kinds short names")
    return None


def _kind(value: object) -> str:
    """What a value is; never the value: it may be a key."""
    if value is None:
        return "null"
    if isinstance(value, list):
        kinds = sorted({_plain_kind(item) for item in value})
        return f"a list of {', '.join(kinds)}" if kinds else "an empty list"
    return _plain_kind(value)


def _plain_kind(value: object) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string",
             list: "a list", dict: "an object"}  # fmt: skip
    return names.get(type(value), "null")
