"""A kind of model of one's own: a row of `detection.ROWS` and an engine, no more."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.config.settings import Config
from sidecar.residents import detection
from sidecar.residents.detection import Row
from sidecar.residents.model_state import ModelSpec
from sidecar.residents.shared import Shared
from testkit.servers import running_sidecar
from testkit.tiny_models import make_model


@dataclass
class Parrot:
    """A model that says what it is told."""

    name: str
    num_bytes: int = 8
    max_context: int = 80
    takes_images: bool = False
    failed_tests: tuple[str, ...] = ()

    def counters(self) -> dict[str, int]:
        return {}

    def say(self, text: str) -> str:
        return text

    def close(self) -> int:
        return self.num_bytes


class ParrotLoader:
    def __init__(self, config: Config, shared: Shared) -> None:
        self._shared = shared

    def load(self, spec: ModelSpec, tell: Callable[[str], None]) -> Parrot:
        tell("weights_loading")
        return Parrot(spec.id)


def test_it_is_found_loaded_leased_and_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Row(
        "parrot",
        lambda found: found.model_type == "parrot",
        f"{ParrotLoader.__module__}:ParrotLoader",
    )
    monkeypatch.setattr(detection, "ROWS", (own, *detection.ROWS))
    make_model(tmp_path / "talker", "dense")
    polly = make_model(tmp_path / "polly", "dense")
    (polly / "config.json").write_text(json.dumps({"model_type": "parrot"}))
    named = {"MODEL_DIR": str(tmp_path), "MODEL_PATH": str(tmp_path / "talker")}
    with running_sidecar(named) as app:
        listed: Any = httpx.get(f"{app.url}/v1/models").json()["data"]
        assert {m["id"]: m["kind"] for m in listed}["polly"] == "parrot"
        with app.pool.lease("polly") as model:
            assert isinstance(model, Parrot)
            assert model.say("hello") == "hello"
        body = {"model": "polly", "messages": [{"role": "user", "content": "hi"}]}
        refused = httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=60)
        assert refused.status_code == 400
        assert "does not answer chats" in refused.json()["error"]["message"]
        gone = httpx.post(f"{app.url}/admin/models/polly/unload", timeout=60)
        assert gone.json()["freed_bytes"] == 8
