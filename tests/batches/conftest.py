"""A sidecar with a tiny model, and a client of its batches."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from sidecar.app import App
from testkit.servers import running_sidecar
from testkit.tiny_models import make_model

Json = dict[str, Any]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("batches") / "dense", "dense")


@dataclass
class Batches:
    """A running sidecar, and how its batches are asked for."""

    app: App
    folder: Path

    def client(self, key: str = "mine") -> openai.OpenAI:
        """OpenAI's own."""
        return openai.OpenAI(base_url=f"{self.app.url}/v1", api_key=key, max_retries=0)


@pytest.fixture
def batches(model: Path, tmp_path: Path) -> Iterator[Batches]:
    folder = tmp_path / "batches"
    settings = {"MODEL_PATH": str(model), "BATCH_DIR": str(folder)}
    with running_sidecar(settings) as app:
        yield Batches(app, folder)


def chat_line(name: str, text: str, **more: Any) -> Json:
    """One request of a file."""
    body = {"model": "local", "messages": [{"role": "user", "content": text}],
            "temperature": 0, "max_tokens": 4, **more}  # fmt: skip
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body}


def written(lines: Sequence[Json]) -> bytes:
    """A file of requests."""
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def read(data: bytes) -> dict[str, Json]:
    """Answers by the names of their requests, each there once."""
    lines = [json.loads(line) for line in data.splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found


def begun(client: openai.OpenAI, data: bytes, endpoint: str = CHAT) -> Any:
    """A batch of a file."""
    file = client.files.create(file=("night.jsonl", data), purpose="batch")
    return client.batches.create(
        input_file_id=file.id,
        endpoint=endpoint,  # type: ignore[arg-type]
        completion_window="24h",
    )


def ended(client: openai.OpenAI, batch_id: str, within_s: float = 240.0) -> Any:
    """A batch once it has ended."""
    return waited(
        lambda: client.batches.retrieve(batch_id),
        lambda batch: batch.status in ("completed", "failed", "expired", "cancelled"),
        within_s,
    )


def waited(
    ask: Callable[[], Any], is_it: Callable[[Any], bool], within_s: float = 240.0
) -> Any:
    """What is asked for, once it is so."""
    deadline = time.monotonic() + within_s
    while not is_it(found := ask()):
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found
