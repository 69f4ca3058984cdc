"""Settings of what outlives a run on the disk."""

from dataclasses import dataclass
from pathlib import Path

from sidecar.config.sources import setting
from sidecar.config.values import boolean, choice, integer, number, place

# fmt: off


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """KV on the disk"""

    is_on: bool = setting(False, "KV_DISK_PERSISTENCE", boolean,
        "Conversations outlive a restart: their KV is written to files, which hold "
        "what was said. They are not encrypted: the disk should be.",
        "EXO_KV_DISK_PERSISTENCE")
    cache_home: str | None = setting(None, "MLX_CACHE_HOME", place,
        "Files that outlive a run.", "EXO_CACHE_HOME", shown="~/.cache/litellm-mlx")
    path: str | None = setting(None, "KV_DISK_PATH", place,
        "Folder of those files.", "EXO_KV_DISK_PATH", shown="MLX_CACHE_HOME/kv-cache")
    ttl_hours: float = setting(24.0, "KV_DISK_TTL_HOURS", number(0, 1e6),
        "Hours since their last use after which they are deleted. 0: never.",
        "EXO_KV_DISK_TTL_HOURS")
    max_gb: float = setting(500.0, "KV_DISK_MAX_SIZE_GB", number(0.001, 1e6),
        "Gigabytes of all models' files.", "EXO_KV_DISK_MAX_SIZE_GB")
    min_tokens: int = setting(1000, "KV_DISK_MIN_PREFIX_TOKENS", integer(1, 1 << 24),
        "The shortest prompt that is written or read back.")
    run_tokens: int = setting(4096, "KV_DISK_RUN_TOKENS", integer(1, 1 << 24),
        "Tokens that a conversation writes although it has no rest; shorter files "
        "are joined.")
    quiet_s: float = setting(20.0, "KV_DISK_QUIET_SECONDS", number(0, 86400),
        "How long a conversation rests before it is written.")
    day_gb: float = setting(100.0, "KV_DISK_MAX_WRITE_GB_PER_DAY", number(0, 1e6),
        "Gigabytes written in a day, to spare the disk. 0: no limit.")
    min_free_gb: float = setting(10.0, "KV_DISK_MIN_FREE_GB", number(0, 1e6),
        "Gigabytes that the disk keeps free.")
    restore: str = setting("auto", "KV_DISK_RESTORE",
        choice("auto", "always", "never"),
        "Whether reading back is weighed against computing anew, as measured.")

    @property
    def root(self) -> Path:
        """The folder of all models' files."""
        return Path(self.path).expanduser() if self.path else self.home / "kv-cache"

    @property
    def home(self) -> Path:
        """The folder of files that outlive a run."""
        return Path(self.cache_home or "~/.cache/litellm-mlx").expanduser()
