"""What the real proxy refuses: told as the client reads it, and sent to nobody else."""

import base64
import functools
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from PIL import Image

from sidecar.app import App
from testkit.cloud import Cloud, cloud_config, running_cloud
from testkit.proxy import Proxy, running_proxy
from testkit.raw_http import eventually
from testkit.servers import held_gpu, metric

HI: list[Any] = [{"role": "user", "content": "hi"}]
GOOGLE = "/v1beta/models/local:generateContent"


@pytest.fixture(scope="module")
def cloud() -> Iterator[Cloud]:
    """Whatever comes here was paid for."""
    with running_cloud() as cloud:
        yield cloud


@pytest.fixture(scope="module")
def paid(
    app: App, cloud: Cloud, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Proxy]:
    """A proxy whose local model falls back to a cloud."""
    own = cloud_config(cloud)
    own["router_settings"] = {"fallbacks": [{"local": ["cloud"]}]}
    with running_proxy(app.url, tmp_path_factory.mktemp("paid"), own=own) as proxy:
        yield proxy


def png() -> str:
    """A small picture in base64."""
    file = io.BytesIO()
    Image.new("RGB", (2, 2)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def user(*parts: Any) -> dict[str, Any]:
    return {"contents": [{"role": "user", "parts": list(parts)}]}


def post_google(proxy: Proxy, body: Any, path: str = GOOGLE) -> httpx.Response:
    return proxy.http.post(path, json=body, headers={"x-goog-api-key": "any"})


@pytest.mark.parametrize("verb", ["generateContent", "streamGenerateContent?alt=sse"])
def test_googles_newer_clients_ask_under_v1(paid: Proxy, verb: str) -> None:
    """google-genai 3.4 (Python) and 3.1 (JS) do; it was 405."""
    body = user({"text": "hi"})
    old, new = (
        post_google(paid, body, f"/{at}/models/local:{verb}") for at in ("v1beta", "v1")
    )
    assert (old.status_code, new.status_code) == (200, 200)
    assert '"candidates"' in new.text
    assert "SPENT" not in new.text


REFUSED: list[tuple[str, Any]] = [
    ("max", {**user({"text": "hi"}), "generationConfig": {"maxOutputTokens": -5}}),
    ("role", {"contents": [{"role": "bogus", "parts": [{"text": "hi"}]}]}),
    ("parts", {"contents": [{"role": "user", "parts": 5}]}),
    ("part", user({"bogus": "hi"})),
    ("number", user(5)),
    ("text", user({"text": 5})),
    ("inlineData", user({"text": "hi"}, {"inlineData": 5})),
    ("mime", user({"inlineData": {"mimeType": "audio/wav", "data": "AAAA"}})),
    ("file", user({"fileData": {"fileUri": "gs://x"}})),
    ("picture", user({"inlineData": {"mimeType": "image/png", "data": png()}})),
    ("older", user({"inline_data": {"mime_type": "image/png", "data": png()}})),
    ("system", {**user({"text": "hi"}), "systemInstruction": 5}),
    ("config", {**user({"text": "hi"}), "generationConfig": 5}),
    ("tools", {**user({"text": "hi"}), "tools": [{"functionDeclarations": 5}]}),
    ("choice", {**user({"text": "hi"}), "toolConfig": 5}),
    ("cached", {**user({"text": "hi"}), "cachedContent": "cachedContents/abc"}),
    ("search", {**user({"text": "hi"}), "tools": [{"googleSearch": {}}]}),
    ("null", {**user({"text": "hi"}), "toolConfig": {"functionCallingConfig": []}}),
    (
        "mode",
        {**user({"text": "hi"}), "toolConfig": {"functionCallingConfig": {"mode": []}}},
    ),
    (
        "level",
        {
            **user({"text": "hi"}),
            "generationConfig": {"thinkingConfig": {"thinkingLevel": "x"}},
        },
    ),
    (
        "budget",
        {
            **user({"text": "hi"}),
            "generationConfig": {"thinkingConfig": {"thinkingBudget": "1"}},
        },
    ),
    ("two", {**user({"text": "hi"}), "generationConfig": {"candidateCount": 2}}),
]


@pytest.mark.parametrize("body", [b for _, b in REFUSED], ids=[n for n, _ in REFUSED])
def test_what_is_refused_on_googles_route_is_not_paid_for(
    paid: Proxy, cloud: Cloud, body: Any
) -> None:
    """In Google's shape; the cloud was asked, or a picture dropped with 200."""
    before = len(cloud.asked)
    for path in (GOOGLE, "/v1/models/local:streamGenerateContent?alt=sse"):
        answer = post_google(paid, body, path)
        error = answer.json()["error"]
        assert answer.status_code in (400, 422), answer.text
        assert (error["code"], error["status"]) == (
            answer.status_code, "INVALID_ARGUMENT",
        )  # fmt: skip
        assert "{" not in error["message"]
    assert len(cloud.asked) == before


def test_what_is_down_or_too_slow_on_googles_route_still_falls_back(
    paid: Proxy, cloud: Cloud
) -> None:
    body = {**user({"text": "Tell me more."}), "mlx_max_ttft_s": 0.001}
    before = len(cloud.asked)
    assert "SPENT" in post_google(paid, body).text
    assert len(cloud.asked) == before + 1


def test_an_answer_that_breaks_off_is_not_gone_on_with_elsewhere(
    app: App, paid: Proxy, cloud: Cloud
) -> None:
    """Of Responses LiteLLM sent prompt and half answer to the cloud."""
    before = len(cloud.asked)
    body = {
        "model": "local",
        "input": "tell",
        "stream": True,
        "max_output_tokens": 20_000,
        "logit_bias": {"5": 100},
    }
    with paid.http.stream("POST", "/v1/responses", json=body) as answer:
        lines = answer.iter_lines()
        next(line for line in lines if ".delta" in line)
        app.core.services.chat.stop()
        rest = "\n".join(lines)
    assert "shutting down" in rest
    assert "response.completed" not in rest
    assert len(cloud.asked) == before


def test_a_response_that_has_not_begun_falls_back(
    app: App, paid: Proxy, cloud: Cloud
) -> None:
    """Its client knows no more than that it was taken."""
    before = len(cloud.asked)
    body = {"model": "local", "input": "tell", "stream": True}
    with held_gpu(app) as go:
        with paid.http.stream("POST", "/v1/responses", json=body) as answer:
            assert eventually(lambda: metric(app, "mlx_active_requests") > 0)
            app.core.services.chat.stop()
            answer.read()
        go.set()
    assert len(cloud.asked) > before


def test_a_response_is_cancelled_by_the_id_that_its_client_sees(
    app: App, paid: Proxy
) -> None:
    """LiteLLM wraps the sidecar's own id in one of its own."""
    body = {"model": "local", "input": "tell", "stream": True,
            "max_output_tokens": 20_000, "logit_bias": {"5": 100}}  # fmt: skip
    with paid.http.stream("POST", "/v1/responses", json=body) as answer:
        lines = answer.iter_lines()
        first = next(line for line in lines if '"response.created"' in line)
        name = json.loads(first.removeprefix("data: "))["response"]["id"]
        next(line for line in lines if ".delta" in line)
        told = httpx.post(f"{app.url}/v1/cancel/{name}", timeout=60).json()
        rest = "\n".join(lines)
    assert told == {"cancelled": True, "id": name}
    assert "response.completed" not in rest


def test_a_key_in_the_query_is_one_on_googles_route_alone(
    app: App, tmp_path: Path
) -> None:
    """Elsewhere LiteLLM does not look there: it was a bare 500."""
    key = "sk-1234567890"
    own = {"general_settings": {"master_key": key}}
    with running_proxy(app.url, tmp_path, own=own) as proxy:
        ask = functools.partial(httpx.post, params={"key": key}, timeout=120)
        chatted = ask(f"{proxy.url}/v1/chat/completions", json=chat("hi"))
        assert chatted.status_code == 401
        assert chatted.json()["error"]["message"].startswith("a key is needed")
        google = ask(proxy.url + GOOGLE, json=user({"text": "hi"}))
        assert google.status_code == 200, google.text


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"functionDeclarations": None}]},
        {"toolConfig": {"functionCallingConfig": None}},
        {"toolConfig": None, "tools": None},
    ],
)
def test_null_is_as_good_as_no_field_on_googles_route(
    paid: Proxy, cloud: Cloud, more: Any
) -> None:
    """SDKs write it; LiteLLM fails at it, and would ask the cloud."""
    before = len(cloud.asked)
    answer = post_google(paid, {**user({"text": "hi"}), **more})
    assert answer.status_code == 200, answer.text
    assert len(cloud.asked) == before


@pytest.mark.parametrize("verb", ["generateContent", "streamGenerateContent?alt=sse"])
def test_what_is_asked_for_in_vain_on_googles_route_is_named(
    paid: Proxy, verb: str
) -> None:
    """In the header that the other routes have."""
    config = {
        "maxOutputTokens": 4,
        "topK": 3,
        "responseModalities": ["IMAGE"],
        "thinkingConfig": {"includeThoughts": True, "thinkingBudget": 1000},
    }
    asked = {"mode": "AUTO", "allowedFunctionNames": ["f"]}
    turns = [
        {
            "role": "user",
            "parts": [{"inlineData": {"mimeType": "image/png", "data": png()}}],
        },
        {"role": "model", "parts": [{"text": "A picture."}]},
        {"role": "user", "parts": [{"text": "hi"}]},
    ]
    body = {
        "contents": turns,
        "generationConfig": config,
        "toolConfig": {"functionCallingConfig": asked},
        "safetySettings": [{}],
    }
    answer = post_google(paid, body, f"/v1beta/models/local:{verb}")
    assert answer.status_code == 200, answer.text
    named = answer.headers["x-litellm-mlx-ignored"]
    calling = "toolConfig.functionCallingConfig"
    for name in (
        "safetySettings", "generationConfig.responseModalities",
        f"{calling}.allowedFunctionNames", "messages[0].content[0]",
        "generationConfig.thinkingConfig.includeThoughts",
    ):  # fmt: skip
        assert name in named, named
    for name in ("topK", "maxOutputTokens", "contents", "thinkingBudget"):
        assert name not in named
    plain = post_google(paid, user({"text": "hi"}))
    assert "x-litellm-mlx-ignored" not in plain.headers


FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "a type in capitals": ({"responseSchema": {"type": "INTEGER"}}, int),
    "null": (
        {"responseSchema": {"type": "STRING", "nullable": True, "enum": []}},
        type(None),
    ),
    "an array": (
        {"responseSchema": {"type": "ARRAY", "items": {"type": "BOOLEAN"},
                            "minItems": 1, "maxItems": 2}},
        list,
    ),
    "an object": (
        {"responseSchema": {
            "type": "OBJECT", "required": ["b", "a"],
            "properties": {"a": {"type": "BOOLEAN"},
                           "b": {"type": "STRING", "enum": ["x"], "nullable": True}},
            "propertyOrdering": ["b", "a"],
        }},
        dict,
    ),
    "no schema": ({}, dict),
}  # fmt: skip


@pytest.mark.parametrize("case", FORMS)
def test_a_form_is_kept_to_on_googles_route(paid: Proxy, case: str) -> None:
    """It is OpenAPI's there; nothing of it is named as ignored."""
    form, kind = FORMS[case]
    config = {"responseMimeType": "application/json", "maxOutputTokens": 300, **form}
    body = {**user({"text": "hi"}), "generationConfig": config}
    answer = post_google(paid, body)
    assert answer.status_code == 200, answer.text
    assert "x-litellm-mlx-ignored" not in answer.headers
    (candidate,) = answer.json()["candidates"]
    if candidate["finishReason"] == "STOP":
        value = json.loads("".join(p["text"] for p in candidate["content"]["parts"]))
        assert isinstance(value, kind)
    if kind is dict and form and candidate["finishReason"] == "STOP":
        assert [*value] == ["b", "a"]
        assert value["b"] in ("x", None)


def test_one_of_some_texts_and_one_function_on_googles_route(paid: Proxy) -> None:
    schema = {"type": "STRING", "enum": ["lamp", "desk"]}
    config = {"responseMimeType": "text/x.enum", "responseSchema": schema}
    answer = post_google(paid, {**user({"text": "hi"}), "generationConfig": config})
    (part,) = answer.json()["candidates"][0]["content"]["parts"]
    assert part["text"] in schema["enum"]
    at = {"type": "STRING", "enum": ["left"]}
    form = {"type": "OBJECT", "properties": {"at": at}, "required": ["at"]}
    named = [
        {"name": name, "description": "Look.", "parameters": form}
        for name in ("aa", "bb", "look")
    ]
    for allowed in ("aa", "bb", "look", "nope"):
        asked = {"mode": "ANY", "allowedFunctionNames": [allowed]}
        answer = post_google(
            paid,
            {
                **user({"text": "hi"}),
                "tools": [{"functionDeclarations": named}],
                "toolConfig": {"functionCallingConfig": asked},
            },
        )
        if allowed == "nope":
            assert answer.status_code == 400
            assert "nope" in answer.text
            continue
        parts = answer.json()["candidates"][0]["content"]["parts"]
        assert [part["functionCall"]["name"] for part in parts] == [allowed]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"responseSchema": True}, "responseSchema must be an object"),
        ({"responseJsonSchema": "x"}, "responseJsonSchema must be an object"),
        ({"responseSchema": "DEEP"}, "responseSchema is nested too deep"),
        ({"thinkingConfig": {"thinkingBudget": 1e16}}, ""),
        ({"thinkingConfig": {"thinkingBudget": 10**30}}, ""),
    ],
)
def test_odd_forms_and_budgets_of_googles_stay_here(
    paid: Proxy, config: dict[str, Any], said: str
) -> None:
    """Refused by name, or answered; a cloud is asked for none of it."""
    if config.get("responseSchema") == "DEEP":
        deep: dict[str, Any] = {"type": "STRING"}
        for _ in range(400):
            deep = {"type": "ARRAY", "items": deep}
        config = {"responseSchema": deep}
    body = {
        **user({"text": "hi"}),
        "generationConfig": {**config, "maxOutputTokens": 8},
    }
    answer = post_google(paid, body)
    assert answer.status_code == (400 if said else 200), answer.text
    assert said in answer.text


def test_names_that_are_ignored_make_no_header_of_their_own(paid: Proxy) -> None:
    """A client wrote them: no line ends, and not thousands."""
    odd = {"x\r\nset-cookie: a": 1, **{f"zork{at}": 1 for at in range(500)}}
    answer = post_google(paid, {**user({"text": "hi"}), **odd})
    assert answer.status_code == 200, answer.text
    named = answer.headers["x-litellm-mlx-ignored"].split(", ")
    assert (len(named), named[0]) == (32, "x??set-cookie??a")
    assert "set-cookie" not in answer.headers


def test_thinking_is_switched_off_on_googles_route(paid: Proxy) -> None:
    """A budget of 0 had no effect, and was not named."""
    for config, thinks in (({}, True), ({"thinkingBudget": 0}, False)):
        body = {**user({"text": "Who are you?"})}
        body["generationConfig"] = {"thinkingConfig": config}
        usage = post_google(paid, body).json()["usageMetadata"]
        assert bool(usage.get("thoughtsTokenCount")) is thinks


@pytest.mark.parametrize("number", [5, 17])
def test_all_stop_strings_count(paid: Proxy, number: int) -> None:
    """LiteLLM passes on the first four of a list, and says nothing."""
    stops = [f"zz{at}" for at in range(number - 1)] + ["demo"]
    who: list[Any] = [{"role": "user", "content": "Who are you?"}]
    chat = paid.openai.chat.completions.create(
        model="local", messages=who, stop=stops, extra_body={"enable_thinking": False}
    )
    assert chat.choices[0].message.content == "I am the built-in"
    config = {"stopSequences": stops, "thinkingConfig": {"thinkingBudget": 0}}
    asked = user({"text": "Who are you?"})
    told = post_google(paid, {**asked, "generationConfig": config}).json()
    assert told["candidates"][0]["content"]["parts"][0]["text"] == "I am the built-in"


def test_all_that_a_configuration_of_googles_says_is_told(
    paid: Proxy,
) -> None:
    """LiteLLM leaves out `topK` and `seed`: the sidecar says that it has read them."""
    for name, value in (("topK", "x"), ("seed", "x"), ("presencePenalty", 1000)):
        body = {**user({"text": "hi"}), "generationConfig": {name: value}}
        assert post_google(paid, body).status_code in (400, 422), name


def test_a_refusal_is_no_json_in_a_string(paid: Proxy) -> None:
    """With its type, field and code; it was `MlxException - {"type": ...}`."""
    with pytest.raises(anthropic.APIStatusError) as refused:
        paid.anthropic.messages.create(model="local", max_tokens=-5, messages=HI)
    error: Any = refused.value.body
    assert error["error"] == {
        "type": "invalid_request_error",
        "message": "max_tokens must be 1..2147483648, got -5",
    }
    with pytest.raises(openai.APIStatusError) as failed:
        paid.openai.responses.create(model="local", input="hi", temperature=-5)
    body: Any = failed.value.body
    assert body["message"].startswith("temperature must be ")
    assert (body["param"], body["code"]) == ("temperature", "validation_error")


def chat(content: Any) -> dict[str, Any]:
    return {"model": "local", "messages": [{"role": "user", "content": content}]}


def call(value: Any) -> dict[str, Any]:
    said = {"role": "assistant", "content": "", "tool_calls": value}
    return {"model": "local", "messages": [*HI, said]}


CHAT = "/v1/chat/completions"
COUNT = "/v1beta/models/local:countTokens"
STUMBLED: list[tuple[str, str, Any, str]] = [
    ("content", CHAT, chat(5), "messages[0].content"),
    ("part", CHAT, chat([5]), "messages[0].content[0]"),
    ("kind", CHAT, chat([{"type": "bogus"}]), "messages[0].content[0].type"),
    ("role", CHAT, {"model": "local", "messages": [{}]}, "messages[0].role"),
    ("calls", CHAT, call(5), "messages[1].tool_calls"),
    ("call", CHAT, call([5]), "messages[1].tool_calls"),
    ("function", CHAT, call([{"function": 5}]), "messages[1].tool_calls"),
    (
        "picture",
        CHAT,
        chat([{"type": "input_image", "image_url": f"data:image/png;base64,{png()}"}]),
        "messages[0].content[0]",
    ),
    ("model", "/v1/messages/count_tokens", {"model": 5, "messages": HI}, "model"),
    ("user", "/v1/messages", {"model": "local", "max_tokens": 2, "messages": HI,
     "metadata": {"user_id": 5}}, "user_id"),
    ("user of a chat", CHAT, {**chat("hi"), "user": ["me"]}, "user"),
    ("count", COUNT, {"contents": [{"parts": 5}]}, "contents"),
    ("counted", COUNT, {"contents": [{"parts": [{"text": [5]}]}]}, "contents"),
    ("mixed", "/v1/embeddings", {"model": "local", "input": [[5], "b"]}, "input"),
    ("drawing", "/v1/images/generations", {"model": "local", "prompt": [5]}, "prompt"),
    ("document", "/v1/rerank", {"model": "local", "query": "x", "documents": [5]},
     "documents"),
    ("documents", "/v2/rerank", {"model": "local", "query": "x", "documents": 5},
     "documents"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "param"), [s[1:] for s in STUMBLED], ids=[s[0] for s in STUMBLED]
)
def test_what_litellm_stumbled_over_is_400_and_named(
    paid: Proxy, cloud: Cloud, path: str, body: Any, param: str
) -> None:
    """It was 500, and went to the cloud."""
    before = len(cloud.asked)
    answer = paid.http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    assert param in answer.json()["error"]["message"]
    assert len(cloud.asked) == before


def test_a_refusal_is_one_line_in_the_log(paid: Proxy) -> None:
    """It was sixty, of LiteLLM's own code."""
    bodies = [
        ("/v1/rerank", {"model": "local", "query": "x", "documents": ["y"]}),
        ("/v1/audio/speech", {"model": "local", "input": "x", "voice": "a"}),
        ("/v1/images/generations", {"model": "local", "prompt": "x"}),
        (CHAT, {**chat("hi"), "max_tokens": -5}),
        ("/v1/messages", {"model": "local", "max_tokens": -5, "messages": HI}),
        ("/v1/responses", {"model": "local", "input": [5]}),
        (GOOGLE, REFUSED[0][1]),
    ]
    for path, body in bodies:
        before = paid.log.stat().st_size
        assert paid.http.post(path, json=body).status_code in (400, 422, 501)
        said = paid.log.read_bytes()[before:].decode()
        assert "Traceback" not in said
        assert len(said.splitlines()) <= 4, said


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HI}),
        (CHAT, {"messages": HI, "stream": True}),
        ("/v1/messages", {"messages": HI, "max_tokens": 9}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1beta/models/mlx-tiny-agent:generateContent", user({"text": "hi"})),
    ],
)
def test_who_is_busy_says_when_to_ask_again(paid: Proxy, path: str, body: Any) -> None:
    """503 of the sidecar's, through every format; this model has no fallback."""
    asked = {"model": "mlx-tiny-agent", "mlx_max_ttft_s": 0.001, **body}
    answer = paid.http.post(path, json=asked)
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) >= 1


def test_the_chunk_with_the_usage_has_no_choice(paid: Proxy) -> None:
    """As OpenAI has it: ag2 reads the last chunk with a choice as the answer's."""
    chunks = list(
        paid.openai.chat.completions.create(
            model="local", messages=HI, stream=True, max_tokens=5,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert [bool(chunk.choices) for chunk in chunks if chunk.usage] == [False]
    assert all(chunk.choices for chunk in chunks if not chunk.usage)
    assert json.loads(chunks[-1].model_dump_json())["choices"] == []
