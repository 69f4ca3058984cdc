"""
Calls as a model would write them, for templates that print none.

What is written is read back as the same call, but for texts that hold the end of their
own value (docs/tool-calls.md).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from sidecar.output.calls.call_sink import Format, ToolSyntax
from sidecar.output.calls.element_calls import (
    MINIMAX_M3_NAME,
    deepseek_dsml,
    deepseek_dsml_spaced,
    minimax_m3_xml,
    minimax_xml,
    qwen3_coder_xml,
    seed_xml,
)
from sidecar.output.calls.gemma_calls import PLAIN_KEY, gemma
from sidecar.output.calls.glm_calls import glm4_native, glm4_xml, longcat
from sidecar.output.calls.json_calls import (
    bare_json,
    cohere_list,
    hermes_json,
    json_list,
    mistral_list,
)
from sidecar.output.calls.marked_calls import (
    deepseek,
    deepseek_fenced,
    kimi,
    mistral,
)
from sidecar.output.calls.python_calls import python_calls, tool_code
from sidecar.output.calls.python_names import is_python_name
from sidecar.output.grammars.element_rules import (
    ElementRules,
    dsml_rules,
    glm_rules,
    minimax_m3_rules,
    minimax_rules,
    qwen_rules,
    seed_rules,
)

Json = Mapping[str, Any]
Write = Callable[[str, Json], str]  # of a name and arguments
_NINE = "000000000"  # Mistral's ids have nine characters
_TAG_NAME = re.compile(r"""[^<>"\s](?:[^<>"\n\r]*[^<>"\s])?""")
_CALL_BEGIN, _CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"


def writer_of(syntaxes: Sequence[ToolSyntax]) -> Write | None:
    """What writes calls in a model's own way; None: as all models are understood."""
    own = syntaxes[0]
    inside = _WRITERS.get(own.formats[0]) if own.formats else None
    if inside is None:
        return None
    if own.is_inside:  # the opener is the beginning of the call itself
        return inside
    if own.formats[0] is gemma:
        quote = "<escape>" if own.opener == "<start_function_call>" else '<|"|>'
        inside = partial(_gemma_call, quote)
    return lambda name, said: f"{own.opener}{inside(name, said)}{own.closer}"


def _tojson(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else _tojson(value)


def _object(name: str, said: Json, *, key: str = "arguments") -> str:
    return _tojson({"name": name, key: dict(said)})


def _hermes(name: str, said: Json) -> str:
    return f"\n{_object(name, said)}\n"


def _cohere(name: str, said: Json) -> str:
    call = {"tool_call_id": "0", "tool_name": name, "parameters": dict(said)}
    return f"[\n    {_tojson(call)}\n]"


def _mistral(name: str, said: Json) -> str:
    return f"[{_tojson({'name': name, 'arguments': dict(said), 'id': _NINE})}]"


def _elements(rules: ElementRules, name: str, said: Json) -> str:
    """
    As the grammar of the same format has it.

    A name that would end its own tag is written with JSON's escapes.
    """
    said = {_escaped(key): value for key, value in said.items()}
    parts = [
        rules.argument(key, isinstance(value, str))
        + _plain(value)
        + rules.argument_end(key)
        for key, value in said.items()
    ]
    return f"{rules.call(name)}{''.join(parts)}{rules.call_end}"


def _escaped(key: str) -> str:
    if _TAG_NAME.fullmatch(key):
        return key
    return _tojson(key).replace("<", r"\u003c").replace(">", r"\u003e")


def _in_lines(rules: ElementRules, names: re.Pattern[str] | None = None) -> Write:
    """
    A call in lines of its own.

    Args:
        names: of arguments that have elements; with others they are one object, which
            the readers of all these formats take.
    """

    def write(name: str, said: Json) -> str:
        if all(map((names or _TAG_NAME).fullmatch, said)):
            return f"\n{_elements(rules, name, said)}\n"
        return f"\n{rules.call(name)}{_tojson(dict(said))}{rules.call_end}\n"

    return write


def _named(name: str, said: Json) -> str:
    return f"\n<name>{name}</name>\n<arguments>{_tojson(dict(said))}</arguments>\n"


def _kimi(name: str, said: Json) -> str:
    return (
        f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>"
        f"{_tojson(dict(said))}<|tool_call_end|>"
    )


def _deepseek(name: str, said: Json) -> str:
    return f"{_CALL_BEGIN}{name}<｜tool▁sep｜>{_tojson(dict(said))}{_CALL_END}"


def _deepseek_fenced(name: str, said: Json) -> str:
    fence = f"```json\n{_tojson(dict(said))}\n```"
    return f"{_CALL_BEGIN}function<｜tool▁sep｜>{name}\n{fence}{_CALL_END}"


def _gemma_call(quote: str, name: str, said: Json) -> str:
    def value(one: Any) -> str:
        if isinstance(one, str):
            return f"{quote}{one}{quote}"
        if isinstance(one, Mapping):
            return members(one)
        if isinstance(one, list):
            return f"[{','.join(map(value, one))}]"
        return _tojson(one)

    def key(name: str) -> str:
        return name if PLAIN_KEY.fullmatch(name) else f"{quote}{name}{quote}"

    def members(of: Json) -> str:
        inside = ",".join(f"{key(name)}:{value(one)}" for name, one in of.items())
        return f"{{{inside}}}"

    return f"call:{name}{members(said)}"


def _python(name: str, said: Json) -> str:
    def value(one: Any) -> str:
        return _tojson(one) if isinstance(one, str) else repr(one)

    plain = {key: one for key, one in said.items() if is_python_name(key)}
    parts = [f"{key}={value(one)}" for key, one in plain.items()]
    if odd := {key: one for key, one in said.items() if key not in plain}:
        inside = ", ".join(f"{_tojson(key)}: {value(one)}" for key, one in odd.items())
        parts.append(f"**{{{inside}}}")
    return f"[{name}({', '.join(parts)})]"


_WRITERS: dict[Format, Write] = {
    hermes_json: _hermes,
    bare_json: partial(_object, key="parameters"),
    json_list: lambda name, said: f"[{_object(name, said)}]",
    mistral_list: _mistral,
    cohere_list: _cohere,
    qwen3_coder_xml: _in_lines(qwen_rules),
    seed_xml: _in_lines(seed_rules),
    minimax_xml: _in_lines(minimax_rules),
    minimax_m3_xml: _in_lines(minimax_m3_rules, MINIMAX_M3_NAME),
    deepseek_dsml: _in_lines(dsml_rules("")),
    deepseek_dsml_spaced: _in_lines(dsml_rules(" ")),
    glm4_native: partial(_elements, glm_rules()),
    longcat: partial(_elements, glm_rules("longcat_")),
    glm4_xml: _named,
    mistral: lambda name, said: f"{name}[ARGS]{_tojson(dict(said))}",
    kimi: _kimi,
    deepseek: _deepseek,
    deepseek_fenced: _deepseek_fenced,
    gemma: partial(_gemma_call, '<|"|>'),
    python_calls: _python,
    tool_code: lambda name, said: f"\n{_python(name, said)}\n",
}  # fmt: skip
