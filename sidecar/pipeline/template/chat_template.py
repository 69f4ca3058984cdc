"""
Calls of the model's own chat template.

What a template can do is found out once, at load, by rendering small conversations;
what it cannot take is then said in words it can.
"""

import itertools
import json
import logging
import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sidecar.core.errors import BadRequest
from sidecar.core.json_bytes import load_json
from sidecar.core.prompt import ChatTokenizer
from sidecar.core.requests import ChatRequest, Message, Tool, ToolCall, call_key
from sidecar.pipeline.template.alternation import join_answers
from sidecar.pipeline.template.traits import (
    CallIds,
    TemplateTraits,
    probe_traits,
    template_fault,
)

logger = logging.getLogger(__name__)

WriteCall = Callable[[str, Mapping[str, Any]], str]

_HERMES_EXAMPLE = '<tool_call>{"name": NAME, "arguments": OBJECT}</tool_call>'
_NO_TEMPLATE = "the model has no chat template: it gets `role: content` lines"


class ChatTemplate:
    """
    Renders conversations for one model. Safe from any thread.

    Templates run in jinja's sandbox, as transformers sets it up.

    Args:
        write_call: writes a call of a name and arguments as the model does, where its
            template prints none.
    """

    def __init__(
        self, tokenizer: ChatTokenizer, write_call: WriteCall | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._write_call = write_call or _hermes
        self.traits = probe_traits(tokenizer)
        if not self.traits.exists:
            logger.warning(_NO_TEMPLATE)
        elif fault := template_fault(tokenizer):
            logger.warning("every chat is refused: the chat template fails: %s", fault)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        kwargs: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
        is_probe: bool = False,
    ) -> str:
        """
        The prompt text.

        Args:
            is_probe: nobody's conversation: that it is refused is no news.
        Raises:
            BadRequest: the template refuses this conversation.
        """
        prepared = adapt(messages, tools, self.traits, self._write_call)
        if not self.traits.exists:
            lines = [f"{m.role}: {m.text}\n" for m in prepared]
            return "".join([*lines, "assistant:" if add_generation_prompt else ""])
        offered = [dict(tool.raw) for tool in tools] if self.traits.tools else []
        kwargs = {**kwargs, "add_generation_prompt": add_generation_prompt}
        if not self.traits.tools_apart and not _starts_with_user(prepared):
            # Else the model's own words would stand in what it takes for the user's.
            kwargs.setdefault("tools_in_user_message", False)
        apply = self._apply if is_probe else self._apply_or_spell
        try:
            return apply(prepared, offered, kwargs)
        except Exception as error:
            level = logging.DEBUG if is_probe else logging.WARNING
            logger.log(level, "template refused the conversation", exc_info=True)
            raise BadRequest(
                f"the model's chat template refuses these messages: {error}",
                param="messages",
            ) from error

    def render_up_to_answer(
        self,
        messages: Sequence[Message],
        begun: Message,
        tools: Sequence[Tool],
        kwargs: Mapping[str, Any],
    ) -> str:
        """
        The prompt text up to where the text of an answer stands that is begun.

        As the template prints an answer that is the last message, so that its own
        thinking stands before it, or that there is none.

        Raises:
            BadRequest: the template refuses this conversation, or shows no such place.
        """
        mark = f"zqbegun{secrets.token_hex(8)}"
        turn = replace(begun, parts=(mark,))
        whole = self.render(
            [*messages, turn], tools, kwargs, add_generation_prompt=False
        )
        before, *behind = whole.split(mark)
        if len(behind) != 1:
            raise BadRequest(
                "the model's chat template cannot go on with an answer that is begun",
                param="messages",
            )
        return before

    def _apply_or_spell(
        self,
        messages: Sequence[Message],
        offered: Sequence[dict[str, Any]],
        kwargs: Mapping[str, Any],
    ) -> str:
        try:
            return self._apply(messages, offered, kwargs)
        except Exception:
            spelled = _spell_unanswered(messages, self._write_call)
            if spelled == messages:
                raise
            return self._apply(spelled, offered, kwargs)

    def _apply(
        self,
        messages: Sequence[Message],
        offered: Sequence[dict[str, Any]],
        kwargs: Mapping[str, Any],
    ) -> str:
        text = self._tokenizer.apply_chat_template(
            [to_dict(message, self.traits) for message in messages],
            tools=offered or None,
            tokenize=False,
            **kwargs,
        )
        return str(text)


def adapt(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    traits: TemplateTraits,
    write_call: WriteCall,
) -> list[Message]:
    """Say what the template cannot take in words it can; nothing is lost."""
    adapted = _say_tools(messages, tools, traits, write_call)
    adapted = _say_calls(adapted, traits, write_call)
    if not traits.thought_and_text:
        adapted = [_join_thought(m) for m in adapted]
    if not traits.later_system:
        adapted = [_mark_system(m) if i else m for i, m in enumerate(adapted)]
    if not traits.system and adapted and adapted[0].role == "system":
        adapted[0] = _mark_system(adapted[0])
    if not traits.system_alone and all(m.role == "system" for m in adapted):
        adapted = [_mark_system(m) for m in adapted]
    if not traits.free_answers:
        adapted = join_answers(adapted, with_calls=traits.text_and_call)
    if not traits.repeated_user:
        adapted = _join_users(adapted)
    if not traits.user_after_tool:
        adapted = _join_to_results(adapted)
    return adapted


def _starts_with_user(messages: Sequence[Message]) -> bool:
    talk = (message.role for message in messages if message.role != "system")
    return next(talk, "user") == "user"


def to_dict(message: Message, traits: TemplateTraits) -> dict[str, Any]:
    """The form chat templates take: text content, arguments as objects."""
    entry: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.reasoning is not None and not _holds_reasoning(message):
        entry["reasoning_content"] = message.reasoning
    if message.tool_calls:
        entry["tool_calls"] = [_call_dict(call, traits) for call in message.tool_calls]
    if message.tool_call_id is not None:
        entry["tool_call_id"] = message.tool_call_id
    return entry


def _holds_reasoning(message: Message) -> bool:
    """Clients echo thinking as a field, within the text, or as both."""
    thought = (message.reasoning or "").strip()
    if not thought:
        return False
    return any(
        before.rstrip().endswith(thought)
        for before in message.text.split("</think>")[:-1]
    )


def _call_dict(call: ToolCall, traits: TemplateTraits) -> dict[str, Any]:
    arguments: Any = parse_arguments(call.arguments)
    if not traits.argument_objects:
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def parse_arguments(text: str) -> dict[str, Any]:
    """Arguments as an object; text that is none becomes `{"raw": text}`."""
    try:
        value = load_json(text) if text.strip() else {}
        if "\\u" in text:  # half a surrogate pair has no ids
            json.dumps(value, ensure_ascii=False).encode()
    except ValueError:  # or nested too deep for what prints it
        return {"raw": text}
    return value if isinstance(value, dict) else {"raw": text}


def defined_tools(request: ChatRequest) -> tuple[Tool, ...]:
    """
    The tools that are defined before all messages.

    One that is chosen by name is not defined alone, and where none may be called all
    are: all that follows would be another prompt.
    """
    chosen = request.tool_choice.name
    return tuple(
        tool for tool in request.tools if not tool.is_deferred or tool.name == chosen
    )


def offered_tools(request: ChatRequest) -> tuple[Tool, ...]:
    """Those of them that may be called, under the request's choice."""
    choice, tools = request.tool_choice, defined_tools(request)
    if choice.mode == "none":
        return ()
    if choice.mode != "named":
        return tools
    return tuple(tool for tool in tools if tool.name == choice.name)


def in_order_of_calls(messages: Sequence[Message]) -> tuple[Message, ...]:
    """
    Messages with each run of results sorted, where it answers the calls before it.

    Clients that run calls side by side send results as they come, and most templates
    print no ids: nothing but the order says which result is whose. Results with
    pictures stay where they are: a request's images are counted in its order.
    """
    ordered = [*messages]
    for start, message in enumerate(messages, 1):
        if len(message.tool_calls) < 2:
            continue
        results = [*itertools.takewhile(_is_result, messages[start:])]
        ordered[start : start + len(results)] = _sorted_results(message, results)
    return tuple(ordered)


def _is_result(message: Message) -> bool:
    return message.role == "tool"


def _sorted_results(turn: Message, results: Sequence[Message]) -> Sequence[Message]:
    places = {call_key(call.id): at for at, call in enumerate(turn.tool_calls)}
    asked = [places.get(call_key(result.tool_call_id or "")) for result in results]
    known = [place for place in asked if place is not None]
    is_clear = len({*known}) == len(asked) and len(places) == len(turn.tool_calls)
    if not is_clear or any(result.images for result in results):
        return results
    return [results[at] for at in sorted(range(len(known)), key=known.__getitem__)]


def state_choice(request: ChatRequest, *, is_held: bool = False) -> tuple[Message, ...]:
    """
    A forced tool choice is said at the end.

    Args:
        is_held: a grammar holds the answer to it: then it need not be said, and the
            next prompt, which does not say it, goes on where this one was.
    """
    if is_held or not request.tools:
        return request.messages
    order = {
        "required": "Answer with a call of one of the functions.",
        "named": f"Answer with a call of the function {request.tool_choice.name}.",
    }.get(request.tool_choice.mode)
    if order is None or not request.messages:
        return request.messages
    *before, last = request.messages
    if last.role in ("user", "tool"):
        return (*before, replace(last, parts=(*last.parts, order)))
    return (*request.messages, Message("user", (order,)))


def _say_tools(
    messages: Sequence[Message],
    tools: Sequence[Tool],
    traits: TemplateTraits,
    write_call: WriteCall,
) -> list[Message]:
    if tools and not traits.tools:
        example = traits.call_example or _example(write_call)
        described = Message("system", (_describe(tools, example),))
        return _merge_leading_system([described, *messages])
    has_system = bool(messages) and messages[0].role == "system"
    if tools and not traits.tools_alone and not has_system:
        return [Message("system"), *messages]
    return [*messages]


def _say_calls(
    messages: Sequence[Message], traits: TemplateTraits, write_call: WriteCall
) -> list[Message]:
    adapted = [*messages]
    if not traits.tool_calls:
        adapted = [_spell_calls(m, write_call) for m in adapted]
    elif not traits.parallel_calls:
        adapted = _one_call_each(adapted)
    if not traits.tool_role:
        adapted = [_spell_result(m) for m in adapted]
    elif traits.tool_calls:
        if not traits.orphan_results:
            adapted = _spell_orphans(adapted)
        if not traits.open_call and adapted:
            adapted[-1] = _spell_calls(adapted[-1], write_call)
        adapted = _rename_calls(adapted, traits.call_ids)
    return adapted


def _describe(tools: Sequence[Tool], example: str) -> str:
    listed = "\n".join(json.dumps(dict(tool.raw)) for tool in tools)
    return (
        f"You may call these functions:\n{listed}\n\nTo call one, answer with\n"
        f"{example}"
    )


def _example(write_call: WriteCall) -> str:
    """A call as people are shown it who never saw one."""
    if write_call is _hermes:
        return _HERMES_EXAMPLE
    return write_call("NAME", {"ARGUMENT": "VALUE"})


def _hermes(name: str, arguments: Mapping[str, Any]) -> str:
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>{said}</tool_call>"


def _spell_calls(message: Message, write_call: WriteCall) -> Message:
    if not message.tool_calls:
        return message
    calls = tuple(
        write_call(call.name, parse_arguments(call.arguments))
        for call in message.tool_calls
    )
    return replace(message, parts=(*message.parts, *calls), tool_calls=())


def _spell_unanswered(
    messages: Sequence[Message], write_call: WriteCall
) -> list[Message]:
    """
    A call that was never answered, as text.

    To templates that count who speaks, a call is part of its result: without one they
    find users side by side, and refuse.
    """
    followers = [*messages[1:], None]
    return [
        _spell_calls(message, write_call)
        if behind and behind.role == "user"
        else message
        for message, behind in zip(messages, followers, strict=True)
    ]


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """A turn's calls one by one, each before its own result."""
    split: list[Message] = []
    waiting: list[Message] = []  # the calls of the last turn that have no result yet
    for message in messages:
        if waiting and message.role == "tool":
            asked = call_key(message.tool_call_id or "")
            ids = [call_key(call.tool_calls[0].id) for call in waiting]
            at = ids.index(asked) if asked in ids else 0
            if at and split[-1] is waiting[0]:
                waiting, at = _called_first(split, waiting, at), 0
            call = waiting.pop(at)
            split += [message] if split[-1] is call else [call, message]
            continue
        split += [call for call in waiting if call is not split[-1]]
        waiting = []
        if len(message.tool_calls) > 1:
            first, *later = message.tool_calls
            waiting = [replace(message, tool_calls=(first,))]
            waiting += [Message("assistant", tool_calls=(call,)) for call in later]
        split.append(waiting[0] if waiting else message)
    return split + [call for call in waiting if call is not split[-1]]


def _called_first(
    split: list[Message], waiting: list[Message], at: int
) -> list[Message]:
    """Let the call whose result came first stand first, with the turn's own text."""
    calls = [message.tool_calls for message in waiting]
    order = [calls[at], *calls[:at], *calls[at + 1 :]]
    moved = [replace(m, tool_calls=c) for m, c in zip(waiting, order, strict=True)]
    split[-1] = moved[0]
    return moved


def _rename_calls(messages: Sequence[Message], form: CallIds) -> list[Message]:
    """Ids by order, for they are new in every run, and clients rewrite them."""
    renamed: list[Message] = []
    known: dict[str, list[str]] = defaultdict(list)  # clients may give two one id
    waiting: dict[str, None] = {}  # in order
    number, of_no_call = 0, "9" * 9 if form == "nine" else "call_none"
    for message in messages:
        calls = []
        for call in message.tool_calls:
            calls.append(replace(call, id=_call_name(number, call, form)))
            known[call_key(call.id)].append(calls[-1].id)
            number += 1
        waiting = dict.fromkeys(call.id for call in calls) or waiting
        answers = None
        if message.role == "tool":
            named = known[call_key(message.tool_call_id or "")]
            left = [name for name in named if name in waiting]
            answers = (left or named[-1:] or [next(iter(waiting), of_no_call)])[0]
            waiting.pop(answers, None)
        renamed.append(replace(message, tool_calls=tuple(calls), tool_call_id=answers))
    return renamed


def _call_name(number: int, call: ToolCall, form: CallIds) -> str:
    if form == "kimi":
        return f"functions.{call.name}:{number}"
    return f"{number:09}" if form == "nine" else f"call_{number}"


def _spell_result(message: Message) -> Message:
    if message.role != "tool":
        return message
    head = f"[Tool Result for {message.tool_call_id or 'call'}]"
    return Message("user", (f"{head}\n{message.text}\n[End Tool Result]",))


def _spell_orphans(messages: Sequence[Message]) -> list[Message]:
    """Results that no call stands before, as a client leaves them that cuts a talk."""
    spelled: list[Message] = []
    is_called = False
    for message in messages:
        if message.role != "tool":
            is_called = bool(message.tool_calls)
        spelled.append(message if is_called else _spell_result(message))
    return spelled


def _join_thought(message: Message) -> Message:
    """Of reasoning and text beside a call, one text."""
    if not (message.reasoning and message.text and message.tool_calls):
        return message
    return replace(message, parts=(message.reasoning, *message.parts), reasoning=None)


def _mark_system(message: Message) -> Message:
    if message.role != "system":
        return message
    return Message("user", ("<system>", message.text, "</system>"))


def _merge_leading_system(messages: list[Message]) -> list[Message]:
    if len(messages) > 1 and messages[1].role == "system":
        parts = (*messages[1].parts, *messages[0].parts)
        return [Message("system", parts), *messages[2:]]
    return messages


def _join_users(messages: list[Message]) -> list[Message]:
    joined: list[Message] = []
    for role, group in itertools.groupby(messages, lambda message: message.role):
        run = [*group]
        if role == "user" and len(run) > 1:
            run = [Message("user", ("\n".join(message.text for message in run),))]
        joined += run
    return joined


def _join_to_results(messages: Sequence[Message]) -> list[Message]:
    """What a user says right behind a tool's result becomes a part of that."""
    joined: list[Message] = []
    said: list[str] = []  # behind the last message, if that is a tool's result
    for message in [*messages, None]:
        is_behind = bool(joined) and joined[-1].role == "tool"
        if message is not None and message.role == "user" and is_behind:
            said += ("<user>", message.text, "</user>")
            continue
        if said:
            # An empty result is no line of its own, however it was said.
            own = (joined[-1].text,) if joined[-1].text else ()
            joined[-1] = replace(joined[-1], parts=(*own, *said))
            said = []
        joined += [message] if message is not None else []
    return joined
