"""Packets under AES-GCM: what one end seals the other opens, in order and only unchanged."""

from __future__ import annotations

import os

import pytest
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given
from hypothesis import strategies as some

from agents.gcm import LENGTH_BYTES, Opener, Sealer


def opened(opener: Opener, packet: bytes) -> bytes:
    plain = opener.open(packet[:LENGTH_BYTES], memoryview(packet)[LENGTH_BYTES:])
    return plain[1 : len(plain) - plain[0]]


@given(some.lists(some.binary(min_size=1, max_size=5000), max_size=5), some.integers(0, 2**64 - 1))
def test_what_is_sealed_opens(payloads: list[bytes], counter: int) -> None:
    engine, iv = AESGCM(b"k" * 16), b"iv.." + counter.to_bytes(8, "big")
    sealer, opener = Sealer(engine, iv), Opener(engine, iv)
    for payload in payloads:
        packet = sealer.seal(payload)
        assert int.from_bytes(packet[:4], "big") == len(packet) - 20
        assert (len(packet) - 20) % 16 == 0
        assert opened(opener, packet) == payload


def test_a_changed_or_repeated_packet_is_refused() -> None:
    engine, iv = AESGCM(os.urandom(32)), os.urandom(12)
    packet = Sealer(engine, iv).seal(b"x" * 100)
    for place in range(len(packet)):
        with pytest.raises(InvalidTag):
            opened(Opener(engine, iv), packet[:place] + bytes([packet[place] ^ 1]) + packet[place + 1 :])
    opener = Opener(engine, iv)
    assert opened(opener, packet) == b"x" * 100
    with pytest.raises(InvalidTag):
        opened(opener, packet)


def test_keys_that_have_served_go_on_where_they_were() -> None:
    engine, iv = AESGCM(os.urandom(16)), os.urandom(12)
    first = Sealer(engine, iv)
    packets = [first.seal(b"packet %d" % number) for number in range(3)]
    assert opened(Opener(engine, iv, served=2), packets[2]) == b"packet 2"
