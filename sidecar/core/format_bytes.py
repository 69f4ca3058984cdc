"""Sizes for people."""


def format_bytes(num_bytes: float) -> str:
    """`4.2 GB`: for people, in powers of ten as disks and hubs have them."""
    for unit in ("bytes", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"
