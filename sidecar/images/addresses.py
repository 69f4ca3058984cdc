"""Checks the addresses that images are fetched from: those of the public internet."""

import ipaddress

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# They spell IPv4 addresses, this machine's among them, and count as global to Python:
# IPv4-compatible, NAT64 (well known and local), 6to4; and the old site-local ones.
_NOT_PUBLIC = tuple(
    map(
        ipaddress.IPv6Network,
        ("::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "fec0::/10"),
    )
)


def is_public(address: str) -> bool:
    """Whether an address, as `getaddrinfo` gives it, is one of the public internet."""
    try:
        ip: _Address = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and any(ip in net for net in _NOT_PUBLIC):
        return False
    return ip.is_global and not ip.is_multicast
