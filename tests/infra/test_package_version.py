"""Which version is said, installed or not."""

from importlib import metadata

from sidecar.infra.package_version import NOT_INSTALLED, package_version


def test_an_installed_package_tells_its_version() -> None:
    assert package_version("mlx-lm") == metadata.version("mlx-lm")


def test_bare_files_have_none() -> None:
    """As where the sidecar is run from a copy that was never installed."""
    assert package_version("no-such-package-here") == NOT_INSTALLED
