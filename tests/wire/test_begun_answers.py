"""An answer that the client began, gone on with through the proxy, by real SDKs."""

from typing import Any

import openai
import pytest

from testkit.proxy import Proxy

HI: dict[str, Any] = {"role": "user", "content": "hi"}
BEGUN: dict[str, Any] = {"role": "assistant", "content": "Hello! I am the built-in"}
REST = " demo model of the MLX sidecar. How can I help you?"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_messages_goes_on_with_a_last_answer(
    proxy: Proxy, *, is_streamed: bool
) -> None:
    asked: dict[str, Any] = {"model": "builtin", "max_tokens": 40}
    asked["messages"] = [HI, BEGUN]
    if is_streamed:
        with proxy.anthropic.messages.stream(**asked) as stream:
            text = "".join(stream.text_stream)
    else:
        (block,) = proxy.anthropic.messages.create(**asked).content
        text = block.text
    assert text == REST


@pytest.mark.parametrize(
    ("last", "extra"),
    [(BEGUN, {"continue_final_message": True}), ({**BEGUN, "prefix": True}, {})],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_chat_goes_on_with_it_where_that_is_asked_for(
    proxy: Proxy, last: Any, extra: dict[str, Any], *, is_streamed: bool
) -> None:
    asked: dict[str, Any] = {"model": "builtin", "max_tokens": 40, "extra_body": extra}
    asked["messages"] = [HI, last]
    if is_streamed:
        chunks = proxy.openai.chat.completions.create(**asked, stream=True)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    else:
        answer = proxy.openai.chat.completions.create(**asked).choices[0].message
        assert not getattr(answer, "reasoning_content", None)
        text = answer.content
    assert text == REST


def test_what_cannot_be_gone_on_with_is_a_400(proxy: Proxy) -> None:
    with pytest.raises(openai.BadRequestError, match="continue_final_message"):
        proxy.openai.chat.completions.create(
            model="builtin",
            messages=[HI],
            extra_body={"continue_final_message": True},
        )
