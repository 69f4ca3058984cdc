"""Which models are found, what kind each is, and what they are called."""

import json
import os
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sidecar.config.settings import ModelConfig
from sidecar.core.errors import ModelNotFound
from sidecar.residents import detection, discovery
from sidecar.residents.catalog import Catalog, find_catalog
from sidecar.residents.detection import kind_of
from sidecar.residents.discovery import DiscoveredModel, discover
from sidecar.residents.model_settings import ModelSettings

QWEN = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"],
        "max_position_embeddings": 4096}  # fmt: skip


def safetensors(names: Sequence[str]) -> bytes:
    """A file with tensors of no elements."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps(dict.fromkeys(names, entry)).encode()
    return struct.pack("<Q", len(header)) + header


def model(
    folder: Path, config: dict[str, Any] | None = None, names: Sequence[str] = ("a",)
) -> Path:
    """A folder that looks like a whole checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(QWEN if config is None else config))
    (folder / "model.safetensors").write_bytes(safetensors(names))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def found(*places: Path) -> dict[str, DiscoveredModel]:
    return {one.id: one for one in discover([str(place) for place in places])}


def test_models_lie_flat_or_below_their_provider(tmp_path: Path) -> None:
    """E1."""
    model(tmp_path / "flat")
    model(tmp_path / "org" / "deep")
    (tmp_path / "notes").mkdir()
    (tmp_path / "file.txt").write_text("x")
    there = found(tmp_path)
    assert sorted(there) == ["deep", "flat"]
    assert there["deep"].aliases == ("org/deep",)
    assert there["deep"].context_len == 4096
    assert {one.state for one in there.values()} == {"unloaded"}


def test_a_name_that_two_providers_have_is_neithers(tmp_path: Path) -> None:
    """E1: both are called by their whole names."""
    model(tmp_path / "a" / "same")
    model(tmp_path / "b" / "same")
    there = found(tmp_path)
    assert sorted(there) == ["a/same", "b/same"]
    assert all(one.aliases == () for one in there.values())


def test_a_folder_that_is_a_model_is_found_as_one(tmp_path: Path) -> None:
    assert sorted(found(model(tmp_path / "only"))) == ["only"]


def test_each_folder_counts_once_whatever_leads_there(tmp_path: Path) -> None:
    """Links, loops of links, the same place twice; hidden ones do not count."""
    model(tmp_path / "one")
    model(tmp_path / ".hidden")
    (tmp_path / "again").symlink_to(tmp_path / "one")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert len(found(tmp_path, tmp_path)) == 1


def test_what_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text("{")
    cut = model(tmp_path / "cut")
    (cut / "model.safetensors").write_bytes(safetensors(["a"])[:-3])
    part = model(tmp_path / "part")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (part / "model.safetensors.index.json").write_text(json.dumps(index))
    model(tmp_path / "strange", {"model_type": "no-such-architecture"})
    there = found(tmp_path)
    assert {one.id: one.state for one in there.values()} == {
        "torn": "broken", "cut": "incomplete", "part": "incomplete",
        "strange": "unavailable",
    }  # fmt: skip
    assert "not JSON" in str(there["torn"].reason)
    assert "cut off" in str(there["cut"].reason)
    assert "model-2.safetensors" in str(there["part"].reason)
    assert "no-such-architecture" in str(there["strange"].reason)


def test_files_that_stay_as_they_are_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LiteLLM asks every ten seconds; what changed is seen all the same."""
    folder = model(tmp_path / "one")
    assert found(tmp_path)["one"].state == "unloaded"
    reads: list[Path] = []
    read = discovery.read_config

    def noting(path: Path) -> dict[str, Any] | None:
        reads.append(path)
        return read(path)

    monkeypatch.setattr(discovery, "read_config", noting)
    assert found(tmp_path)["one"].state == "unloaded"
    assert reads == []
    (folder / "model.safetensors").unlink()
    assert found(tmp_path)["one"].state == "incomplete"
    assert len(reads) == 1


def test_a_place_that_is_not_there_is_none(tmp_path: Path) -> None:
    assert found(tmp_path / "nowhere") == {}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub's."""
    cache = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    return cache


def snapshot(cache: Path, repo: str, ref: str | None, kind: str = "models") -> Path:
    """A repository in the cache, as huggingface_hub lays it out."""
    root = cache / f"{kind}--{repo.replace('/', '--')}"
    commit = "0123456789abcdef0123456789abcdef01234567"
    if ref:
        (root / "refs").mkdir(parents=True)
        (root / "refs" / ref).write_text(commit)
    folder = root / "snapshots" / commit
    folder.mkdir(parents=True)
    return folder


def test_the_hubs_cache_is_read_without_the_network(hub: Path) -> None:
    """E22: whole, half downloaded, without refs/main; a data set is none."""
    model(snapshot(hub, "org/whole", "main"))
    model(snapshot(hub, "org/no-ref", None))
    half = model(snapshot(hub, "org/half", "main"))
    (half / "model.safetensors").unlink()
    model(snapshot(hub, "org/data", "main", "datasets"))
    there = {one.id: one for one in discover(["hub"])}
    assert {name: one.state for name, one in there.items()} == {
        "org/whole": "unloaded", "org/no-ref": "unloaded", "org/half": "incomplete",
    }  # fmt: skip
    assert there["org/whole"].aliases == ("whole",)
    assert there["org/whole"].is_cached


def test_no_cache_is_no_fault(hub: Path) -> None:
    """E22."""
    assert discover(["hub"]) == ()


KINDS: list[tuple[str, str, dict[str, Any], tuple[str, ...]]] = [
    ("llm", "qwen3-4b", QWEN, ("model.layers.0.mlp",)),
    ("reranker", "bge", {"architectures": ["XLMRobertaForSequenceClassification"],
                         "model_type": "xlm-roberta",
                         "id2label": {"0": "LABEL_0"}}, ()),
    ("reranker", "one", {"architectures": ["BertForSequenceClassification"],
                         "num_labels": 1}, ()),
    ("classifier", "mood", {"architectures": ["BertForSequenceClassification"],
                            "id2label": {"0": "bad", "1": "good"}}, ()),
    ("classifier", "two", {"architectures": ["BertForSequenceClassification"],
                           "model_type": "bert"}, ()),
    ("reranker", "Qwen3-Reranker-0.6B", QWEN, ()),
    ("embedding", "bge", {"architectures": ["BertModel"], "model_type": "bert"}, ()),
    ("embedding", "Qwen3-Embedding-0.6B", QWEN, ()),
    ("embedding", "nomic", {"architectures": ["NomicTextEmbedding"]}, ()),
    ("vlm", "qwen-vl", {"model_type": "qwen2_5_vl", "vision_config": {"depth": 1}},
     ("visual.blocks.0",)),
    ("llm", "text-only", {"model_type": "qwen3_5", "vision_config": {"depth": 1}},
     ("model.layers.0",)),
    ("llm", "no-config", {"model_type": "qwen3_5"}, ("visual.blocks.0",)),
    ("ocr", "ocr", {"model_type": "deepseekocr", "vision_config": {}},
     ("model.vision_model.a",)),
    ("llm", "nothing", {}, ()),
    ("llm", "odd", {"model_type": ["x"], "architectures": 7, "vision_config": 3}, ()),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "config", "tensors"), KINDS)
def test_the_files_tell_the_kind(
    tmp_path: Path,
    kind: str,
    name: str,
    config: dict[str, Any],
    tensors: tuple[str, ...],
) -> None:
    folder = model(tmp_path / name, config, tensors)
    assert kind_of(folder, config) == kind


def test_sentence_transformers_say_that_they_pool(tmp_path: Path) -> None:
    folder = model(tmp_path / "gte")
    stages = [{"type": "sentence_transformers.models.Pooling"}]
    (folder / "modules.json").write_text(json.dumps(stages))
    assert kind_of(folder, QWEN) == "embedding"


def catalog(root: Path, **settings: Any) -> Catalog:
    wishes = settings.pop("wishes", {})
    most = settings.pop("max_context", 2048)
    return find_catalog(ModelConfig(places=(str(root),), **settings), wishes, most)


def test_the_default_one_is_first_and_not_twice(tmp_path: Path) -> None:
    model(tmp_path / "a")
    model(tmp_path / "b")
    there = catalog(tmp_path, path=str(tmp_path / "b"))
    assert [spec.id for spec in there.specs] == ["openai/b", "a"]
    for name in ("", "default", "local", "openai/local", "b", f"{tmp_path.name}/b"):
        assert there.names.resolve(name) == "openai/b"


def test_the_default_one_may_be_named_as_it_was_found(tmp_path: Path) -> None:
    model(tmp_path / "org" / "b")
    there = catalog(tmp_path, path="org/b")
    assert [spec.id for spec in there.specs] == ["openai/org/b"]
    assert there.names.resolve("b") == "openai/org/b"
    assert there.specs[0].place == str(tmp_path / "org" / "b")
    model(tmp_path / "twin" / "b")  # what comes later changes none of its names
    again = catalog(tmp_path, path="org/b")
    assert again.names.resolve("openai/org/b") == "openai/org/b"
    assert again.specs[0].place == str(tmp_path / "org" / "b")


def test_a_name_of_the_default_one_is_nobody_elses(tmp_path: Path) -> None:
    model(tmp_path / "one" / "b")
    model(tmp_path / "two" / "b")
    there = catalog(tmp_path / "two", path=str(tmp_path / "one" / "b"))
    assert [spec.id for spec in there.specs] == ["openai/b", "two/b"]


def test_the_built_in_one_is_the_default(tmp_path: Path) -> None:
    (spec,) = catalog(tmp_path).specs
    assert (spec.id, spec.place) == ("openai/mlx-tiny-agent", None)


def test_before_its_load_it_has_its_own_context(
    tmp_path: Path,
) -> None:
    """A client that is told of more compacts too late."""
    (built_in,) = catalog(tmp_path, max_context=1 << 20).specs
    assert built_in.context_len == 32768
    model(tmp_path / "elsewhere" / "mine")
    named = str(tmp_path / "elsewhere" / "mine")
    spec = catalog(tmp_path / "nothing", path=named, max_context=1 << 20).specs[0]
    assert spec.context_len == 4096


def test_names_can_be_given_and_kept_back(tmp_path: Path) -> None:
    """MODEL_ALIASES with globs, AVAILABLE_MODELS, and what the file says."""
    for name in ("qwen-a", "qwen-b", "glm"):
        model(tmp_path / name)
    wishes = {"qwen-a": ModelSettings(pinned=True, ttl_seconds=7, alias="coder")}
    there = catalog(
        tmp_path,
        available=("qwen-*",),
        aliases={"claude-*": "default", "big": "qwen-b"},
        pinned=("qwen-b",),
        wishes=wishes,
    )
    assert [spec.id for spec in there.specs[1:]] == ["qwen-a", "qwen-b"]
    first, second = there.specs[1:]
    assert (first.pinned, first.ttl_s, second.pinned) == (True, 7, True)
    assert there.specs[0].aliases[-1] == "claude-*"  # LiteLLM is told of it
    assert second.aliases[-1] == "big"
    assert first.context_len == 2048  # MAX_KV_SIZE; it was made for 4096
    names = there.names
    assert names.resolve("claude-opus-9") == "openai/mlx-tiny-agent"
    assert (names.resolve("big"), names.resolve("coder")) == ("qwen-b", "qwen-a")
    with pytest.raises(ModelNotFound, match="qwen-a"):
        names.resolve("qwen-c")


def test_kinds_without_an_engine_are_listed_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = detection.Row("parrot", lambda found: found.model_type == "parrot")
    monkeypatch.setattr(detection, "ROWS", (own, *detection.ROWS))
    model(tmp_path / "polly", {"model_type": "parrot"})
    spec = catalog(tmp_path).specs[1]
    assert spec.state == "unavailable"
    assert "parrot models are not served" in str(spec.fault)


def test_what_needs_a_library_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder, that is; a decoder that embeds needs none beside mlx-lm."""
    monkeypatch.setitem(sys.modules, "mlx_vlm", None)
    monkeypatch.setitem(sys.modules, "mlx_audio", None)
    model(tmp_path / "kokoro", {"model_type": "kokoro"})
    encoder = {"architectures": ["BertModel"], "model_type": "bert"}
    decoder = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    model(tmp_path / "bge", encoder)
    model(tmp_path / "qwen3-embed", decoder)
    by_id = {spec.id: spec for spec in catalog(tmp_path).specs}
    assert by_id["bge"].state == "unavailable"
    assert "litellm-mlx[vision]" in str(by_id["bge"].fault)
    assert by_id["kokoro"].state == "unavailable"
    assert "litellm-mlx[audio]" in str(by_id["kokoro"].fault)
    assert by_id["qwen3-embed"].state == "unloaded"


def test_a_pattern_is_no_name_and_an_alias_is_nobody_elses(tmp_path: Path) -> None:
    """A router would send there whatever it is asked for, or what is another's."""
    for name in ("claude-*", "default", "one", "two"):
        model(tmp_path / name)
    wishes = {"one": ModelSettings(alias="two")}
    there = catalog(tmp_path, wishes=wishes)
    listed = {spec.id: spec.aliases for spec in there.specs}
    assert not any(
        "*" in name for names in listed.items() for name in (names[0], *names[1])
    )
    assert "two" not in listed["one"]
    assert there.names.resolve("default") == "openai/mlx-tiny-agent"


def test_a_hostile_folder_harms_no_other(tmp_path: Path) -> None:
    model(tmp_path / "good")
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "config.json").write_text("[" * 100_000)
    deep = model(tmp_path / "deep")
    (deep / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60))
    os.mkfifo(model(tmp_path / "pipe") / "chat_template.jinja")
    os.mkfifo(model(tmp_path / "stages") / "modules.json")
    loop = model(tmp_path / "loop") / "model-2.safetensors"
    loop.symlink_to(loop)
    (model(tmp_path / "dangling") / "model-2.safetensors").symlink_to("nowhere")
    nested = b'{"a": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    header = struct.pack("<Q", len(nested)) + nested
    (model(tmp_path / "nested") / "model.safetensors").write_bytes(header)
    endless = b'{"a": {"data_offsets": [0, Infinity]}}'
    header = struct.pack("<Q", len(endless)) + endless
    (model(tmp_path / "endless") / "model.safetensors").write_bytes(header)
    there = found(tmp_path)
    assert there["good"].state == "unloaded"
    assert {name for name, one in there.items() if one.state == "unloaded"} == {"good"}
