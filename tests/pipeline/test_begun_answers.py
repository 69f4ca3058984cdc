"""An answer that the client began stands where the model would have written it."""

from dataclasses import replace

import pytest

from sidecar.core.errors import BadRequest
from sidecar.core.requests import ChatRequest, ClientInfo, Message, Thinking
from sidecar.pipeline.prepare import PreparedPrompt
from testkit.chats import Said, assistant, system, user, words
from testkit.real_templates import FAMILIES, FamilyChats

BEGUN = assistant("Well, the first of the")
ASKED = f"go {words(120)}"
TALK = [system("Rules."), user(ASKED)]
# It switches thinking by words of the conversation, and opens it before a last answer.
REFUSING = ["nemotron-nano-v2"]
NAMES = [family.name for family in FAMILIES if family.name not in REFUSING]


def prepare(
    chats: FamilyChats,
    talk: list[Message],
    begun: Message | None = None,
    *,
    thinking: bool = True,
) -> PreparedPrompt:
    request = ChatRequest(
        "r",
        "m",
        tuple(talk),
        thinking=Thinking(thinking),
        client=ClientInfo("s"),
        begun=begun,
    )
    return chats.pipeline.prepare(request)


@pytest.mark.parametrize("name", NAMES)
def test_it_stands_where_the_template_prints_an_answer(name: str) -> None:
    """As transformers cuts it, whose way of doing so is its own."""
    chats = FamilyChats(name)
    prompt = prepare(chats, TALK, BEGUN)
    entries = [{"role": m.role, "content": m.text} for m in (*TALK, BEGUN)]
    keeps = chats.pipeline.template.traits.preserve_thinking
    kept = {"preserve_thinking": True} if keeps else {}
    wanted = chats.tokenizer.apply_chat_template(
        entries,
        tokenize=False,
        continue_final_message=True,
        enable_thinking=False,
        **kept,
    )
    assert prompt.text.partition(ASKED)[1:] == wanted.partition(ASKED)[1:]
    assert not prompt.opens_thinking
    assert not prompt.thinking
    if chats.is_lossless:
        assert chats.decode(prompt.model_ids) == prompt.text


@pytest.mark.parametrize("name", NAMES)
def test_the_next_turn_goes_on_from_it(name: str) -> None:
    """
    The KV of what was begun is used, and no turn's own ids stand in its place.

    Without thinking, which some templates switch at the beginning of the prompt.
    """
    chats = FamilyChats(name)
    prompt = prepare(chats, TALK, BEGUN)
    chats.answer(prompt, Said(" three."))
    whole = replace(BEGUN, parts=(f"{BEGUN.text} three.",))
    again = prepare(chats, [*TALK, whole, user("and now?")], thinking=False)
    assert again.report.num_spliced == 0
    assert "first of the three." in again.text
    if not chats.family.reorders:
        assert chats.reuse(again) > len(prompt.model_ids) - 24


@pytest.mark.parametrize("name", REFUSING)
def test_a_family_that_would_read_it_as_thinking_refuses_it(name: str) -> None:
    with pytest.raises(BadRequest, match="begins each answer with its thinking"):
        prepare(FamilyChats(name), TALK, BEGUN)


def test_thinking_that_the_client_began_stands_before_it() -> None:
    begun = replace(BEGUN, reasoning="I count them.")
    text = prepare(FamilyChats("qwen3"), TALK, begun).text
    assert text.endswith(f"<think>\nI count them.\n</think>\n\n{BEGUN.text}")


def test_a_template_that_shows_no_such_place_refuses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It prints the answers that it was made for, and no others."""
    chats = FamilyChats("qwen3")
    template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    monkeypatch.setattr(chats.tokenizer._tokenizer, "chat_template", template)
    with pytest.raises(BadRequest, match="cannot go on"):
        prepare(chats, TALK, BEGUN)


def test_a_template_that_opens_thinking_before_it_refuses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chats = FamilyChats("qwen3")
    template = (
        "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}<think>\n"
        "{% endif %}{{ m.content }}\n{% endfor %}"
    )
    monkeypatch.setattr(chats.tokenizer._tokenizer, "chat_template", template)
    with pytest.raises(BadRequest, match="begins each answer with its thinking"):
        prepare(chats, TALK, BEGUN)
