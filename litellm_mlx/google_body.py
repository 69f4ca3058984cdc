"""
What clients ask on Google's routes, as LiteLLM can make a chat of it.

LiteLLM knows some fields by one of their two names only, and passes over what it does
not know, a picture for one: the model would answer what nobody asked. So what a chat
has a place for is brought into the form that LiteLLM reads, and all else is refused.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeGuard

import litellm

from litellm_mlx import errors
from litellm_mlx.google_schema import (
    MAX_LEVELS,
    MEDIA_TYPES,
    as_json_schema,
    asked_form,
)
from litellm_mlx.nesting import is_deeper

Json = Mapping[str, object]

_AT_V1 = re.compile(r"/v1(/models/[^/]+:(\w*[gG]enerateContent|countTokens))")
_ANSWERS = (":generateContent", ":streamGenerateContent")
_CALLING = "functionCallingConfig"
_CONFIGS = ("config", "generationConfig", "generation_config")
_ROLES = {None: "user", "user": "user", "function": "user", "model": "model"}
# Of the configuration, what LiteLLM leaves out: its name in a chat.
_LEFT_OUT = {
    "topK": "top_k",
    "seed": "seed",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}
_MODES = ("MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED")
_KEPT_MODES = ("MODE_UNSPECIFIED", "AUTO", "NONE", "ANY")
_LEVELS = ("minimal", "low", "medium", "high")
_NO_LEVEL = "thinking_level_unspecified"
# What has an effect; all else is named to the client.
_TAKEN = (
    "model", "contents", "systemInstruction", "tools", "toolConfig", "generationConfig",
    "config",
)  # fmt: skip
_MAX_BUDGET = 10_000_000  # tokens; more is no limit
_FORM = ("responseMimeType", "responseSchema", "responseJsonSchema")
_TAKEN_OF_CONFIG = (
    *_LEFT_OUT, "stopSequences", "temperature", "topP", "maxOutputTokens",
    "candidateCount", "thinkingConfig", *_FORM,
)  # fmt: skip

_DECLARED = "functionDeclarations"
_TAKEN_OF_FUNCTION = ("name", "description", "parameters", "parametersJsonSchema")


def served_path(path: str) -> str:
    """The path where LiteLLM serves it: newer clients of Google's ask under /v1."""
    found = _AT_V1.fullmatch(path)
    return f"/v1beta{found[1]}" if found else path


def makes_an_answer(path: str) -> bool:
    """Whether a route of Google's has the model write something."""
    return path.endswith(_ANSWERS)


def readable(call: Json) -> dict[str, object]:
    """
    The arguments of a call with all that LiteLLM reads of them in its own form.

    Raises:
        litellm.BadRequestError: naming the field.
    """
    read = dict(call)
    read["contents"] = _turns(
        _content(content, f"contents[{index}]")
        for index, content in enumerate(_listed(call.get("contents")))
    )
    read["config"] = config = _config(read)
    _check_thinking(config)
    _check_stored(read)
    _check_tools(read)
    system = read.pop("system_instruction", None) or read.get("systemInstruction")
    if system:
        text = "\n".join(_texts(system, "systemInstruction"))
        read["systemInstruction"] = {"parts": [{"text": text}]}
    return read


def left_out(body: Json) -> dict[str, object]:
    """The fields of a client's body that LiteLLM leaves out, as a chat names them."""
    config = _config_of(body)
    said = {chat: _get(config, name) for name, chat in _LEFT_OUT.items()}
    form = asked_form(*(_get(config, name) for name in _FORM))
    return {
        **{name: value for name, value in said.items() if value is not None},
        **_thinking(_mapping(_get(config, "thinkingConfig"))),
        **_named_tool(_mapping(_get(body, "toolConfig"))),
        **form,
    }


def in_vain(body: Json) -> list[str]:
    """What a client's body asks for on a route that makes an answer, without effect."""
    config = _config_of(body)
    named = [name for name in body if _camel(name) not in _TAKEN and body[name]]
    named += [
        f"generationConfig.{name}"
        for name, value in config.items()
        if _camel(name) not in _TAKEN_OF_CONFIG and value is not None
    ]
    thinking = _mapping(_get(config, "thinkingConfig"))
    if _get(thinking, "includeThoughts"):
        named.append("generationConfig.thinkingConfig.includeThoughts")
    if _get(config, "responseMimeType") not in (None, *MEDIA_TYPES):
        named.append("generationConfig.responseMimeType")
    named += _tools_in_vain(body.get("tools"))
    return named + _choice_in_vain(_mapping(_get(body, "toolConfig")))


def can_be_read(contents: object) -> bool:
    """Whether contents are of the kinds that are taken here."""
    try:
        for index, content in enumerate(_listed(contents)):
            _content(content, f"contents[{index}]")
    except litellm.BadRequestError:
        return False
    return True


def _tools_in_vain(tools: object) -> list[str]:
    """What function declarations say beside what a chat has a place for."""
    return [
        f"tools[{index}].{_DECLARED}[{number}].{name}"
        for index, tool in enumerate(_as_list(tools))
        for number, one in enumerate(_as_list(_get(_mapping(tool), _DECLARED)))
        for name, value in _mapping(one).items()
        if _camel(str(name)) not in _TAKEN_OF_FUNCTION and value is not None
    ]


def _choice_in_vain(choice: Json) -> list[str]:
    calling = _mapping(_get(choice, "functionCallingConfig"))
    named = [f"toolConfig.{name}" for name in choice if _camel(name) != _CALLING]
    if _get(calling, "mode") not in (None, *_KEPT_MODES):
        named.append(f"toolConfig.{_CALLING}.mode")
    if _get(calling, "allowedFunctionNames") and not _named_tool(choice):
        named.append(f"toolConfig.{_CALLING}.allowedFunctionNames")
    return named


def _named_tool(choice: Json) -> dict[str, object]:
    """How a chat asks for the one function that may be called."""
    calling = _mapping(_get(choice, "functionCallingConfig"))
    names = _as_list(_get(calling, "allowedFunctionNames"))
    is_one = len(names) == 1 and isinstance(names[0], str)
    if _get(calling, "mode") != "ANY" or not is_one:
        return {}
    function = {"name": names[0]}
    return {"tool_choice": {"type": "function", "function": function}}


def _thinking(config: Json) -> dict[str, object]:
    """How a chat says what Google's `thinkingConfig` says."""
    level, budget = _get(config, "thinkingLevel"), _get(config, "thinkingBudget")
    if budget == 0 and not isinstance(budget, bool):
        return {"thinking": {"type": "disabled"}}
    if isinstance(level, str) and level.lower() in _LEVELS:
        return {"reasoning_effort": level.lower()}
    if _is_budget(budget):
        return {"thinking_budget": int(budget)} if 0 < budget <= _MAX_BUDGET else {}
    return {}


def _check_thinking(config: Json) -> None:
    where = "generationConfig.thinkingConfig"
    given = _get(config, "thinkingConfig")
    thinking = {} if given is None else _object(given, where)
    level, budget = _get(thinking, "thinkingLevel"), _get(thinking, "thinkingBudget")
    if level is not None and str(level).lower() not in (*_LEVELS, _NO_LEVEL):
        _refuse(f"{where}.thinkingLevel", f"must be one of {', '.join(_LEVELS)}")
    if budget is not None and not _is_budget(budget):
        _refuse(f"{where}.thinkingBudget", "must be a whole number, -1 or more")


def _is_budget(value: object) -> TypeGuard[int | float]:
    """A whole number from -1 on; in JSON of Google's it may have a point."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value >= -1 and float(value).is_integer()


def _config_of(body: Json) -> Json:
    return _mapping(next(filter(None, (body.get(name) for name in _CONFIGS)), {}))


def _get(fields: Json, name: str) -> object:
    """A field by either of its two names; null says nothing."""
    value = fields.get(name)
    return fields.get(_snake(name)) if value is None else value


def _mapping(value: object) -> Json:
    return value if isinstance(value, Mapping) else {}


def _config(read: dict[str, object]) -> Json:
    """What LiteLLM calls `config`; it reads it under one of three names."""
    given = [read.pop(name, None) for name in _CONFIGS]
    config = _fields(next(filter(None, given), None), "generationConfig")
    if config.get("candidateCount") not in (1, None):
        _refuse("generationConfig.candidateCount", "must be 1")
    _check_schemas(config)
    schema, asked = _get(config, "responseSchema"), _get(config, "responseJsonSchema")
    if schema is not None and asked is None:
        config = {**config, "responseJsonSchema": as_json_schema(schema)}
    return config


def _check_schemas(config: Json) -> None:
    for name in _FORM[1:]:
        where, schema = f"generationConfig.{name}", _get(config, name)
        if schema is not None and not isinstance(schema, dict):
            _refuse(where, "must be an object")
        if is_deeper(schema, MAX_LEVELS):
            _refuse(where, "is nested too deep")


def _check_stored(read: Json) -> None:
    """Refuse a beginning that Google would keep: the model would not have read it."""
    for name in ("cachedContent", "cached_content"):
        if read.get(name) or _object(read["config"], "config").get(name):
            _refuse("cachedContent", "is not kept here: send the whole conversation")


def _check_tools(read: dict[str, object]) -> None:
    """Refuse what is no choice or tool; leave out fields that are null."""
    given = read.pop("tool_config", None)
    named = read.pop("toolConfig", None)
    choice = _fields(named or given, "toolConfig")
    if choice and not _named_tool(choice):  # else a chat's own choice says it
        read["toolConfig"] = choice
    if (calling := choice.get(_CALLING)) is not None:
        where = f"toolConfig.{_CALLING}"
        choice[_CALLING] = _fields(calling, where)
        if choice[_CALLING].get("mode", "AUTO") not in _MODES:
            _refuse(f"{where}.mode", f"must be one of {', '.join(_MODES)}")
    listed = _sequence(read.get("tools") or [], "tools")
    tools = [_fields(tool, f"tools[{n}]") for n, tool in enumerate(listed)]
    if "tools" in read:
        read["tools"] = tools
    for index, offered in enumerate(tools):
        for name in offered:
            if name != _DECLARED:
                what = "is run by Google: only functionDeclarations are taken"
                _refuse(f"tools[{index}].{name}", what)
        where = f"tools[{index}].{_DECLARED}"
        offered[_DECLARED] = [
            _fields(_object(one, f"{where}[{number}]"), where)
            for number, one in enumerate(_sequence(offered.get(_DECLARED, []), where))
        ]


def _turns(contents: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Contents, each answer as one: the SDKs send a content for each chunk of it."""
    turns: list[dict[str, Any]] = []
    for content in contents:
        if content["role"] == "model":
            said = [part for part in content["parts"] if part.get("text") != ""]
            if turns and turns[-1]["role"] == "model":
                turns[-1]["parts"] += said
                continue
            content = {**content, "parts": said}
        turns.append(content)
    return turns


def _content(value: object, where: str) -> dict[str, Any]:
    if isinstance(value, str):
        return {"role": "user", "parts": [{"text": value}]}
    content = _object(value, where)
    given = content.get("role")
    role = _ROLES.get(given) if given is None or isinstance(given, str) else None
    if role is None:
        _refuse(f"{where}.role", "must be user or model")
    parts = content.get("parts") or []
    listed = [parts] if isinstance(parts, str | Mapping) else parts
    read = [
        _part(part, f"{where}.parts[{index}]", role)
        for index, part in enumerate(_sequence(listed, f"{where}.parts"))
    ]
    return {"role": role, "parts": [part for part in read if part is not None]}


def _part(value: object, where: str, role: str) -> Json | None:
    """One part; None for a thought, which Google's own models are not sent either."""
    if isinstance(value, str):
        return {"text": value}
    part = _object(value, where)
    if part.get("thought") is True:
        return None
    for name, of_role, read in _PARTS:
        given = _get(part, name)
        if given is not None and role in of_role:
            return read(given, f"{where}.{name}")
    names = sorted(name for name in part if name not in ("thought", "thoughtSignature"))
    return _refuse(where, f"is of a kind that is not taken from a {role}: {names}")


def _text(value: object, where: str) -> Json:
    if not isinstance(value, str):
        _refuse(where, "must be a string")
    return {"text": value}


def _picture(value: object, where: str) -> Json:
    given = _object(value, where)
    media = _get(given, "mimeType")
    if not isinstance(media, str) or not media.startswith("image/"):
        _refuse(f"{where}.mimeType", "must be of an image: no other data is taken")
    if not isinstance(given.get("data"), str):
        _refuse(f"{where}.data", "must be a string")
    return {"inline_data": {"mime_type": media, "data": given["data"]}}


def _named(kind: str) -> Callable[[object, str], Json]:
    def read(value: object, where: str) -> Json:
        given = _object(value, where)
        if not isinstance(given.get("name"), str):
            _refuse(f"{where}.name", "must be a string")
        if given.get("parts"):
            _refuse(f"{where}.parts", "must be left out: results are texts or objects")
        return {kind: given}

    return read


_PARTS: Sequence[tuple[str, tuple[str, ...], Callable[[object, str], Json]]] = (
    ("text", ("user", "model"), _text),
    ("inlineData", ("user",), _picture),
    ("functionResponse", ("user",), _named("functionResponse")),
    ("functionCall", ("model",), _named("functionCall")),
)


def _texts(value: object, where: str) -> list[str]:
    """The texts of a system instruction, in any of its forms."""
    if isinstance(value, Mapping) and "parts" in value:
        value, where = value["parts"], f"{where}.parts"
    texts = []
    for index, item in enumerate(_listed(value)):
        text = item.get("text") if isinstance(item, Mapping) else item
        if not isinstance(text, str):
            _refuse(f"{where}[{index}]", "must be a text")
        texts.append(text)
    return texts


def _as_list(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else []


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else [value]


def _sequence(value: object, where: str) -> Sequence[object]:
    if not isinstance(value, list):
        _refuse(where, "must be a list")
    return value


def _fields(value: object, where: str) -> dict[str, Any]:
    """Those that are not null, by the one of their two names that LiteLLM knows."""
    given = {} if value is None else _object(value, where)
    return {_camel(name): field for name, field in given.items() if field is not None}


def _object(value: object, where: str) -> Json:
    if not isinstance(value, Mapping):
        _refuse(where, "must be an object")
    return value


def _camel(name: str) -> str:
    return re.sub(r"_([a-z])", lambda found: found[1].upper(), name)


def _snake(name: str) -> str:
    return re.sub(r"([A-Z])", lambda found: f"_{found[1].lower()}", name)


def _refuse(where: str, what: str) -> NoReturn:
    raise errors.refused(where, what)
