"""The database for one command: the one that is named or running, else ours, started for as long as it takes."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from portal.standalone.errors import StartError
from portal.standalone.folder import DataFolder
from portal.standalone.leftovers import end_leftovers
from portal.standalone.lines import LineWriter
from portal.standalone.postgres import prepare_postgres
from portal.standalone.processes import server_processes
from portal.standalone.running import OnlyOne
from portal.standalone.supervisor import supervising


@contextlib.contextmanager
def borrowed_database(folder: DataFolder, *, alone: bool) -> Iterator[None]:
    """A database that answers inside the block. `alone` refuses while an `up` runs on the data folder."""
    named = bool(os.environ.get("DATABASE_URL"))
    if named:  # our servers have no part in it, and the folder may be somebody else's, as in a container
        folder.prepare_light()
    else:
        folder.prepare()
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(OnlyOne(folder.run))
        except StartError:
            if alone:
                raise
            yield  # that one's server is there
            return
        if not named:
            records = folder.run / "children.json"
            end_leftovers(records, str(folder.root))
            supervisor = held.enter_context(supervising(records, LineWriter(sys.stderr, quiet=True)))
            postgres = prepare_postgres(folder)
            for process in server_processes(folder, postgres, None):
                supervisor.start(process)
            postgres.wait_ready(lambda: supervisor.runs("postgres"))
        yield
