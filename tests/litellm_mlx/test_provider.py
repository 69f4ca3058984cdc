"""Whole answers and streams on three routes, through the proxy."""

from typing import Any

import pytest

from tests.litellm_mlx.conftest import Proxy
from tests.litellm_mlx.fake_sidecar import FakeSidecar
from tests.litellm_mlx.proxy_client import (
    CALLS,
    HI,
    ROUTES,
    assert_usage,
    joined,
    post,
)
from tests.litellm_mlx.sidecar_answers import (
    DONE,
    USAGE,
    Json,
    Script,
    chunk,
    problem,
    rich_answer,
    tool_delta,
)


class TestChat:
    def test_a_stream_keeps_everything(self, proxy: Proxy) -> None:
        """Reasoning, text, both calls, one finish, and the sidecar's own counts."""
        stream = proxy.openai.chat.completions.create(
            model="mlx/chat",
            messages=HI,
            stream=True,
            stream_options={"include_usage": True},
        )
        got = joined(list(stream))
        assert got["text"] == "I will look."
        assert got["reasoning"] == "Let me think."
        assert got["calls"] == CALLS
        assert got["finishes"] == ["tool_calls"]
        assert got["num_usages"] == 1
        assert_usage(got["usage"])

    def test_a_whole_answer_keeps_everything(self, proxy: Proxy) -> None:
        """Nothing is lost on the way, usage details included."""
        answer = proxy.openai.chat.completions.create(model="mlx/chat", messages=HI)
        message: Any = answer.choices[0].message
        assert message.content == "I will look."
        assert message.reasoning_content == "Let me think."
        assert [call.id for call in message.tool_calls] == ["call_a", "call_b"]
        assert answer.choices[0].finish_reason == "tool_calls"
        assert_usage(answer.usage)

    def test_the_sidecar_is_called_as_agreed(
        self, proxy: Proxy, sidecar: FakeSidecar
    ) -> None:
        """Path, key, request id and the model without its prefix."""
        proxy.openai.chat.completions.create(model="mlx/org/agreed", messages=HI)
        call = sidecar.last_call("org/agreed")
        assert call.path == "/v1/chat/completions"
        assert call.headers["authorization"] == "Bearer sidecar-key"
        assert call.headers["x-request-id"] == call.call_id
        assert call.body["messages"] == HI
        assert call.body["stream"] is False
        assert not sidecar.is_cancelled("org/agreed")

    @pytest.mark.parametrize("route", ROUTES)
    def test_bodies_that_are_sent_on_come_with_key_and_id(
        self, proxy: Proxy, sidecar: FakeSidecar, route: str
    ) -> None:
        """LiteLLM's own transport knows neither; without an id no cancel finds it."""
        model = f"sent-on{route[3:6]}"
        post(proxy, route, f"native/{model}", stream=False)
        call = sidecar.last_call(model)
        assert call.path == route
        assert call.headers["authorization"] == "Bearer sidecar-key"
        assert call.call_id

    def test_headers_of_the_sidecar_reach_the_client(
        self, proxy: Proxy, sidecar: FakeSidecar
    ) -> None:
        """Under LiteLLM's prefix, and of a whole answer only."""
        headers = {"x-mlx-cached": "64", "x-secret": "no"}
        model = sidecar.on("headers", Script(headers=headers))
        body = {"model": f"mlx/{model}", "messages": HI}
        answer = proxy.http.post("/v1/chat/completions", json=body)
        assert answer.headers["llm_provider-x-mlx-cached"] == "64"
        assert "llm_provider-x-secret" not in answer.headers

    def test_two_choices_stream_side_by_side(
        self, proxy: Proxy, sidecar: FakeSidecar
    ) -> None:
        """With n=2 both texts, both finishes and the usage arrive."""
        steps = [
            chunk("two", {"content": "a"}),
            chunk("two", {"content": "b"}, index=1),
            chunk("two", {}, "stop"),
            chunk("two", {"content": "c"}, index=1),
            chunk("two", {}, "length", index=1),
            chunk("two", None, usage=USAGE),
            DONE,
        ]
        sidecar.on("two", Script(steps=list(steps)))
        stream = proxy.openai.chat.completions.create(
            model="mlx/two",
            messages=HI,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        choices = [choice for c in chunks for choice in c.choices]
        texts: Json = {0: "", 1: ""}
        for choice in choices:
            texts[choice.index] += choice.delta.content or ""
        finishes = {c.index: c.finish_reason for c in choices if c.finish_reason}
        assert texts == {0: "a", 1: "bc"}
        assert finishes == {0: "stop", 1: "length"}
        assert_usage(joined(chunks)["usage"])

    def test_a_raw_completion_is_one_at_the_sidecar(
        self, proxy: Proxy, sidecar: FakeSidecar
    ) -> None:
        """LiteLLM makes a chat of the prompts, a user message each."""
        for prompt in ("once", ["once", "twice"]):
            proxy.openai.completions.create(model="mlx/raw", prompt=prompt, echo=True)
            call = sidecar.last_call("raw")
            assert call.path == "/v1/completions"
            assert call.body["prompt"] == prompt
            assert call.body["echo"] is True
            assert "messages" not in call.body


class TestMessages:
    def test_a_stream_keeps_everything(self, proxy: Proxy) -> None:
        """Blocks in order, cached tokens told apart, stop reason tool_use."""
        with proxy.anthropic.messages.stream(
            model="mlx/messages", max_tokens=99, messages=HI
        ) as stream:
            message = stream.get_final_message()
        self.check(message)

    def test_a_whole_answer_keeps_everything(self, proxy: Proxy) -> None:
        """The same content as streamed."""
        create = proxy.anthropic.messages.create
        self.check(create(model="mlx/messages", max_tokens=99, messages=HI))

    def check(self, message: Any) -> None:
        types = [block.type for block in message.content]
        assert types == ["thinking", "text", "tool_use", "tool_use"]
        assert message.content[0].thinking == "Let me think."
        assert message.content[1].text == "I will look."
        assert message.content[3].input == {"tz": "CET"}
        assert message.stop_reason == "tool_use"
        assert message.usage.input_tokens == 36
        assert message.usage.cache_read_input_tokens == 64
        assert message.usage.output_tokens == 20

    def test_keepalives_do_not_cut_blocks(
        self, proxy: Proxy, sidecar: FakeSidecar
    ) -> None:
        """LiteLLM takes an empty delta for text: it would end the thinking block."""
        model, empty = "alive", chunk("alive", {})
        answer = rich_answer(model)
        steps = [step for pair in zip(answer, [empty] * 9) for step in pair]  # noqa: B905
        sidecar.on(model, Script(steps=[*steps, answer[-1]]))
        create = proxy.anthropic.messages.create
        stream = create(model="mlx/alive", max_tokens=9, messages=HI, stream=True)
        starts = [e for e in stream if e.type == "content_block_start"]
        types = [start.content_block.type for start in starts]
        assert types == ["thinking", "text", "tool_use", "tool_use"]


class TestResponses:
    def test_a_stream_keeps_everything(self, proxy: Proxy) -> None:
        """Reasoning, message, both calls and the counts."""
        create = proxy.openai.responses.create
        events = list(create(model="mlx/responses", input="hi", stream=True))
        assert events[-1].type == "response.completed"
        self.check(events[-1].response)

    def test_a_whole_answer_keeps_everything(self, proxy: Proxy) -> None:
        """The same content as streamed."""
        self.check(proxy.openai.responses.create(model="mlx/responses", input="hi"))

    def check(self, response: Any) -> None:
        types = [item.type for item in response.output]
        assert types == ["reasoning", "message", "function_call", "function_call"]
        assert response.output_text == "I will look."
        assert response.output[3].arguments == '{"tz":"CET"}'
        assert response.usage.input_tokens == 100
        assert response.usage.input_tokens_details.cached_tokens == 64
        assert response.usage.output_tokens_details.reasoning_tokens == 7


class TestEmbeddings:
    def test_they_are_forwarded_with_their_parameters(
        self, proxy: Proxy, sidecar: FakeSidecar
    ) -> None:
        """Dimensions and encoding_format pass without configuration."""
        vector = {"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}
        usage = {"prompt_tokens": 2, "total_tokens": 2}
        body = {"object": "list", "data": [vector], "model": "e", "usage": usage}
        sidecar.on("embed", Script(body=body))
        answer = proxy.openai.embeddings.create(
            model="mlx/embed", input=["a"], dimensions=2, encoding_format="float"
        )
        assert answer.data[0].embedding == [0.5, 0.25]
        assert answer.usage.prompt_tokens == 2
        sent = sidecar.last_call("embed")
        assert sent.path == "/v1/embeddings"
        assert sent.body["input"] == ["a"]
        assert sent.body["dimensions"] == 2
        assert sent.body["encoding_format"] == "float"

    def test_a_sidecar_that_cannot_says_so(
        self, proxy: Proxy, sidecar: FakeSidecar
    ) -> None:
        """501 stays 501, with the sidecar's words."""
        refusal = problem(501, "not_implemented", "no embedding engine here")
        sidecar.on("no-embed", refusal)
        body = {"model": "mlx/no-embed", "input": "a"}
        answer = proxy.http.post("/v1/embeddings", json=body)
        assert answer.status_code == 501
        assert "no embedding engine here" in answer.text


def test_tool_arguments_may_come_in_pieces(proxy: Proxy, sidecar: FakeSidecar) -> None:
    """The id comes once, the arguments are appended."""
    more = {"tool_calls": [{"index": 0, "function": {"arguments": '"x"}'}}]}
    steps = [chunk("cut", tool_delta(0, "c1", "f", '{"a":')), chunk("cut", more)]
    sidecar.on("cut", Script(steps=[*steps, chunk("cut", {}, "tool_calls"), DONE]))
    with proxy.anthropic.messages.stream(
        model="mlx/cut", max_tokens=9, messages=HI
    ) as stream:
        message: Any = stream.get_final_message()
    assert [block.input for block in message.content] == [{"a": "x"}]
