"""What is refused, and that nothing else is harmed by it (V6, V9, V11, V12, V14)."""

import base64
import contextlib
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.app import App
from sidecar.core.errors import UnsupportedContent
from sidecar.core.prompt import MADE, Hit, ModelIds, Retreat
from sidecar.core.requests import Image, Message, ToolCall
from sidecar.images.text_only import without_unseen
from sidecar.kv.prefix_tree import Node, path_to
from sidecar.residents.resident import Resident
from testkit.pictures import data_url, image_part, picture
from testkit.raw_http import eventually
from testkit.servers import held_gpu, running_sidecar

Json = dict[str, Any]
WORDS = "what stands in this picture, and where does it stand in it? " * 8


@pytest.fixture(scope="module")
def app(folder: Path) -> Iterator[App]:
    settings = {"MODEL_PATH": str(folder / "seeing"), "MAX_IMAGES_PER_REQUEST": "4"}
    with running_sidecar({**settings, "MAX_IMAGE_SIZE_MB": "1"}) as app:
        yield app


@pytest.fixture(scope="module")
def blind(folder: Path) -> Iterator[App]:
    with running_sidecar({"MODEL_PATH": str(folder / "blind")}) as app:
        yield app


def post(app: App, *parts: Json, role: str = "user") -> httpx.Response:
    talk = [{"role": role, "content": [{"type": "text", "text": WORDS}, *parts]}]
    if role != "user":
        talk.append({"role": "user", "content": "and?"})
    body = {"messages": talk, "max_tokens": 4, "temperature": 0}
    return httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=120)


def refused(answer: httpx.Response) -> tuple[str, str, str]:
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["code"], error["param"], error["message"]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"type": "video_url", "video_url": {"url": "x"}}, "send frames as images"),
        ({"type": "input_video", "data": "x"}, "send frames as images"),
        ({"type": "input_audio", "input_audio": {"data": "x"}}, "audio"),
        ({"type": "hologram"}, "not supported"),
    ],
)
def test_other_media_are_refused_by_name(app: App, part: Json, said: str) -> None:
    code, param, message = refused(post(app, part))
    assert (code, param) == ("unsupported_content", "messages[0].content[1].type")
    assert said in message


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_images_stand_in_user_and_tool_messages(app: App, role: str) -> None:
    code, param, _ = refused(post(app, image_part(1), role=role))
    assert (code, param) == ("unsupported_content", "messages[0].content[1]")


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("file:///etc/passwd", "http, https or data"),
        ("/etc/passwd", "http, https or data"),
        ("iVBORw0KGgo=", "http, https or data"),
        ("data:text/plain;base64,aGk=", "is a file"),
        ("data:image/png;base64,????", "base64"),
        ("data:image/png;base64,aGk=", "cannot be decoded"),
        ("data:image/png;base64", "data:image/"),
        ("http://127.0.0.1:9/a.png", "not a public address"),
    ],
)
def test_a_bad_source_is_named(app: App, url: str, said: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    _, param, message = refused(post(app, part))
    assert param.startswith("messages[0].content[1]")
    assert said in message
    assert "passwd" not in message


def test_too_many_and_too_large_are_refused(app: App) -> None:
    _, param, message = refused(post(app, *map(image_part, range(5))))
    assert (param, "at most 4" in message) == ("messages[0].content[5]", True)
    large = data_url(picture(1, 800, 800), "BMP")
    part = {"type": "image_url", "image_url": {"url": large}}
    _, param, message = refused(post(app, part))
    assert (param, "1 MB" in message) == ("messages[0].content[1]", True)


def test_all_images_of_a_request_have_one_deadline(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sidecar.images.reader._READ_S", -1.0)
    code, param, _ = refused(post(app, image_part(1)))
    assert (code, param) == ("image_fetch_failed", "messages[0].content[1]")


def test_ids_that_are_made_for_images_cannot_be_sent(app: App) -> None:
    """A client must not name another one's image."""
    body = {"prompt": [1, 2, MADE + 7], "max_tokens": 4}
    answer = httpx.post(f"{app.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt"


def test_a_mark_that_is_typed_beside_its_image_is_refused(app: App) -> None:
    assert post(app, image_part(1)).status_code == 200
    with app.pool.lease("default") as model:
        assert model.images is not None
        mark = next(reversed(model.images._known._entries.values())).mark
    typed = {"type": "text", "text": f"and {mark} too"}
    assert "texts must not hold" in refused(post(app, image_part(1), typed))[2]
    # Without the image it is a word as any other.
    assert post(app, typed).status_code == 200


def test_a_model_that_takes_text_only_says_so(blind: App) -> None:
    code, param, message = refused(post(blind, image_part(1)))
    assert (code, param) == ("unsupported_content", "messages[0].content[1]")
    assert "takes text only" in message
    (listed,) = httpx.get(f"{blind.url}/v1/models").json()["data"]
    assert listed["supports_vision"] is False


def test_without_the_library_it_says_what_to_install(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that sees is then read for its text alone, by mlx-lm."""
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    with running_sidecar({"MODEL_PATH": str(folder / "seeing")}) as app:
        assert post(app).status_code == 200
        assert "litellm-mlx[vision]" in refused(post(app, image_part(1)))[2]
        (listed,) = httpx.get(f"{app.url}/v1/models").json()["data"]
        assert listed["supports_vision"] is False


def test_or_tells_the_model_what_is_missing(folder: Path) -> None:
    """So that one picture read by a tool does not end an agent's session."""
    settings = {"MODEL_PATH": str(folder / "blind"), "UNSUPPORTED_IMAGES": "note"}
    with running_sidecar(settings) as app:
        noted, plain = post(app, image_part(1)), post(app)
    assert noted.status_code == 200
    tokens = [a.json()["usage"]["prompt_tokens"] for a in (noted, plain)]
    assert 8 < tokens[0] - tokens[1] < 40


SCREENSHOT = data_url(picture(9))
READ_BY_A_TOOL: list[tuple[str, Json, str]] = [
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": "look"},
                {
                    "role": "assistant",
                    "tool_calls": [
                        {"id": "c1", "function": {"name": "read", "arguments": "{}"}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": [image_part(9)]},
            ]
        },
        "messages[2].content[0]",
    ),
    (
        "/v1/messages",
        {
            "messages": [
                {"role": "user", "content": "look"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "tool_use", "id": "c1", "name": "read", "input": {}}
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c1",
                            "content": [
                                {
                                    "type": "image",
                                    "source": {
                                        "type": "base64",
                                        "media_type": "image/png",
                                        "data": SCREENSHOT.partition(",")[2],
                                    },
                                }
                            ],
                        },
                        {"type": "text", "text": "and now?"},
                    ],
                },
            ]
        },
        "messages[2].content[0].content[0]",
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": "look"},
                {
                    "type": "function_call",
                    "call_id": "c1",
                    "name": "r",
                    "arguments": "",
                },
                {
                    "type": "function_call_output",
                    "call_id": "c1",
                    "output": [{"type": "input_image", "image_url": SCREENSHOT}],
                },
            ]
        },
        "input[2].output[0]",
    ),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "body", "place"), READ_BY_A_TOOL, ids=[r for r, _, _ in READ_BY_A_TOOL]
)
def test_an_image_that_a_tool_read_ends_no_session(
    blind: App,
    route: str,
    body: Json,
    place: str,
    stream: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is a note to the model, and named to the client and in the log."""
    length = {"max_output_tokens" if "input" in body else "max_tokens": 4}
    asked = {**body, **length, "stream": stream}
    with caplog.at_level("INFO", "sidecar.service.request_log"):
        answer = httpx.post(f"{blind.url}{route}", json=asked, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-litellm-mlx-ignored"] == place
    assert f"ignored={place!r}" in caplog.text


def test_an_image_of_an_earlier_turn_ends_no_session_but_a_new_one_is_refused(
    blind: App,
) -> None:
    """A refused one has no answer behind it: its user goes on in a row of messages."""

    def ask(*talk: Json) -> httpx.Response:
        body = {"messages": list(talk), "max_tokens": 4}
        return httpx.post(f"{blind.url}/v1/chat/completions", json=body, timeout=120)

    shown = {"role": "user", "content": [image_part(1)]}
    asked = {"role": "user", "content": "what is it?"}
    answered = {"role": "assistant", "content": "a picture"}
    later = ask(shown, answered, asked)
    assert later.status_code == 200, later.text
    assert later.headers["x-litellm-mlx-ignored"] == "messages[0].content[0]"
    assert refused(ask(asked, answered, shown))[1] == "messages[2].content[0]"
    went_on = ask(shown, asked)
    assert went_on.status_code == 200, went_on.text
    assert went_on.headers["x-litellm-mlx-ignored"] == "messages[0].content[0]"
    refusal = refused(ask(asked, shown))
    assert refusal[1] == "messages[1].content[0]"
    # By these words Claude Code takes the image out, and asks again.
    assert refusal[2].startswith("Could not process image: messages[1].content[0]")
    assert "UNSUPPORTED_IMAGES=note" in refusal[2]


PDF = base64.b64encode(b"%PDF-1.4 one page").decode()
DOCUMENT = {
    "type": "document",
    "source": {"type": "base64", "media_type": "application/pdf", "data": PDF},
}
FILE = {"filename": "a.pdf", "file_data": f"data:application/pdf;base64,{PDF}"}
LOOK = {"role": "user", "content": "look"}
CHAT_CALL = READ_BY_A_TOOL[0][1]["messages"][1]
BLOCK_CALL = READ_BY_A_TOOL[1][1]["messages"][1]
FILES: dict[str, tuple[str, Json, str]] = {
    "read by a tool, messages": (
        "/v1/messages",
        {"messages": [LOOK, BLOCK_CALL, {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [
                {"type": "text", "text": "PDF file read"}, DOCUMENT]}]}]},
        "messages[2].content[0].content[1]",
    ),
    "by its address, messages": (
        "/v1/messages",
        {"messages": [LOOK, BLOCK_CALL, {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [
                {"type": "document",
                 "source": {"type": "url", "url": "https://a.example/b.pdf"}}]}]}]},
        "messages[2].content[0].content[0]",
    ),
    "earlier, messages": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [DOCUMENT]},
                      {"role": "assistant", "content": "ok"}, LOOK]},
        "messages[0].content[0]",
    ),
    "earlier, chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "file", "file": FILE}]},
                      {"role": "assistant", "content": "ok"}, LOOK]},
        "messages[0].content[0]",
    ),
    "behind a result, chat": (
        "/v1/chat/completions",
        {"messages": [LOOK, CHAT_CALL,
                      {"role": "tool", "tool_call_id": "c1", "content": "read"},
                      {"role": "user", "content": [{"type": "file", "file": FILE}]}]},
        "messages[3].content[0]",
    ),
    "behind results, in two messages, chat": (
        "/v1/chat/completions",
        {"messages": [LOOK, CHAT_CALL,
                      {"role": "tool", "tool_call_id": "c1", "content": "read"},
                      LOOK,
                      {"role": "user", "content": [{"type": "file", "file": FILE}]}]},
        "messages[4].content[0]",
    ),
    "as a picture, earlier, chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [
                          {"type": "image_url", "image_url": FILE["file_data"]}]},
                      {"role": "assistant", "content": "ok"}, LOOK]},
        "messages[0].content[0]",
    ),
    "read by a tool, responses": (
        "/v1/responses",
        {"input": [LOOK, {"type": "function_call", "call_id": "c1", "name": "read",
                          "arguments": "{}"},
                   {"type": "function_call_output", "call_id": "c1",
                    "output": [{"type": "input_file", **FILE}]}]},
        "input[2].output[0]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
@pytest.mark.parametrize("model", ["app", "blind"])
def test_a_file_that_nobody_reads_ends_no_session(
    case: str, model: str, request: pytest.FixtureRequest
) -> None:
    """A PDF that Claude Code read made each later request of its session a 400."""
    served: App = request.getfixturevalue(model)
    route, body, place = FILES[case]
    length = {"max_output_tokens" if "input" in body else "max_tokens": 4}
    answer = httpx.post(f"{served.url}{route}", json={**body, **length}, timeout=120)
    assert answer.status_code == 200, answer.text
    assert place in answer.headers["x-litellm-mlx-ignored"].split(", ")
    with served.pool.lease("default") as resident:
        seen = resident.engine.store._tree.nodes()
        ids = [i for node in seen for i in node.ids]
        text = resident.engine.model.tokenizer.decode(ids)
    assert "not shown, files are not read here]" in text


def test_a_new_file_of_a_user_is_refused(app: App) -> None:
    """In words by which Claude Code takes it out, and asks again."""
    body = {"messages": [{"role": "user", "content": [DOCUMENT]}], "max_tokens": 4}
    answer = httpx.post(f"{app.url}/v1/messages", json=body, timeout=120)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["message"].startswith("The PDF specified was not valid: messages[0]")


def test_a_picture_right_behind_a_result_is_its_clients(blind: App) -> None:
    """PI's way to send what a tool read: in a chat's result no picture can stand."""
    talk = [LOOK, CHAT_CALL, {"role": "tool", "tool_call_id": "c1", "content": "read"},
            {"role": "user", "content": [image_part(9)]}]  # fmt: skip
    body = {"messages": talk, "max_tokens": 4}
    answer = httpx.post(f"{blind.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-litellm-mlx-ignored"] == "messages[3].content[0]"


TEXT = Message("user", ("and?",))
CALL = Message("assistant", (), tool_calls=(ToolCall("c1", "read", "{}"),))
RESULT = Message("tool", ("read",), tool_call_id="c1")
SHOWN = Message("user", (Image("data:image/png;base64,", path="here"),))


@pytest.mark.parametrize("rows", [
    [SHOWN], [SHOWN, CALL, RESULT], [SHOWN, CALL, RESULT, CALL, RESULT],
    [SHOWN, Message("assistant", ("It",))], [TEXT, SHOWN, CALL, RESULT],
])  # fmt: skip
def test_what_a_client_put_behind_a_result_stays_noted(rows: list[Message]) -> None:
    """In each later turn of the loop too, in which it is still the newest."""
    talk = [TEXT, CALL, RESULT, *rows]
    assert without_unseen(talk, "auto", "text only")[1] == ("here",)
    with pytest.raises(UnsupportedContent):
        without_unseen(talk, "error", "text only")
    with pytest.raises(UnsupportedContent):
        without_unseen([*talk, Message("assistant", ("ok",)), SHOWN], "auto", "text")


def test_or_all_are_refused(folder: Path) -> None:
    settings = {"MODEL_PATH": str(folder / "blind"), "UNSUPPORTED_IMAGES": "error"}
    route, body, place = READ_BY_A_TOOL[0]
    with running_sidecar(settings) as app:
        answer = httpx.post(f"{app.url}{route}", json=body, timeout=120)
    assert refused(answer)[1] == place


def test_a_match_within_an_image_goes_back_to_its_start(app: App) -> None:
    """V6: of a prefill that was cancelled there, say."""
    shown = post(app, image_part(61)).json()
    with app.pool.lease("default") as model:
        store, before = model.engine.store, model.engine.store.counters["vlm_retreat"]
        image = last_image(model)
        ids = next(ids for ids in map(whole, store._tree.nodes()) if image[5] in ids)
        start = ids.index(image[0])
        cut = ModelIds((*ids[: start + 5], *(i ^ 1 for i in image[6:]), 7))
        assert store.match_len(cut) == start
        assert store.lookup(cut, "") == Hit(start, retreat=Retreat("vlm_retreat", 5))
        restored = app.gpu.call(lambda: store.restore(cut))
        assert restored.cached_len == start
        app.gpu.call(lambda: store.abandon(restored.lease))
        assert store.counters["vlm_retreat"] == before + 1
        assert store.check_integrity() == []
    again = post(app, image_part(61)).json()
    assert again["choices"] == shown["choices"]


def whole(node: Node) -> tuple[int, ...]:
    return tuple(i for part in path_to(node) for i in part.ids)


def last_image(model: Resident) -> tuple[int, ...]:
    assert model.images is not None
    return next(reversed(model.images._known._entries.values())).ids


@contextlib.contextmanager
def begun(app: App, *parts: Json) -> Iterator[socket.socket]:
    """A streamed request whose client will leave."""
    talk = [{"role": "user", "content": [{"type": "text", "text": WORDS}, *parts]}]
    body = json.dumps({"messages": talk, "max_tokens": 400, "stream": True}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", app.listener.port)) as client:
        client.sendall(head.encode() + body)
        yield client


def test_a_client_that_leaves_leaves_nothing_behind(app: App) -> None:
    """V14: while the GPU is busy with another, before and behind its first token."""
    assert post(app, image_part(71)).status_code == 200
    with held_gpu(app), begun(app, image_part(72)):
        pass
    with begun(app, image_part(73)) as client:
        assert client.recv(200)
    eventually(lambda: app.pool.num_leases == 0)
    with app.pool.lease("default") as model:
        assert model.engine.store.check_integrity() == []
    before = post(app, image_part(71)).json()
    assert before["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    for seed in (72, 73):
        assert post(app, image_part(seed)).status_code == 200
