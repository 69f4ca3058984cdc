"""LiteLLM's call to the sidecar's body."""

import json
from typing import Any

import httpx
import litellm
import pytest

from litellm_mlx.translate import embedding_call
from tests.litellm_mlx.provider_calls import SETTINGS, body_with, call_with, proxied


class TestBody:
    def test_parameters_are_forwarded_but_transport_matters_are_not(self) -> None:
        """What LiteLLM needs for itself stays away; unknown keys go along."""
        params = {"top_k": 4, "max_retries": 0, "stream": True, "extra_headers": {}}
        body = body_with(params | {"anything": [1], "stop": None})
        assert body["top_k"] == 4
        assert body["anything"] == [1]
        assert not body.keys() & {"max_retries", "extra_headers", "stop"}

    def test_usage_is_always_asked_for_in_streams(self) -> None:
        """LiteLLM logs usage even if the client did not ask for it."""
        params = {"stream_options": {"include_usage": False, "other": 1}}
        assert body_with(params)["stream_options"] == {
            "include_usage": True,
            "other": 1,
        }
        assert "stream_options" not in body_with(params, stream=False)
        assert body_with(params, stream=False)["stream"] is False

    def test_extra_body_is_flattened_without_touching_what_is_ours(self) -> None:
        """A literal extra_body means the same as its fields."""
        extra = {"enable_thinking": False, "messages": [], "stream": 3, "x_mlx": 1}
        body = body_with({"extra_body": extra, "top_k": 1})
        assert body["enable_thinking"] is False
        assert body["messages"] == [{"role": "user", "content": "hi"}]
        assert body["stream"] is True
        assert body["x_mlx"] == {}

    def test_it_does_not_change_its_input(self) -> None:
        """LiteLLM keeps using its dicts for retries and logs."""
        params = {"stream": True, "extra_body": {"a": 1}, "stop": None}
        before = json.dumps(params)
        call_with(params, {"metadata": {"a": 1}})
        assert json.dumps(params) == before

    def test_lone_surrogates_and_big_integers_are_sent(self) -> None:
        """What JSON can say goes through, even if orjson cannot say it."""
        messages = [{"role": "user", "content": "half \ud83d"}]
        body = body_with({"seed": 2**70}, messages=messages)
        assert body["messages"] == messages
        assert body["seed"] == 2**70

    def test_litellm_messages_are_plain_on_the_wire(self) -> None:
        """SDK callers echo the answer object itself."""
        message = litellm.Message(content="yes", role="assistant")
        sent = body_with(messages=[message])["messages"][0]
        assert sent["content"] == "yes"
        assert sent["role"] == "assistant"

    def test_metadata_is_the_clients_own(self) -> None:
        """In the SDK LiteLLM's additions are taken out again."""
        ours = {"k": "v", "model_group": "g", "user_api_key_hash": "h", "headers": {}}
        assert body_with({}, {"metadata": ours})["metadata"] == {"k": "v"}
        asked = {"requester_metadata": {"k": "v", "headers": {"a": "b"}}}
        assert body_with({}, {"metadata": asked})["metadata"] == {"k": "v"}
        assert "metadata" not in body_with({}, {"metadata": {"model_group": "g"}})


class TestPlaceAndTime:
    @pytest.mark.parametrize("base", ["http://h:1/v1", "http://h:1/v1/", "http://h:1"])
    def test_urls(self, base: str) -> None:
        """A base without /v1 works too; cancel is always below /v1."""
        call = call_with(api_base=base)
        assert call.url == base.rstrip("/") + "/chat/completions"
        assert call.cancel_url == f"http://h:1/v1/cancel/{call.call_id}"

    def test_the_default_place_and_key_come_from_the_settings(self) -> None:
        """A deployment's own key goes before the environment's."""
        call = call_with()
        assert call.url == "http://127.0.0.1:8080/v1/chat/completions"
        assert call.headers["Authorization"] == "Bearer k"
        assert call_with(api_key="d").headers["Authorization"] == "Bearer d"

    def test_each_attempt_has_an_id_of_its_own(self) -> None:
        """Retries share LiteLLM's id, and a client may have chosen it."""
        params = {"litellm_call_id": "a/b c\r\n" + "x" * 200}
        first, second = call_with({}, params), call_with({}, params)
        assert first.call_id != second.call_id
        assert first.call_id.startswith("a_b_c_xx")
        assert len(first.call_id) < 100
        assert first.headers["X-Request-ID"] == first.call_id

    @pytest.mark.parametrize(
        ("timeout", "expected"),
        [(None, 1200), (9.0, 9), (6000.0, 1200), (httpx.Timeout(7), 7)],
    )
    def test_the_shorter_time_limit_counts(self, timeout: Any, expected: float) -> None:
        """LiteLLM's default of 6000 s does not beat the setting."""
        assert call_with(timeout=timeout).read_timeout_s == expected

    def test_embeddings(self) -> None:
        """Embedding calls carry their parameters flat."""
        call = {"model": "e", "input": ["a"], "optional_params": {"dimensions": 3}}
        sent = embedding_call(call, SETTINGS)
        assert sent.url.endswith("/v1/embeddings")
        body = json.loads(sent.content)
        assert body == {"model": "e", "input": ["a"], "dimensions": 3}


class TestPrivateBlock:
    def test_who_asks_and_what_translation_loses(self) -> None:
        """The exact budget and the client's own effort word."""
        body = {
            "messages": [{"role": "user", "content": "plain"}],
            "thinking": {"type": "enabled", "budget_tokens": 2048},
            "output_config": {"effort": "high"},
        }
        client = proxied("/v1/messages?beta=true", body, user_agent="cli")
        params = {"reasoning_effort": "medium"}
        block = body_with(params, client | {"litellm_session_id": "s"})["x_mlx"]
        assert block == {
            "session": "s",
            "thinking": {"type": "enabled", "budget_tokens": 2048},
            "effort": "high",
            "user_agent": "cli",
        }

    @pytest.mark.parametrize(
        ("url", "dialect"),
        [
            ("/v1/chat/completions", "chat"),
            ("/chat/completions/", "chat"),
            ("/v1/messages?beta=true", "messages"),
            ("/v1/responses", "responses"),
            ("/v1/completions", "completions"),
            ("/engines/m/other", "chat"),
        ],
    )
    def test_the_route_tells_the_dialect(self, url: str, dialect: str) -> None:
        """The url is the only place that says which dialect the body is."""
        call = call_with({}, proxied(url, {"a": 1}))
        assert call.can_take_empty is (dialect == "chat")

    def test_effort_by_dialect(self) -> None:
        """The client's word, wherever its dialect puts it."""
        effort = {"effort": "xhigh"}
        for body in ({"reasoning": effort}, {"reasoning_effort": "xhigh"}):
            block = body_with({}, proxied("/v1/responses", body))["x_mlx"]
            assert block["effort"] == "xhigh"
        assert body_with({"reasoning_effort": "xhigh"})["x_mlx"]["effort"] == "xhigh"

    def test_strange_bodies_do_no_harm(self) -> None:
        """The client's own body was never checked by anyone."""
        strange = {"messages": [None, 3, {"content": [None, "x"]}], "tools": {"a": 1}}
        for body in (strange, {"system": "s", "tool_choice": "auto"}, {"text": "x"}):
            assert body_with({}, proxied("/v1/messages", body))["x_mlx"] == {}
