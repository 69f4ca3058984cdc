"""A sidecar that ends between two questions of the launcher's: its own words count."""

from pathlib import Path
from typing import Any

import pytest

from litellm_mlx.launcher.commands import _listed_by
from litellm_mlx.launcher.services import SidecarGone, fetch_models
from litellm_mlx.launcher.settings import Flags, LaunchSettings, load_settings
from litellm_mlx.launcher.supervisor import ServiceFailed
from testkit.proxy import free_port


@pytest.fixture
def settings(tmp_path: Path) -> LaunchSettings:
    """Of a sidecar that is not there."""
    environ = {"MLX_CACHE_HOME": str(tmp_path), "MLX_PORT": str(free_port())}
    return load_settings(Flags(), tmp_path, environ)


def test_nobody_there_is_no_list(settings: LaunchSettings) -> None:
    with pytest.raises(SidecarGone):
        fetch_models(settings)


def test_the_supervisor_says_why(settings: LaunchSettings) -> None:
    class Ending:
        """A supervisor whose service has ended by the second question."""

        def wait(self, is_so: Any) -> None:
            assert not is_so()
            raise ServiceFailed("its own words", "")

    with pytest.raises(ServiceFailed, match="its own words"):
        _listed_by(Ending(), settings)  # type: ignore[arg-type]
