"""What a template takes is found by probing; the rest is said in other words."""

from collections.abc import Sequence
from typing import Any

import pytest

from sidecar.core.errors import BadRequest
from sidecar.core.requests import ChatRequest, Message, ToolCall, ToolChoice
from sidecar.dialects.fields import Fields
from sidecar.dialects.openai_chat.request import read_messages
from sidecar.pipeline.template.chat_template import (
    ChatTemplate,
    offered_tools,
    parse_arguments,
    state_choice,
)
from testkit.chat_templates import KINDS, tokenizer_of
from testkit.chats import (
    Chats,
    Client,
    assistant,
    result,
    system,
    tool,
    user,
)
from testkit.real_templates import tokenizer_of_family

CALL = ToolCall("call_1", "look", '{"path": "a.py"}')
LOOP = [
    system("Be brief."),
    user("go"),
    assistant("I look.", CALL),
    result("it says hi\n"),
    user("and now?"),
]


def rendered(kind: str, messages: Sequence[Message], **kwargs: Any) -> str:
    template = ChatTemplate(tokenizer_of(kind))
    return template.render(messages, (), kwargs)


def read(*items: dict[str, Any]) -> tuple[Message, ...]:
    return read_messages(Fields({"messages": list(items)}))


@pytest.mark.parametrize(
    ("kind", "lacking"),
    [
        ("builtin", set()),
        ("plain", set()),
        ("trim", set()),
        ("glm", set()),
        ("calls_only", {"text_and_call"}),
        ("system_first", {"later_system"}),
        ("no_tools", {"tool_role", "tools", "tool_calls"}),
        ("llama3", {"tools", "tool_calls"}),
        (
            "alternate",
            {
                "later_system",
                "repeated_user",
                "free_answers",
                "tool_role",
                "tools",
                "tool_calls",
            },
        ),
        ("none", {"exists", "tools", "tool_calls"}),
    ],
)
def test_what_a_template_lacks_is_found_at_load(kind: str, lacking: set[str]) -> None:
    """By rendering small conversations."""
    traits = ChatTemplate(tokenizer_of(kind)).traits
    names = set(type(traits).__dataclass_fields__) - {
        "reasoning_effort",
        "call_example",
    }
    assert {name for name in names if not getattr(traits, name)} == lacking


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("escape", "urlencode")])
def test_nothing_that_was_said_is_lost(kind: str) -> None:
    """Whatever the template lacks: every text, call and result is in the prompt."""
    prompt = Chats(kind).ask(LOOP, Client(tools=(tool("look"), tool("find"))))
    for said in ("Be brief.", "go", "look", "a.py", "it says hi", "and now?", "find"):
        assert said in prompt.text, said
    assert prompt.text.index("go") < prompt.text.index("it says hi")


@pytest.mark.parametrize("kind", ["builtin", "plain", "glm"])
def test_a_template_that_takes_all_is_given_the_messages_as_they_are(kind: str) -> None:
    """The prompt is what the template makes of them, to the letter."""
    chats, client = Chats(kind), Client(tools=(tool("look"),))
    assert chats.ask(LOOP, client).text == chats.plain_text(LOOP, client)


def test_a_later_system_message_stays_in_place() -> None:
    """Where the template allows system text first only, as user text in a block."""
    messages = [system("one"), user("a"), assistant("b"), system("two"), user("c")]
    strict = rendered("system_first", messages)
    assert "<|im_start|>user\n<system>\ntwo\n</system><|im_end|>" in strict
    assert strict.index("b<|im_end|>") < strict.index("two") < strict.index("\nc<")
    assert "<|im_start|>system\none<|im_end|>" in strict
    free = rendered("plain", messages)
    assert "<|im_start|>system\ntwo<|im_end|>" in free


def test_users_in_a_row_are_joined_where_roles_must_alternate() -> None:
    """Elsewhere they stay two."""
    messages = [user("one"), user("two\n"), user("three"), assistant("b"), user("c")]
    joined = rendered("alternate", messages)
    assert "<|im_start|>user\none\ntwo\n\nthree<|im_end|>" in joined
    apart = rendered("plain", messages)
    assert "<|im_start|>user\none<|im_end|>\n<|im_start|>user\ntwo" in apart


@pytest.mark.parametrize("output", ["out", "out\n", "", "\n"])
@pytest.mark.parametrize("kind", ["no_tools", "alternate", "reorder"])
def test_a_result_is_user_text_where_there_is_no_tool_role(
    kind: str, output: str
) -> None:
    """In one form, whatever the output ends with."""
    shown = f"[Tool Result for call_1]\n{output}\n[End Tool Result]"
    assert shown in rendered(kind, [user("go"), assistant("ok"), result(output)])


@pytest.mark.parametrize("output", ["out", "out\n", "", "  \n"])
@pytest.mark.parametrize(
    "kind", ["no_tools", "alternate", "plain", "trim", "llama3", "none", "glm"]
)
def test_tool_output_never_costs_the_proof(kind: str, output: str) -> None:
    """Most commands end their output with a newline."""
    messages = [user("go"), assistant("ok"), result(output), user("")]
    assert Chats(kind).ask(messages).report.is_proved


def test_tools_are_described_where_the_template_does_not() -> None:
    """In the system text, before it or in one of their own."""
    chats, client = Chats("no_tools"), Client(tools=(tool("look"),))
    for messages in ([system("Be brief."), user("go")], [user("go")]):
        text = chats.ask(messages, client).text
        assert text.startswith("<|im_start|>system\n")
        assert text.count("<|im_start|>system") == 1
        assert "You may call these functions:" in text


def test_a_model_without_a_template_reads_lines() -> None:
    """`role: content`, calls spelled out."""
    text = rendered("none", LOOP)
    assert text == (
        "system: Be brief.\nuser: go\nassistant: I look.\n"
        '<tool_call>{"name": "look", "arguments": {"path": "a.py"}}</tool_call>\n'
        "tool: it says hi\n\nuser: and now?\nassistant:"
    )


def test_a_template_that_refuses_is_the_clients_business() -> None:
    """A 400 that says what the template said."""
    template = ChatTemplate(tokenizer_of_family("qwen3.5"))
    with pytest.raises(BadRequest, match="No user query"):
        template.render([assistant("b")], (), {})


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [
        ('{"a": 1}', {"a": 1}),
        ("", {}),
        (" ", {}),
        ("{", {"raw": "{"}),
        ("[1]", {"raw": "[1]"}),
        ("null", {"raw": "null"}),
    ],
)
def test_arguments_are_objects_for_templates(arguments: str, parsed: Any) -> None:
    """Whatever text the client sent."""
    assert parse_arguments(arguments) == parsed


def request_of(mode: str, name: str | None = None, *messages: Message) -> ChatRequest:
    choice = ToolChoice(mode, name)  # type: ignore[arg-type]
    return ChatRequest("r", "m", messages, (tool("a"), tool("b")), choice)


def test_only_tools_that_may_be_called_are_offered() -> None:
    """By the tool choice."""
    names = {
        mode: [t.name for t in offered_tools(request_of(mode, "b"))]
        for mode in ("auto", "required", "none", "named")
    }
    assert names == {
        "auto": ["a", "b"],
        "required": ["a", "b"],
        "none": [],
        "named": ["b"],
    }


def test_a_forced_choice_is_said_at_the_end() -> None:
    """Where it costs no cached prefix."""
    asked = system("s"), user("go")
    assert state_choice(request_of("auto", None, *asked)) == asked
    *before, last = state_choice(request_of("named", "b", *asked))
    assert before == [asked[0]]
    assert last.text == "go\nAnswer with a call of the function b."
    *before, last = state_choice(request_of("required", None, *asked, assistant("x")))
    assert tuple(before) == (*asked, assistant("x"))
    assert last == user("Answer with a call of one of the functions.")


ASK = {"role": "user", "content": "go"}
NEXT = {"role": "user", "content": "and?"}
CALLED = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
OUT = {"role": "tool", "tool_call_id": "c1", "content": "out"}


@pytest.mark.parametrize("kind", ["builtin", "trim", "llama3", "no_tools"])
@pytest.mark.parametrize(
    "alike",
    [
        [{"role": "user", "content": "a\nb"},
         {"role": "user", "content": [{"type": "text", "text": "a\nb"}]},
         {"role": "user", "content": [{"type": "text", "text": "a"},
                                      {"type": "text", "text": "b"}]},
         {"role": "user", "content": [{"type": "text", "text": "a\nb",
                                       "cache_control": {"type": "ephemeral"}}]}],
        [{"role": "assistant", "tool_calls": [CALLED]},
         {"role": "assistant", "content": None, "tool_calls": [CALLED]},
         {"role": "assistant", "content": "", "tool_calls": [CALLED]},
         {"role": "assistant", "content": " \n", "tool_calls": [CALLED]},
         {"role": "assistant", "content": [], "tool_calls": [CALLED]},
         {"role": "assistant", "content": "(no content)", "tool_calls": [CALLED]}],
        [{"role": "system", "content": "x"}, {"role": "developer", "content": "x"}],
        [{"role": "assistant", "content": "", "tool_calls": [CALLED]},
         {"role": "assistant", "content": "", "tool_calls": [CALLED],
          "reasoning_content": ""}],
    ],
    ids=["parts", "blank answer", "developer", "no reasoning"],
)  # fmt: skip
def test_shape_is_not_content(kind: str, alike: list[dict[str, Any]]) -> None:
    """Requests that differ in shape only give the same ids."""
    behind = [OUT] if alike[0].get("tool_calls") else []
    prompts = {
        Chats(kind).ask(read(ASK, message, *behind, NEXT)).model_ids
        for message in alike
    }
    assert len(prompts) == 1


def test_call_ids_never_reach_the_model() -> None:
    """They are new in every run."""
    asked = {}
    for call_id in ("call_1", "call_2"):
        call = ToolCall(call_id, "f", "{}")
        messages = [user("go"), assistant("", call), result("out", call_id)]
        asked[call_id] = Chats("plain").ask(messages).model_ids
    assert asked["call_1"] == asked["call_2"]


ORPHAN = result("nobody asked")
OPEN = assistant("", ToolCall("call_9", "look", '{"path": "b.py"}'))
LEFT_OUT: list[tuple[str, str, list[Message], str]] = [
    (family, "a result of no call", talk, "nobody asked")
    for family in ("gemma4", "gemma4-e2b", "gpt-oss", "minimax-m2", "mistral-nemo")
    for talk in ([user("go"), ORPHAN], [ORPHAN, user("go")],
                 [user("go"), assistant("no"), ORPHAN, user("and now?")])
] + [
    ("nemotron-nano-v2", "a call at the end", [user("go"), OPEN], "b.py"),
    ("gemma3", "a system text alone", [system("Be brief.")], "Be brief."),
    ("qwen3.5", "a system text alone", [system("Be brief.")], "Be brief."),
]  # fmt: skip


@pytest.mark.parametrize(("family", "what", "talk", "said"), LEFT_OUT)
def test_what_a_template_drops_or_refuses_is_said_as_text(
    family: str, what: str, talk: list[Message], said: str
) -> None:
    """Where its own form loses it, without a word or with a refusal."""
    template = ChatTemplate(tokenizer_of_family(family))
    assert said in template.render(talk, (tool("look"),), {}), what


@pytest.mark.parametrize("family", ["qwen3", "glm4.6", "gemma4"])
def test_results_of_calls_stay_results(family: str) -> None:
    template = ChatTemplate(tokenizer_of_family(family))
    assert "[Tool Result" not in template.render(LOOP, (tool("look"),), {})
