"""The model's own turns, token by token, in every kind of template."""

import json

import pytest

from sidecar.core.errors import BadRequest
from sidecar.core.requests import ToolCall
from sidecar.pipeline.template.encoder import Encoded, PromptEncoder
from sidecar.pipeline.template.turn_delimiters import (
    Start,
    TurnDelimiters,
    TurnDelimitersCache,
)
from testkit.chat_templates import tokenizer_of
from testkit.chats import (
    Chats,
    Client,
    Said,
    assistant,
    common_len,
    result,
    system,
    tool,
    user,
    words,
)
from testkit.real_templates import FamilyChats

SPLICING = ["builtin", "plain", "opens_think", "trim", "escape", "system_first",
            "alternate", "no_tools", "calls_only", "llama3", "glm", "none"]  # fmt: skip
CALLING = [
    "builtin",
    "plain",
    "opens_think",
    "trim",
    "calls_only",
    "glm",
    "none",
    "no_tools",
]
HEADER = "<|im_start|>assistant\n"
THINK = "<think>\n\n</think>\n\n"
RESULT = "\n</tool_response><|im_end|>\n"


def frame_of(kind: str, *, thinking: bool = True) -> TurnDelimiters | None:
    pipeline = Chats(kind).pipeline
    kwargs = {"enable_thinking": thinking, "preserve_thinking": True}
    return TurnDelimitersCache(pipeline.template, pipeline.encoder).get(kwargs)


def call(name: str = "look", call_id: str = "call_1", **arguments: object) -> ToolCall:
    return ToolCall(call_id, name, json.dumps(arguments))


@pytest.mark.parametrize(
    ("kind", "thinking", "start", "closing"),
    [
        ("builtin", True, Start("<|im_end|>\n", HEADER, ""), '"}}\n</tool_call>'),
        ("builtin", False, Start("<|im_end|>\n", HEADER, THINK), '"}}\n</tool_call>'),
        ("trim", True, Start("<|im_end|>\n", HEADER, ""), '"}}</tool_call>'),
        ("opens_think", True, Start("<|im_end|>\n", HEADER, "<think>\n"),
         '"}}</tool_call>'),
        ("llama3", True,
         Start("<|eot_id|>", "<|start_header_id|>assistant<|end_header_id|>\n\n", ""),
         '"}}</tool_call>'),
        ("glm", True, Start("", "<|assistant|>", ""), "</arg_value>\n</tool_call>"),
        ("glm", False, Start("", "<|assistant|>", "\n<think></think>"),
         "</arg_value>\n</tool_call>"),
        ("none", True, Start("\n", "assistant:", ""), None),
        ("spm", True, Start(" [/INST]", "", ""), '"}}</tool_call>'),
    ],
)  # fmt: skip
def test_the_frame_of_a_turn_is_found_by_probing(
    kind: str, thinking: bool, start: Start, closing: str | None
) -> None:
    """What stands before and behind it, with and without an empty think block."""
    frame = frame_of(kind, thinking=thinking)
    assert frame is not None
    assert (frame.starts["user"], frame.closing) == (start, closing)


@pytest.mark.parametrize("kind", ["urlencode"])
def test_a_template_that_hides_the_marks_has_no_frame(kind: str) -> None:
    """Its turns go through the template."""
    assert frame_of(kind) is None


class Gluing(PromptEncoder):
    """An encoder to which a think tag behind a header is one more token."""

    def encode(self, text: str, *, is_start: bool = True) -> Encoded:
        found = super().encode(text, is_start=is_start)
        more = (1,) if "\n<think>" in text else ()
        return Encoded((*found.ids, *more), found.chars, found.tokens)


def test_a_header_that_does_not_tokenise_alone_is_no_frame() -> None:
    """Its ids would not be those that the KV holds."""
    template = Chats("opens_think").pipeline.template
    for encoder, sound in ((PromptEncoder, True), (Gluing, False)):
        frames = TurnDelimitersCache(template, encoder(tokenizer_of("opens_think")))
        assert (frames.get({}) is not None) is sound
    assert (frames.lead_ids(None), frames.header_tokens(None)) == ((), 1)


def test_what_a_probe_is_refused_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is asked with each set of arguments; a client's refusal is logged."""
    chats = Chats("alternate")
    assert chats.pipeline.can_splice
    assert caplog.records == []
    with pytest.raises(BadRequest):
        FamilyChats("qwen3.5").ask([assistant("b")])
    assert "template refused the conversation" in caplog.text


def test_frames_are_probed_once_for_each_set_of_arguments() -> None:
    """And the number of sets is bounded."""
    chats = Chats()
    template = chats.pipeline.template
    frames = TurnDelimitersCache(template, chats.pipeline.encoder)
    calls = []
    render = template.render
    template.render = lambda *a, **k: calls.append(k) or render(*a, **k)
    for _ in range(3):
        assert frames.get({"x": 1}) is not None
    probed = len(calls)
    assert probed < 50
    for number in range(80):
        frames.get({"n": number})
    assert frames.get({"x": 1}) is not None
    assert len(calls) > 81 * probed


@pytest.mark.parametrize("kind", SPLICING)
def test_the_next_prompt_begins_with_the_last_one_and_its_answer(kind: str) -> None:
    """Id by id, whatever the tokenizer would make of the answer's text."""
    chats = Chats(kind)
    assert chats.pipeline.can_splice
    asked = [system("Be brief."), user("hi")]
    first = chats.turn(asked, Said("It is fine,  is it\nnot? "))
    kept = (*first.prompt.model_ids, *first.sampled)
    assert chats.tokenizer.encode(first.said.raw, add_special_tokens=False) != list(
        first.sampled
    )
    second = chats.ask([*asked, first.said.echo, user("and?")])
    assert common_len(second.model_ids, kept) == len(kept)
    assert second.report.num_spliced == 1


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("kind", CALLING)
def test_a_tool_loop_is_reused_to_the_last_token(kind: str, thinking: bool) -> None:
    """
    Ten turns; the client strips thinking and writes the arguments its own way.

    The bar: reuse at every turn >= prompt and completion of the turn before - 2.
    """
    chats, client = Chats(kind), Client(tools=(tool("look"),), thinking=thinking)
    messages = [system("Be brief. " + words(60)), user("go")]
    kept = 0
    for number in range(10):
        made = call(path=f"src/{number}.py", depth=number, call_id=f"call_{number}")
        reasoning = f"I wonder about {number}." if thinking else ""
        said = Said(f"Looking at {number}." if number % 3 else "", reasoning, (made,))
        turn = chats.turn(messages, said, client)
        assert turn.reused >= kept - 2
        assert turn.prompt.report.num_spliced == number
        kept = turn.kept
        spaced = json.dumps(json.loads(made.arguments), indent=2, sort_keys=True)
        echoed = ToolCall(made.id, made.name, spaced)
        messages += [
            assistant(said.text, echoed),
            result(f"line one of {number}\n  line two\n", made.id),
        ]


@pytest.mark.parametrize("kind", CALLING)
def test_a_call_stands_in_the_prompt_once(kind: str) -> None:
    """Its raw ids hold it; the template must not print it again."""
    chats, client = Chats(kind), Client(tools=(tool("look"),))
    said = Said("I look.", "hm", (call("look", path="unique_path.py"),))
    chats.turn([user("go")], said, client)
    prompt = chats.ask([user("go"), said.echo, result("out")], client)
    assert prompt.report.num_spliced == 1
    assert prompt.text.count("unique_path.py") == 1
    behind = prompt.text[prompt.text.index("unique_path.py") :]
    assert "look" not in behind
    assert "out" in behind


@pytest.mark.parametrize("kind", ["builtin", "glm", "calls_only"])
def test_several_turns_in_a_row_are_spliced(kind: str) -> None:
    """Two assistant messages with nothing between them."""
    chats = Chats(kind)
    first = chats.turn([user("hi")], Said("One.", "a"))
    asked = [user("hi"), first.said.echo]
    second = chats.turn(asked, Said("Two.", "b"))
    prompt = chats.ask([*asked, second.said.echo, user("and?")])
    assert prompt.report.num_spliced == 2
    assert chats.reuse(prompt) >= second.kept - 2


def test_stripped_thinking_comes_back() -> None:
    """The model reads what it thought."""
    chats = Chats()
    said = Said("Four.", "Two and two is four.")
    chats.turn([user("2+2?")], said)
    prompt = chats.ask([user("2+2?"), said.echo, user("sure?")])
    assert "Two and two is four." in prompt.text


def test_an_empty_think_block_of_the_template_is_not_read_twice() -> None:
    """What stands between the header and the turn goes with the placeholder."""
    chats = Chats()
    said = Said("Four.", "Sum.")
    chats.turn([user("2+2?")], said)
    prompt = chats.ask([user("2+2?"), said.echo, user("sure?")])
    assert prompt.text.count("<think>") == 1


def test_thinking_off_has_a_frame_of_its_own() -> None:
    """A turn is spliced with what the prompt held behind its header then."""
    chats = Chats()
    off, on = Client(thinking=False), Client(thinking=True)
    first = chats.turn([user("hi")], Said("Hello."), off)
    asked = [user("hi"), first.said.echo, user("and?")]
    assert chats.ask(asked, off).report.num_spliced == 1
    mixed = chats.ask(asked, on)
    assert mixed.report.num_spliced == 1
    assert chats.reuse(mixed) == first.kept
    behind = mixed.text[mixed.text.index("Hello.") :]
    assert chats.plain_text(asked, on).endswith(behind)


def test_an_answer_cut_off_by_length_goes_on_where_it_stopped() -> None:
    """Its ids are kept as they are, half a character at the end included."""
    chats = Chats()
    prompt = chats.ask([user("hi")])
    whole = chats.tokenizer.encode("Sure 東京 and", add_special_tokens=False)
    cut = next(n for n in range(len(whole)) if "�" in chats.decode(whole[:n]))
    shown = chats.decode(whole[:cut])
    chats.answer(prompt, Said(shown), sampled=whole[:cut])
    following = chats.ask([user("hi"), assistant(shown), user("go on")])
    assert following.report.num_spliced == 1
    assert chats.reuse(following) == len(prompt.model_ids) + cut


def test_a_turn_that_ended_at_a_stop_string_goes_through_the_template() -> None:
    """Its ids hold text that nobody was shown."""
    chats = Chats()
    prompt = chats.ask([user("hi")])
    chats.answer(prompt, Said("Sure. "), sampled=())
    asked = [user("hi"), assistant("Sure. "), user("go on")]
    following = chats.ask(asked)
    assert following.report.num_spliced == 0
    assert following.text == chats.plain_text(asked)
    assert chats.reuse(following) >= len(prompt.model_ids) - 1


def test_an_answer_without_visible_text_is_no_turn() -> None:
    """Cut off while thinking: there is nothing to know it by."""
    chats = Chats()
    prompt = chats.ask([user("hi")])
    chats.answer(prompt, Said("", "endless"), raw="<think>\nendless")
    following = chats.ask([user("hi"), assistant(""), user("go on")])
    assert following.report.num_spliced == 0
    assert "endless" not in following.text


@pytest.mark.parametrize("settings", [{"splicing": False}])
def test_splicing_can_be_switched_off(settings: dict[str, bool]) -> None:
    """CACHE_SPLICE=false, or PRESERVE_THINKING=false: past turns by the template."""
    chats = Chats(**settings)
    assert not chats.pipeline.can_splice
    said = Said("Four.", "Two and two is four.")
    chats.turn([user("2+2?")], said)
    asked = [user("2+2?"), said.echo, user("sure?")]
    prompt = chats.ask(asked)
    assert prompt.text == chats.plain_text(asked)


def test_a_template_that_drops_old_thinking_does_so() -> None:
    """Without preserve_thinking, where splicing is off: reuse ends at the last turn."""
    chats = Chats(preserve_thinking=False, splicing=False)
    first = chats.turn([user("2+2?")], Said("Four.", "Sum."))
    asked = [user("2+2?"), first.said.echo, user("sure?")]
    prompt = chats.ask(asked)
    assert prompt.text == chats.plain_text(asked)
    assert "<think>" not in prompt.text
    assert chats.reuse(prompt) >= len(first.prompt.model_ids) - 1


@pytest.mark.parametrize("kind", ["builtin", "llama3", "glm"])
def test_message_beginnings_are_worth_a_checkpoint(kind: str) -> None:
    """The end of the system text, the last user message, and the prompt's end."""
    chats = Chats(kind)
    first = chats.turn([system("Be brief."), user("hi")])
    asked = [system("Be brief."), user("hi"), first.said.echo, user("last")]
    prompt = chats.ask(asked)
    ranks = {b.rank: b.depth for b in prompt.model.boundaries}
    role = {"builtin": "<|im_start|>", "llama3": "<|start_header_id|>", "glm": "<|"}
    for rank, said in ((0, "hi"), (1, "last")):
        before = chats.decode(prompt.model_ids[: ranks[rank]])
        behind = prompt.text[len(before) :]
        assert behind.startswith(role[kind])
        assert said in behind
        assert said not in before[-20:]
    assert ranks[2] > ranks[1] > ranks[3] > ranks[0]
    tail = chats.decode(prompt.model_ids[ranks[2] :])
    assert tail.startswith(role[kind])
    assert "last" not in tail


def test_without_marks_only_the_end_is_a_boundary() -> None:
    """No proof: where messages begin is not known."""
    prompt = Chats("urlencode").ask([user("hi"), assistant("a"), user("b")])
    assert {b.rank for b in prompt.model.boundaries} <= {2}
