"""
What clients ask on Google's routes, as LiteLLM can make a chat of it.

LiteLLM knows some fields by one of their two names only, and passes over what it does
not know, a picture for one: the model would answer what nobody asked. So what a chat
has a place for is brought into the form that LiteLLM reads, and all else is refused.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from litellm_mlx import errors

Json = Mapping[str, object]

_AT_V1 = re.compile(r"/v1(/models/[^/]+:(\w*[gG]enerateContent|countTokens))")
_CONFIGS = ("config", "generationConfig", "generation_config")
_ROLES = {None: "user", "user": "user", "function": "user", "model": "model"}
# Of the configuration, what LiteLLM leaves out: its name in a chat.
_LEFT_OUT = {
    "topK": "top_k",
    "seed": "seed",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
}


def served_path(path: str) -> str:
    """The path where LiteLLM serves it: newer clients of Google's ask under /v1."""
    found = _AT_V1.fullmatch(path)
    return f"/v1beta{found[1]}" if found else path


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
    read["config"] = _config(read)
    _check_stored(read)
    _check_tools(read)
    system = read.pop("system_instruction", None) or read.get("systemInstruction")
    if system is not None:
        text = "\n".join(_texts(system, "systemInstruction"))
        read["systemInstruction"] = {"parts": [{"text": text}]}
    return read


def left_out(body: Json) -> dict[str, object]:
    """The fields of a client's body that LiteLLM leaves out, as a chat names them."""
    config = body.get("generationConfig") or body.get("generation_config")
    if not isinstance(config, Mapping):
        return {}
    return {chat: config[name] for name, chat in _LEFT_OUT.items() if name in config}


def _config(read: dict[str, object]) -> Json:
    """What LiteLLM calls `config`; it reads it under one of three names."""
    given = [read.pop(name, None) for name in _CONFIGS]
    config = _object(next(filter(None, given), {}), "generationConfig")
    if config.get("candidateCount") not in (1, None):
        _refuse("generationConfig.candidateCount", "must be 1")
    return config


def _check_stored(read: Json) -> None:
    """Refuse a beginning that Google would keep: the model would not have read it."""
    for name in ("cachedContent", "cached_content"):
        if read.get(name) or _object(read["config"], "config").get(name):
            _refuse("cachedContent", "is not kept here: send the whole conversation")


def _check_tools(read: Json) -> None:
    choice = _object(
        read.get("toolConfig") or read.get("tool_config") or {}, "toolConfig"
    )
    where = "toolConfig.functionCallingConfig"
    _object(choice.get("functionCallingConfig") or {}, where)
    for index, tool in enumerate(_sequence(read.get("tools") or [], "tools")):
        where = f"tools[{index}].functionDeclarations"
        offered = _object(tool, f"tools[{index}]")
        for name in offered:
            if name not in ("functionDeclarations", "function_declarations"):
                what = "is run by Google: only functionDeclarations are taken"
                _refuse(f"tools[{index}].{name}", what)
        declared = offered.get("functionDeclarations") or []
        for number, one in enumerate(_sequence(declared, where)):
            _object(one, f"{where}[{number}]")


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
        given = part.get(name, part.get(_snake(name)))
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
    media = given.get("mimeType", given.get("mime_type"))
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


def _listed(value: object) -> Sequence[object]:
    return value if isinstance(value, list) else [value]


def _sequence(value: object, where: str) -> Sequence[object]:
    if not isinstance(value, list):
        _refuse(where, "must be a list")
    return value


def _object(value: object, where: str) -> Json:
    if not isinstance(value, Mapping):
        _refuse(where, "must be an object")
    return value


def _snake(name: str) -> str:
    return re.sub(r"([A-Z])", lambda found: f"_{found[1].lower()}", name)


def _refuse(where: str, what: str) -> NoReturn:
    raise errors.refused(where, what)
