"""
KV on the disk: a prompt brought back against the same prompt computed.

    python -m bench disk [--model FOLDER | --large] [--tokens 8192 32768]

One process, one run. For each length a prompt is computed cold, written, and brought
back after all memory was lost; then computed and brought back in turns. Beside a write
and beside a restore another conversation streams: the pauses between its tokens are
compared with those of the same stream alone.
"""

import argparse
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from bench.models import is_made, make
from sidecar.app import App, build, serve_in_thread
from sidecar.config.settings import GenerationConfig, load_config
from sidecar.core.conversation import Conversation
from sidecar.core.prompt import ModelIds, ModelPrompt
from sidecar.core.requests import GenerationOptions, SamplingParams
from sidecar.engine.job import ChoiceEnded, Job, JobFailed, Token
from sidecar.engine.sampling import Sampling, settle
from sidecar.residents.resident import Resident
from testkit.servers import wait_ready

_WAIT_S = 600.0


def main(argv: list[str]) -> int:
    """Exit code 0; the table goes to standard output."""
    options = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        root = Path(scratch)
        model = Path(options.model or root / "model")
        if not is_made(model):
            make(model, "--large" if options.large else "--small")
        with _serving(model, root / "kv") as app:
            for length in options.tokens:
                _compare(app, length, options.rounds)
            _beside_a_stream(app, max(options.tokens))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench disk", description=__doc__)
    parser.add_argument("--model", help="a folder; where it has none, one is made")
    parser.add_argument("--large", action="store_true", help="8 B, for a GPU")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", help="where the files go")
    return parser


@contextmanager
def _serving(model: Path, root: Path) -> Iterator[App]:
    flags = {
        "MLX_PORT": "0", "MODEL_DIR": "none", "MODEL_PATH": str(model),
        "ENABLE_REQUEST_LOGGING": "false", "CACHE_SELFTEST": "off",
        "KV_DISK_PERSISTENCE": "true", "KV_DISK_PATH": str(root),
        "KV_DISK_QUIET_SECONDS": "86400", "KV_DISK_RESTORE": "always",
        "KV_DISK_MAX_WRITE_GB_PER_DAY": "0", "KV_DISK_MIN_FREE_GB": "0",
    }  # fmt: skip
    app = build(load_config(flags, Path("/nonexistent"), {}))
    thread = serve_in_thread(app)
    try:
        wait_ready(app.url, _WAIT_S)
        _wait_open(app)
        yield app
    finally:
        app.stop_listening()
        app.close()
        thread.join(60)


def _wait_open(app: App) -> None:
    """The digest of the weights is made once: a second a gigabyte."""
    with _leased(app) as resident:
        disk, started = resident.disk, time.monotonic()
        assert disk is not None
        assert disk.wait_open(_WAIT_S)
        seconds = time.monotonic() - started
    sys.stdout.write(f"weights digested {seconds:.1f} s after the load\n")


@contextmanager
def _leased(app: App) -> Iterator[Resident]:
    with app.pool.lease("local") as served:
        assert isinstance(served, Resident)
        yield served


def _ids(seed: str, length: int) -> ModelIds:
    chance = random.Random(seed)
    return ModelIds(tuple(chance.randrange(5, 3000) for _ in range(length)))


def _submit(resident: Resident, ids: ModelIds, max_tokens: int) -> Job:
    options = GenerationOptions(sampling=SamplingParams(), max_tokens=max_tokens)
    return resident.engine.submit(ModelPrompt(ids), _sampling(resident), options)


def _sampling(resident: Resident) -> Sampling:
    own = resident.engine.model.generation_config
    return settle(SamplingParams(), GenerationConfig(), own)


def _first_token_s(resident: Resident, ids: ModelIds) -> float:
    """From the request to its first token; what the disk has is brought back."""
    started = time.perf_counter()
    prompt = ModelPrompt(ids)
    expected = resident.cache.lookup(ids, Conversation()).cached_len
    assert resident.restore_raw(prompt, lambda: True).cached_len >= expected
    job = _submit(resident, ids, 1)
    try:
        while not isinstance(event := job.next_event(_WAIT_S), Token):
            assert not isinstance(event, (JobFailed, type(None))), event
        first_s = time.perf_counter() - started
        while not isinstance(job.next_event(_WAIT_S), ChoiceEnded):
            pass
        return first_s
    finally:
        resident.engine.release(job)


def _lose_memory(resident: Resident) -> None:
    """KV and what explains it, as a restart does; the slots stay known."""
    resident.memory.forget()


def _compare(app: App, length: int, rounds: int) -> None:
    with _leased(app) as resident:
        disk = resident.disk
        assert disk is not None
        _first_token_s(resident, _ids(f"warm-up {length}", length))  # kernels
        cold, warm, written = [], [], []
        for number in range(rounds):
            ids = _ids(f"{length} {number}", length)
            disk.forget()
            resident.memory.forget()
            cold.append(_first_token_s(resident, ids))
            started = time.perf_counter()
            disk.flush()
            written.append(time.perf_counter() - started)
            _lose_memory(resident)
            warm.append(_first_token_s(resident, ids))
        counts = resident.counters()
        num_bytes = counts["disk_bytes_read"] / max(1, counts["disk_restored"])
        size = resident.engine.guard.model.kv_bytes(length)
    cold_s, warm_s, written_s = map(statistics.median, (cold, warm, written))
    sys.stdout.write(
        f"{length} tokens, {size / 1e6:.0f} MB of KV: computed {cold_s:.2f} s, "
        f"brought back {warm_s:.2f} s ({cold_s / warm_s:.1f} times as fast), "
        f"written {written_s:.2f} s ({num_bytes / 1e6 / written_s:.0f} MB/s)\n"
    )


def _beside_a_stream(app: App, length: int) -> None:
    with _leased(app) as resident:
        disk = resident.disk
        assert disk is not None
        disk.forget()
        resident.memory.forget()
        ids = _ids("beside", length)

        def write() -> None:
            _first_token_s(resident, ids)

        _gaps(resident, lambda: time.sleep(1))
        idle = _gaps(resident, lambda: time.sleep(4))
        write()
        told = {"idle": idle, "beside a write": _gaps(resident, disk.flush)}
        _lose_memory(resident)
        prompt = ModelPrompt(ids)
        told["beside a restore"] = _gaps(
            resident, lambda: resident.restore_raw(prompt, lambda: True)
        )
    for name, gaps in told.items():
        p99 = sorted(gaps)[int(0.99 * (len(gaps) - 1))]
        sys.stdout.write(
            f"a stream {name}: {len(gaps)} tokens, pause p50 "
            f"{1000 * statistics.median(gaps):.1f} ms, p99 {1000 * p99:.1f} ms, "
            f"longest {1000 * max(gaps):.1f} ms\n"
        )


def _gaps(resident: Resident, act: Callable[[], object]) -> list[float]:
    """Seconds between a stream's tokens while something else is done."""
    begun, over = threading.Event(), threading.Event()

    def read() -> list[float]:
        job, gaps, last = _submit(resident, _ids("stream", 64), 1 << 14), [], 0.0
        try:
            while not over.is_set():
                if isinstance(job.next_event(_WAIT_S), Token):
                    now = time.perf_counter()
                    if last:
                        gaps.append(now - last)
                    if len(gaps) == 20:
                        begun.set()
                    last = now
            return gaps[20:]
        finally:
            resident.engine.release(job)

    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(read)
        assert begun.wait(_WAIT_S)
        act()
        over.set()
        return reading.result(_WAIT_S)
