"""Which versions of PyTorch fp8pass supports."""

from __future__ import annotations

SUPPORTED = ">=2.11,<2.15"


_MINIMUM, _BELOW = (2, 11), (2, 15)


def check_version(version: str) -> None:
    """Raise ImportError unless `version` of PyTorch is one fp8pass supports."""
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if not _MINIMUM <= release < _BELOW:
        raise ImportError(
            f"fp8pass supports PyTorch {SUPPORTED}, this is {version}. "
            f"Install one that works: pip install 'torch{SUPPORTED}'"
        )
