"""What looking for newer values behind older ones costs."""

import pytest

from sidecar.core.requests import Message
from testkit.chats import Chats, assistant, system, user
from testkit.growth import grows_linearly

WORDS = "stem stone below stream start " * 20


@pytest.mark.parametrize("role", [system, user], ids=["system", "user"])
def test_many_clocks_that_changed_cost_one_search_of_the_text(role: object) -> None:
    """Each stands behind others, and all that is between them is searched for each."""

    def talk(number: int, hour: int) -> list[Message]:
        clocks = (f"Current time is {hour}:{i % 60:02d}.\n" for i in range(number))
        text = "".join(f"{clock}{WORDS}\n" for clock in clocks)
        first = role(text)  # type: ignore[operator]
        return [first] if role is user else [first, user("hi")]

    def asked(number: int) -> tuple[Chats, list[Message]]:
        chats = Chats(min_gain=1)
        chats.turn(talk(number, 10), "Hm.")
        return chats, [*talk(number, 11), assistant("Hm."), user("go")]

    def work(given: tuple[Chats, list[Message]]) -> None:
        chats, messages = given
        chats.ask(messages)

    assert grows_linearly(work, asked, 25)
