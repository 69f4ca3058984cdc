"""What a chat template takes, found at load by rendering small conversations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, Literal

from sidecar.core.prompt import ChatTokenizer

# How a call's id stands in the prompt: not at all, as any text, as nine characters
# (Mistral), or as `functions.NAME:N` (Kimi).
CallIds = Literal["hidden", "any", "nine", "kimi"]


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a chat template takes, found by probing it."""

    exists: bool = True
    system: bool = True  # a system message at all, and always before what follows it
    system_alone: bool = True  # nothing but a system message
    later_system: bool = True  # one that is not the first message, in its place
    repeated_user: bool = True  # two user messages in a row
    free_answers: bool = True  # answers first, in a row, or empty
    text_and_call: bool = True  # prints the text beside a call
    user_after_tool: bool = True  # a user message right behind a tool's result
    tool_role: bool = True
    orphan_results: bool = True  # prints a result that no call stands before
    open_call: bool = True  # prints a call at the end, which has no result yet
    tools: bool = True  # prints the offered tools
    tools_alone: bool = True  # also if there is no system message
    tool_calls: bool = True  # prints past calls
    parallel_calls: bool = True  # prints several calls of one turn
    thought_and_text: bool = True  # takes reasoning and text beside a call
    argument_objects: bool = True  # takes arguments as objects, else as JSON text
    call_ids: CallIds = "hidden"
    call_example: str = ""  # a call of NAME as the template prints it
    preserve_thinking: bool = True  # does not refuse the argument
    reasoning_effort: bool = False
    tools_apart: bool = True  # not within what it takes for the first question


_TOOL = {
    "type": "function",
    "function": {
        "name": "zq_probe",
        "description": "zq",
        "parameters": {"type": "object", "properties": {}},
    },
}
_SYSTEM = {"role": "system", "content": "zq system"}
_USER = {"role": "user", "content": "zq user"}
_ASSISTANT = {"role": "assistant", "content": "zq answer"}
_FREE_ANSWERS = (
    [_ASSISTANT, _USER],
    [_USER, _ASSISTANT, _ASSISTANT, _USER],
    [_USER, {"role": "assistant", "content": ""}, _USER],
)
_ANY_IDS = ("call_zq1", "call_zq2")
_NINE_IDS = ("zqcall001", "zqcall002")
_TOOLS_IN_USER = "tools_in_user_message"
_Messages = Sequence[dict[str, Any]]
_Render = Callable[..., str]


def probe_traits(tokenizer: ChatTokenizer) -> TemplateTraits:
    """Render small conversations and look at what came out; a refusal gives none."""

    def render(messages: _Messages, **kwargs: Any) -> str:
        try:
            return str(
                tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, **kwargs
                )
            )
        except Exception:  # noqa: BLE001 - a refusal is the answer
            return ""

    if not render([_USER]) and not tokenizer.chat_template:
        return TemplateTraits(exists=False, tools=False, tool_calls=False)
    tools = "zq_probe" in render([_SYSTEM, _USER], tools=[_TOOL])
    tools_alone = "zq_probe" in render([_USER], tools=[_TOOL])
    return TemplateTraits(
        system=_takes_system(render),
        system_alone="zq system" in render([_SYSTEM]),
        later_system=_takes_later_system(render),
        repeated_user=bool(render([_USER, _USER])),
        free_answers=all(map(render, _FREE_ANSWERS)),
        tools=tools or tools_alone,
        tools_alone=tools_alone or not tools,
        preserve_thinking=bool(render([_USER], preserve_thinking=True)),
        reasoning_effort="reasoning_effort" in str(tokenizer.chat_template),
        tools_apart=_TOOLS_IN_USER not in str(tokenizer.chat_template),
        **_probe_calls(render, _stop_tokens(tokenizer)),
    )


def template_fault(tokenizer: ChatTokenizer) -> str | None:
    """Why the template renders not even a single question, as its syntax is wrong."""
    try:
        tokenizer.apply_chat_template(
            [_USER], tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # noqa: BLE001 - whatever a template raises
        return f"{type(error).__name__}: {error}"
    return None


def _stop_tokens(tokenizer: ChatTokenizer) -> list[str]:
    stop_ids = set(tokenizer.eos_token_ids)
    added = tokenizer.get_added_vocab().items()
    return [token for token, number in added if number in stop_ids]


def _takes_system(render: _Render) -> bool:
    """Some templates print it before the last user message, or drop it later on."""
    talk = [_SYSTEM, _USER, _ASSISTANT, dict(_USER, content="zq more")]
    texts = [render(talk[:2]), render(talk)]
    return all(0 <= text.find("zq system") < text.find("zq user") for text in texts)


def _takes_later_system(render: _Render) -> bool:
    """Some templates print it in place of the first one, or before all messages."""
    more, last = dict(_SYSTEM, content="zq two"), dict(_USER, content="zq more")
    text = render([_SYSTEM, _USER, _ASSISTANT, more, last])
    said = ("zq system", "zq user", "zq answer", "zq two", "zq more")
    places = [text.find(each) for each in said]
    return places == sorted(places) and places[0] >= 0


def _probe_calls(render: _Render, stops: Sequence[str]) -> dict[str, Any]:
    """The first way to say calls that the template prints as they are."""
    for ids in (_ANY_IDS, _NINE_IDS):
        for as_object in (True, False):
            loop = render(_loop(1, ids, as_object), tools=[_TOOL])
            if not _is_said(loop, 1):
                continue
            both = render(_loop(2, ids, as_object), tools=[_TOOL])
            behind = [*_loop(1, ids, as_object), dict(_USER, content="zq more")]
            asked, calling, *results = _loop(1, ids, as_object)
            said = {**calling, "content": "zq said"}
            calling = {**said, "reasoning_content": "zq why"}
            return {
                "thought_and_text": bool(
                    render([asked, calling, *results], tools=[_TOOL])
                ),
                "text_and_call": "zq said"
                in render([asked, said, *results], tools=[_TOOL]),
                "argument_objects": as_object,
                "parallel_calls": _is_said(both, 2),
                "user_after_tool": "zq more" in render(behind, tools=[_TOOL]),
                "orphan_results": "zq result 1" in render([asked, results[0]]),
                "open_call": "zq argument 1" in render([asked, said], tools=[_TOOL]),
                "call_ids": _call_ids(loop, ids),
                "call_example": _call_example(render, ids, as_object, stops),
            }
    silent = [_USER, _ASSISTANT, _result(1, _ANY_IDS)]
    tool_role = "zq result 1" in render(silent, tools=[_TOOL])
    return {"tool_calls": False, "tool_role": tool_role}


def _call_example(
    render: _Render, ids: Sequence[str], as_object: bool, stops: Sequence[str]
) -> str:
    """What the template prints for a call where it prints an answer's text."""
    call = render(_loop(1, ids, as_object)[:2], tools=[_TOOL])
    answer = render([_USER, _ASSISTANT], tools=[_TOOL])
    start = len(commonprefix([call, answer]))
    end = len(commonprefix([call[:start:-1], answer[:start:-1]]))
    example = call[start : len(call) - end].replace("zq_probe", "NAME")
    for stop in stops:
        example = example.partition(stop)[0]
    return example.strip().replace('"zq"', '"KEY"').replace("zq argument 1", "VALUE")


def _loop(num_calls: int, ids: Sequence[str], as_object: bool) -> _Messages:
    numbers = range(1, num_calls + 1)
    calls = [_call(number, ids, as_object) for number in numbers]
    calling = {"role": "assistant", "content": "", "tool_calls": calls}
    return [_USER, calling, *(_result(number, ids) for number in numbers)]


def _call(number: int, ids: Sequence[str], as_object: bool) -> dict[str, Any]:
    text = f"zq argument {number}"
    arguments = {"zq": text} if as_object else f'{{"zq": "{text}"}}'
    function = {"name": "zq_probe", "arguments": arguments}
    return {"id": ids[number - 1], "type": "function", "function": function}


def _result(number: int, ids: Sequence[str]) -> dict[str, Any]:
    content = f"zq result {number}"
    return {"role": "tool", "tool_call_id": ids[number - 1], "content": content}


def _is_said(text: str, num_calls: int) -> bool:
    """All calls and results in order, arguments not as Python would print them."""
    said = [f"zq argument {number}" for number in range(1, num_calls + 1)]
    said += [f"zq result {number}" for number in range(1, num_calls + 1)]
    places = [text.find(each) for each in said]
    return places == sorted(places) and places[0] >= 0 and "{'zq'" not in text


def _call_ids(loop: str, ids: Sequence[str]) -> CallIds:
    if ids[0] not in loop:
        return "hidden"
    if ids is _NINE_IDS:
        return "nine"
    return "kimi" if "<|tool_call_argument_begin|>" in loop else "any"
