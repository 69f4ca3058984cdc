"""The substitution proof: spans are used only where putting them back gives T."""

from collections.abc import Callable, Sequence

import pytest

from sidecar.core.errors import BadRequest
from sidecar.core.requests import Message, ToolCall
from sidecar.memory.known_turns import Healed
from sidecar.pipeline.template.chat_template import ChatTemplate
from sidecar.pipeline.template.elements import Splice
from sidecar.pipeline.template.marked_render import Layout, lay_out
from sidecar.pipeline.template.turn_delimiters import Start, TurnDelimiters
from sidecar.volatile import spans
from sidecar.volatile.marked_message import Span
from sidecar.volatile.rules import load_rules
from testkit.chat_templates import tokenizer_of
from testkit.chats import Chats, assistant, result, system, user, words

RULES = load_rules()
BLOCK = '## Inbound Context (trusted metadata)\n```json\n{"a": "b"}\n```\n\n'
VOLATILE = [
    system(" Hello.\nCurrent time is 10:05.\n" + BLOCK + "# Project Context\nfiles \n"),
    user('\n {"message_id": "m-1"} hi\n\n'),
    assistant(" well\n"),
    result(" out\n\n"),
    user(" \n"),
]


def laid_out(kind: str, messages: Sequence[Message]) -> tuple[Layout, str]:
    """The layout, and what the template makes of the messages alone."""
    template = ChatTemplate(tokenizer_of(kind))

    def render(shown: Sequence[Message]) -> str:
        return template.render(shown, (), {})

    layout = lay_out(spans.mark(messages, RULES), {}, None, render)
    return layout, render(messages)


def filled(layout: Layout) -> str:
    """fill(K, own values)."""
    return "".join(
        e if isinstance(e, str) else e.printed(e.value) for e in layout.elements if e
    )


@pytest.mark.parametrize(
    "kind",
    ["builtin", "plain", "trim", "llama3", "glm", "system_first", "calls_only",
     "no_tools", "alternate", "spm", "none"],
)  # fmt: skip
def test_own_values_put_back_give_the_prompt(kind: str) -> None:
    """To the letter, whatever the template does with white space."""
    messages = VOLATILE if kind != "alternate" else [*VOLATILE[:3], VOLATILE[4]]
    layout, plain = laid_out(kind, messages)
    assert layout.is_proved
    assert filled(layout) == plain
    kinds = [span.kind for span in layout.spans if span.value]
    assert {"current_time", "inbound_context", "message_id"} <= set(kinds)


@pytest.mark.parametrize("kind", ["trim", "llama3"])
def test_white_space_that_a_template_trims_is_not_there(kind: str) -> None:
    """The value of a span is what the prompt really holds."""
    layout, _ = laid_out(kind, VOLATILE)
    edges = [s.value for s in layout.spans if s.kind in ("edge_ws", "tail_ws")]
    assert len(edges) == 7
    assert set(edges) == {""}


def test_a_template_that_trims_a_part_of_it_is_not_proved() -> None:
    """Neither all of the white space nor none: then there are no spans."""
    tokenizer = tokenizer_of("plain")
    template = ChatTemplate(tokenizer)

    def render(messages: Sequence[Message]) -> str:
        stripped = [
            Message(m.role, (m.text.removesuffix("\n"),), m.reasoning, m.tool_calls)
            for m in messages
        ]
        return template.render(stripped, (), {})

    marked = spans.mark([user("hi \n")], RULES)
    layout = lay_out(marked, {}, None, render)
    assert not layout.is_proved
    assert layout.spans == []
    assert filled(layout) == render([user("hi \n")])


@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        ("urlencode", [user("hi")]),
        ("urlencode", [system("x"), user("a"), assistant("b"), user("c")]),
    ],
)
def test_without_a_proof_there_are_no_spans(kind: str, messages: list[Message]) -> None:
    """K = T: reuse is strict, the prompt is the template's own, and it is counted."""
    layout, plain = laid_out(kind, messages)
    assert not layout.is_proved
    assert layout.elements == (plain,)
    chats = Chats(kind)
    prompt = chats.ask(messages)
    assert prompt.text == plain
    assert not prompt.report.is_proved
    assert chats.pipeline.counters["alignment_unavailable"] == 1


@pytest.mark.parametrize(
    "messages",
    [
        [user('say "hi"\nCurrent time is 10:05.')],
        [system("x\n" + BLOCK + "# Project Context"), user("Current time is 10:05.")],
        [user("Current time is 10:05."), assistant("ok"), result('{"a": "\\"}\n\n')],
    ],
    ids=["one line", "block", "result"],
)
def test_a_template_that_escapes_for_json_keeps_its_spans(
    messages: Sequence[Message],
) -> None:
    """Values are as the client sent them; in the prompt they stand escaped."""
    layout, plain = laid_out("escape", messages)
    assert layout.is_proved
    assert filled(layout) == plain
    assert [s.value for s in layout.spans if s.kind == "current_time"] == ["10:05"]
    values = "".join(m.text for m in messages)
    assert all(span.value in values for span in layout.spans)


def test_a_note_in_a_json_string_is_escaped_too() -> None:
    """What is put in later, the template would have escaped."""
    layout, _ = laid_out("escape", [user("hi")])
    note = layout.spans[-1]
    assert note.kind == "note"
    assert note.printed('now\n"x"') == 'now\\n\\"x\\"'


@pytest.mark.parametrize("tail", ["", "\n", "\n\n", "\n \n"])
@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\n</r>"])
def test_white_space_is_told_by_what_follows_it(tail: str, end: str) -> None:
    """A template may trim it and print as much of its own."""
    marked = spans.mark([assistant("a"), result("out" + tail), user("b")], RULES)
    for trims in (True, False):

        def render(shown: Sequence[Message], trims: bool = trims) -> str:
            texts = [m.text.rstrip() if trims else m.text for m in shown]
            return "".join(f"<m>{text}{end}" for text in texts)

        layout = lay_out(marked, {}, None, render)
        assert layout.is_proved
        assert filled(layout) == render([m.message for m in marked])


def test_a_template_that_prints_a_text_twice_is_not_proved() -> None:
    """A span would stand in two places."""
    marked = spans.mark([user("Current time is 10:05.")], RULES)
    twice = lay_out(marked, {}, None, lambda shown: shown[0].text * 2)
    assert not twice.is_proved
    assert twice.elements == ("Current time is 10:05." * 2,)


@pytest.mark.parametrize(
    "typed",
    [
        "\ue000\ue001",
        "\ue0000\ue001",
        "\ue000" + "0" * 16 + "0\ue001",
        "__STABLE_MSG_ID__ __CACHE_STABLE_TIME__",
        "[turn 0123456789abcdef0123456789abcdef]",
        "\ue000zq-turn\ue001",
    ],
)
def test_what_users_type_is_never_taken_for_a_mark(typed: str) -> None:
    """Private-use characters and sentinels are ordinary text."""
    messages = [system("Current time is 10:05. " + typed), user(typed)]
    layout, plain = laid_out("builtin", messages)
    assert layout.is_proved
    assert filled(layout) == plain


@pytest.mark.parametrize("kind", ["plain", "trim", "llama3", "none"])
def test_a_typed_sentinel_is_not_a_span(kind: str) -> None:
    """A8: lookup finds the place, and still reuse ends there."""
    chats = Chats(kind, min_gain=1)
    tail = words(40)
    first = chats.turn([user(f"Stats: runtime 1m52s\n{tail}")])
    typed = [user(f"Stats: runtime __STABLE_RUNTIME__\n{tail}")]
    prompt = chats.ask(typed)
    assert prompt.report.pinned == ()
    assert "1m52s" not in prompt.text
    at = first.text.index("1m52s")
    assert prompt.text[:at] == first.text[:at]
    assert chats.reuse(prompt) <= len(chats.tokenizer.encode(first.text[:at])) + 1


GAPS = (frozenset({""}), frozenset({"["}))
FRAME = TurnDelimiters(
    {"user": Start("</u>", "<a>", "+", *GAPS)}, closing="]", drops_calls=True
)
TURN = Healed("<a>", (1, 2), "raw", "")
TALK = [user("hi"), assistant("well"), user("and?")]


def shown_as(layout: Layout) -> str:
    """The text, with `{turn}` for spliced turns."""
    return "".join(
        e if isinstance(e, str) else e.value if isinstance(e, Span) else "{turn}"
        for e in layout.elements
    )


@pytest.mark.parametrize(
    "render",
    [
        lambda shown: "".join(f"<{m.role[0]}>{m.text}" for m in shown),
        lambda shown: "".join(f"<{m.role}>{m.text}</u>" for m in shown),
        lambda shown: "".join(m.text for m in shown if m.role == "user"),
        lambda shown: "".join(f"<a>{m.text}</u>" * 2 for m in shown),
        lambda shown: "".join(f"<a>{m.text}</u>" for m in reversed(shown)),
    ],
    ids=["no end", "another header", "hidden", "twice", "backwards"],
)
def test_a_turn_that_is_not_in_its_frame_is_left_alone(
    render: Callable[[Sequence[Message]], str],
) -> None:
    """Then it goes through the template."""
    layout = lay_out(spans.mark(TALK, RULES), {1: TURN}, FRAME, render)
    assert not any(isinstance(e, Splice) for e in layout.elements)
    assert filled(layout) == render(TALK)


@pytest.mark.parametrize(
    "turn", [Healed("<b>", (1, 2), "raw", ""), Healed("", (1, 2), "raw", "")]
)
def test_a_turn_written_behind_another_header_is_left_alone(turn: Healed) -> None:
    """Its ids would stand behind text that its KV does not hold."""
    layout = lay_out(spans.mark(TALK, RULES), {1: turn}, FRAME, in_frame)
    assert filled(layout) == in_frame(TALK)


def in_frame(shown: Sequence[Message]) -> str:
    """A template in Python: `<role>text[name arguments]</role>`."""

    def one(message: Message) -> str:
        calls = "".join(f"[{c.name} {c.arguments}]" for c in message.tool_calls)
        role = message.role[0]
        return f"<{role}>{message.text}{calls}</{role}>"

    return "".join(map(one, shown))


@pytest.mark.parametrize("ruleset", [RULES, None])
def test_a_turn_in_its_frame_is_put_in_place_of_what_is_printed(
    ruleset: object,
) -> None:
    """From the header to the end of turn; also where there are no spans."""
    marked = spans.mark(TALK, ruleset)  # type: ignore[arg-type]
    layout = lay_out(marked, {1: TURN}, FRAME, in_frame)
    assert layout.is_proved
    assert shown_as(layout) == "<u>hi</u><a>{turn}</a><u>and?</u>"


def test_white_space_before_a_turn_costs_no_splice_where_there_are_no_spans() -> None:
    """Whether the template trims it or not."""
    marked = spans.mark([user("hi \n"), *TALK[1:]], None)
    for text in ("hi", "hi \n"):

        def render(shown: Sequence[Message], text: str = text) -> str:
            trimmed = in_frame(shown)
            return trimmed if text == "hi \n" else trimmed.replace(" \n", "")

        layout = lay_out(marked, {1: TURN}, FRAME, render)
        assert shown_as(layout) == f"<u>{text}</u><a>{{turn}}</a><u>and?</u>"


CALLS = (ToolCall("c1", "f", '{"x": "</a>"}'), ToolCall("c2", "g", "]</a>"))
CALLING = TurnDelimiters({"user": FRAME.starts["user"]}, '"}]', drops_calls=True)


@pytest.mark.parametrize("calls", [CALLS, CALLS[1:]], ids=["two", "one"])
def test_a_turn_with_calls_ends_behind_its_last_call(
    calls: tuple[ToolCall, ...],
) -> None:
    """Whatever stands in its arguments."""
    talk = [user("hi"), assistant("well", *calls), result("]</a>")]
    layout = lay_out(spans.mark(talk, RULES), {1: TURN}, CALLING, in_frame)
    assert shown_as(layout) == "<u>hi</u><a>{turn}</a><t>]</a></t>"


@pytest.mark.parametrize("drops_calls", [True, False])
def test_calls_that_do_not_end_as_the_frame_says_are_dropped_if_they_may(
    drops_calls: bool,
) -> None:
    """Else the turn goes through the template."""
    frame = TurnDelimiters(FRAME.starts, "}}", drops_calls=drops_calls)
    talk = [user("hi"), assistant("well", *CALLS), result("out")]
    layout = lay_out(spans.mark(talk, RULES), {1: TURN}, frame, in_frame)
    is_spliced = any(isinstance(e, Splice) for e in layout.elements)
    assert is_spliced is drops_calls
    if is_spliced:
        assert shown_as(layout) == "<u>hi</u><a>{turn}</a><t>out</t>"
    else:
        assert filled(layout) == in_frame(talk)


def test_a_template_that_refuses_placeholders_gets_the_turns() -> None:
    """The client's conversation is what it must take."""

    def render(shown: Sequence[Message]) -> str:
        if "well" not in (m.text for m in shown):
            raise BadRequest("what did you do with it")
        return in_frame(shown)

    layout = lay_out(spans.mark(TALK, RULES), {1: TURN}, FRAME, render)
    assert filled(layout) == in_frame(TALK)


def test_turns_are_spliced_where_there_is_no_proof() -> None:
    """A template that looks at the text costs the spans, not the turns."""

    def render(shown: Sequence[Message]) -> str:
        return in_frame(shown) + ("!" if shown[-1].text == "and?" else "?")

    layout = lay_out(spans.mark(TALK, RULES), {1: TURN}, FRAME, render)
    assert not layout.is_proved
    assert layout.spans == []
    assert shown_as(layout) == "<u>hi</u><a>{turn}</a><u>and?</u>!"


@pytest.mark.parametrize("kind", ["plain", "trim", "llama3", "glm"])
def test_a_template_that_looks_at_the_text_is_not_proved(kind: str) -> None:
    """What it prints depends on a mark being there or not."""
    template = ChatTemplate(tokenizer_of(kind))

    def render(shown: Sequence[Message]) -> str:
        short = any(m.text == "hi" for m in shown)
        return template.render(shown, (), {}) + ("!" if short else "?")

    layout = lay_out(spans.mark([user("hi")], RULES), {}, None, render)
    assert not layout.is_proved
    assert filled(layout) == render([user("hi")])


def test_spans_keep_the_order_of_the_messages() -> None:
    """Several at one place too."""
    layout, _ = laid_out("builtin", VOLATILE)
    messages = [span.message for span in layout.spans]
    assert messages == sorted(messages)
    assert all(isinstance(span, Span) for span in layout.spans)
