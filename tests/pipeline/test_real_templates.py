"""
Reuse on the chat templates that models come with (tests/fixtures/chat_templates).

Each row of the table in testkit/real_templates.py is held to the same bars; what
a template's own design takes away is said there, and checked to be no more than that.
"""

from os.path import commonprefix

import pytest

from sidecar.core.requests import Message
from sidecar.pipeline.template import chat_template
from testkit.chats import Client, Said, assistant, result, system, user
from testkit.real_talk import TOOLS, Step, Talk, lost, outside, read, write
from testkit.real_templates import BY_NAME, FAMILIES, FOLDER, FamilyChats

NAMES = [family.name for family in FAMILIES]
KEEPING = [family.name for family in FAMILIES if not family.reorders]
MOVING = [family.name for family in FAMILIES if family.reorders]
THINKING = pytest.mark.parametrize("thinking", [True, False], ids=["on", "off"])
DRIFTS = pytest.mark.parametrize("drifts", [False, True], ids=["same", "drifts"])


def test_every_template_has_a_row_and_its_origin() -> None:
    """Where it is from and under which licence."""
    origins = (FOLDER / "README.md").read_text()
    files = {file.name for file in FOLDER.glob("*.jinja")}
    assert len(files) >= 15
    assert {f"{name}.jinja" for name in NAMES if BY_NAME[name].template} == files
    for file in files:
        assert f"| {file} |" in origins, file


@DRIFTS
@THINKING
@pytest.mark.parametrize("name", KEEPING)
def test_a_tool_loop_is_reused_to_the_last_token(
    name: str, thinking: bool, drifts: bool
) -> None:
    """
    Results that end in white space, calls in parallel, arguments written anew.

    Also when the system prompt tells another time in each request: the first one stays
    in its place, and each new one is said at the end.
    """
    steps = Talk(FamilyChats(name), thinking, drifts).run()
    assert lost(steps) == []
    for number, step in enumerate(steps):
        assert step.turn.prompt.report.num_spliced == number
        assert step.turn.prompt.report.is_proved


@DRIFTS
@pytest.mark.parametrize("name", MOVING)
def test_what_a_template_moves_costs_only_what_stands_behind_it(
    name: str, drifts: bool
) -> None:
    """A new user message changes the prompt; within a tool loop all is reused."""
    chats = FamilyChats(name)
    steps = Talk(chats, True, drifts).run()
    new_user = [n for n, step in enumerate(steps) if step.messages[-1].role == "user"]
    assert set(lost(steps)) <= set(new_user)
    for number, step in enumerate(steps[1:], 1):
        assert step.turn.prompt.report.num_spliced == number
        same = commonprefix([steps[number - 1].turn.text, step.turn.text])
        assert step.turn.reused >= len(chats.pipeline.encoder.encode(same).ids) - 2


@THINKING
@pytest.mark.parametrize("name", NAMES)
def test_text_outside_turns_is_what_the_template_prints(
    name: str, thinking: bool
) -> None:
    """Between the turns as they were written stands what stands in T, in order."""
    chats = FamilyChats(name)
    talk = Talk(chats, thinking, is_plain=True)
    steps = talk.run()
    for number, step in enumerate(steps):
        plain = chats.rendered(step.messages, talk.client)
        assert_in_order(outside(step, steps[:number]), plain, step)


def assert_in_order(texts: list[str], plain: str, step: Step) -> None:
    """Nothing that is not a turn's may stand between the texts in T."""
    first, *others = texts
    assert plain.startswith(first)
    at, between = len(first), []
    for text in others:
        found = plain.find(text, at)
        assert found >= 0, text
        between.append(plain[at:found])
        at = found + len(text)
    assert plain[at:] == step.opening
    said = [m.text.strip() for m in step.messages if m.role != "assistant"]
    assert not [text for text in between for each in said if each in text]


LOOP = [
    system("Be brief."),
    user("Fix the test.\n"),
    assistant("", read(path="a.py"), write(path="b.py", text="x")),
    result("first out\n", "1"),
    result("second out", "2"),
    assistant("Done."),
    user("And now?"),
]


def loop() -> list[Message]:
    """A conversation with another model: two calls in a turn."""
    first, second = LOOP[2].tool_calls
    return [
        *LOOP[:3], result("first out\n", first.id), result("second out", second.id),
        *LOOP[5:],
    ]  # fmt: skip


@THINKING
@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_of_another_model_is_said_whole(
    name: str, thinking: bool
) -> None:
    """Both calls and results, each in its place, as the template prints them."""
    chats = FamilyChats(name)
    client = Client(tools=TOOLS, thinking=thinking)
    prompt = chats.ask(loop(), client)
    assert prompt.text == chats.rendered(loop(), client)
    said = ["Be brief.", "Fix the test.", "a.py", "first out", "second out", "Done.",
            "And now?"]  # fmt: skip
    places = [prompt.text.find(each) for each in said]
    assert places == sorted(places)
    assert places[0] >= 0
    assert "b.py" in prompt.text
    assert prompt.report.is_proved


@pytest.mark.parametrize("again", [False, True], ids=["text", "calls"])
@pytest.mark.parametrize("name", NAMES)
def test_words_printed_behind_a_result_stay_before_an_own_turn(
    name: str, again: bool
) -> None:
    """Gemma 4's template does so, where a turn's own ids are put."""
    chats, client = FamilyChats(name), Client(tools=TOOLS)
    call = read(path="a.py")
    asked = [user("Go."), assistant("I look at it.", call), result("out", call.id)]
    said = Said("Fine.", "", (read(path="b.py"),) if again else ())
    turn = chats.turn(asked, said, client)
    behind = result("more", said.calls[0].id) if again else user("And now?")
    later = [*asked, turn.said.echo, behind]
    plain = chats.rendered(later, client)
    assert chats.ask(later, client).text.count("I look at it.") == plain.count(
        "I look at it."
    )


@pytest.mark.parametrize("calls", [False, True], ids=["text", "calls"])
@pytest.mark.parametrize("name", NAMES)
def test_answers_may_be_first_and_in_a_row_and_empty(name: str, calls: bool) -> None:
    """A greeting, a turn that was cut in two, one that was all thinking."""
    chats = FamilyChats(name)
    call = read(path="a.py")
    looked = (assistant("", call), result("first out", call.id)) if calls else ()
    talk = [system("Be brief."), assistant("Hello there."), user("Say it."),
            assistant(""), user("Go on."), assistant("One."), assistant("Two."),
            *looked, user("And now?")]  # fmt: skip
    text = chats.ask(talk, Client(tools=TOOLS)).text
    said = ["Hello there.", "Say it.", "Go on.", "One.", "Two.",
            *(["a.py", "first out"] if calls else []), "And now?"]  # fmt: skip
    places = [text.find(each) for each in said]
    assert places == sorted(places)
    assert all(text.count(each) == 1 for each in said)


@pytest.mark.parametrize("name", NAMES)
def test_a_user_may_speak_behind_a_result(name: str) -> None:
    """Interrupted, or a reminder that the client adds."""
    talk = [*loop()[:5], user("Stop that.")]
    text = FamilyChats(name).ask(talk, Client(tools=TOOLS)).text
    assert text.index("second out") < text.index("Stop that.")


@pytest.mark.parametrize(
    ("name", "calls"), [*((n, False) for n in KEEPING), *((n, True) for n in NAMES)]
)
def test_a_turn_behind_a_reminder_at_a_result_is_put_back(
    name: str, *, calls: bool
) -> None:
    """Clients put texts beside results; some templates take them into those."""
    chats, client = FamilyChats(name), Client(tools=TOOLS, session="s")
    history = [system("Rules."), user("go")]
    called = chats.turn(history, Said("", "", (read(path="a.py"),)), client)
    history += [called.said.echo, result("RES", called.said.calls[0].id)]
    history.append(user("Remember the rules."))
    next_calls = (read(path="b.py"),) if calls else ()
    thought = "I think." if BY_NAME[name].think else ""
    turn = chats.turn(history, Said("Text.", thought, next_calls), client)
    answers = [result("RES2", call.id) for call in turn.said.calls]
    history += [turn.said.echo, *(answers or [user("and now?")])]
    again = chats.prepare(history, client)
    assert chats.reuse(again) >= turn.kept - 2
    assert thought in again.text


@pytest.mark.parametrize("name", NAMES)
def test_call_ids_never_reach_the_model(name: str) -> None:
    """They are new in every run, and some clients drop their underscores."""
    prompts = set()
    for form in ("call_{}", "toolu-{}", "call{}"):
        one, two = loop()[2].tool_calls
        ids = [form.format(n) for n in ("x1", "x2")]
        calls = [type(one)(ids[0], one.name, one.arguments),
                 type(two)(ids[1], two.name, two.arguments)]  # fmt: skip
        talk = [*LOOP[:2], assistant("", *calls), result("a", ids[0]),
                result("b", ids[1].replace("_", "")), *LOOP[5:]]  # fmt: skip
        prompts.add(FamilyChats(name).ask(talk, Client(tools=TOOLS)).model_ids)
    known = FamilyChats(name).pipeline.template.traits
    if known.tool_role:
        assert len(prompts) == 1


@pytest.mark.parametrize("name", KEEPING)
def test_thinking_may_be_switched_between_turns(name: str) -> None:
    """A turn stands as it was written, whatever the prompt of the next one holds."""
    chats = FamilyChats(name)
    talk = Talk(chats, thinking=True)
    talk.call("I look.", "Where is it?", read(path="a.py"))
    off = chats.ask(talk.messages, Client(tools=TOOLS, thinking=False))
    assert off.report.num_spliced == 1
    assert talk.steps[0].written in off.text


def test_a_template_that_refuses_preserve_thinking_is_not_sent_it() -> None:
    """The library's own code for DeepSeek V3.2 knows no such argument."""
    chats = FamilyChats("deepseek-v3.2-mlx")
    assert not chats.pipeline.template.traits.preserve_thinking
    assert chats.ask([user("hi")]).text.endswith("<｜Assistant｜><think>")
    assert chats.pipeline.can_splice


@pytest.mark.parametrize("text", ["<think>hm</think>\nFour.", "hm</think>\n\nFour."])
@pytest.mark.parametrize("name", ["glm4.5", "glm4.7", "qwen3.5", "minimax-m2"])
def test_reasoning_echoed_twice_is_rendered_once(name: str, text: str) -> None:
    """As a field, and within the text."""
    call = read(path="a.py")
    talk = [user("2+2?"), assistant(text, call, reasoning="hm"), result("x", call.id)]
    assert FamilyChats(name).ask(talk).text.count("hm") == 1


@pytest.mark.parametrize("name", ["gpt-oss", "glm4.5"])
def test_reasoning_and_text_before_a_call_are_taken(
    name: str,
) -> None:
    """One refuses the two beside a call, and with them each later chat."""
    call = read(path="a.py")
    echoed = assistant("I look.", call, reasoning="hm")
    text = FamilyChats(name).ask([user("2+2?"), echoed, result("x", call.id)]).text
    assert text.count("hm") == text.count("I look.") == 1


@pytest.mark.parametrize("name", ["glm4.5", "qwen3.5"])
def test_other_reasoning_within_the_text_is_not_taken_for_the_field(name: str) -> None:
    """Only what is the same is said once."""
    call = read(path="a.py")
    echoed = assistant("I say </think> to close it.", call, reasoning="hm")
    text = FamilyChats(name).ask([user("2+2?"), echoed, result("x", call.id)]).text
    assert "hm" in text


@pytest.mark.parametrize("typed", ["hi /nothink", "hi /nothink\n", "/nothink"])
@pytest.mark.parametrize("name", ["glm4.5", "glm4.6"])
def test_a_switch_that_the_user_typed_costs_no_turn(name: str, typed: str) -> None:
    """The template looks at how the text ends, where our marks would stand."""
    chats, client = FamilyChats(name), Client(tools=TOOLS, thinking=False)
    first = chats.turn([user(typed)], "Fine.", client)
    asked = [user(typed), first.said.echo, user("and?")]
    following = chats.turn(asked, "Good.", client)
    assert following.reused >= first.kept - 2
    plain = chats.rendered(asked, client)
    assert plain.startswith(first.text)
    assert following.text.endswith(plain[plain.index("<|user|>\nand?") :])


@pytest.mark.parametrize(
    "name", ["deepseek-v3", "deepseek-v3.1", "deepseek-r1-distill"]
)
def test_tools_are_described_in_the_models_own_words(name: str) -> None:
    """Where the template does not print them, a call of its own is the example."""
    text = FamilyChats(name).ask([user("go")], Client(tools=TOOLS)).text
    described = text[: text.index("go")]
    assert "<tool_call>" not in described
    assert "<｜tool▁calls▁begin｜>" in described
    assert described.count("NAME") == 1
    assert "<｜Assistant｜>" not in described


@pytest.mark.parametrize("missing", [False, True], ids=["swapped", "only the second"])
@pytest.mark.parametrize("name", ["gpt-oss", "llama3.1", "llama3.2"])
def test_where_calls_stand_alone_each_result_stands_behind_its_own(
    name: str, missing: bool
) -> None:
    """By its id; the calls stand in the order in which they were made."""
    chats = FamilyChats(name)
    assert not chats.pipeline.template.traits.parallel_calls
    first, second = loop()[2].tool_calls
    results = [result("second out", second.id), result("first out\n", first.id)]
    talk = [*LOOP[:3], *results[: 1 if missing else 2], *LOOP[5:]]
    text = chats.ask(talk, Client(tools=TOOLS)).text
    assert text.index("b.py") < text.index("second out")
    if missing:
        assert text.index("second out") < text.index("a.py")
    else:
        assert text.index("a.py") < text.index("first out") < text.index("b.py")
    split = chat_template._one_call_each(talk)
    assert [m.tool_calls[0].id for m in split if m.tool_calls] == [second.id, first.id]
