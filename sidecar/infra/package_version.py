"""Which version of a package is installed."""

from importlib import metadata

NOT_INSTALLED = "-"


def package_version(name: str) -> str:
    """A distribution's version; NOT_INSTALLED where it runs from bare files."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED
