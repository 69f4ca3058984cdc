"""`mlx-sidecar pull` against a stand-in of a hub."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sidecar.cli.pull import _put as put
from testkit.hub import Hub, running_hub
from testkit.raw_http import eventually

REPO = Path(__file__).parents[2]
NUM_KILLS = 20
STEP = 1 << 16  # bytes that come before each kill


@pytest.fixture
def files(model_folder: Callable[[str], Path]) -> dict[str, bytes]:
    folder = model_folder("dense")
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.fixture
def hub(files: dict[str, bytes]) -> Iterator[Hub]:
    with running_hub("org/tiny", files) as found:
        yield found


def begin(
    hub: Hub, home: Path, model: str = "org/tiny", *flags: str
) -> "subprocess.Popen[str]":
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO), "HOME": str(home)}
    return subprocess.Popen(
        [sys.executable, "-m", "sidecar", "pull", model, *flags], cwd=home,
        env={**env, **hub.environment(str(home))}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def pull(
    hub: Hub, home: Path, model: str = "org/tiny", *flags: str
) -> tuple[int, str, str]:
    process = begin(hub, home, model, *flags)
    out, error = process.communicate(timeout=120)
    return process.returncode, out, error


def kept(home: Path) -> int:
    """Bytes of weights that are there in part."""
    parts = [f for f in home.glob("hub/*/blobs/*.incomplete") if len(f.stem) == 64]
    return sum(part.stat().st_size for part in parts)


def blobs_are(home: Path, files: dict[str, bytes]) -> bool:
    (folder,) = home.glob("hub/models--org--tiny/snapshots/*")
    return all((folder / name).read_bytes() == data for name, data in files.items())


@pytest.mark.parametrize("num_kills", [6, NUM_KILLS])
def test_kills_cost_nothing(
    num_kills: int, hub: Hub, files: dict[str, bytes], tmp_path: Path
) -> None:
    """Each time it goes on by a range where it was; the files are equal at the end."""
    hub.line.holds_after = STEP
    done = 0
    for _ in range(num_kills):
        process = begin(hub, tmp_path)
        done += STEP

        def is_held(wanted: int = done) -> bool:
            return kept(tmp_path) == wanted

        assert eventually(is_held, 60), (kept(tmp_path), done)
        process.kill()
        process.communicate()
    hub.line.holds_after = None
    code, out, error = pull(hub, tmp_path)
    assert (code, error) == (0, "")
    assert "are here already" in out
    assert "serve it: python3 install_and_run.py --model org/tiny" in out
    assert hub.starts["model.safetensors"] == [n * STEP for n in range(num_kills + 1)]
    assert blobs_are(tmp_path, files)
    again = len(hub.fetched)
    assert pull(hub, tmp_path)[0] == 0
    assert len(hub.fetched) == again


def test_ctrl_c_keeps_what_is_there(hub: Hub, tmp_path: Path) -> None:
    hub.line.holds_after = STEP
    process = begin(hub, tmp_path)
    assert eventually(lambda: kept(tmp_path) == STEP, 60)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "what was downloaded is kept" in error
    assert "Traceback" not in error
    assert kept(tmp_path) == STEP


def test_a_wrong_checksum_is_never_taken(
    hub: Hub, files: dict[str, bytes], tmp_path: Path
) -> None:
    """It is fetched once more; damaged for ever, it is refused and nothing stays."""
    hub.line.damaged = 1
    assert pull(hub, tmp_path)[0] == 0
    assert blobs_are(tmp_path, files)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("org/absent", "no such model on the hub"),
        ("just-a-name", "must be a hub id"),
        ("/a/folder", "must be a hub id"),
    ],
)
def test_what_cannot_be_pulled_says_why(
    hub: Hub, tmp_path: Path, model: str, words: str
) -> None:
    code, out, error = pull(hub, tmp_path, model)
    assert code in (1, 2)
    assert words in error
    assert (out, "Traceback" in error) == ("", False)


def test_an_unknown_name_is_told_those_like_it(hub: Hub, tmp_path: Path) -> None:
    code, _, error = pull(hub, tmp_path, "org/tinny")
    assert code == 1
    assert "names like it: org/tiny" in error


def test_other_bits_are_a_sibling(hub: Hub, tmp_path: Path) -> None:
    """Of the same model, not of one whose name begins like it."""
    hub.listed = ("org/model-8bit", "org/model-bf16", "org/model-large-4bit")
    hub.repository = "org/Model-4bit"
    code, out, _ = pull(hub, tmp_path, "org/Model-8bit", "--bits", "4")
    assert code == 0
    assert "in 4 bits it is org/Model-4bit" in out
    assert "serve it: python3 install_and_run.py --model org/Model-4bit" in out
    code, _, error = pull(hub, tmp_path, "org/model-bf16", "--bits", "6")
    assert code == 1
    assert "the hub has no org/model-6bit; there are org/model-8bit" in error
    assert "large" not in error


def test_a_folder_of_ones_own(
    hub: Hub, files: dict[str, bytes], tmp_path: Path
) -> None:
    """Weights are no second time on the disk; what is there is left alone."""
    mine = tmp_path / "models" / "mine"
    code, _, error = pull(hub, tmp_path, "org/tiny", "--to", str(mine))
    assert (code, "there is no folder" in error) == (2, True)
    assert hub.fetched == []
    mine.parent.mkdir()
    code, out, _ = pull(hub, tmp_path, "org/tiny", "--to", str(mine))
    assert code == 0
    assert f"serve it: python3 install_and_run.py --model {mine}" in out
    assert {f.name: f.read_bytes() for f in mine.iterdir()} == files
    (weights,) = mine.glob("*.safetensors")
    assert weights.stat().st_nlink == 2
    assert [*mine.parent.iterdir()] == [mine]
    code, _, error = pull(hub, tmp_path, "org/tiny", "--to", str(mine))
    assert (code, "is there already" in error) == (2, True)


@pytest.mark.parametrize("tool", ["pull", "recommend"])
def test_no_answer_of_a_hub_names_a_file_outside(
    hub: Hub, files: dict[str, bytes], tmp_path: Path, tool: str
) -> None:
    """huggingface_hub takes the ETag of a small file as its name in the cache."""
    hub.line.etag = "../" * 12 + str(tmp_path / "escaped").lstrip("/")
    hub.repository = "mlx-community/tiny"
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPO), "HOME": str(tmp_path)}
    words = [tool] if tool == "recommend" else [tool, hub.repository]
    done = subprocess.run(
        [sys.executable, "-m", "sidecar", *words], cwd=tmp_path, check=False, text=True,
        env={**env, **hub.environment(str(tmp_path))}, capture_output=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "escaped").exists()
    if tool == "pull":
        assert "names a file by what is none: ETag" in done.stderr


def test_a_folder_that_cannot_be_written_to_is_said_at_once(
    hub: Hub, tmp_path: Path
) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    code, _, error = pull(hub, tmp_path, "org/tiny", "--to", "dangling")
    assert (code, "is there already" in error) == (2, True)
    code, _, error = pull(hub, tmp_path, "org/tiny", "--to", "/proc/mine")
    assert (code, "/proc cannot be written to" in error) == (2, True)
    assert hub.fetched == []


def test_weights_of_another_disk_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No link can be made to them."""

    def elsewhere(*_: object) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr(os, "link", elsewhere)
    target = put(folder, tmp_path / "mine")
    assert (target / "model.safetensors").read_bytes() == b"weights"
    assert sorted(f.name for f in target.iterdir()) == [
        "config.json", "model.safetensors",
    ]  # fmt: skip
