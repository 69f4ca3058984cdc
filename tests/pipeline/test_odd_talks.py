"""Talks that agents have and the authors of chat templates did not think of."""

import re
from collections.abc import Callable, Sequence

import pytest

from sidecar.core.errors import BadRequest
from sidecar.core.requests import Message, ToolCall
from sidecar.pipeline.template.chat_template import ChatTemplate
from testkit.chats import Client, Said, Turn, assistant, result, system, user
from testkit.real_talk import TOOLS, read
from testkit.real_templates import FAMILIES, FamilyChats, tokenizer_of_family

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


@pytest.mark.parametrize("family", NAMES)
def test_a_result_of_no_call_is_not_said_to_be_of_one(family: str) -> None:
    """A client that cuts a talk may leave it behind the results of other calls."""
    first, second = read(path="a.py"), read(path="b.py")
    talk = [user("go"), assistant("", first), result("ONE", first.id),
            assistant("", second), result("zqtwo", second.id),
            result("zqstray", "call_of_nobody"), user("more")]  # fmt: skip
    text = FamilyChats(family).prepare(talk, CLIENT).text
    assert text.index("zqtwo") < text.index("zqstray")
    for name in ("000000000", "000000001"):
        assert text.count(name) in (0, 2)
    assert text.count("Return of functions.read:") == text.count(
        "begin|>functions.read:"
    )


def test_kimi_says_of_which_call_of_a_turn_a_result_is() -> None:
    """Its template counts the calls of a turn; another prints the ids it is given."""
    first, second, third = (read(path=f"{at}.py") for at in range(3))
    talk = [user("go"), assistant("", first, second), result("1", first.id),
            result("2", second.id), assistant("", third),
            result("3", third.id)]  # fmt: skip
    tokenizer = tokenizer_of_family("kimi-k2")
    numbers = re.compile(r"functions\.read:(\d)")
    own = ChatTemplate(tokenizer).render(talk, (), {})
    assert numbers.findall(own) == ["0", "1", "0", "1", "0", "0"]
    made = "'functions.' + func_name + ':' + loop.index0|string"
    assert made in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(made, "tool_call['id']")
    given = ChatTemplate(tokenizer).render(talk, (), {})
    assert numbers.findall(given) == ["0", "1", "0", "1", "2", "2"]


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
