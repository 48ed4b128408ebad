"""A separate program that matches lines against a user's pattern, so that it can be killed.

Input: a line of JSON ``{"pattern", "case"}``, then blocks of a line with a length in bytes and as many bytes
of JSON, a list of texts. Output: ``{"fault": null or a message}``, then for each block the indexes of the
matching texts. It imports nothing of the portal and limits its own CPU time and memory.
"""

from __future__ import annotations

import json
import re
import resource
import sys

CPU_S = 5
MEMORY_BYTES = 512 * 1024 * 1024


def main() -> None:
    """Answer until the input ends."""
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    reading, writing = sys.stdin.buffer, sys.stdout
    asked = json.loads(reading.readline())
    try:
        matches = re.compile(asked["pattern"], 0 if asked["case"] else re.IGNORECASE).search
    except (re.error, OverflowError, RecursionError) as error:
        writing.write(json.dumps({"fault": str(error)}) + "\n")
        return
    writing.write('{"fault": null}\n')
    writing.flush()
    while size := reading.readline():
        texts = json.loads(reading.read(int(size)))
        writing.write(json.dumps([place for place, text in enumerate(texts) if matches(text)]) + "\n")
        writing.flush()


if __name__ == "__main__":
    main()
