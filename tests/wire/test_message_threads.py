"""What Anthropic's SDK does with message threads, which are not kept here."""

from collections.abc import Iterator

import anthropic
import httpx
import pytest
from anthropic import beta_tool

from sidecar.app import App
from testkit.proxy import Proxy
from testkit.scripted import Answer, Call, Switch, render

ANSWERS = [
    Answer("", "", (Call("read", {"path": "a.txt"}),)),
    Answer("", "", (Call("read", {"path": "b.txt"}),)),
    Answer("", "alpha and beta."),
]


@beta_tool
def read(path: str) -> str:
    """
    Read a file.

    Args:
        path: the file
    """
    return {"a.txt": "alpha", "b.txt": "beta"}[path]


@pytest.fixture(params=["direct", "proxy"])
def client(
    request: pytest.FixtureRequest, proxy: Proxy, scripted_sidecar: App, switch: Switch
) -> Iterator[anthropic.Anthropic]:
    """The SDK, at the sidecar itself and at the proxy; the answers are scripted."""
    switch.prompts.clear()
    switch.script = lambda prompt: render(ANSWERS[prompt.num_answers], prompt)
    if request.param == "proxy":
        yield proxy.anthropic
        return
    same = {"base_url": scripted_sidecar.url, "api_key": "any"}
    with anthropic.Anthropic(**same, max_retries=0) as direct:
        yield direct


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_tool_runner_sends_the_whole_conversation(
    client: anthropic.Anthropic, switch: Switch, stream: bool
) -> None:
    """Refused in the words that it knows, it goes on without a thread."""
    runner = client.beta.messages.tool_runner(
        model="local", max_tokens=500, tools=[read], stream=stream,
        messages=[{"role": "user", "content": "Read a.txt and b.txt."}],
    )  # fmt: skip
    final = runner.until_done()
    assert final.content[-1].text == "alpha and beta."
    last = switch.prompts[-1].text
    assert all(said in last for said in ("Read a.txt and", "alpha", "beta"))
    assert len(switch.prompts) == len(ANSWERS)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_thread_is_refused_by_the_name_that_the_sdk_knows(
    client: anthropic.Anthropic, switch: Switch, stream: bool
) -> None:
    """Answered 200, the model would have seen the last message alone."""
    following = {"type": "continue", "previous_message_id": "msg_1"}
    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.create(
            model="local", max_tokens=20, stream=stream,
            messages=[{"role": "user", "content": "And?"}],
            extra_body={"thread": following},
        )  # fmt: skip
    assert refused.value.body["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": [],
    }
    assert not switch.prompts


def test_tokens_of_a_thread_are_not_counted(scripted_sidecar: App) -> None:
    """Nor are they those of the one message that was sent."""
    answer = httpx.post(
        f"{scripted_sidecar.url}/v1/messages/count_tokens",
        json={"model": "local", "messages": [{"role": "user", "content": "And?"}],
              "thread": {"type": "create"}},
    )  # fmt: skip
    assert answer.status_code == 400
    assert answer.json()["error"]["details"]["unsupported"] == []
