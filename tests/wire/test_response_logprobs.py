"""Log-probabilities of a response's text, directly and through LiteLLM."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from sidecar.app import App
from testkit.proxy import Proxy
from testkit.scripted import Switch

pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
WANTED: Any = {"include": ["message.output_text.logprobs"]}


@pytest.fixture(params=["direct", "proxy"])
def client(
    request: pytest.FixtureRequest, proxy: Proxy, scripted_sidecar: App, switch: Switch
) -> Iterator[openai.OpenAI]:
    """The SDK, at the sidecar itself and at the proxy; the answer is scripted."""
    switch.script = lambda prompt: "<think>\nhm\n</think>\nIt is read."
    if request.param == "proxy":
        yield proxy.openai
        return
    with openai.OpenAI(base_url=f"{scripted_sidecar.url}/v1", api_key="any") as direct:
        yield direct


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("asked", "num_top"),
    [(WANTED, 0), ({"top_logprobs": 2}, 2), ({**WANTED, "top_logprobs": 3}, 3)],
)
def test_logprobs_are_told_where_they_are_asked_for(
    client: openai.OpenAI, stream: bool, asked: Any, num_top: int
) -> None:
    """One for each token of the text, and as many alternatives as asked for."""
    pieces: list[Any] = []
    if stream:
        with client.responses.stream(model="local", input="Hi.", **asked) as events:
            pieces = [e for e in events if e.type == "response.output_text.delta"]
            answer = events.get_final_response()
    else:
        answer = client.responses.create(model="local", input="Hi.", **asked)
    part: Any = answer.output[-1].content[0]  # type: ignore[union-attr]
    assert "".join(item.token for item in part.logprobs) == "It is read."
    assert {len(item.top_logprobs) for item in part.logprobs} == {num_top}
    assert all(item.logprob <= 0 for item in part.logprobs)
    told = [item.token for piece in pieces for item in piece.logprobs]
    assert told == [item.token for item in part.logprobs] * stream


def test_none_are_told_unasked(client: openai.OpenAI) -> None:
    answer: Any = client.responses.create(model="local", input="Hi.")
    assert not answer.output[-1].content[0].logprobs
