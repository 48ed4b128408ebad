"""``python -m tests.faults.campaign``: runs episodes of drawn faults and says of each what was wrong.

    --episodes N     how many (5)
    --seed WORD      draws them; an episode is drawn from the word and its number alone
    --only NUMBER    one episode, as it was drawn in a campaign of that seed
    --workers N      how many the engine has (2)

One line of JSON for each episode, and one for all. Ends with 1 when anything was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.campaign.targets import servers


def main() -> int:
    """Sets everything up, and runs what was asked for."""
    parser = argparse.ArgumentParser(prog="campaign")
    parser.add_argument("--episodes", type=int, default=5)
    parser.add_argument("--seed", default="")
    parser.add_argument("--only", type=int)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--within", type=float, default=1e9, help="begin no episode after so many seconds")
    wanted = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(143))  # what was started is ended on the way out
    seed = wanted.seed or secrets.token_hex(4)
    numbers = range(wanted.episodes) if wanted.only is None else [wanted.only]
    root = Path(tempfile.mkdtemp(prefix="fairway-campaign-"))
    root.chmod(0o711)
    os.environ |= {
        "DJANGO_SETTINGS_MODULE": "portal.config.settings",
        "FAIRWAY_SECRET_KEY": secrets.token_urlsafe(48),
        "FAIRWAY_LOG_LEVEL": "ERROR",
    }
    until_s = time.monotonic() + wanted.within
    bad = done = jobs = starts = versions = 0
    longest_s = 0.0
    try:
        with servers(root) as (postgres, valkey):
            (root / "data").mkdir(mode=0o755)
            import django
            from django.core.management import call_command

            django.setup()
            call_command("migrate", verbosity=0)
            from tests.faults.campaign.episodes import Field

            with contextlib.ExitStack() as ending:
                field = ending.enter_context(Field(root, postgres, valkey, wanted.workers))
                for number in numbers:
                    if time.monotonic() > until_s:
                        break
                    reported = field.episode(f"{seed}:{number}")
                    print(json.dumps({"episode": number, "seed": seed, **reported}), flush=True)
                    done += 1
                    bad += bool(reported["wrong"])
                    jobs, starts = jobs + reported["acknowledged"], starts + reported["starts"]
                    versions += reported["ledger_versions"]
                    longest_s = max(longest_s, reported["quiet_after_s"])
    finally:
        if "KEEP_ROOM" not in os.environ:
            shutil.rmtree(root, ignore_errors=True)
    summary = {
        "seed": seed,
        "episodes": done,
        "with_something_wrong": bad,
        "acknowledged_jobs": jobs,
        "starts": starts,
        "ledger_versions": versions,
        "longest_until_quiet_s": round(longest_s, 1),
    }
    print(json.dumps({"campaign": summary}), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
