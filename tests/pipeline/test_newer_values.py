"""What looking for newer values behind older ones costs."""

import pytest

from sidecar.core.prompt import SeenImage
from sidecar.core.requests import Message
from sidecar.pipeline.reuse.newer_values import NewerValues
from sidecar.pipeline.template.elements import Element, ImageSlot
from sidecar.volatile.marked_message import Span
from sidecar.volatile.rules import load_rules
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


PICTURE = ImageSlot(SeenImage("mark", "00", (1, 1), (7,), (7,), {}, None))


@pytest.mark.parametrize(
    "pieces",
    [
        ["Current time: 10:19"],
        ["Current ", PICTURE, "time: 10:19"],
        [PICTURE, "Cur", PICTURE, PICTURE, "rent", PICTURE, " time: 10:19", PICTURE],
        [*["x"] * 40, "Current time", PICTURE, ": 10:19"],
    ],
    ids=["whole", "one", "many", "behind others"],
)
def test_a_phrase_with_pictures_in_it_speaks_of_a_value(pieces: list[Element]) -> None:
    """A note said 10:18 behind a message that says 10:19 around a picture."""
    clock = Span("current_time", 0, 5, "10:18")
    elements = ["Now: ", clock, "<|im_start|>user\n", *pieces]
    values = NewerValues(elements, ["system", "user"], load_rules().policy)
    assert values.are_spoken_of_behind(clock.key)
    without = [piece for piece in pieces if not isinstance(piece, str)]
    values = NewerValues(
        ["Now: ", clock, *without], ["system", "user"], load_rules().policy
    )
    assert not values.are_spoken_of_behind(clock.key)
