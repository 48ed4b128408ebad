"""The one spelling of a host name or address, so that two nodes at one address are recognized."""

from __future__ import annotations

import ipaddress
import re

MAX_HOST_LENGTH = 253
_LABEL = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


def canonical_host(text: str) -> str | None:
    """Return a host name in lower case without the final dot, or an address as Python prints it.

    None for anything else, such as an address that no machine has, or an IPv4 address in an old spelling (10.1,
    012.0.0.1), which programs read differently. An IPv6 address may have a zone and be in brackets.
    """
    host = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        name = text.lower().removesuffix(".")
        is_name = len(name) <= MAX_HOST_LENGTH and _NAME.fullmatch(name)
        return name if is_name and not _NUMBER.fullmatch(name.rpartition(".")[2]) else None
    if isinstance(address, ipaddress.IPv6Address):
        zone = address.scope_id
        if zone is not None and not re.fullmatch(r"[A-Za-z0-9_.-]{1,15}", zone):
            return None
        if address.ipv4_mapped is not None:
            address = address.ipv4_mapped
    return None if address.is_unspecified or address.is_multicast else str(address)
