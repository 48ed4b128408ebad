"""Makes system calls under a seccomp profile (standard input, JSON), and prints the error of each as JSON.

The profile is loaded as container runtimes do, through libseccomp, for this process and its children. ``by 32 bits``
are calls through the interface of 32-bit programs, which some kernels do not have.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import struct
import sys
from typing import Any

CLONE_NEWUSER, CLONE_FILES, HIGH, AF_VSOCK = 0x10000000, 0x400, 1 << 32, 40
OPERATORS = {"SCMP_CMP_NE": 1, "SCMP_CMP_EQ": 4, "SCMP_CMP_MASKED_EQ": 7}
ALLOW, ERRNO, X86, X86_64 = 0x7FFF0000, 0x50000, 0x40000003, 0xC000003E
PR_SET_NO_NEW_PRIVS, UNKNOWN_CALL = 38, -1
LIBC = ctypes.CDLL(None, use_errno=True)


class Condition(ctypes.Structure):
    _fields_ = (
        ("arg", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("a", ctypes.c_uint64),
        ("b", ctypes.c_uint64),
    )


def load(profile: dict[str, Any]) -> None:
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    default = ERRNO | profile["defaultErrnoRet"]
    context = ctypes.c_void_p(library.seccomp_init(default))
    for architecture in (X86, X86_64):
        assert library.seccomp_arch_add(context, architecture) in (0, -errno.EEXIST)
    for rule in profile["syscalls"]:
        action = ALLOW if rule["action"] == "SCMP_ACT_ALLOW" else ERRNO | rule.get("errnoRet", errno.EPERM)
        includes = rule.get("includes") or {}
        if action == default or includes.get("caps") or includes.get("arches"):
            continue
        rows = [
            Condition(each["index"], OPERATORS[each["op"]], each["value"], each.get("valueTwo", 0))
            for each in rule.get("args") or ()
        ]
        conditions = (Condition * max(1, len(rows)))(*rows)
        for name in rule["names"]:
            number = library.seccomp_syscall_resolve_name(name.encode())
            if number != UNKNOWN_CALL:
                result = library.seccomp_rule_add_array(context, action, number, len(rows), conditions)
                assert result == 0, (name, os.strerror(-result))
    assert library.seccomp_load(context) == 0


def answer(child: int) -> str:
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return errno.errorcode.get(os.WEXITSTATUS(status), "works")


def call(*words: int) -> str:
    child = os.fork()
    if child == 0:
        result = LIBC.syscall(*[ctypes.c_long(word) for word in words])
        os._exit(ctypes.get_errno() if result == -1 else 0)
    return answer(child)


def call_by_32_bits(number: int, first: int, second: int = 0, memory: bytes = b"") -> str:
    """Make a call by interrupt 0x80; ``memory`` replaces the second argument by its address."""
    child = os.fork()
    if child == 0:
        LIBC.mmap.restype = ctypes.c_void_p
        page = LIBC.mmap(None, 4096, 7, 0x22 | 0x40, -1, 0)  # executable, in the first 2 GiB
        ctypes.memmove(page + 2048, memory, len(memory))
        words = (number, first, page + 2048 if memory else second, 0)
        moves = b"".join(
            code + struct.pack("<I", word)
            for code, word in zip(b"\xb8 \xbb \xb9 \xba".split(), words, strict=True)
        )
        program = b"\x53" + moves + b"\xcd\x80\x5b\xc3"
        ctypes.memmove(page, program, len(program))
        os._exit(max(0, -ctypes.CFUNCTYPE(ctypes.c_int)(page)()))
    return answer(child)


def main() -> None:
    assert LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    load(json.load(sys.stdin))
    found = {
        "unshare": call(272, CLONE_NEWUSER),
        "unshare by 64 bits": call(272, CLONE_NEWUSER | HIGH),
        "unshare files": call(272, CLONE_FILES),
        "clone": call(56, CLONE_NEWUSER | signal.SIGCHLD, 0, 0, 0, 0),
        "clone by 64 bits": call(56, CLONE_NEWUSER | HIGH << 1 | signal.SIGCHLD, 0, 0, 0, 0),
        "fork": call(56, signal.SIGCHLD, 0, 0, 0, 0),
        "clone3": call(435, 0, 0),
        "io_uring": call(425, 1, 0),
        "vsock": call(41, AF_VSOCK, 1, 0),
        "vsock by 64 bits": call(41, AF_VSOCK | HIGH, 1, 0),
        "inet": call(41, 2, 1, 0),
        "netlink": call(41, 16, 3, 0),
        "unshare by 32 bits": call_by_32_bits(310, CLONE_NEWUSER),
        "vsock by 32 bits": call_by_32_bits(359, AF_VSOCK, 1),
        "vsock by socketcall": call_by_32_bits(102, 1, memory=struct.pack("<III", AF_VSOCK, 1, 0)),
    }
    print(json.dumps(found))


main()
