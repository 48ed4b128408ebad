"""The exception with which a Python program ended is found in its log, whatever surrounds it."""

from __future__ import annotations

import pytest

from portal.domain.python_exceptions import last_exception

HEAD = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\n    f()\n    ~^^\n'
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
HANDLING = "\nDuring handling of the above exception, another exception occurred:\n\n"
RULE = "=" * 60
CHILD_FAILED = (
    HEAD + "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"
    f"{RULE}\ntrain.py FAILED\n{RULE}\nFailures:\n  <NO_OTHER_FAILURES>\n{RULE}\n[0]:\n  time      : x\n"
    "  rank      : 0 (local_rank: 0)\n  exitcode  : 1 (pid: 9)\n  error_file: <N/A>\n  traceback : see x\n"
)
GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "x.py", line 3, in <module>
  |     raise g
  | ExceptionGroup: two (2 sub-exceptions)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "x.py", line 1
    | ValueError: a
    +---------------- 2 ----------------
    | TypeError: b
    +------------------------------------
"""


def prefixed(prefix: str, text: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in text.split("\n"))


CASES = {
    "plain": (HEAD + "ValueError: bad", "ValueError: bad"),
    "without message": (HEAD + "AssertionError", "AssertionError"),
    "blank message": (HEAD + "ValueError: ", "ValueError"),
    "dotted": (HEAD + "torch.cuda.OutOfMemoryError: CUDA out", "torch.cuda.OutOfMemoryError: CUDA out"),
    "interrupt": (HEAD + "KeyboardInterrupt", "KeyboardInterrupt"),
    "handling": (HEAD + "ValueError: first\n" + HANDLING + HEAD + "RuntimeError: second", "RuntimeError: second"),
    "cause": (HEAD + "ValueError: first\n" + CAUSE + HEAD + "RuntimeError: second", "RuntimeError: second"),
    "indented message": (HEAD + "RuntimeError: in Net:\n\tMissing key a", "RuntimeError: in Net: Missing key a"),
    "lines of message": (HEAD + "ValueError: first\nsecond\nthird", "ValueError: first"),
    "note": (HEAD + "ValueError: x\n  note one", "ValueError: x note one"),
    "rank prefix": (prefixed("[rank0]: ", HEAD + "ValueError: x"), "ValueError: x"),
    "mpirun prefix": (prefixed("[1,0]<stderr>:", HEAD + "ValueError: x"), "ValueError: x"),
    "srun prefix": (prefixed("3: ", HEAD + "ValueError: x"), "ValueError: x"),
    "ray prefix": (prefixed("(RayTask pid=1) ", HEAD + "ValueError: x"), "ValueError: x"),
    "torchrun": (HEAD + "ValueError: real\nE1128 failed (exitcode: 1)\n" + CHILD_FAILED, "ValueError: real"),
    "torchrun, ranks": (
        prefixed("[rank0]: ", HEAD + "ValueError: real") + "W1128 closing\n" + CHILD_FAILED, "ValueError: real",
    ),
    "torchrun alone": (CHILD_FAILED, ""),
    "spawn": (
        HEAD + "torch.multiprocessing.spawn.ProcessRaisedException: \n\n-- Process 1 terminated with the following "
        "error:\n" + HEAD + "ValueError: x", "ValueError: x",
    ),
    "subprocess": (HEAD + "subprocess.CalledProcessError: 'x' failed", "subprocess.CalledProcessError: 'x' failed"),
    "syntax": ('  File "x.py", line 1\n    x = = 1\n        ^\nSyntaxError: invalid', "SyntaxError: invalid"),
    "group": (GROUP, "ExceptionGroup: two (2 sub-exceptions)"),
    "output after": (HEAD + "ValueError: x\nwandb: Run summary\nwandb: loss 1", "ValueError: x"),
    "caught": (HEAD + "ValueError: caught\n" + "step\n" * 40, ""),
    "caught, then another": (HEAD + "ValueError: x\n" + "step\n" * 40 + HEAD + "KeyError: 'b'", "KeyError: 'b'"),
    "none": ("hello\nKeyError: no traceback", ""),
    "cut": (HEAD, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_last_exception_is_found(case: str) -> None:
    text, wanted = CASES[case]
    assert last_exception(text.split("\n")) == wanted
