"""No text of a user, a tool or a stranger fails a request, or costs more than it is."""

import re
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sidecar.core.errors import ContextLengthExceeded, RequestCancelled
from sidecar.core.requests import ChatRequest, Message, ToolCall
from sidecar.pipeline.reuse import gone_spans
from sidecar.pipeline.reuse.prompt_ids import check_length
from sidecar.pipeline.template.chat_template import parse_arguments
from sidecar.pipeline.template.encoder import PromptEncoder
from sidecar.volatile import matchers, rules, spans
from sidecar.volatile.marked_message import Span
from testkit.chats import Chats, Client, Said, assistant, result, system, user
from testkit.growth import cpu_s, grows_linearly

RULES = rules.load_rules(None, {"system_reminder": "pin"})
SIZE = 200_000
ENCODER = Chats().pipeline.encoder
META = "X (untrusted metadata):\n"
DEEP = ["[" * 3000, '{"a":' * 3000, "[" * 100_000, "[" * 990 + "]" * 990]
OURS = [
    META, "```json\n", "```text\n", "```\n", "```", "{}\n", "[]\n", "\n\n", " ", "\t",
    "\u2028", "\r\n", "\x00", "\u0130", "\u212a", "\u202e", "東京", "مرحبا", "\ue000",
    '"message_id": "7"', '"message_id"', "<system-reminder>\n", "</system-reminder>\n",
    "Current time is 10:05.\n", "Stats: runtime 1m2s\n", "# Project Context\n",
    "## Inbound Context (trusted metadata)\n", "Git snapshot at conversation start.\n",
    "gitStatus: This is the status.\nStatus:\n", '<context name="gitStatus">\n',
    "</context>\n", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "[turn 0]",
    "<context-update 0>\n", 'zqmark"0;', "__STABLE_MSG_ID__", "{{ x }}", "{% x %}",
    "[" * 2000, '{"a":' * 2000, "1" * 5000, "\\" * 500, '"' * 500, "`" * 500,
]  # fmt: skip
hostile = st.lists(
    st.one_of(
        st.sampled_from(OURS),
        st.tuples(st.sampled_from(OURS), st.integers(2, 40)).map(lambda x: x[0] * x[1]),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    ),
    max_size=8,
).map("".join)


@settings(max_examples=150)
@given(hostile, st.sampled_from(["system", "user", "tool"]))
@example(f"{META}```json\n{DEEP[0]}\n```\n", "user")
@example(f"{META}```json\n{DEEP[1]}\n```\n", "user")
@example(f"## Inbound Context (trusted metadata)\n```json\n{DEEP[2]}\n```\n", "system")
def test_no_text_makes_a_rule_fail(text: str, role: str) -> None:
    """What a rule cannot read is ordinary text; nothing of it is lost."""
    message = Message(role, (text,))  # type: ignore[arg-type]
    (kept,) = spans.normalise([message], RULES)
    (marked,) = spans.mark([kept], RULES)
    RULES.is_vanishing(role, text)
    own = "".join(p if isinstance(p, str) else p.value for p in marked.pieces)
    assert own == kept.text


@settings(max_examples=40)
@given(hostile, hostile)
@example(f"{META}```json\n{DEEP[0]}\n```\n", DEEP[1])
def test_no_text_fails_a_request_or_the_turns_behind_it(said: str, told: str) -> None:
    """A group chat's line and a tool's result: read now, and with the next turn."""
    chats = Chats()
    call = ToolCall("call_1", "look", told)
    asked = [system("Be kind."), user(said), assistant("", call), result(told)]
    chats.answer(chats.prepare(asked, Client()), Said("Yes."))
    later = [*asked, assistant("Yes."), user("Go on.")]
    following = chats.prepare(later, Client())
    assert chats.decode(following.model_ids).count("Go on.") >= 1


@pytest.mark.parametrize("text", DEEP)
@pytest.mark.parametrize("kind", ["builtin", "glm", "no_tools"])
def test_arguments_nested_beyond_reason_are_text(text: str, kind: str) -> None:
    """A template would fail on them, at each later turn as well."""
    arguments = text if text.startswith("{") else f'{{"a": {text}}}'
    assert parse_arguments(arguments) == {"raw": arguments}
    chats = Chats(kind)
    call = ToolCall("call_1", "look", arguments)
    prompt = chats.ask([user("hi"), assistant("", call), result("ok"), user("so?")])
    assert prompt.model_ids


def test_arguments_nested_as_people_do_stay_an_object() -> None:
    """The limit is far beyond them."""
    text = '{"a": ' + "[" * 50 + "]" * 50 + "}"
    assert "raw" not in parse_arguments(text)


def repeated(unit: str) -> Callable[[int], str]:
    return lambda size: unit * (size // len(unit))


def export(size: int) -> str:
    unit = '{\n  "message_id": "%07d",\n  "from": "Anna",\n  "text": "well, yes"\n},\n'
    return "".join(unit % number for number in range(size // len(unit)))


# Of each the shape that it was, or would be, dear for.
DEAR = {
    "export": export,
    "ids": repeated('"message_id": "a"\n'),
    "keys": repeated('"message_id"'),
    "words": repeated("directory "),
    "headers": repeated(META),
    "open fences": repeated(f"{META}```json\n"),
    "blocks": repeated(f"{META}```json\n{{}}\n```\nhi\n"),
    "bad blocks": repeated(f"{META}```json\n[]\n```\n"),
    "snapshots": repeated("Git snapshot at conversation start.\n```text\n"),
    "contexts": repeated("## Inbound Context (trusted metadata)\n```json\n"),
    "reminders": repeated("<system-reminder>\n"),
    "dates": repeated(
        "<system-reminder>\nThe current date is: Friday.\n</system-reminder>\n"
    ),
    "clocks": repeated("Current time is 10:05.\n"),
    "runtimes": repeated("Stats: runtime 1m2s\n"),
    "billing": repeated("x-anthropic-billing-header: cc_version=1;\n"),
    "newlines": repeated("\n"),
    "folders": lambda size: '"message_id": "1"\n' + repeated("<cwd>\n")(size),
}


@pytest.mark.parametrize("role", ["system", "user"])
@pytest.mark.parametrize("name", DEAR)
def test_marking_reads_a_text_once(name: str, role: str) -> None:
    """All rules together; finds, places and pieces included."""

    def work(text: str) -> None:
        message = Message(role, (text,))  # type: ignore[arg-type]
        spans.mark(spans.normalise([message], RULES), RULES)

    assert grows_linearly(work, DEAR[name], SIZE)


NEWER = sorted(
    {
        pattern
        for policy in RULES.policies.values()
        for pattern in (policy.newer, policy.newer_than_said)
        if pattern
    }
)


@pytest.mark.parametrize("pattern", NEWER, ids=lambda pattern: pattern[:20])
def test_a_text_is_searched_once_for_newer_values(pattern: str) -> None:
    """Whatever of the pattern it repeats, and whatever stands between."""
    search = re.compile(pattern).search
    words = {*re.findall(r"[A-Za-z_]{4,}", pattern), *"[#*(", "12", "message_id"}
    for word in words:
        for between in (".", " ", ":", "\n", '"', "\\", "-", "", ". "):
            text = repeated(word + between)(16_000)
            assert cpu_s(search, text) < 8 * max(cpu_s(search, text[:4000]), 0.005)


def test_a_conversation_has_so_many_spans_and_no_more() -> None:
    """In order, so that what a later message holds changes no earlier one."""
    maximum = spans._MAX_FINDS
    line = '"message_id": "7"\n'
    messages = [user(line * matchers.MAX_PLACES)] * (maximum // matchers.MAX_PLACES + 2)
    marked = spans.mark(messages, RULES)
    found = [
        sum(isinstance(p, Span) and p.kind == "message_id" for p in item.pieces)
        for item in marked
    ]
    assert sum(found) == maximum
    assert found[:2] == [matchers.MAX_PLACES] * 2
    assert found[-1] == 0


def test_a_part_has_so_many_finds_and_the_rest_is_text() -> None:
    """The budget of a rule in one part."""
    text = "Current time is 10:05.\n" * (matchers.MAX_PLACES + 5)
    assert len(rules.find(RULES.rules, "user", text)) == matchers.MAX_PLACES


def test_spans_are_put_back_in_one_walk() -> None:
    """Each gone span once searched all elements of the prompt."""
    elements = [
        element
        for message in range(20)
        for element in (Span("edge_ws", message, 0, ""), "x" * 1000)
    ]
    gone = [(message, place, "k", 0) for message in range(20) for place in range(1000)]
    back = gone_spans.put_back(elements, gone)
    assert len(back) == len(elements) + len(gone) + 20 * 999
    assert "".join(e for e in back if isinstance(e, str)) == "x" * 20_000
    assert [e.key for e in back if isinstance(e, Span) and e.kind == "k"] == gone


def test_a_fence_far_behind_many_headers_is_sought_once() -> None:
    """And the block is still the last header's that it is near enough to."""
    head = "Git snapshot at conversation start.\n```text\n"
    text = head * 3000 + "git: M a\n```\n"
    (found,) = matchers.fenced_section(
        text,
        header="Git snapshot at conversation start.",
        header_is_prefix=True,
        language="text",
    )
    assert text[: found[0]].count(head) == 3000 - 1000
    assert found[1] == len(text)


def test_work_ends_when_the_client_is_gone() -> None:
    """Asked between messages: the others are not read."""
    chats = Chats()
    asked = [user('"message_id": "7"')] * 50
    num_asked = 0

    def is_wanted() -> bool:
        nonlocal num_asked
        num_asked += 1
        return num_asked < 10

    request = ChatRequest("r", "m", tuple(asked))
    with pytest.raises(RequestCancelled, match="closed"):
        chats.pipeline.prepare(request, chats.store, is_wanted=is_wanted)
    assert num_asked == 10
    assert chats.pipeline.prepare(request, chats.store).model_ids


MAX = 4096  # tokens: a small context


def ask(text: str, role: str) -> None:
    asked = [system(text), user("hi")] if role == "system" else [user(text)]
    request = ChatRequest("r", "m", tuple(asked))
    chats = Chats()
    chats.pipeline.prepare(request, chats.store, MAX)


@pytest.mark.parametrize("role", ["system", "user"])
@pytest.mark.parametrize("name", DEAR)
def test_what_is_far_too_long_is_not_tokenised_whole(
    name: str, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of it tells; the tokenizer's work does not grow with the text."""
    read: list[int] = []
    ids_of = PromptEncoder._ids

    def counted(self: PromptEncoder, text: str, add_special_tokens: bool) -> list[int]:
        read.append(len(text))
        return ids_of(self, text, add_special_tokens)

    monkeypatch.setattr(PromptEncoder, "_ids", counted)
    with pytest.raises(ContextLengthExceeded) as refused:
        ask(DEAR[name](3_000_000), role)
    assert refused.value.num_tokens > MAX
    assert sum(read) < 1_000_000


@given(hostile, st.integers(1, 64), st.sampled_from(["system", "user"]))
@settings(max_examples=60)
@example(" " * 128, 64, "user")
@example("a" * 3000, 8, "user")
@example("=" * 64, 64, "user")
def test_what_fits_is_never_refused(text: str, times: int, role: str) -> None:
    """Whatever the text is cut into to count it."""
    text = text * times
    try:
        check_length([text], ENCODER, MAX)
    except ContextLengthExceeded:
        assert ENCODER.count(text) > MAX
