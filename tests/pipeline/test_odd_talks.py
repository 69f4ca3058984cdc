"""Talks that agents have and the authors of chat templates did not think of."""

from collections.abc import Callable, Sequence

import pytest

from sidecar.core.errors import BadRequest
from sidecar.core.requests import Message, ToolCall
from testkit.chats import Client, Said, Turn, assistant, result, system, user
from testkit.real_talk import TOOLS, read
from testkit.real_templates import FAMILIES, FamilyChats

NAMES = [family.name for family in FAMILIES]
MOVING = {family.name for family in FAMILIES if family.reorders}
CLIENT = Client(tools=TOOLS)
Behind = Callable[[ToolCall], Sequence[Message]]
ODD: dict[str, Behind] = {
    "an empty result, then the user": lambda call: [
        result("", call.id), user("But hurry.")
    ],
    "a result, then an empty message": lambda call: [result("out", call.id), user("")],
    "a result, then a blank message": lambda call: [result("out", call.id), user("\n")],
    "a result, then orders": lambda call: [result("out", call.id), system("A rule.")],
    "no result": lambda call: [user("I stopped it.")],
}  # fmt: skip


def talk(family: str, behind_third: Behind, num_turns: int = 6) -> list[Turn]:
    """A tool loop with a clock that drifts; the third call is followed by that."""
    chats, turns = FamilyChats(family), []
    said = [user("Fix it.")]
    for number in range(num_turns):
        clock = f"You are an agent.\nCurrent time is 10:{number:02}.\nBe brief."
        call = read(path=f"{number}.py")
        answer = Said("", "", (call,))
        turns.append(chats.turn([system(clock), *said], answer, CLIENT))
        last = [result(f"out {number}", call.id)]
        said += [answer.echo, *(behind_third(call) if number == 2 else last)]
    return turns


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("family", NAMES)
def test_the_proof_and_the_reuse_come_back(family: str, odd: str) -> None:
    """Whatever it cost where it was said, later turns reuse all of the turn before."""
    turns = talk(family, ODD[odd])
    assert all(turn.prompt.report.is_proved for turn in turns)
    last, before = turns[-1], turns[-2]
    if family not in MOVING:
        assert last.reused >= before.kept - 40


@pytest.mark.parametrize("family", NAMES)
def test_later_orders_take_nothing_away(family: str) -> None:
    """Neither the first orders nor the tools, and they stand where they were said."""
    said = [system("FIRST."), user("ASKED"), system("SECOND."), assistant("ANSWERED")]
    said += [user("MORE"), system("THIRD.")]
    prompt = FamilyChats(family).prepare(said, CLIENT)
    words = ("FIRST", "ASKED", "SECOND", "ANSWERED", "MORE", "THIRD")
    places = [prompt.text.find(word) for word in words]
    assert places == sorted(places)
    assert places[0] >= 0
    assert "read" in prompt.text
    assert prompt.report.is_proved


@pytest.mark.parametrize("ids", [("", ""), ("x", "x"), ("a_b", "ab"), ("1", "2")])
@pytest.mark.parametrize("family", ["kimi-k2", "mistral-nemo", "mistral-small-3.2"])
def test_results_are_of_the_calls_in_their_order(
    family: str, ids: tuple[str, str]
) -> None:
    """Clients give calls empty or equal ids; these templates print whose it is."""
    calls = (ToolCall(ids[0], "read", "{}"), ToolCall(ids[1], "write", "{}"))
    said = [user("go"), assistant("", *calls), result("ONE", ids[0])]
    prompt = FamilyChats(family).prepare([*said, result("TWO", ids[1])], CLIENT)
    names = ("000000000", "000000001")
    if family == "kimi-k2":
        names = ("functions.read:0", "functions.write:1")
    assert [prompt.text.count(name) for name in names] == [2, 2]
    assert prompt.text.rfind(names[0]) < prompt.text.rfind(names[1])


@pytest.mark.parametrize("family", ["mistral-nemo", "mistral-small-3.2", "kimi-k2"])
def test_a_result_of_no_call_has_no_id_of_a_call(family: str) -> None:
    """A client that cuts a talk may leave it behind the results of other calls."""
    call = read(path="a.py")
    talk = [user("go"), assistant("", call), result("zqone", call.id),
            result("zqstray", "call_of_nobody"), user("more")]  # fmt: skip
    text = FamilyChats(family).prepare(talk, CLIENT).text
    assert text.index("zqone") < text.index("zqstray")
    own = "functions.read:0" if family == "kimi-k2" else "000000000"
    assert text.count(own) == 2


@pytest.mark.parametrize("family", ["gemma4", "gemma4-e2b"])
def test_a_stray_result_takes_no_other_with_it(family: str) -> None:
    """Gemma's template prints results as long as they stand in a row."""
    calls = read(path="a.py"), read(path="b.py")
    talk = [user("go"), assistant("", *calls), result("zqstray", "call_of_nobody"),
            result("zqone", calls[0].id), result("zqtwo", calls[1].id)]  # fmt: skip
    text = FamilyChats(family).prepare([*talk, user("more")], CLIENT).text
    assert all(word in text for word in ("zqstray", "zqone", "zqtwo"))


def test_kimis_results_are_numbered_as_it_numbers_its_calls() -> None:
    """Through all of the talk, which the turns say that it wrote itself."""
    chats = FamilyChats("kimi-k2")
    first, second = read(path="a.py"), read(path="b.py")
    raw = (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.read:1"
        '<|tool_call_argument_begin|>{"path": "b.py"}<|tool_call_end|>'
        "<|tool_calls_section_end|>"
    )
    talk = [user("go"), assistant("", first), result("1", first.id)]
    chats.answer(chats.prepare(talk, CLIENT), Said("", "", (second,)), raw=raw)
    talk += [assistant("", second), result("2", second.id)]
    text = chats.prepare(talk, CLIENT).text
    assert text.count("functions.read:1") == 2
    assert "Return of functions.read:1" in text


@pytest.mark.parametrize("family", NAMES)
def test_results_that_came_in_another_order_stand_in_that_of_the_calls(
    family: str,
) -> None:
    """Where no ids are printed nothing else says whose they are."""
    chats = FamilyChats(family)
    calls = read(path="a.py"), read(path="b.py")
    said = [user("Fix it."), assistant("", *calls)]
    behind = [result("zq of b", calls[1].id), result("zq of a", calls[0].id)]
    mixed = chats.prepare([*said, *behind], CLIENT)
    assert mixed.report.is_proved
    if chats.pipeline.template.traits.call_ids == "hidden":
        assert mixed.text == chats.prepare([*said, *reversed(behind)], CLIENT).text
        assert mixed.text.index("zq of a") < mixed.text.index("zq of b")


@pytest.mark.parametrize("family", NAMES)
def test_a_talk_that_begins_with_a_call_loses_nothing(family: str) -> None:
    """As a client leaves it that cuts the beginning."""
    asked = [system("zqrule"), assistant("", read(path="zq.py")), result("zqout"),
             user("zqquestion")]  # fmt: skip
    try:
        text = FamilyChats(family).prepare(asked, CLIENT).text
    except BadRequest:
        return  # the template says so
    places = [text.find(word) for word in ("zq.py", "zqout", "zqquestion")]
    assert places == sorted(places)
    assert places[0] >= 0


@pytest.mark.parametrize("family", ["llama3.1", "llama3.2"])
def test_an_answer_that_comes_first_is_not_the_users(family: str) -> None:
    """These templates print the tools within what they take for the user's words."""
    talk = [system("zqrule"), assistant("zqanswer"), user("zqquestion")]
    text = FamilyChats(family).prepare(talk, CLIENT).text
    header = "<|start_header_id|>"
    said = {part.split("<|end_header_id|>")[0]: part for part in text.split(header)}
    assert "zqanswer" not in said["user"]
    assert "zqquestion" in said["user"]
    assert '"name": "read"' in said["system"]


@pytest.mark.parametrize("family", NAMES)
def test_results_of_the_models_own_calls_stand_in_their_order(family: str) -> None:
    """Also where its turn is put back, whatever the template makes of two calls."""
    chats = FamilyChats(family)
    calls = read(path="a.py"), read(path="b.py")
    answer = Said("", "", calls)
    chats.turn([user("Fix it.")], answer, CLIENT)
    behind = [result("zq of b", calls[1].id), result("zq of a", calls[0].id)]
    prompt = chats.prepare([user("Fix it."), answer.echo, *behind], CLIENT)
    if chats.pipeline.template.traits.call_ids == "hidden":
        assert prompt.text.index("zq of a") < prompt.text.index("zq of b")
