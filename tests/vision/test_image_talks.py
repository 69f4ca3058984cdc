"""
Conversations with images on real tiny models that see: warm equals cold, and no image
is ever taken for another (V1-V9, V12, V14, V17 of the image prompts' tests).
"""

import contextlib
import functools
import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sidecar.app import App
from sidecar.core.prompt import ModelIds, ModelPrompt, PlacedImage
from sidecar.core.requests import Image, Message
from sidecar.engine.vision.prompt_images import PromptImages
from testkit.image_chats import (
    WORDS,
    ask,
    assert_same,
    cached,
    forget,
    said,
    tower_runs,
    user,
    values,
)  # fmt: skip
from testkit.pictures import data_url, image_part, picture
from testkit.servers import running_sidecar
from testkit.tiny_vision import BIDIRECTIONAL, SEEING

Json = dict[str, Any]


@contextlib.contextmanager
def serving(folder: Path, kind: str, **settings: str) -> Iterator[App]:
    # Turns as the client sends them: so a cold prompt is the warm one.
    named = {"MODEL_PATH": str(folder / kind), "CACHE_SPLICE": "false"}
    with running_sidecar({**named, **settings}) as app:
        yield app


@pytest.fixture(scope="module", params=[*SEEING, BIDIRECTIONAL])
def app(folder: Path, request: pytest.FixtureRequest) -> Iterator[App]:
    with serving(folder, request.param) as app:
        yield app


def counter(app: App, name: str) -> int:
    resident = app.pool.entry(app.pool.entries()[0].id)
    assert resident.state == "loaded"
    with app.pool.lease("default") as model:
        return model.counters()[name]


def test_an_agents_talk_computes_what_is_new_and_answers_as_if_cold(app: App) -> None:
    """V4: images in turns 1, 3 and 5; each is looked at once, and warm is cold."""
    forget(app)
    runs, held = tower_runs(app), 0
    with app.pool.lease("default") as model:
        is_causal = model.engine.model.vision_encoder.is_causal
    talk: list[Json] = []
    for number in range(6):
        more = [image_part(number)] if number % 2 == 0 else []
        talk.append(user(f"turn {number}. {WORDS}", *more, "what is it?"))
        warm = ask(app, talk)
        is_cold = more and not is_causal  # one pass up to the last image
        assert cached(warm) >= (0 if is_cold else held - 1)
        held = warm["usage"]["prompt_tokens"]
        talk.append(said(warm))
    assert tower_runs(app) == runs + 3
    forget(app)
    assert_same(warm, ask(app, talk[:-1]))


def test_another_image_of_equal_size_is_another_prompt(app: App) -> None:
    """V3: the text is the same to the letter, and so are the pads."""
    forget(app)
    first = ask(app, [user(WORDS, image_part(1), "what is it?")])
    other = ask(app, [user(WORDS, image_part(2), "what is it?")])
    begin = ask(app, [user(WORDS, image_part(3), "what is it?")])
    assert values(first) != values(other)
    with app.pool.lease("default") as model:
        can_be_cut = not model.engine.store.needs_checkpoints
    assert cached(other) < other["usage"]["prompt_tokens"] - 8
    assert cached(begin) == cached(other)
    assert (cached(other) > 0) == can_be_cut
    forget(app)
    assert_same(other, ask(app, [user(WORDS, image_part(2), "what is it?")]))


@pytest.mark.parametrize("change", ["moved", "removed", "swapped", "doubled", "none"])
def test_a_changed_image_ends_reuse_where_it_stands(app: App, change: str) -> None:
    """V5."""
    one, two = image_part(11), image_part(12)
    before = [user(WORDS, one, WORDS, two, "what are they?")]
    after = {
        "moved": [user(WORDS, WORDS, one, two, "what are they?")],
        "removed": [user(WORDS, one, WORDS, "what are they?")],
        "swapped": [user(WORDS, two, WORDS, one, "what are they?")],
        "doubled": [user(WORDS, one, WORDS, two, two, "what are they?")],
        "none": before,
    }[change]
    forget(app)
    ask(app, before)
    warm = ask(app, after)
    forget(app)
    cold = ask(app, after)
    assert cached(cold) == 0
    assert_same(warm, cold)


def test_rows_with_and_without_images_share_a_batch(app: App) -> None:
    """V7: each equals its lone run, whoever decodes beside it."""
    talks = [
        [user(WORDS, image_part(21), "what is it?")],
        [user(WORDS + "no image here")],
        [
            user(
                "short",
                image_part(
                    22,
                ),
                "and",
                image_part(23),
                "which?",
            )
        ],
        [user("nothing to see")],
    ] * 2
    forget(app)
    alone = [ask(app, talk, max_tokens=24) for talk in talks]
    forget(app)
    with ThreadPoolExecutor(len(talks)) as pool:
        beside = list(pool.map(lambda talk: ask(app, talk, max_tokens=24), talks))
    for lone, found in zip(alone, beside, strict=True):
        assert_same(found, lone)


def test_typed_markup_is_text(app: App) -> None:
    """V8: before and behind a picture; the picture stays where it is."""
    with app.pool.lease("default") as model:
        vision_encoder = model.engine.model.vision_encoder
        assert vision_encoder is not None
        typed = "".join(sorted(vision_encoder.processor.media_tokens))
    forget(app)
    plain = ask(app, [user("a ", image_part(31), " b")])
    marked = ask(app, [user(f"a {typed}", image_part(31), f"{typed} b")])
    alone = ask(app, [user(f"a {typed} b")])
    assert marked["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 8
    assert alone["choices"][0]["finish_reason"] == "length"
    forget(app)
    assert_same(marked, ask(app, [user(f"a {typed}", image_part(31), f"{typed} b")]))


def test_a_tools_picture_is_seen_in_its_place(app: App) -> None:
    """V2: the template is given it as it is given any text."""
    call = {
        "id": "call_1", "type": "function",
        "function": {"name": "screenshot", "arguments": "{}"},
    }  # fmt: skip

    def talk(seed: int) -> list[Json]:
        result = [{"type": "text", "text": "taken:"}, image_part(seed)]
        return [
            user(WORDS),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": result},
        ]

    forget(app)
    first, other = ask(app, talk(41)), ask(app, talk(42))
    assert values(first) != values(other)
    forget(app)
    assert_same(other, ask(app, talk(42)))


def test_all_choices_see_the_image(app: App) -> None:
    forget(app)
    talk = [user(WORDS, image_part(51), "what is it?")]
    one = ask(app, talk, max_tokens=16)
    both = ask(app, talk, max_tokens=16, n=2)["choices"]
    alone = values(one)
    for choice in both:
        found = values({"choices": [choice]})
        assert [token for token, _ in found] == [token for token, _ in alone]
        for (_, value), (_, wanted) in zip(found, alone, strict=True):
            assert value == pytest.approx(wanted, abs=2e-4)


@pytest.mark.parametrize("kind", ["seeing", "seeing-25", "seeing-hybrid"])
def test_quantised_kv_of_images_is_reused_exactly(kind: str, folder: Path) -> None:
    """A rotating window cannot be quantised: such models are refused at load."""
    quantised = {"KV_BITS": "8", "KV_GROUP_SIZE": "32", "PREFILL_STEP_SIZE": "64"}
    with serving(folder, kind, CACHE_SELFTEST="on_load", **quantised) as app:
        with app.pool.lease("default") as model:
            assert model.failed_tests == ()
        talk, answers = list[Json](), list[Json]()
        for number in range(4):
            more = [image_part(number)] if number % 2 == 0 else []
            talk.append(user(f"turn {number}. {WORDS}", *more, "what is it?"))
            answers.append(ask(app, talk))
            talk.append(said(answers[-1]))
        for before, after in itertools.pairwise(answers):
            assert cached(after) >= before["usage"]["prompt_tokens"] - 1
        for number, warm in enumerate(answers):
            forget(app)
            assert_same(warm, ask(app, talk[: 2 * number + 1]))


def test_what_the_model_says_is_never_an_image(folder: Path) -> None:
    """It may say what stands for one; put back as ids it would take one's place."""
    with serving(folder, "seeing", CACHE_SPLICE="true") as app:
        with app.pool.lease("default") as model:
            vision_encoder = model.engine.model.vision_encoder
            assert vision_encoder is not None
            added = model.engine.model.tokenizer.get_added_vocab()
            markup = [added[name] for name in ("<|vision_start|>", "<|image_pad|>")]
        for number in markup:
            forget(app)
            talk = [user(WORDS)]
            bias = {str(number): 100}
            first = ask(app, talk, max_tokens=3, logit_bias=bias)
            talk += [said(first), user(image_part(52), "what is it?")]
            warm = ask(app, talk)
            forget(app)
            assert_same(warm, ask(app, talk))


def test_chunks_may_end_within_an_image(folder: Path) -> None:
    """Of so many tokens that some do; as if it were computed in one piece."""
    talk = [user(WORDS, shown(53), "and", shown(54), "what are they?")]
    answers = []
    for step in ("64", "4096"):
        with serving(folder, "seeing", PREFILL_STEP_SIZE=step) as app:
            answers.append(ask(app, talk, max_tokens=16))
    assert_same(*answers)


def shown(seed: int) -> Json:
    """A picture of 256 tokens."""
    url = data_url(picture(seed, 256, 256))
    return {"type": "image_url", "image_url": {"url": url}}


def test_towers_run_once_for_each_key_and_nothing_stays(app: App) -> None:
    """Else the time to a first token would tell what another one has shown."""
    with app.pool.lease("default") as model:
        vision_encoder = model.engine.model.vision_encoder
        assert vision_encoder is not None
        assert model.images is not None
        message = Message("user", (Image(data_url(picture(91)), path="x"),))
        _, (image,) = model.images.read((message,), "", lambda: True)

        def look(salt: str) -> None:
            memo = vision_encoder.memo
            memo.get(vision_encoder.model, image, vision_encoder.pad, salt)

        runs = vision_encoder.memo.num_runs
        for salt in ("one", "one", "two", "two"):
            app.gpu.call(functools.partial(look, salt))
        assert vision_encoder.memo.num_runs == runs + 2
        prompt = ModelPrompt(ModelIds(image.ids), images=(PlacedImage(0, image),))

        def consume() -> int:
            prompt_images = PromptImages(vision_encoder, prompt)
            while placed := prompt_images.unseen(0, len(image.ids)):
                prompt_images.encode(placed)
            prompt_images.vision_inputs(0, len(image.ids))
            return len(prompt_images._features)

        assert app.gpu.call(consume) == 0
        runs = vision_encoder.memo.num_runs
        vision_encoder.memo.forget()
        app.gpu.call(functools.partial(look, "one"))
        assert vision_encoder.memo.num_runs == runs + 1
