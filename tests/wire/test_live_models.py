"""E24: models that come and go while LiteLLM runs, as its clients see it."""

from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from testkit.proxy import Proxy, running_proxy
from testkit.raw_http import eventually
from testkit.servers import running_sidecar

ModelFolder = Callable[[str], Path]
WAIT_S = 120.0


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


@pytest.fixture
def proxy(models: Path, model_folder: ModelFolder, tmp_path: Path) -> Iterator[Proxy]:
    (models / "early").symlink_to(model_folder("hybrid"))
    settings = {
        "MODEL_DIR": str(models),
        "MODEL_PATH": str(model_folder("dense")),
        "MODEL_ALIASES": '{"claude-*": "default", "coder": "early"}',
    }
    with (
        running_sidecar(settings) as app,
        running_proxy(app.url, tmp_path) as running,
    ):
        yield running


def listed(proxy: Proxy) -> set[str]:
    return {model.id for model in proxy.openai.models.list()}


def test_a_model_is_dropped_in_answers_and_is_taken_away(
    proxy: Proxy, models: Path, model_folder: ModelFolder
) -> None:
    before = listed(proxy)
    assert "sliding" not in before
    (models / "sliding").symlink_to(model_folder("sliding"))
    assert eventually(lambda: "sliding" in listed(proxy), WAIT_S)
    assert before < listed(proxy)
    answer = proxy.openai.chat.completions.create(
        model="sliding", messages=[{"role": "user", "content": "hi"}], max_tokens=3
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
    (models / "sliding").unlink()
    assert eventually(lambda: listed(proxy) == before, WAIT_S)
    with pytest.raises(openai.BadRequestError):
        proxy.openai.chat.completions.create(
            model="sliding", messages=[{"role": "user", "content": "hi"}]
        )


def test_what_was_there_at_the_start_is_followed_too(
    proxy: Proxy, models: Path
) -> None:
    """Its names go with it, those of MODEL_ALIASES too; a pattern of them is a net."""
    for name in ("early", "coder", "claude-opus-9"):
        asked = {"role": "user", "content": "hi"}
        chat = proxy.openai.chat.completions.create(
            model=name,
            messages=[asked],
            max_tokens=2,  # type: ignore[list-item]
        )
        assert chat.usage is not None
        message = proxy.anthropic.messages.create(
            model=name,
            messages=[asked],
            max_tokens=2,  # type: ignore[list-item]
        )
        assert (chat.usage.completion_tokens, message.usage.output_tokens) == (2, 2)
    assert {"early", "coder"} <= listed(proxy)
    (models / "early").unlink()
    assert eventually(lambda: not {"early", "coder"} & listed(proxy), WAIT_S)
    assert "local" in listed(proxy)
