"""
The written examples of every format of calls.

For each: a plain call, calls in parallel, and arguments that hold the marks of this
and of other formats; read whole, in 150 cuts, and cut off at every place.
"""

import json
import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest

from sidecar.core.requests import Tool
from sidecar.output.families import find_family, output_syntax
from sidecar.output.reasoning_splitter import new_splitter
from testkit.call_texts import Read, collect, read_calls, split_calls

CITY = {"city": "Rome"}
MARKS = (
    'a </tool_call> b <tool_call> [ARGS] </arg_value> "q" \\ {"x": [1]}\n'
    "  }]) <think> ``` é\U0001f600"
)
NESTED = {"text": MARKS, "rows": [{"a": [1, 2.5, None, True]}, {"</function>": "]"}]}
TOOLS = tuple(
    Tool(
        name,
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "text": {"type": "string"},
                "rows": {"type": "array"},
            },
        },
        {},
    )
    for name in ("get_weather", "write", "weather.get_weather")
)
WEATHER = ("get_weather", CITY)
WRITE = ("write", NESTED)
_M3 = "]<]minimax[>["


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _object(call: tuple[str, Any], name: str = "name", key: str = "arguments") -> str:
    return _json({name: call[0], key: call[1]})


def _xml(call: tuple[str, Any]) -> str:
    parts = "".join(
        f"<parameter={k}>\n{v if isinstance(v, str) else _json(v)}\n</parameter>\n"
        for k, v in call[1].items()
    )
    return f"<function={call[0]}>\n{parts}</function>"


def _glm(call: tuple[str, Any]) -> str:
    return call[0] + "".join(
        f"\n<arg_key>{k}</arg_key>\n<arg_value>"
        f"{v if isinstance(v, str) else _json(v)}</arg_value>"
        for k, v in call[1].items()
    )


def _invoke(call: tuple[str, Any], space: str = "", *, dsml: bool) -> str:
    mark = f"｜DSML｜{space}" if dsml else ""
    parts = []
    for key, value in call[1].items():
        is_text = isinstance(value, str)
        kind = f' string="{"true" if is_text else "false"}"' if dsml else ""
        text = value if is_text else _json(value)
        parts.append(f'<{mark}parameter name="{key}"{kind}>{text}</{mark}parameter>\n')
    return f'<{mark}invoke name="{call[0]}">\n{"".join(parts)}</{mark}invoke>\n'


def _m3(call: tuple[str, Any]) -> str:
    parts = "".join(
        f"{_M3}<{k}>{v if isinstance(v, str) else _json(v)}{_M3}</{k}>\n"
        for k, v in call[1].items()
    )
    return f'{_M3}<invoke name="{call[0]}">\n{parts}{_M3}</invoke>\n'


def _gemma(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, dict):
        inside = ",".join(
            f"{quote}{k}{quote}:{_gemma(v, quote)}"
            if not k.isidentifier()
            else f"{k}:{_gemma(v, quote)}"
            for k, v in value.items()
        )
        return f"{{{inside}}}"
    if isinstance(value, list):
        return f"[{','.join(_gemma(item, quote) for item in value)}]"
    return _json(value)


def _python(call: tuple[str, Any]) -> str:
    return f"{call[0]}({', '.join(f'{k}={v!r}' for k, v in call[1].items())})"


def _kimi(*calls: tuple[str, Any]) -> str:
    inside = "".join(
        f"<|tool_call_begin|>functions.{name}:{n}<|tool_call_argument_begin|>"
        f"{_json(arguments)}<|tool_call_end|>"
        for n, (name, arguments) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{inside}<|tool_calls_section_end|>"


def _deepseek(*calls: tuple[str, Any], fenced: bool = False) -> str:
    inside = "".join(
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(given)}\n```"
        "<｜tool▁call▁end｜>"
        if fenced
        else f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(given)}"
        "<｜tool▁call▁end｜>"
        for name, given in calls
    )
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def _between(opener: str, closer: str, *bodies: str) -> str:
    return "".join(f"{opener}{body}{closer}" for body in bodies)


TAGS = ("<tool_call>", "</tool_call>")


@dataclass(frozen=True)
class Example:
    """A text that a model of a format writes, and the calls that it holds."""

    format: str
    marker: str  # what of the model's template or vocabulary says so
    text: str
    calls: list[tuple[str, Any]] = field(default_factory=lambda: [WEATHER])


def _trio(
    name: str, marker: str, plain: str, parallel: str, nested: str
) -> list[Example]:
    return [
        Example(name, marker, plain),
        Example(name, marker, parallel, [WEATHER, WRITE]),
        Example(name, marker, nested, [WRITE]),
    ]


def _wrapped(
    name: str, marker: str, opener: str, closer: str, *bodies: str
) -> list[Example]:
    """One block a call."""
    one, other = bodies
    return _trio(
        name, marker, _between(opener, closer, one),
        _between(opener, closer, one, other), _between(opener, closer, other),
    )  # fmt: skip


def _listed(
    example: str, marker: str, opener: str, closer: str, **keys: str
) -> list[Example]:
    """One block of a list."""
    one, other = _object(WEATHER, **keys), _object(WRITE, **keys)
    return _trio(
        example, marker, f"{opener}[{one}]{closer}",
        f"{opener}[{one}, {other}]{closer}",
        f"{opener}[{other}]{closer}",
    )  # fmt: skip


EXAMPLES = [
    *_wrapped("hermes_json", "<tool_call>", *TAGS, _object(WEATHER), _object(WRITE)),
    *_wrapped("qwen3_coder_xml", "<function=", *TAGS, _xml(WEATHER), _xml(WRITE)),
    *_wrapped("glm4_native", "<arg_key>", *TAGS, _glm(WEATHER), _glm(WRITE)),
    *_wrapped(
        "glm4_xml",
        "<name>",
        *TAGS,
        f"<name>get_weather</name><arguments>{_json(CITY)}</arguments>",
        f"<name>write</name>\n<arguments>{_json(NESTED)}</arguments>",
    ),
    Example(
        "glm4_short", "<arg_key>", f"{TAGS[0]}get_weather<city>Rome</city>{TAGS[1]}"
    ),
    Example(
        "glm4_short", "<arg_key>", f'{TAGS[0]}get_weather<city="Rome"</city>{TAGS[1]}'
    ),
    *_wrapped(
        "llama_xml",
        "<|start_header_id|>ipython",
        "",
        "",
        f"<function=get_weather>{_json(CITY)}</function>",
        f"<function=write>{_json(NESTED)}</function>",
    ),
    *_wrapped(
        "lost_opener", "<function=", "", "</tool_call>\n", _xml(WEATHER), _xml(WRITE)
    ),
    Example(
        "llama_python",
        "<|python_tag|>",
        '<|python_tag|>weather.get_weather(city="Rome")<|eom_id|>',
        [("weather.get_weather", CITY)],
    ),
    Example(
        "llama_python",
        "<|python_tag|>",
        f"<|python_tag|>{_python(WRITE)}<|eom_id|>",
        [WRITE],
    ),
    Example(
        "python_tag",
        "<|python_tag|>",
        f"<|python_tag|>{_object(WEATHER, key='parameters')}<|eom_id|>",
    ),
    Example(
        "python_tag",
        "<|python_tag|>",
        f"{_object(WEATHER, key='parameters')}; {_object(WRITE, key='parameters')}",
        [WEATHER, WRITE],
    ),
    *_trio(
        "liquid_python",
        "<|tool_call_start|>",
        f"<|tool_call_start|>[{_python(WEATHER)}]<|tool_call_end|>",
        f"<|tool_call_start|>[{_python(WEATHER)}, {_python(WRITE)}]<|tool_call_end|>",
        f"<|tool_call_start|>[{_python(WRITE)}]<|tool_call_end|>",
    ),
    Example(
        "liquid_positional",
        "<|tool_call_start|>",
        '<|tool_call_start|>[get_weather("Rome"), write(rows=[], text="")]'
        "<|tool_call_end|>",
        [WEATHER, ("write", {"rows": [], "text": ""})],
    ),
    *_listed("mistral", "[TOOL_CALLS]", "[TOOL_CALLS] ", ""),
    Example(
        "mistral_quotes",
        "[TOOL_CALLS]",
        f"[TOOL_CALLS] [{{'name': 'get_weather', 'arguments': {CITY!r}, "
        "'id': 'abc123456'}]",
    ),
    *_trio(
        "devstral",
        "[TOOL_CALLS]",
        f"[TOOL_CALLS]get_weather[ARGS]{_json(CITY)}",
        f"[TOOL_CALLS]get_weather[CALL_ID]abc123456[ARGS]{_json(CITY)}"
        f"[TOOL_CALLS]write[ARGS]{_json(NESTED)}",
        f"[TOOL_CALLS]write[ARGS]{_json(NESTED)}",
    ),
    *_wrapped(
        "gemma",
        "<start_function_call>",
        "<start_function_call>",
        "<end_function_call>",
        f"call:get_weather{_gemma(CITY, '<escape>')}",
        f"call:write{_gemma(NESTED, '<escape>')}",
    ),
    *_wrapped(
        "gemma4",
        "<|tool_call>",
        "<|tool_call>",
        "<tool_call|>",
        "call:get_weather" + _gemma(CITY, '<|"|>'),
        "call: write" + _gemma(NESTED, '<|"|>'),
    ),
    *_wrapped(
        "tool_code",
        "```tool_code",
        "```tool_code\n",
        "\n```\n",
        _python(WEATHER),
        f"print({_python(WRITE)})",
    ),
    *_trio(
        "openai_json",
        "<|start_header_id|>ipython",
        _json(
            {"type": "function", "function": {"name": "get_weather", "arguments": CITY}}
        ),
        f"{_object(WEATHER)}\n{_object(WRITE)}",
        f"So:\n{_object(WRITE)}",
    ),
    *_wrapped(
        "harmony",
        "<|channel|>",
        "<|channel|>commentary to=functions.",
        "<|call|><|start|>assistant",
        f"get_weather <|constrain|>json<|message|>{_json(CITY)}",
        f"write <|constrain|>json<|message|>{_json(NESTED)}",
    ),
    *_trio(
        "kimi_k2",
        "<|tool_calls_section",
        _kimi(WEATHER),
        _kimi(WEATHER, WRITE),
        _kimi(WRITE),
    ),
    *_trio(
        "deepseek_v3",
        "<｜tool▁calls▁begin｜>",
        _deepseek(WEATHER, fenced=True),
        _deepseek(WEATHER, WRITE, fenced=True),
        _deepseek(WRITE, fenced=True),
    ),
    *_trio(
        "deepseek_v31",
        "<｜tool▁calls▁begin｜>",
        _deepseek(WEATHER),
        _deepseek(WEATHER, WRITE),
        _deepseek(WRITE),
    ),
    *(
        example
        for name, space, block in (
            ("deepseek_v32", "", "｜DSML｜function_calls"),
            ("deepseek_v4", "", "｜DSML｜tool_calls"),
            ("deepseek_v41", " ", "｜DSML｜ calls"),
        )
        for example in _trio(
            name,
            "｜DSML｜",
            f"<{block}>\n{_invoke(WEATHER, space, dsml=True)}</{block}>",
            f"<{block}>\n{_invoke(WEATHER, space, dsml=True)}"
            f"{_invoke(WRITE, space, dsml=True)}</{block}>",
            f"<{block}>\n{_invoke(WRITE, space, dsml=True)}</{block}>",
        )
    ),
    *_trio(
        "minimax_m2",
        "<minimax:tool_call>",
        f"<minimax:tool_call>\n{_invoke(WEATHER, dsml=False)}</minimax:tool_call>",
        f"<minimax:tool_call>\n{_invoke(WEATHER, dsml=False)}"
        f"{_invoke(WRITE, dsml=False)}</minimax:tool_call>",
        f"<minimax:tool_call>\n{_invoke(WRITE, dsml=False)}</minimax:tool_call>",
    ),
    *_trio(
        "minimax_m3",
        _M3,
        f"{_M3}<tool_call>\n{_m3(WEATHER)}{_M3}</tool_call>",
        f"{_M3}<tool_call>\n{_m3(WEATHER)}{_m3(WRITE)}{_M3}</tool_call>",
        f"{_M3}<tool_call>\n{_m3(WRITE)}{_M3}</tool_call>",
    ),
    *_listed(
        "cohere_action",
        "<|START_ACTION|>",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        name="tool_name",
        key="parameters",
    ),
    *_listed("json_block", "<TOOLCALL>", "<TOOLCALL>", "</TOOLCALL>"),
    *_wrapped(
        "longcat",
        "<longcat_tool_call>",
        "<longcat_tool_call>",
        "</longcat_tool_call>",
        _object(WEATHER),
        _object(WRITE),
    ),
    *_listed("granite", "<|tool_call|>", "<|tool_call|>", "<|/tool_call|>"),
]
IDS = [f"{number}-{example.format}" for number, example in enumerate(EXAMPLES)]


def syntaxes_of(example: Example) -> Any:
    """As the loader chooses them by a template or a vocabulary."""
    channels = ("<|channel|>", "<|message|>")
    vocab = channels if example.format == "harmony" else (example.marker,)
    family = find_family(None, "model", "")
    return output_syntax(family, None, None, example.marker, vocab)


def read(example: Example, pieces: list[str]) -> Read:
    """Read an example in these pieces."""
    splitter = new_splitter(syntaxes_of(example), "off", TOOLS)
    found = [piece for text in pieces for piece in splitter.feed(text)]
    return collect([*found, *splitter.flush(is_cut=False)[0]])


@pytest.mark.parametrize("example", EXAMPLES, ids=IDS)
def test_an_example_is_read_however_it_is_cut(example: Example) -> None:
    """Stream equals whole, and all pieces so far begin a JSON text."""
    text, chance = example.text, random.Random(example.text)
    for number in range(150):
        places = sorted(chance.randrange(len(text) + 1) for _ in range(number % 12))
        pieces = [text[a:b] for a, b in pairwise([0, *places, len(text)])]
        found = read(example, [*text] if number == 149 else pieces)
        assert found.parsed == example.calls
        assert (found.broken, found.open) == ([], None)
        assert found.text.strip() in ("", "So:")


def test_there_are_enough_examples() -> None:
    assert len(EXAMPLES) >= 42


@pytest.mark.parametrize("example", EXAMPLES, ids=IDS)
def test_an_example_that_is_cut_off_is_never_completed(example: Example) -> None:
    """What was shown begins the call that it would have become."""
    syntaxes = syntaxes_of(example).calls
    if example.format == "harmony":
        return
    for end in range(1, len(example.text), 7):
        found = split_calls([*example.text[:end]], syntaxes, TOOLS, is_cut=True)
        names = [name for name, _ in example.calls]
        whole = [_json(arguments) for _, arguments in example.calls]
        done = len(found.calls)
        assert [name for name, _ in found.calls] == names[:done]
        assert [json.loads(text) for _, text in found.calls] == [
            json.loads(text) for text in whole[:done]
        ]
        if found.open is not None:
            assert found.is_cut
            assert found.open[0] == names[done]
            assert whole[done].startswith(found.open[1])


@pytest.mark.parametrize("name", ["hermes_json", "qwen3_coder_xml", "glm4_native"])
def test_arguments_leave_as_they_are_written(name: str) -> None:
    """A call of 20 kB: its first bytes before 5 % of it, and no silence after."""
    arguments = {"text": "".join(f"line {n} </tool_call>\n" for n in range(1000))}
    write = {"hermes_json": _object, "qwen3_coder_xml": _xml, "glm4_native": _glm}[name]
    text = _between(*TAGS, write(("write", arguments)))
    example = Example(name, "", text)
    syntaxes = output_syntax(find_family(None, "m", ""), None, None).calls
    pieces = [text[at : at + 4] for at in range(0, len(text), 4)]
    found = split_calls(pieces, syntaxes, TOOLS)
    assert found.parsed == [("write", arguments)]
    assert max(map(len, found.deltas[0])) < 60
    begun = split_calls(pieces[: len(pieces) // 20], syntaxes, TOOLS, is_cut=True)
    assert begun.open is not None
    assert len(begun.open[1]) > 0.8 * len(example.text) / 20


@pytest.mark.parametrize(
    "name", ["hermes_json", "qwen3_coder_xml", "glm4_native", "mistral"]
)
def test_a_call_that_breaks_behind_what_was_shown_is_broken(name: str) -> None:
    """What follows is shown as it is: its client reports bad JSON to the model."""
    text = {
        "hermes_json": '<tool_call>{"name": "write", "arguments": {"text": oops}}'
        "</tool_call>.",
        "qwen3_coder_xml": "<tool_call><function=write>oops</function></tool_call>.",
        "glm4_native": "<tool_call>write<arg_key>text</arg_key>"
        "<arg_value>a</arg_value>oops</tool_call>.",
        "mistral": '[TOOL_CALLS]write[ARGS]{"text": oops}',
    }[name]
    marker = "[TOOL_CALLS]" if name == "mistral" else ""
    syntaxes = output_syntax(find_family(None, "m", ""), None, None, marker).calls
    found = read_calls(text, syntaxes, TOOLS)
    if name == "qwen3_coder_xml":
        # Nothing of its arguments was shown: run as it is it would have none.
        assert (found.text, found.broken, found.open) == (text, [], None)
        return
    if name == "glm4_native":
        # A value goes on until its end is followed by more of a call: here for ever.
        assert found.open == ("write", '{"text": "a</arg_value>oops</tool_call>.')
        return
    assert (found.calls, len(found.broken), found.open) == ([], 1, None)
    assert "oops" in found.broken[0][1]
    assert found.text == ("" if name == "mistral" else ".")
