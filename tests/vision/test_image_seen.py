"""
What the model is shown is what the client sent: three turns of the `openai` SDK through
LiteLLM, answered by a script that reads the pixels' digest in the prompt.
"""

import contextlib
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from testkit.pictures import data_url, picture
from testkit.proxy import Proxy, running_proxy
from testkit.scripted import Answer, Prompt, render, scripted
from testkit.servers import running_sidecar

KINDS = ("seeing", "seeing-hybrid", "seeing-sliding")
LABEL = re.compile(r"\[image ([0-9a-f]{8}) (\d+x\d+)\]")
WORDS = "what stands in this picture, and where does it stand in it? " * 80


def says_what_it_sees(prompt: Prompt) -> str:
    seen = " ".join(f"{name} {size}" for name, size in LABEL.findall(prompt.text))
    return render(Answer("I look.", f"I see {seen}"), prompt)


def digest(image: Image.Image) -> str:
    named = f"{image.mode} {image.size}".encode()
    return hashlib.sha256(named + image.tobytes()).hexdigest()[:8]


@pytest.fixture(scope="module")
def proxy(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    """One proxy for a sidecar of each kind, by its name."""
    with contextlib.ExitStack() as running:
        urls = {
            kind: running.enter_context(
                running_sidecar(
                    {"MODEL_PATH": str(folder / kind)}, scripted(says_what_it_sees)
                )
            ).url
            for kind in KINDS
        }
        place = tmp_path_factory.mktemp("proxy")
        yield running.enter_context(running_proxy(urls[KINDS[0]], place, more=urls))


@pytest.mark.parametrize("kind", KINDS)
def test_the_very_pixels_and_no_more_than_what_is_new(proxy: Proxy, kind: str) -> None:
    shown = [picture(1, 96, 64), picture(2, 64, 96)]
    talk: list[Any] = []
    for number, asked in enumerate((WORDS, "Again?", "And this?")):
        parts: list[Any] = [{"type": "text", "text": asked}]
        if number != 1:
            url = {"url": data_url(shown[number // 2])}
            parts.append({"type": "image_url", "image_url": url})
        talk.append({"role": "user", "content": parts})
        answer = proxy.openai.chat.completions.create(model=kind, messages=talk)
        text = answer.choices[0].message.content
        talk.append({"role": "assistant", "content": text})
        usage = answer.usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens or 0
        assert cached >= 0.94 * usage.prompt_tokens or not number
    one, two = (f"{digest(p)} {p.width}x{p.height}" for p in shown)
    assert text == f"I see {one} {two}"
