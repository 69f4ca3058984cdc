"""What this server offers: the models found, their names, and what a name means."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from sidecar.config.settings import ModelConfig
from sidecar.config.values import BUILTIN
from sidecar.core.errors import ModelNotFound
from sidecar.engine.loading import model_place
from sidecar.residents.detection import TEXT_KINDS, loader_of
from sidecar.residents.discovery import (
    HUB,
    DiscoveredModel,
    described_folder,
    discover,
)
from sidecar.residents.model_settings import NOTHING_SET, ModelSettings
from sidecar.residents.model_state import ModelSpec, draft_place

_MAX_NAME_CHARS = 200
_MAX_CLOSE = 10
DEFAULT_NAMES = ("local", "openai/local")
_PATTERN = re.compile(r"[*?\[\]]")
_NO_NAMES = ("", "default", *DEFAULT_NAMES)


@dataclass(frozen=True, slots=True)
class Names:
    """
    Names -> ids.

    Args:
        default: the id that no name, `default` and `local` mean.
        aliases: by id, its other names.
        wishes: MODEL_ALIASES: name or glob -> id, alias or `default`.
    """

    default: str
    aliases: Mapping[str, Sequence[str]]
    wishes: Mapping[str, str] = field(default_factory=dict)

    def resolve(self, name: str) -> str:
        """
        The id that a request means.

        Raises:
            ModelNotFound: none; the close ones are named.
        """
        if (found := self.find(name)) is not None:
            return found
        for pattern, wish in self.wishes.items():
            if fnmatchcase(name, pattern) and (found := self.find(wish)) is not None:
                return found
        raise ModelNotFound(self._unknown(name[:_MAX_NAME_CHARS]), param="model")

    def find(self, name: str) -> str | None:
        """The id that has this very name."""
        if name in self.aliases:
            return name
        for own_id, others in self.aliases.items():
            if name in others:
                return own_id
        return self.default if name in _NO_NAMES else None

    def _unknown(self, name: str) -> str:
        names = [n for own, others in self.aliases.items() for n in (own, *others)]
        close = difflib.get_close_matches(name, names, n=_MAX_CLOSE, cutoff=0.3)
        there_is = ", ".join(close or names[:_MAX_CLOSE])
        return f"no model named {name!r} is served; there is: {there_is}"


@dataclass(frozen=True, slots=True)
class Catalog:
    """All that is offered, each model once, and how requests name it."""

    specs: tuple[ModelSpec, ...]
    names: Names


def find_catalog(
    config: ModelConfig,
    wishes: Mapping[str, ModelSettings],
    max_context: int,
    *,
    has_drafts: bool = False,
) -> Catalog:
    """
    Look for models, and put the default one first.

    Args:
        wishes: by name, what the settings file asks for.
        max_context: tokens that are served, whatever a model was made for.
        has_drafts: whether draft models are loaded as well (SPECULATION=draft).
    """
    found = discover((HUB,) if config.places is None else config.places)
    default, own = _default(config, found)
    specs, taken = [default], {default.id, *default.aliases, *_NO_NAMES}
    for one in found:
        spec = _offer(one, taken) if one is not own else None
        if spec is not None and _is_allowed(spec, config.available):
            specs.append(spec)
            taken |= {spec.id, *spec.aliases}
    settled = [_wished(spec, config, wishes, taken) for spec in specs]
    if has_drafts:
        settled = [_with_draft_size(spec, config.draft_model) for spec in settled]
    aliases = {spec.id: spec.aliases for spec in settled}
    names = Names(default.id, aliases, config.aliases)
    return Catalog(
        tuple(
            replace(
                spec,
                aliases=(*spec.aliases, *_given(spec, names)),
                context_len=min(spec.context_len or max_context, max_context),
            )
            for spec in settled
        ),
        names,
    )


def _given(spec: ModelSpec, names: Names) -> list[str]:
    """Names that MODEL_ALIASES gives it; globs as they are, for routers."""
    return [
        name
        for name, wish in names.wishes.items()
        if names.find(name) is None and names.find(wish) == spec.id
    ]


def _default(
    config: ModelConfig, found: Sequence[DiscoveredModel]
) -> tuple[ModelSpec, DiscoveredModel | None]:
    """What MODEL_PATH names: a model that was found, a folder, a hub id, built in."""
    path = config.path
    folder = model_place.folder_of(path)
    own = next((one for one in found if _is_meant(one, path, folder)), None)
    # As it was named: what else is found must not change it.
    name = model_place.model_name(path)
    own_id = config.proxy_model_id or f"openai/{name}"
    more = (own.id, *own.aliases) if own else ()
    names = dict.fromkeys((*DEFAULT_NAMES, name, *more))
    aliases = tuple(other for other in names if other != own_id)
    if own is None or own.is_cached or folder is not None:
        # Of the hub's models the cache may hold a part, or an older one.
        size = own.size_bytes if own else model_place.size_of(path)
        named = described_folder(folder)
        spec = ModelSpec(
            own_id,
            aliases,
            named.kind,
            path,
            size,
            own.context_len if own else named.context_len,
            own.vector_len if own else None,
            takes_images=named.takes_images,
        )
    else:
        spec = replace(_described(own, own_id), aliases=aliases)
    return spec, own


def _is_meant(found: DiscoveredModel, path: str | None, folder: Path | None) -> bool:
    if folder is not None:
        return folder.resolve() == found.folder.resolve()
    if path is None or found.state != "unloaded":
        return False
    is_bare = "/" not in path and found.folder.name == path
    return is_bare or path in (found.id, *found.aliases)


def _offer(found: DiscoveredModel, taken: set[str]) -> ModelSpec | None:
    """Under names that nobody has; None if none is left."""
    names = (found.id, *found.aliases)
    # A pattern would be a net for whatever is asked of a router.
    free = [n for n in names if n not in taken and not _PATTERN.search(n)]
    if not free:
        return None
    return replace(_described(found, free[0]), aliases=tuple(free[1:]))


def _described(found: DiscoveredModel, own_id: str) -> ModelSpec:
    state, fault = found.state, found.reason
    if state == "unloaded" and loader_of(found.kind) is None:
        state, fault = "unavailable", f"{found.kind} models are not served"
    return ModelSpec(
        own_id,
        kind=found.kind,
        place=str(found.folder),
        size_bytes=found.size_bytes,
        context_len=found.context_len,
        vector_len=found.vector_len,
        takes_images=found.takes_images,
        state=state,
        fault=fault and f"model {found.id} cannot be loaded: {fault}",
    )


def _wished(
    spec: ModelSpec,
    config: ModelConfig,
    wishes: Mapping[str, ModelSettings],
    taken: set[str],
) -> ModelSpec:
    """With what the settings say of it; no name that another one has."""
    names = (spec.id, *spec.aliases)
    wish = next((wishes[name] for name in names if name in wishes), NOTHING_SET)
    is_pinned = not set(names).isdisjoint(config.pinned)
    more = (wish.alias,) if wish.alias and wish.alias not in taken else ()
    taken.update(more)
    return replace(
        spec,
        aliases=(*spec.aliases, *more),
        pinned=is_pinned if wish.pinned is None else wish.pinned,
        ttl_s=wish.ttl_seconds,
        syntax=wish.syntax,
        draft_model=wish.draft_model,
        adapter_path=wish.adapter_path or None,
    )


def _with_draft_size(spec: ModelSpec, default: str | None) -> ModelSpec:
    """What a load of it takes, as far as that is known."""
    place = draft_place(spec, default)
    if place is None or spec.kind not in TEXT_KINDS:
        return spec
    draft_bytes = model_place.size_of(None if place in BUILTIN else place)
    return replace(spec, size_bytes=spec.size_bytes + draft_bytes)


def _is_allowed(spec: ModelSpec, allowed: Iterable[str]) -> bool:
    """Whether AVAILABLE_MODELS, names and globs, lets it be served; empty: all."""
    patterns = tuple(allowed)
    names = (spec.id, *spec.aliases)
    return not patterns or any(fnmatchcase(n, p) for n in names for p in patterns)
