"""Where a span counts as matched: its whole message, and what ends it."""

from sidecar.pipeline.reuse.prompt_ids import end_of_message
from testkit.chats import Chats, assistant, system, user, words
from testkit.volatile import OPENER


def test_a_message_that_grew_is_not_the_same_message() -> None:
    """White space that stood at its end is not put into its middle."""
    chats = Chats(min_gain=1)
    instructions = system(words(200))
    chats.turn([instructions, user("count the files\n\n")])
    grown = [instructions, user("count the files and delete them\n")]
    prompt = chats.ask(grown)
    assert prompt.text == chats.plain_text(grown)
    assert chats.reuse(prompt) > 200


def test_a_note_is_not_put_into_the_middle_of_a_message_that_grew() -> None:
    chats = Chats(min_gain=1)

    def instructions(minute: int) -> str:
        return f"Current time is 10:{minute}.\n{words(200)}"

    chats.turn([system(instructions(10)), user("one")])
    asked = [system(instructions(11)), user("one"), assistant("Fine."), user("two")]
    assert OPENER in chats.turn(asked).text
    longer = [*asked[:-1], user("two and three")]
    text = chats.ask(longer).text
    assert text.index("two and three") < text.index(OPENER)


def test_a_message_ends_where_the_next_begins() -> None:
    """The first of the model's own turns: what parts behind it is the same chat."""
    found = ((5, 0), (9, 2), (14, 3))
    assert end_of_message(found, 1) == 9
    assert end_of_message(found, 2) == 14
    assert end_of_message(found, 3) == 0
    assert end_of_message(found, None) == 0
