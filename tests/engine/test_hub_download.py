"""Downloads from the hub: once, resumed whatever stopped them, refused in words."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sidecar.engine.loading import hub_download
from testkit.hub import COMMIT, Hub, running_hub
from testkit.raw_http import eventually

REPO = Path(__file__).parents[2]
ModelFolder = Callable[[str], Path]
WEIGHTS = "model.safetensors"
HELD = 5 * (1 << 16)  # bytes

DOWNLOAD = """
import os, sys
from sidecar.engine.loading import hub_download
from sidecar.engine.loading.checkpoint_files import (
    MemoryLimit,
    config_fault,
    folder_fault,
    memory_fault,
)
from sidecar.engine.loading.checkpoint_files import names_fault
from sidecar.engine.loading.download_progress import DownloadProgress
from sidecar.engine.loading.hub_download import Checks, fetch_snapshot
from sidecar.engine.loading.hub_faults import HubFault
from sidecar.engine.loading.ranged_download import RetryPolicy

def knows(config):
    return config["model_type"] == "qwen3"

name, limit = sys.argv[1], MemoryLimit(int(sys.argv[2]), "MAX_PROCESS_MEMORY")
if "LARGEST" in os.environ:  # 50 GB take long
    hub_download.MAX_HTTP_DOWNLOAD_SIZE = int(os.environ["LARGEST"])
checks = Checks(
    lambda names, size: names_fault(names) or memory_fault(size, limit),
    lambda folder: config_fault(folder, knows),
)
progress = DownloadProgress(lambda line: print(line, file=sys.stderr, flush=True))
try:
    folder = fetch_snapshot(name, checks, progress, RetryPolicy(0.01, 0.1, 4))
    print("whole" if folder_fault(folder, knows) is None else "not whole")
except HubFault as error:
    print("failed", error)
"""


class Cache:
    """A hub's cache in a folder, and processes that download into it."""

    def __init__(self, home: Path, hub: Hub) -> None:
        self.home = home
        self.hub = hub

    def start(
        self, name: str = "org/tiny", limit: int = 1 << 40, **env: str
    ) -> subprocess.Popen[str]:
        """A process that fetches it, without the seconds that MLX takes to import."""
        known = {"PATH": os.environ["PATH"], "HF_HUB_DOWNLOAD_TIMEOUT": "60"}
        return subprocess.Popen(
            [sys.executable, "-c", DOWNLOAD, name, str(limit)],
            cwd=REPO,
            env={**known, **self.hub.environment(str(self.home)), **env},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def fetch(
        self, name: str = "org/tiny", limit: int = 1 << 40, **env: str
    ) -> tuple[str, str]:
        """What it says in the end, and what it told on the way."""
        process = self.start(name, limit, **env)
        out, told = process.communicate(timeout=120)
        assert process.returncode == 0, told
        return out.strip(), told

    def start_and_hold(self) -> subprocess.Popen[str]:
        """A process that has a part of the weights and waits for the rest."""
        self.hub.line.holds_after = HELD
        process = self.start()
        assert eventually(lambda: self.kept_bytes() >= HELD, 60)
        return process

    def start_and_kill(self) -> None:
        """A process that is killed in the middle of the weights."""
        process = self.start_and_hold()
        process.kill()
        process.communicate()

    @property
    def begun(self) -> list[Path]:
        """All begun files, the library's own too."""
        return list(self.home.glob("hub/*/blobs/*.incomplete"))

    @property
    def partials(self) -> list[Path]:
        """Begun weights; the library's own have a longer name."""
        return [file for file in self.begun if len(file.stem) == 64]

    def kept_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.partials)


@pytest.fixture
def files(model_folder: ModelFolder) -> dict[str, bytes]:
    """A model's files, and beside them what no model needs."""
    found = {file.name: file.read_bytes() for file in model_folder("dense").iterdir()}
    noise = random.Random(1).randbytes(1000)
    return {**found, "evil.py": b"1/0", "pytorch_model.bin": noise, "README.md": b"x"}


@pytest.fixture
def cache(files: dict[str, bytes], tmp_path: Path) -> Iterator[Cache]:
    with running_hub("org/tiny", files) as hub:
        yield Cache(tmp_path, hub)


WHOLE = "whole"


def test_only_what_a_model_needs_is_fetched_and_once(cache: Cache) -> None:
    """No code, no pickles, nothing twice; an absent model is said to be absent."""
    out, told = cache.fetch()
    assert out == WHOLE
    assert "downloading org/tiny: 2 MB" in told
    assert "downloaded org/tiny: 2 MB in" in told
    assert cache.fetch() == (WHOLE, "")
    needed = set(cache.hub.files) - {"evil.py", "pytorch_model.bin", "README.md"}
    assert sorted(cache.hub.fetched) == sorted(needed)
    absent, _ = cache.fetch("org/absent")
    assert "no such model on the hub" in absent
    assert "HF_TOKEN" in absent


def test_a_killed_download_goes_on_where_it_was(cache: Cache) -> None:
    """SIGKILL in the middle: the next process asks for the rest only."""
    cache.start_and_kill()
    kept = cache.kept_bytes()
    cache.hub.line.holds_after = None
    out, told = cache.fetch()
    assert out == WHOLE
    assert "are here already" in told
    assert cache.hub.starts[WEIGHTS] == [0, kept]
    assert cache.partials == []


def test_a_line_that_breaks_again_and_again(cache: Cache) -> None:
    """Each break costs a range request, not the file; more breaks than tries."""
    cache.hub.line.breaks_after = 300_000
    out, told = cache.fetch()
    assert out == WHOLE
    assert "the download broke" in told
    starts = cache.hub.starts[WEIGHTS]
    assert len(starts) > 4
    assert starts == sorted(set(starts))


def test_a_hub_that_stays_away_is_given_up_in_a_sentence(cache: Cache) -> None:
    """After some tries in a row; what arrived is kept."""
    process = cache.start_and_hold()
    cache.hub.line.status, cache.hub.line.breaks_after = 503, 0
    cache.hub.line.go.set()
    out, _ = process.communicate(timeout=60)
    assert "its download broke off at" in out
    assert "start again to go on from there" in out
    assert len(out.splitlines()) == 1
    assert cache.kept_bytes() >= HELD


def test_a_refusal_is_not_tried_again(cache: Cache) -> None:
    """401 and the like: a token may be needed."""
    cache.fetch()
    for blob in cache.home.glob("hub/*/blobs/*"):
        if blob.stat().st_size > 1_000_000:
            blob.unlink()
    cache.hub.line.status = 401
    before = len(cache.hub.requests)
    out, _ = cache.fetch()
    assert "HTTP status 401" in out
    assert "HF_TOKEN" in out
    assert len(cache.hub.requests) - before < 8


def test_a_server_without_ranges_is_begun_again(cache: Cache) -> None:
    """It sends all of the file: what was there does not stay in front of it."""
    cache.start_and_kill()
    cache.hub.line.has_ranges, cache.hub.line.holds_after = False, None
    assert cache.fetch()[0] == WHOLE


@pytest.mark.parametrize("is_git", [False, True])
def test_what_arrives_damaged_is_fetched_again(cache: Cache, is_git: bool) -> None:
    """The content is held against its digest, of either kind."""
    cache.hub.line.damaged, cache.hub.line.is_git = 1, is_git
    out, told = cache.fetch()
    assert out == WHOLE
    assert "a file was damaged" in told
    assert cache.hub.starts[WEIGHTS] == [0, 0]


def test_what_always_arrives_damaged_is_given_up(cache: Cache) -> None:
    """Not fetched for ever: twice."""
    cache.hub.line.damaged = 100
    out, _ = cache.fetch()
    assert out.startswith("failed a file of it arrives damaged")
    assert cache.hub.starts[WEIGHTS] == [0, 0]


def test_weights_that_lie_on_another_host(cache: Cache) -> None:
    """As hubs have it: sent there, resumed there, and the token does not go along."""
    cache.hub.line.elsewhere = True
    cache.start_and_kill()
    cache.hub.line.holds_after = None
    assert cache.fetch(HF_TOKEN="hf_secret")[0] == WHOLE
    assert cache.hub.starts[WEIGHTS] == [0, HELD]
    asked = f"/org/tiny/resolve/{COMMIT}/{WEIGHTS}"
    assert cache.hub.tokens[asked] == {None, "Bearer hf_secret"}
    assert cache.hub.tokens[f"/elsewhere/{WEIGHTS}"] == {None}


@pytest.mark.parametrize("what", ["blob", "partial"])
def test_what_lies_damaged_in_the_cache_is_fetched_again(
    cache: Cache, what: str
) -> None:
    """A file that is too short, or a begun one with something else in it."""
    cache.fetch()
    blob = next(cache.home.glob(f"hub/*/snapshots/*/{WEIGHTS}")).resolve()
    if what == "blob":
        blob.write_bytes(b"short")
    else:
        blob.unlink()
        blob.with_name(f"{blob.name}.incomplete").write_bytes(b"x" * 5000)
    assert cache.fetch()[0] == WHOLE
    assert cache.hub.starts[WEIGHTS][-1] == 0


def test_weights_that_lie_in_the_cache_without_their_name_are_not_fetched_again(
    cache: Cache,
) -> None:
    """Killed before the file was linked into the snapshot: its content is here."""
    cache.fetch()
    (link,) = cache.home.glob(f"hub/*/snapshots/*/{WEIGHTS}")
    link.unlink()
    out, told = cache.fetch()
    assert out == WHOLE, told
    assert "2 MB are here already" in told
    assert cache.hub.starts[WEIGHTS] == [0]


def test_two_processes_fetch_a_file_once(cache: Cache) -> None:
    """The second waits for the first, and says so."""
    first = cache.start_and_hold()
    second = cache.start()
    told = []
    assert second.stderr is not None
    while not told or "another process" not in told[-1]:
        told.append(second.stderr.readline())
        assert told[-1], told
    cache.hub.line.go.set()
    for process in (first, second):
        assert process.communicate(timeout=60)[0].strip() == WHOLE
    assert cache.hub.starts[WEIGHTS] == [0]


def test_offline_a_cached_model_is_served_without_a_request(cache: Cache) -> None:
    """HF_HUB_OFFLINE=1, and a hub that is gone: what is here is taken."""
    cache.fetch()
    before = len(cache.hub.requests)
    assert cache.fetch(HF_HUB_OFFLINE="1") == (WHOLE, "")
    assert len(cache.hub.requests) == before
    assert cache.fetch(HF_ENDPOINT="http://127.0.0.1:9")[0] == WHOLE


def test_offline_what_is_not_wholly_here_is_a_sentence(cache: Cache) -> None:
    """Nothing of it, or half of it: the setting to change is named."""
    out, _ = cache.fetch(HF_HUB_OFFLINE="1")
    assert out.startswith("failed HF_HUB_OFFLINE is set")
    assert cache.hub.requests == []
    gone, _ = cache.fetch(HF_ENDPOINT="http://127.0.0.1:9")
    assert "the hub cannot be reached" in gone
    cache.start_and_kill()
    half, _ = cache.fetch(HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE is set" in half
    assert len(half.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({WEIGHTS: None, "model-Q4.gguf": b"GGUF"}, ("GGUF", "MLX")),
        ({WEIGHTS: None}, ("PyTorch", "pytorch_model.bin")),
        ({"config.json": b'{"model_type": "martian"}'}, ("martian", "mlx-lm")),
        (
            {"config.json": b'{"model_type": "bert", "architectures": ["BertModel"]}'},
            ("embedding",),
        ),
    ],
)
def test_what_cannot_be_served_is_not_downloaded(
    files: dict[str, bytes],
    tmp_path: Path,
    change: dict[str, bytes | None],
    words: tuple[str, ...],
) -> None:
    """Found out from the listing or from config.json, before the weights."""
    changed = {**files, **change}
    there = {name: data for name, data in changed.items() if data is not None}
    with running_hub("org/tiny", there) as hub:
        out, _ = Cache(tmp_path, hub).fetch()
    assert all(word in out for word in words), out
    assert WEIGHTS not in hub.fetched


def test_what_does_not_fit_is_not_downloaded(cache: Cache) -> None:
    """Into the memory, or onto the disk: told with both numbers."""
    out, _ = cache.fetch(limit=1000)
    assert "MAX_PROCESS_MEMORY" in out
    cache.hub.line.claimed[WEIGHTS] = 10**16
    out, _ = cache.fetch(limit=10**17)
    assert "10000000.0 GB on the disk" in out
    assert "free; make room" in out
    assert WEIGHTS not in cache.hub.fetched


def test_shards_are_fetched_side_by_side(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    """All of them arrive, with one count of bytes."""
    data = files.pop(WEIGHTS)
    names = [f"model-0000{i}-of-00005.safetensors" for i in range(1, 6)]
    shards = {name: data[:-1] + bytes([i]) for i, name in enumerate(names)}
    with running_hub("org/tiny", {**files, **shards}) as hub:
        out, told = Cache(tmp_path, hub).fetch()
    assert out == WHOLE
    assert f"downloading org/tiny: {5 * len(data) / 1e6:.0f} MB" in told
    assert hub.starts == {name: [0] for name in hub.fetched}


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "model/../../x.safetensors", "..", "a//b", "a/./b", "a\\b", "",
     "x\n.json"],
)  # fmt: skip
def test_a_name_that_leads_outside_is_refused(name: str) -> None:
    """Files there would be made, and removed, by whoever answers as the hub."""
    assert not hub_download.is_inside(name)
    assert hub_download.is_inside("a/model-1.safetensors")


@pytest.mark.parametrize("etag", ["/tmp/victim", "../../x", "a/b", "", "a.b"])
def test_an_etag_that_is_no_digest_names_no_file(etag: str) -> None:
    """It becomes the name of a file in the cache."""
    assert not hub_download._ETAG.fullmatch(etag)
    assert hub_download._ETAG.fullmatch("0a" * 32)


@pytest.mark.parametrize("bytes_over", [0, 1])
def test_a_file_larger_than_http_may_carry_is_left_to_the_library(
    cache: Cache, files: dict[str, bytes], bytes_over: int
) -> None:
    """One of just that size is still ours, to be resumed; both arrive."""
    cache.hub.line.holds_after = HELD
    process = cache.start(LARGEST=str(len(files[WEIGHTS]) - bytes_over))
    try:
        assert eventually(lambda: WEIGHTS in cache.hub.starts and cache.begun, 60)
        assert bool(cache.partials) == (bytes_over == 0)
    finally:
        cache.hub.line.go.set()
        out, told = process.communicate(timeout=120)
    assert out.strip() == WHOLE, told
