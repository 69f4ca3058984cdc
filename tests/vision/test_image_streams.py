"""Pictures of many clients beside a text stream (V13): no two towers in one pause."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.app import App
from sidecar.engine.job import Job, Token
from sidecar.engine.vision.prompt_images import PromptImages
from testkit.pictures import data_url, picture
from testkit.raw_http import eventually
from testkit.servers import running_sidecar

CLIENTS = 8


def test_a_stream_goes_on_between_pictures(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three megapixels each, of eight clients; health answers, and all get theirs."""
    told: list[str] = []
    look, emit_later = PromptImages.encode, Job.emit_later

    def looked(self: PromptImages, *args: Any) -> bool:
        is_seen = look(self, *args)
        if is_seen:
            told.append("look")
        return is_seen

    def emitted(self: Job, event: Any) -> None:
        emit_later(self, event)
        if isinstance(event, Token) and not self.spec.prompt.images:
            told.append("token")

    settings = {"MODEL_PATH": str(folder / "seeing"), "MAX_CONCURRENT_REQUESTS": "16"}
    with running_sidecar(settings) as app, ThreadPoolExecutor(CLIENTS + 1) as pool:
        urls = [data_url(picture(n, 2048, 1536), "JPEG") for n in range(CLIENTS)]
        monkeypatch.setattr(PromptImages, "encode", looked)
        monkeypatch.setattr(Job, "emit_later", emitted)
        over = threading.Event()
        stream = pool.submit(read_stream, app, over)
        assert eventually(lambda: "token" in told, 60)
        shown = [pool.submit(show, app, url) for url in urls]
        while not all(one.done() for one in shown):
            assert httpx.get(f"{app.url}/health", timeout=30).is_success
        at_the_end = list(told)
        over.set()
        assert [one.result() for one in shown] == [200] * CLIENTS
        assert stream.result() > CLIENTS
    assert at_the_end.count("look") == CLIENTS
    between = " ".join(at_the_end).split("look")[1:-1]
    assert all("token" in some for some in between), at_the_end


def show(app: App, url: str) -> int:
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "what?"},
    ]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    answer = httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=300)
    return answer.status_code


def read_stream(app: App, over: threading.Event) -> int:
    """Read a long answer until it is enough; how many lines there were."""
    with app.pool.lease("default") as model:
        never = {str(token): -100 for token in model.engine.model.stop_ids}
    body = {
        "messages": [{"role": "user", "content": "talk"}], "max_tokens": 20_000,
        "stream": True, "temperature": 1.5, "logit_bias": never,
    }  # fmt: skip
    lines = 0
    with httpx.stream(
        "POST", f"{app.url}/v1/chat/completions", json=body, timeout=300
    ) as answer:
        for line in answer.iter_lines():
            lines += line.startswith("data: {")
            if over.is_set():
                break
    return lines
