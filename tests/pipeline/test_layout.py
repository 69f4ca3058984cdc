"""The substitution proof: spans are used only where putting them back gives T."""

from collections.abc import Callable, Sequence

import pytest

from sidecar.core.requests import Message
from sidecar.pipeline import canonical
from sidecar.pipeline.canonical import Span
from sidecar.pipeline.healing import Healed
from sidecar.pipeline.elements import Splice
from sidecar.pipeline.layout import Layout, lay_out
from sidecar.pipeline.rules import load_rules
from sidecar.pipeline.splicing import Frame
from sidecar.pipeline.template import ChatTemplate
from tests.support.chat_templates import tokenizer_of
from tests.support.chats import Chats, assistant, result, system, user, words

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

    layout = lay_out(canonical.mark(messages, RULES), {}, None, render)
    return layout, render(messages)


def filled(layout: Layout) -> str:
    """fill(K, own values)."""
    return "".join(
        e if isinstance(e, str) else e.value for e in layout.elements if e
    )  # fmt: skip


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

    marked = canonical.mark([user("hi \n")], RULES)
    layout = lay_out(marked, {}, None, render)
    assert not layout.is_proved
    assert layout.spans == []
    assert filled(layout) == render([user("hi \n")])


@pytest.mark.parametrize(
    ("kind", "messages"),
    [
        ("escape", [system("x\n" + BLOCK + "# Project Context"), user("hi")]),
        ("urlencode", [user("hi")]),
        ("reorder", [system("x"), user("a"), assistant("b"), user("c")]),
    ],
    ids=["escaped value", "escaped mark", "reordered"],
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


def test_an_escaping_template_keeps_the_spans_it_does_not_touch() -> None:
    """The proof is about values, not about templates."""
    layout, plain = laid_out("escape", [user('say "hi"\nCurrent time is 10:05.')])
    assert layout.is_proved
    assert filled(layout) == plain
    assert [s.value for s in layout.spans if s.kind == "current_time"] == ["10:05"]


def test_a_template_that_prints_a_text_twice_is_not_proved() -> None:
    """A span would stand in two places."""
    marked = canonical.mark([user("Current time is 10:05.")], RULES)
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


FRAME = Frame("<a>", "<a>", "</a>")
TURN = Healed("<a>", (1, 2), "raw", "")


@pytest.mark.parametrize(
    "render",
    [
        lambda shown: "".join(f"<{m.role[0]}>{m.text}" for m in shown),
        lambda shown: "".join(f"<{m.role}>{m.text}</a>" for m in shown),
        lambda shown: "".join(m.text for m in shown if m.role == "user"),
        lambda shown: "".join(f"<a>{m.text}</a>" * 2 for m in shown),
        lambda shown: "".join(f"<a>{m.text}</a>" for m in reversed(shown)),
    ],
    ids=["no end", "another header", "hidden", "twice", "backwards"],
)
def test_a_turn_that_is_not_in_its_frame_is_left_alone(
    render: Callable[[Sequence[Message]], str],
) -> None:
    """Then all turns go through the template."""
    messages = [user("hi"), assistant("well"), user("and?")]
    marked = canonical.mark(messages, RULES)
    layout = lay_out(marked, {1: TURN}, FRAME, render)
    assert not any(isinstance(e, Splice) for e in layout.elements)
    assert filled(layout) == render(messages)


def test_a_turn_in_its_frame_is_put_in_place_of_what_is_printed() -> None:
    """From the header to the end of turn."""
    messages = [user("hi"), assistant("well"), user("and?")]
    layout = lay_out(
        canonical.mark(messages, RULES),
        {1: TURN},
        FRAME,
        lambda shown: "".join(f"<{m.role[0]}>[{m.text}]</{m.role[0]}>" for m in shown),
    )
    text = "".join(
        e if isinstance(e, str) else e.value if isinstance(e, Span) else "{turn}"
        for e in layout.elements
    )
    assert text == "<u>[hi]</u><a>{turn}</a><u>[and?]</u>"


@pytest.mark.parametrize("kind", ["plain", "trim", "llama3", "glm"])
def test_a_template_that_looks_at_the_text_is_not_proved(kind: str) -> None:
    """What it prints depends on a mark being there or not."""
    template = ChatTemplate(tokenizer_of(kind))

    def render(shown: Sequence[Message]) -> str:
        short = any(m.text == "hi" for m in shown)
        return template.render(shown, (), {}) + ("!" if short else "?")

    layout = lay_out(canonical.mark([user("hi")], RULES), {}, None, render)
    assert not layout.is_proved
    assert filled(layout) == render([user("hi")])


def test_spans_keep_the_order_of_the_messages() -> None:
    """Several at one place too."""
    layout, _ = laid_out("builtin", VOLATILE)
    messages = [span.message for span in layout.spans]
    assert messages == sorted(messages)
    assert all(isinstance(span, Span) for span in layout.spans)
