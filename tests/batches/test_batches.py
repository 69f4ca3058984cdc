"""Files and batches through OpenAI's own client."""

import json

import httpx
import openai
import pytest

from sidecar.app import App
from testkit.servers import held_gpu
from tests.batches.conftest import (
    Batches,
    begun,
    chat_line,
    ended,
    read,
    waited,
    written,
)


def plain(app: App, body: object, path: str = "/v1/chat/completions") -> str:
    """What is said to the same request by itself."""
    answer = httpx.post(f"{app.url}{path}", json=body, timeout=120).json()
    choice = answer["choices"][0]
    return str(choice.get("text") or choice["message"]["content"])


def test_each_request_is_answered_as_by_itself(batches: Batches) -> None:
    client = batches.client()
    lines = [chat_line(f"line-{n}", f"Say {n} and more.") for n in range(6)]
    file = client.files.create(file=("night.jsonl", written(lines)), purpose="batch")
    assert (file.filename, file.purpose, file.status) == (
        "night.jsonl", "batch", "processed",
    )  # fmt: skip
    batch = client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        metadata={"night": "first"},
    )
    assert batch.status == "validating"
    done = ended(client, batch.id)
    assert (done.status, done.metadata) == ("completed", {"night": "first"})
    assert done.request_counts.model_dump() == {
        "total": 6, "completed": 6, "failed": 0,
    }  # fmt: skip
    assert done.error_file_id is None
    assert done.created_at <= done.in_progress_at <= done.completed_at
    found = read(client.files.content(done.output_file_id).read())
    assert list(found)
    assert found.keys() == {line["custom_id"] for line in lines}
    for line in lines:
        answer = found[line["custom_id"]]["response"]
        assert answer["status_code"] == 200
        said = answer["body"]["choices"][0]["message"]["content"]
        assert said == plain(batches.app, line["body"])
    names = [one.filename for one in client.files.list()]
    assert sorted(names) == sorted(["night.jsonl", f"{batch.id}_output.jsonl"])
    assert [one.id for one in client.batches.list()] == [batch.id]


def test_a_request_that_fails_is_told_and_the_others_are_answered(
    batches: Batches,
) -> None:
    client = batches.client()
    lines = [
        chat_line("good", "Say it."),
        chat_line("unknown model", "Say it.", model="no-such-model"),
        chat_line("bad field", "Say it.", temperature="hot"),
        chat_line("a stream", "Say it.", stream=True),
    ]
    done = ended(client, begun(client, written(lines)).id)
    assert done.status == "completed"
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 3)
    failed = read(client.files.content(done.error_file_id).read())
    codes = {name: line["response"]["status_code"] for name, line in failed.items()}
    assert codes == {"unknown model": 404, "bad field": 400, "a stream": 400}
    said = failed["a stream"]["response"]["body"]
    assert "stream must be false" in json.dumps(said)


@pytest.mark.parametrize(
    ("data", "line", "why"),
    [
        (b"no json\n", 1, "not valid JSON"),
        (b"\n\n", None, "no requests"),
        (written([{**chat_line("a", "x"), "method": "GET"}]), 1, "POST"),
        (written([{**chat_line("a", "x"), "url": "/v1/embeddings"}]), 1, "url"),
        (written([{**chat_line("a", "x"), "extra": 1}]), 1, "extra"),
        (written([{**chat_line("", "x")}]), 1, "custom_id"),
        (written([{**chat_line("a", "x"), "body": []}]), 1, "body"),
        (written([chat_line("a", "x"), chat_line("a", "y")]), 2, "twice"),
        (b"\n \n" + written([chat_line("a", "x")]) + b"\n{bad}\n", 5, "not valid"),
    ],
)
def test_a_file_that_is_no_batch_fails_and_says_where(
    batches: Batches, data: bytes, line: int | None, why: str
) -> None:
    client = batches.client()
    done = ended(client, begun(client, data).id)
    assert (done.status, done.output_file_id) == ("failed", None)
    assert done.errors.data[0].line == line
    assert why in done.errors.data[0].message


def test_what_is_asked_for_wrongly_is_refused_by_name(batches: Batches) -> None:
    client = batches.client()
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=("a.jsonl", b"{}"), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="file must not be empty"):
        client.files.create(file=("a.jsonl", b""), purpose="batch")
    file = client.files.create(file=("a.jsonl", b"{}"), purpose="batch")
    for wrong, name in (
        ({"completion_window": "1d"}, "completion_window"),
        ({"completion_window": "0h"}, "completion_window"),
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"input_file_id": "file-none"}, "no file"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"extra_body": {"priority": 1}}, "priority"),
    ):
        asked = {"input_file_id": file.id, "endpoint": "/v1/completions",
                 "completion_window": "24h", **wrong}  # fmt: skip
        with pytest.raises(openai.APIStatusError, match=name) as refused:
            client.batches.create(**asked)  # type: ignore[arg-type]
        assert refused.value.status_code in (400, 404, 422)
    assert not list(client.batches.list())


def test_a_key_sees_its_own_files_and_batches_only(batches: Batches) -> None:
    mine, other = batches.client("mine"), batches.client("other")
    batch = begun(mine, written([chat_line("a", "Say it.")]))
    done = ended(mine, batch.id)
    assert not list(other.files.list())
    assert not list(other.batches.list())
    for ask in (
        lambda: other.batches.retrieve(batch.id),
        lambda: other.batches.cancel(batch.id),
        lambda: other.files.content(done.output_file_id),
        lambda: other.files.delete(done.input_file_id),
        lambda: other.batches.create(
            input_file_id=done.input_file_id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()


def test_a_file_is_deleted_once_no_batch_reads_it(batches: Batches) -> None:
    client = batches.client()
    lines = [chat_line(f"line-{n}", f"Say {n}.") for n in range(3)]
    with held_gpu(batches.app):
        batch = begun(client, written(lines))
        with pytest.raises(openai.BadRequestError, match=batch.id):
            client.files.delete(batch.input_file_id)
    done = ended(client, batch.id)
    assert client.files.delete(done.input_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(done.input_file_id)
    assert not list(batches.folder.glob(f"{done.input_file_id}*"))


def test_a_cancelled_batch_keeps_what_was_answered(batches: Batches) -> None:
    client = batches.client()
    lines = [chat_line(f"line-{n}", f"Say {n}.", max_tokens=64) for n in range(200)]
    batch = begun(client, written(lines))
    waited(
        lambda: client.batches.retrieve(batch.id),
        lambda now: now.request_counts.completed >= 3,
    )
    client.batches.cancel(batch.id)
    done = ended(client, batch.id, 30)
    assert done.status == "cancelled"
    count = done.request_counts.completed
    assert 3 <= count < 200
    assert len(read(client.files.content(done.output_file_id).read())) == count
    with pytest.raises(openai.BadRequestError, match="cancelled already"):
        client.batches.cancel(batch.id)


def test_completions_embeddings_and_responses_are_endpoints(batches: Batches) -> None:
    client = batches.client()
    bodies = {
        "/v1/completions": {"model": "local", "prompt": "Once", "max_tokens": 3},
        "/v1/responses": {"model": "local", "input": "Hi", "max_output_tokens": 3},
    }
    for url, body in bodies.items():
        line = {"custom_id": "a", "method": "POST", "url": url, "body": body}
        done = ended(client, begun(client, written([line]), url).id)
        found = read(client.files.content(done.output_file_id).read())
        assert found["a"]["response"]["status_code"] == 200
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings",
            "body": {"model": "local", "input": "Hi"}}  # fmt: skip
    done = ended(client, begun(client, written([line]), "/v1/embeddings").id)
    failed = read(client.files.content(done.error_file_id).read())
    assert failed["a"]["response"]["status_code"] == 400  # this model embeds nothing


def test_lists_come_in_pages(batches: Batches) -> None:
    client = batches.client()
    ids = {
        client.files.create(file=(f"{n}.jsonl", b"{}"), purpose="batch").id
        for n in range(5)
    }
    pages = client.files.list(limit=2)
    assert len(pages.data) == 2
    assert pages.has_more
    assert {one.id for one in pages} == ids
    answer = httpx.get(
        f"{batches.app.url}/v1/files?limit=0", headers={"Authorization": "Bearer mine"}
    )
    assert answer.status_code == 422


def test_files_are_listed_by_purpose_and_in_order(batches: Batches) -> None:
    client = batches.client()
    batch = begun(client, written([chat_line("a", "Say it.")]))
    done = ended(client, batch.id)
    own = [one.id for one in client.files.list(purpose="batch")]
    assert own == [done.input_file_id]
    assert not list(client.files.list(purpose="fine-tune"))
    newest = [one.id for one in client.files.list(order="desc")]
    assert [one.id for one in client.files.list(order="asc")] == newest[::-1]
    with pytest.raises(openai.UnprocessableEntityError, match="order"):
        client.files.list(order="odd")  # type: ignore[arg-type]


def test_an_upload_has_each_part_once(batches: Batches) -> None:
    url, key = f"{batches.app.url}/v1/files", {"Authorization": "Bearer mine"}
    file = ("file", ("a.jsonl", b"{}"))
    for parts, name in (
        ([file, ("file", ("b.jsonl", b"{}")), ("purpose", (None, "batch"))], "file"),
        ([file, ("purpose", (None, "x")), ("purpose", (None, "batch"))], "purpose"),
    ):
        answer = httpx.post(url, files=parts, headers=key)  # type: ignore[arg-type]
        assert answer.status_code == 400
        assert f"{name} must be there once" in answer.text


def test_a_batch_stores_no_responses(batches: Batches) -> None:
    """They are few for each key: a person's would be pushed out."""
    client, url = batches.client(), "/v1/responses"
    mine = client.responses.create(model="local", input="Hi", max_output_tokens=16)
    lines = [
        {"custom_id": f"line-{n}", "method": "POST", "url": url,
         "body": {"model": "local", "input": "Hi", "max_output_tokens": 1}}
        for n in range(300)
    ]  # fmt: skip
    lines[7]["body"]["store"] = True  # type: ignore[index]
    done = ended(client, begun(client, written(lines), url).id)
    assert (done.request_counts.completed, done.request_counts.failed) == (299, 1)
    found = read(client.files.content(done.output_file_id).read())
    assert client.responses.retrieve(mine.id).id == mine.id
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(found["line-0"]["response"]["body"]["id"])


def test_no_endpoint_of_a_batch_stores_and_what_is_ignored_is_named(
    batches: Batches,
) -> None:
    client, url = batches.client(), "/v1/chat/completions"
    talk = [{"role": "user", "content": "Hi"}]
    more = ({"store": True}, {"bogus": 1, "store": False}, {})
    lines = [
        {"custom_id": f"line-{n}", "method": "POST", "url": url,
         "body": {"model": "local", "messages": talk, "max_tokens": 1, **fields}}
        for n, fields in enumerate(more)
    ]  # fmt: skip
    done = ended(client, begun(client, written(lines), url).id)
    assert (done.request_counts.completed, done.request_counts.failed) == (2, 1)
    refused = read(client.files.content(done.error_file_id).read())["line-0"]
    assert refused["response"]["body"]["error"]["param"] == "store"
    found = read(client.files.content(done.output_file_id).read())
    assert "bogus" in found["line-1"]["response"]["ignored"]
    assert "ignored" not in found["line-2"]["response"]


def test_a_file_may_begin_with_the_mark_of_an_editor(batches: Batches) -> None:
    client = batches.client()
    data = b"\xef\xbb\xbf" + written([chat_line("a", "Say it.")])
    assert ended(client, begun(client, data).id).request_counts.completed == 1


def test_one_process_has_the_folder_at_a_time(batches: Batches) -> None:
    from sidecar.core.errors import Unavailable
    from sidecar.service.batches.batch_service import BatchService

    batches.client().files.create(file=("a.jsonl", b"{}"), purpose="batch")
    with pytest.raises(Unavailable, match="another process"):
        BatchService(batches.folder).open()
    assert batches.folder.stat().st_mode & 0o777 == 0o700
    for path in batches.folder.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, path
