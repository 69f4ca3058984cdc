"""A model that reads documents is asked its own words where a client says nothing."""

from collections.abc import Iterator

import httpx
import pytest

from sidecar.app import App
from sidecar.core.requests import Image, Message
from sidecar.residents.ocr import ocr_prompt, with_prompt
from testkit.pictures import data_url, image_part, picture
from testkit.servers import running_sidecar
from tools.tiny_checkpoints import make_seeing

ASKED = "Text Recognition:"
PICTURE = Image(data_url(picture(1)), path="messages[0].content[0]")


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("ocr") / "reader"
    make_seeing(folder, "glm_ocr")
    with running_sidecar({"MODEL_PATH": str(folder), "CACHE_SPLICE": "false"}) as app:
        yield app


def test_the_words_are_its_makers() -> None:
    assert ocr_prompt({"model_type": "glm_ocr"}) == ASKED
    assert ocr_prompt({"model_type": "DeepseekOCR_2"}).startswith("Convert")
    assert ocr_prompt({"model_type": "qwen3_vl"}) == ocr_prompt({}) == ""


def test_they_stand_behind_pictures_of_a_user_who_says_nothing() -> None:
    """Spaces are nothing; of others, and beside words, all stays as it is."""
    alone, spaced = Message("user", (PICTURE,)), Message("user", ("  ", PICTURE))
    others = (
        Message("user", (PICTURE, "what?")), Message("user", ("hello",)),
        Message("tool", (PICTURE,), tool_call_id="t"),
    )  # fmt: skip
    found = with_prompt((alone, spaced, *others), ASKED)
    assert [m.parts for m in found[:2]] == [(PICTURE, ASKED)] * 2
    assert found[2:] == others


def test_it_reads_and_goes_on(app: App) -> None:
    """What the model reads, and that it is warm at the next turn."""
    alone = {"role": "user", "content": [image_part(3)]}
    spoken = {
        "role": "user",
        "content": [image_part(3), {"type": "text", "text": ASKED}],
    }
    first = ask(app, [alone])
    said = [
        alone,
        {"role": "assistant", "content": "ab"},
        {"role": "user", "content": "x"},
    ]
    assert ask(app, [spoken])["prompt_tokens"] == first["prompt_tokens"]
    then = ask(app, said)
    assert then["prompt_tokens_details"]["cached_tokens"] >= first["prompt_tokens"] - 4
    assert app.pool.entries()[0].kind == "ocr"


def ask(app: App, messages: list[dict[str, object]]) -> dict[str, object]:
    body = {"messages": messages, "max_tokens": 4, "temperature": 0}
    answer = httpx.post(f"{app.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]  # type: ignore[no-any-return]
