"""The database of one command: a configured or running one, else our own, started for the duration."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

from portal.standalone.data_dir import DataDir
from portal.standalone.errors import StartError
from portal.standalone.instance_lock import InstanceLock
from portal.standalone.process_table import start_servers
from portal.standalone.processes.log_prefix import PrefixedWriter
from portal.standalone.processes.orphan_processes import terminate_orphans
from portal.standalone.processes.supervisor import Supervisor
from portal.standalone.servers.postgres import prepare_postgres


@contextlib.contextmanager
def command_database(folder: DataDir, *, exclusive: bool) -> Iterator[None]:
    """Provide a database within the context. `exclusive` refuses while an `up` runs on the data folder."""
    named = bool(os.environ.get("DATABASE_URL"))
    if named:  # our servers are not involved, and the folder may belong to another account, as in a container
        folder.prepare_unowned()
    else:
        folder.prepare()
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(InstanceLock(folder.run))
        except StartError:
            if exclusive:
                raise
            yield  # the server of the running `up`
            return
        if not named:
            records = folder.run / "children.json"
            terminate_orphans(records, *folder.marks)
            supervisor = held.enter_context(Supervisor(records, PrefixedWriter(sys.stderr, quiet=True)))
            start_servers(supervisor, [prepare_postgres(folder)])
        yield
