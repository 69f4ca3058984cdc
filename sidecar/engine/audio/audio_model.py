"""A model of mlx-audio's and its turns on the GPU thread, to hear or to speak."""

import inspect
import warnings
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, Literal, TypeVar

import mlx.core as mx

from sidecar.engine.gpu_thread import GpuThread
from sidecar.engine.loading.checkpoint_files import brought_code, read_config
from sidecar.engine.loading.closed_network import closed_network
from sidecar.engine.loading.reachable_arrays import evaluate_in_slices, reachable_arrays
from sidecar.engine.loading.weights import let_go
from sidecar.kv.kv_layers import give_back_much, release_freed_memory

T = TypeVar("T")

AudioKind = Literal["stt", "tts"]


class AudioModel:
    """
    A loaded model, used on the GPU thread alone. `turn` and `close`: any thread.

    Args:
        model: what mlx-audio made; all its arrays are evaluated.
    """

    def __init__(self, model: Any, gpu: GpuThread) -> None:
        self._model: Any = model
        self._gpu = gpu
        self.num_bytes = sum(array.nbytes for array in reachable_arrays(model))
        self.parameters = frozenset(inspect.signature(model.generate).parameters)
        self.is_closed = False

    def turn(self, function: Callable[[Any], T]) -> T:
        """
        Have something computed with the model, in one turn of the GPU thread.

        Streams of other models go on before it and behind it.

        Args:
            function: of the model; what it returns must not be lazy.
        Raises:
            NotFetched: the library wanted to fetch something.
        """

        def steps() -> Generator[None, None, T]:
            yield from ()  # what is computed here cannot be cut
            with closed_network():
                found = function(self._model)
            give_back_much()
            return found

        return self._gpu.call_in_steps(steps(), is_background=False)

    def close(self) -> int:
        """Let the weights go; the bytes. A second time does nothing."""
        if self.is_closed:
            return 0
        self.is_closed = True
        return self._gpu.call(self._let_go)

    def _let_go(self) -> int:
        mx.synchronize()
        before = mx.get_active_memory()
        let_go(self._model)
        self._model = None  # a codec that it keeps for itself is no module of its
        release_freed_memory()
        return max(0, before - mx.get_active_memory())


def read_audio_model(kind: AudioKind, folder: Path, *, trust: bool) -> Any:
    """
    Read a model and compute all it holds; on the load thread.

    Args:
        trust: let the folder bring code of its own.
    Raises:
        ValueError: it would run code of its own, or lacks its tokenizer.
        NotFetched: it lacks a part that the library would fetch.
    """
    places = (folder, *filter(Path.is_dir, folder.iterdir()))
    code = next(filter(None, map(brought_code, places)), None)
    if code and not trust:
        raise ValueError(
            f"its {code} brings code of its own, TRUST_REMOTE_CODE=true runs it"
        )
    if kind == "stt":
        from mlx_audio.stt.utils import load_model
    else:
        from mlx_audio.tts.utils import load_model
    # By its type alone: a folder named for another model is none.
    kwargs: dict[str, Any] = {"model_name_parts": []} if _has_type(folder) else {}
    with closed_network(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it goes on without what it warns of
        model: Any = load_model(folder, lazy=True, **kwargs)
    if kind == "stt" and _lacks_tokenizer(model):
        raise ValueError("its tokenizer or its preprocessor_config.json cannot be read")
    mx.eval(mx.random.state)
    for _ in evaluate_in_slices(model):
        pass
    return model


def _has_type(folder: Path) -> bool:
    return bool((read_config(folder) or {}).get("model_type"))


def _lacks_tokenizer(model: Any) -> bool:
    """mlx-audio writes ids, or fails at the first window, where it found none."""
    missing = object()
    names = ("_processor", "_tokenizer", "tokenizer")
    held = [getattr(model, name, missing) for name in names]
    there = [item for item in held if item is not missing]
    return bool(there) and all(item is None for item in there)
