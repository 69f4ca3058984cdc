"""One sidecar with tiny models of each kind, and how it is asked."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest

from sidecar.app import App
from testkit.servers import running_sidecar
from testkit.tiny_models import make_model

KINDS = ("dense", "hybrid", "sliding", "capped")
Json = dict[str, Any]


class Ask(Protocol):
    """Posts to a path of the sidecar: the status and the body."""

    def __call__(self, path: str, /, **body: Any) -> tuple[int, Json]: ...


@pytest.fixture(scope="package")
def native_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    root: Path = tmp_path_factory.mktemp("native")
    for kind in KINDS:
        make_model(root / kind, kind)
    named = {"MODEL_DIR": str(root), "MODEL_PATH": str(root / "dense"),
             "ATTENTION_MAX_TOKENS": "400", "MAX_KV_SIZE": "12000"}  # fmt: skip
    with running_sidecar(named) as app:
        yield app


@pytest.fixture(scope="package")
def ask(native_app: App) -> Ask:
    def post(path: str, /, **body: Any) -> tuple[int, Json]:
        answer = httpx.post(f"{native_app.url}{path}", json=body, timeout=120)
        return answer.status_code, answer.json()

    return post
