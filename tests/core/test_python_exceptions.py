"""The exception with which a Python program ended is found in its log, whatever surrounds it."""

from __future__ import annotations

import pytest

from portal.domain.jobs.python_exceptions import last_exception

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


MPIRUN = f"""{RULE}
Primary job  terminated normally, but 1 process returned
a non-zero exit code. Per user-direction, the job has been aborted.
{RULE}
{RULE}
mpirun detected that one or more processes exited with non-zero status, thus causing
the job to be terminated. The first process to do so was:

  Process name: [[123,1],0]
  Exit code:    1
{RULE}
"""
WANDB = "".join(f"wandb: {line}\n" for line in ("", "Run history:", *"abcdefgh", "Find logs at: ./wandb"))
CELL = "ValueError                 Traceback (most recent call last)\nCell In[1], line 1\n----> 1 f()\n"
IGNORED = "Exception ignored in: <function A.__del__ at 0x7f>\n" + HEAD + "AttributeError: closed\n"
THREAD = "Exception in thread Thread-1 (f):\n" + HEAD + "OSError: of a thread\n"
NEVER_RETRIEVED = (
    "Task exception was never retrieved\nfuture: <Task finished name='Task-2' exception=KeyError('x')>\n"
    + HEAD + "KeyError: 'x'\n"
)  # fmt: skip
LOGGING = (
    "--- Logging error ---\n" + HEAD + "ValueError: I/O\nCall stack:\n  File \"a.py\", line 3\nMessage: 'x'\n"
)


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
    "at once": (HEAD + "ValueError: real\n" + HEAD + "subprocess.CalledProcessError: x", "ValueError: real"),
    "the rank that failed first": (
        prefixed("[rank1]: ", HEAD + "ValueError: real") + prefixed("[rank0]: ", HEAD + "OSError: peer closed"),
        "ValueError: real",
    ),
    "local class": (HEAD + "main.<locals>.Fault: x\nwandb: Run summary", "main.<locals>.Fault: x"),
    "no exception after the frames": (HEAD + "- 1\n- 2\n- 3\n- 4\n- 5\nloss: 3\n", ""),
    "mpirun": (prefixed("[1,0]<stderr>:", HEAD + "ValueError: x") + MPIRUN, "ValueError: x"),
    "Weights & Biases": (HEAD + "ValueError: x\n" + WANDB, "ValueError: x"),
    "long indented message": (HEAD + "M: bad\n" + "\tsize\n" * 40, "M: bad" + " size" * 4),
    "blocks of message": (HEAD + "M: 9 errors\n" + "name\n  missing\n    see x\n" * 9, "M: 9 errors"),
    "Spark": (
        HEAD + "py4j.Py4JJavaError: o1.\n: java.X: y\n" + "\tat a.b(c)\n" * 60 + "Caused by: z\n\t... 1 more\n",
        "py4j.Py4JJavaError: o1.",
    ),
    "Java": ('Exception in thread "main" java.lang.X: y\n\tat a.B.main(B.java:3)\n', ""),
    "notebook": (CELL + "\nValueError: x", "ValueError: x"),
    "nbconvert": (
        HEAD + "nbclient.CellExecutionError: cell:\n---\nf()\n---\n\n" + CELL + "\nValueError: x", "ValueError: x",
    ),
    "ignored": (HEAD + "ValueError: x\n" + IGNORED, "ValueError: x"),
    "only ignored": (IGNORED, ""),
    "logging": (HEAD + "ValueError: x\n" + LOGGING, "ValueError: x"),
    "thread": (THREAD, "OSError: of a thread"),
    "thread at the end": (HEAD + "ValueError: x\n" + THREAD, "ValueError: x"),
    "asyncio": (HEAD + "ValueError: x\n" + NEVER_RETRIEVED, "ValueError: x"),
    "none": ("hello\nKeyError: no traceback", ""),
    "cut": (HEAD, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_last_exception_is_found(case: str) -> None:
    text, wanted = CASES[case]
    assert last_exception(text.split("\n")) == wanted
