"""
Planted faults of what is known of images: each must be caught by the oracle fuzzer.

A fault is patched into the running program, a few sequences of fixed seeds are played,
and a violation must be reported; without a fault the same sequences report none.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sidecar.engine import sequence
from sidecar.engine.vision.prompt_images import PromptImages
from sidecar.engine.vision.vision_encoder import FeatureMemo, SeeingModel
from sidecar.images import reader, seen
from sidecar.images.reader import ImageReader
from sidecar.kv import prefix_store
from sidecar.pipeline.template import image_slots
from testkit.image_oracle import SeeingPlayer
from testkit.image_rig import SeeingRig, running_seeing_rig
from testkit.image_talk import plan_seeing
from testkit.oracle_talk import Op
from testkit.planted import patched

MakeRig = Callable[[str], SeeingRig]
_LENGTH = 6
_MAX_SEQUENCES = 12


@pytest.fixture(scope="module")
def make_rig(folder: Path) -> Iterator[MakeRig]:
    rigs: dict[str, SeeingRig] = {}
    with ExitStack() as stack:

        def make(kind: str) -> SeeingRig:
            if kind not in rigs:
                rigs[kind] = stack.enter_context(running_seeing_rig(folder / kind))
            return rigs[kind]

        yield make


def found(rig: SeeingRig, ops: Sequence[str], sequences: int) -> list[str]:
    """The invariants that a run violates; none if it shows nothing."""
    for number in range(sequences):
        player = SeeingPlayer(rig)
        if player.play(_only(plan_seeing(f"faults/{number}", _LENGTH), ops)):
            return [violation.invariant for violation in player.found]
    return []


def _only(ops: Sequence[Op], names: Sequence[str]) -> list[Op]:
    """Plain requests and these: what shows a fault comes sooner."""
    instead = ["append", *names]
    return [Op(instead[n % len(instead)], op.seed) for n, op in enumerate(ops)]


# The faults


def ids_that_do_not_know_the_content() -> AbstractContextManager[None]:
    """An image of equal size is taken for another."""
    return patched(
        seen, "_made_ids", lambda made: lambda _, size, count: made("", size, count)
    )


def a_mark_of_the_size_alone() -> AbstractContextManager[None]:
    def make(seen_image: Any) -> Any:
        def alike(digest: str, size: tuple[int, int], processed: Any) -> Any:
            mark = seen_image(str(size), size, processed).mark
            return replace(seen_image(digest, size, processed), mark=mark)

        return alike

    return patched(reader, "seen_image", make)


@contextmanager
def features_known_by_size_alone() -> Iterator[None]:
    def make(method: Any) -> Any:
        def of_any(self: Any, *args: Any) -> Any:
            *before, image, pad, salt = args if len(args) > 2 else (*args, None)
            if not before:  # has
                image, salt = args
                return method(self, replace(image, mark=str(image.size)), salt)
            return method(
                self, *before, replace(image, mark=str(image.size)), pad, salt
            )

        return of_any

    with patched(FeatureMemo, "get", make), patched(FeatureMemo, "has", make):
        yield


def positions_of_images_one_on() -> AbstractContextManager[None]:
    def make(positions: Any) -> Any:
        def moved(self: Any, ids: Any, images: Any) -> Any:
            told, shift = positions(self, ids, images)
            pads = np.isin(ids, [i for i in images[0].read_ids if ids.count(i) > 8])
            return (None if told is None else told + pads), shift

        return moved

    return patched(SeeingModel, "positions", make)


def positions_behind_images_one_on() -> AbstractContextManager[None]:
    """What is decoded stands one further on than what was read."""
    return patched(
        sequence.Sequence,
        "shift",
        lambda shift: property(lambda self: shift.fget(self) + bool(shift.fget(self))),
    )


def an_image_embedded_as_one_before_it() -> AbstractContextManager[None]:
    def make(look: Any) -> Any:
        def wrong(self: PromptImages, placed: Any) -> bool:
            done: bool = look(self, placed)
            like = [
                p
                for p in self._images
                if p.start < placed.start and len(p.image.ids) == len(placed.image.ids)
            ]
            if done and like:
                vision_encoder = self._vision_encoder
                self._features[placed.start] = vision_encoder.memo.get(
                    vision_encoder.model, like[0].image, vision_encoder.pad, self._salt
                )
            return done

        return wrong

    return patched(PromptImages, "encode", make)


def pixels_of_another_image() -> AbstractContextManager[None]:
    """Decoded ones are kept by their number of bytes."""
    kept: dict[tuple[int, ...], Any] = {}

    def make(vision_inputs: Any) -> Any:
        def first(self: ImageReader, *args: Any) -> Any:
            mine = vision_inputs(self, *args)
            named = {n: p.shape for n, p in mine.processed.pixels.items()}
            other = kept.setdefault(tuple(sorted(map(str, named.items()))), mine)  # type: ignore[arg-type]
            return replace(mine, processed=other.processed)

        return first

    return patched(ImageReader, "_prepare", make)


def a_match_that_ends_within_an_image() -> AbstractContextManager[None]:
    return patched(prefix_store, "before_image", lambda _: lambda ids, depth: depth)


def images_in_the_places_of_each_other() -> AbstractContextManager[None]:
    def make(cut: Any) -> Any:
        def turned(text: str, marks: Any, by_mark: Any) -> Any:
            others = dict(zip(by_mark, [*by_mark.values()][::-1], strict=True))
            return [
                replace(e, image=replace(others[e.image.mark], mark=e.image.mark))
                if isinstance(e, image_slots.ImageSlot)
                else e
                for e in cut(text, marks, by_mark)
            ]

        return turned

    return patched(image_slots, "_cut", make)


@dataclass(frozen=True)
class Fault:
    """
    Args:
    plant: puts it in. by: what has to be told, among more. kinds: models that show it.
    ops: what provokes it.
    """

    plant: Callable[[], AbstractContextManager[None]]
    by: str = "III"
    kinds: tuple[str, ...] = ("seeing",)
    ops: tuple[str, ...] = ("swap",)


ALL = ("seeing", "seeing-hybrid", "seeing-sliding")
FAULTS = (
    Fault(ids_that_do_not_know_the_content, kinds=ALL),
    Fault(a_mark_of_the_size_alone),
    Fault(features_known_by_size_alone, kinds=ALL),
    Fault(positions_of_images_one_on, kinds=("seeing", "seeing-hybrid")),
    Fault(positions_behind_images_one_on, kinds=("seeing", "seeing-hybrid")),
    Fault(an_image_embedded_as_one_before_it, kinds=ALL),
    Fault(pixels_of_another_image),
    Fault(a_match_that_ends_within_an_image, "II", ops=("cancel_within",)),
    Fault(images_in_the_places_of_each_other, "II"),
)
CASES = [
    pytest.param(fault, kind, id=f"{fault.plant.__name__}-{kind}")
    for fault in FAULTS
    for kind in fault.kinds
]


@pytest.mark.parametrize(("fault", "kind"), CASES)
def test_a_planted_fault_is_caught(fault: Fault, kind: str, make_rig: MakeRig) -> None:
    rig = make_rig(kind)
    with fault.plant():
        assert fault.by in found(rig, fault.ops, _MAX_SEQUENCES)
        rig.forget()


@pytest.mark.parametrize("kind", ALL)
def test_without_a_fault_nothing_is_reported(kind: str, make_rig: MakeRig) -> None:
    ops = sorted({op for fault in FAULTS for op in fault.ops})
    assert found(make_rig(kind), ops, 1) == []
