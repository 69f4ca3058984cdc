"""What clients see when the sidecar cannot, and who takes over."""

from typing import Any

import anthropic
import openai
import pytest

from tests.litellm_mlx.conftest import Proxy
from tests.litellm_mlx.fake_sidecar import FakeSidecar
from tests.litellm_mlx.proxy_client import (
    CHAT,
    HI,
    MESSAGES,
    RESPONSES,
    ROUTES,
    both_modes,
    post,
)
from tests.litellm_mlx.sidecar_answers import (
    DONE,
    Json,
    Script,
    chunk,
    problem,
    text_answer,
)

# What the sidecar says, what the client gets.
REFUSALS = [
    (400, "invalid_request", 400),
    (400, "context_length_exceeded", 400),
    (401, "unauthorized", 401),
    (403, "forbidden", 403),
    (404, "model_not_found", 404),
    (408, "request_timeout", 408),
    (413, "payload_too_large", 400),
    (422, "validation_error", 400),
    (429, "rate_limited", 429),
    (429, "rate_limit_exceeded", 429),
    (500, "internal_error", 500),
    (500, "model_load_failed", 500),
    (501, "not_implemented", 501),
    (503, "service_unavailable", 503),
]


REFUSED = (400, 401, 403, 404, 413, 422, 501)


@both_modes
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("status", "code", "seen"), REFUSALS)
def test_a_refusal_keeps_its_status_and_words(
    proxy: Proxy,
    sidecar: FakeSidecar,
    route: str,
    status: int,
    code: str,
    seen: int,
    stream: bool,
) -> None:
    """Streams too, on every route: the call is opened before headers are sent."""
    refusal = problem(status, code, f"because of {code}", retry_after="7")
    model = sidecar.on(f"refuse-{code}", refusal)
    before = len(sidecar.calls_for(model))
    answer = post(proxy, route, f"mlx/{model}", stream=stream)
    assert answer.status_code == seen
    assert f"because of {code}" in answer.text
    # Nobody waits for Retry-After to ask again: the router has the answer at once.
    assert len(sidecar.calls_for(model)) == before + 1
    assert not sidecar.is_cancelled(model)


@both_modes
@pytest.mark.parametrize("model", ["dead", "native-dead"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_sidecar_that_is_down(
    proxy: Proxy, route: str, model: str, stream: bool
) -> None:
    """503, which the router can cool down and fall back from."""
    answer = post(proxy, route, model, stream=stream)
    assert answer.status_code == 503
    assert "sidecar is not reachable" in answer.text


@pytest.mark.parametrize("prompt", [[[]], [], [7] * 50_000, [[7]], {}, 3, ["a", 3]])
def test_a_prompt_that_is_no_text_is_400(proxy: Proxy, prompt: object) -> None:
    """LiteLLM makes chats of texts only, and repeats all else in a 500."""
    body = {"model": "mlx/x", "prompt": prompt}
    answer = proxy.http.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert len(answer.text) < 2_000


class TestBrokenStreams:
    """After the first chunk the status is gone; the error comes inside the stream."""

    START = chunk("x", {"role": "assistant", "content": "so far"})
    FRAME: Json = {"error": {"message": "ran dry", "code": "generation_error"}}
    WAYS = [
        ("death", Script(steps=[START], is_cut=True), "broke off its answer"),
        ("early end", Script(steps=[START]), "without a finish_reason"),
        ("DONE without finish", Script(steps=[START, DONE]), "without a finish_reason"),
        ("error frame", Script(steps=[START, FRAME]), "ran dry"),
        ("garbage", Script(steps=[START, b"data: {x\n\n"]), "unreadable chunk"),
    ]

    @pytest.fixture(params=WAYS, ids=[way[0] for way in WAYS])
    def broken(self, request: Any, sidecar: FakeSidecar) -> tuple[str, str]:
        """A model whose stream breaks, and what must be said about it."""
        name, script, text = request.param
        return sidecar.on(f"break-{name.replace(' ', '-')}", script), text

    def test_chat(self, proxy: Proxy, broken: tuple[str, str]) -> None:
        """An error chunk, no DONE; the client's library raises."""
        model, text = broken
        raw = post(proxy, CHAT, f"mlx/{model}", stream=True).text
        assert "so far" in raw
        assert text in raw
        assert "[DONE]" not in raw
        create = proxy.openai.chat.completions.create
        stream = create(model=f"mlx/{model}", messages=HI, stream=True)
        with pytest.raises(openai.APIError, match=text):
            list(stream)

    def test_messages(self, proxy: Proxy, broken: tuple[str, str]) -> None:
        """An error event, no message_stop; the client's library raises."""
        model, text = broken
        raw = post(proxy, MESSAGES, f"mlx/{model}", stream=True).text
        assert "so far" in raw
        assert "event: error" in raw
        assert "message_stop" not in raw
        create = proxy.anthropic.messages.create
        stream = create(model=f"mlx/{model}", messages=HI, max_tokens=9, stream=True)
        with pytest.raises(anthropic.APIError, match=text):
            list(stream)

    def test_responses(self, proxy: Proxy, broken: tuple[str, str]) -> None:
        """Not reported as completed."""
        model, text = broken
        raw = post(proxy, RESPONSES, f"mlx/{model}", stream=True).text
        assert text in raw
        assert "response.completed" not in raw

    def test_a_whole_answer_that_is_none(
        self, proxy: Proxy, sidecar: FakeSidecar
    ) -> None:
        """A 200 that holds no completion is a failure of the sidecar."""
        model = sidecar.on("hollow", Script(body={"object": "nothing"}))
        answer = post(proxy, CHAT, f"mlx/{model}", stream=False)
        assert answer.status_code == 500
        assert "without choices" in answer.text


class TestFallback:
    """`fb-*` are deployments with `cloud` as their fallback."""

    FAILING = {
        "fb-503": problem(503, "service_unavailable", "loading", retry_after="7"),
        "fb-429": problem(429, "rate_limited", "queue is full", retry_after="7"),
        "fb-context": problem(400, "context_length_exceeded", "too long"),
        "fb-dead": None,
    }

    @both_modes
    @pytest.mark.parametrize("route", [CHAT, MESSAGES])
    @pytest.mark.parametrize("model", FAILING)
    def test_the_cloud_answers(
        self, proxy: Proxy, sidecar: FakeSidecar, model: str, route: str, stream: bool
    ) -> None:
        """Down, busy or too long: whole and streamed, on both routes."""
        script = self.FAILING[model]
        if script is not None:
            sidecar.on(model, script)
        before = len(sidecar.calls_for(model))
        answer = post(proxy, route, model, stream=stream)
        assert answer.status_code == 200, answer.text
        assert "from the cloud" in answer.text
        tried = len(sidecar.calls_for(model)) - before
        assert tried == (script is not None), "Retry-After is not waited for"

    @both_modes
    @pytest.mark.parametrize("route", ROUTES)
    @pytest.mark.parametrize(
        ("status", "code"),
        [
            (status, code)
            for status, code, _ in REFUSALS
            if (status in REFUSED and code != "context_length_exceeded")
            or code == "rate_limit_exceeded"
        ],
    )
    def test_what_was_refused_stays_here(
        self, proxy: Proxy, sidecar: FakeSidecar, cloud: FakeSidecar,
        route: str, status: int, code: str, stream: bool,
    ) -> None:  # fmt: skip
        """A picture that the local model cannot see is not for the cloud to see."""
        sidecar.on("fb-lost", problem(status, code, f"because of {code}"))
        num_calls = len(cloud.calls)
        answer = post(proxy, route, "fb-lost", stream=stream)
        assert answer.status_code >= 400
        assert f"because of {code}" in answer.text
        assert len(cloud.calls) == num_calls

    @pytest.mark.parametrize(
        ("status", "code"),
        [(401, "unauthorized"), (404, "model_not_found"), (408, "request_timeout"),
         (429, "rate_limited"), (429, "rate_limit_exceeded")],
    )  # fmt: skip
    def test_what_one_client_was_refused_is_nothing_to_the_others(
        self, proxy: Proxy, sidecar: FakeSidecar, status: int, code: str
    ) -> None:
        """LiteLLM would shut the model out for all: their chats went to the cloud."""
        model = sidecar.on("fb-lost", problem(status, code, "not you"))
        post(proxy, CHAT, model, stream=False)
        sidecar.on("fb-lost", Script(steps=text_answer(model, "from here")))
        for _ in range(3):
            assert "from here" in post(proxy, CHAT, model, stream=True).text

    @pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/responses/compact"])
    def test_what_no_local_model_serves_stays_here(
        self, proxy: Proxy, cloud: FakeSidecar, path: str
    ) -> None:
        num_calls = len(cloud.calls)
        body = {"model": "fb-lost", "input": "hi", "voice": "alloy"}
        answer = proxy.http.post(path, json=body)
        assert answer.status_code >= 400
        assert len(cloud.calls) == num_calls

    @both_modes
    @pytest.mark.parametrize("route", [MESSAGES, RESPONSES])
    @pytest.mark.parametrize(
        ("status", "code"),
        [(400, "invalid_request"), (401, "unauthorized"),
         (429, "rate_limit_exceeded")],
    )  # fmt: skip
    def test_it_stays_where_bodies_are_sent_on_as_they_are(
        self, proxy: Proxy, sidecar: FakeSidecar, cloud: FakeSidecar,
        route: str, status: int, code: str, stream: bool,
    ) -> None:  # fmt: skip
        """LiteLLM reads the sidecar's answer itself there."""
        sidecar.on("fb-native", problem(status, code, f"because of {code}"))
        num_calls = len(cloud.calls)
        answer = post(proxy, route, "fb-native", stream=stream)
        assert answer.status_code == status
        assert len(cloud.calls) == num_calls

    @both_modes
    @pytest.mark.parametrize(
        ("status", "code", "text"),
        [
            (400, "context_length_exceeded", "the prompt has 9 tokens"),
            (400, "invalid_request", "prompt is too long: 9 tokens"),
            (429, "rate_limited", "queue is full"),
            (503, "service_unavailable", "loading"),
        ],
    )
    def test_all_else_falls_back_there_too(
        self, proxy: Proxy, sidecar: FakeSidecar, status: int, code: str, text: str,
        stream: bool,
    ) -> None:  # fmt: skip
        """As Messages and Responses say that a prompt is too long."""
        sidecar.on("fb-native", problem(status, code, text))
        answer = post(proxy, MESSAGES, "fb-native", stream=stream)
        assert answer.status_code == 200, answer.text
        assert "from the cloud" in answer.text

    def test_a_late_refusal_still_falls_back(
        self, proxy: Proxy, sidecar: FakeSidecar
    ) -> None:
        """Behind the eager wait, LiteLLM's own first-chunk fallback is left."""
        refusal = problem(503, "service_unavailable", "still loading")
        refusal.wait_s = 2.3
        sidecar.on("fb-late", refusal)
        answer = post(proxy, CHAT, "fb-late", stream=True)
        assert answer.status_code == 200
        assert "from the cloud" in answer.text

    def test_no_fallback_after_the_first_words(
        self, proxy: Proxy, sidecar: FakeSidecar, cloud: FakeSidecar
    ) -> None:
        """Two models in one answer would be worse than an error."""
        words = chunk("x", {"role": "assistant", "content": "local words"})
        sidecar.on("fb-503", Script(steps=[words], is_cut=True))
        num_calls = len(cloud.calls)
        answer = post(proxy, CHAT, "fb-503", stream=True)
        assert "local words" in answer.text
        assert "broke off its answer" in answer.text
        assert len(cloud.calls) == num_calls
