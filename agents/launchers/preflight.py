"""An all-reduce of all tasks in the job's own image and network before their command.

It uses torch.distributed where the image has torch (NCCL on GPUs, else Gloo), else sockets. An image without Python
runs the command at once; the agents have checked connection and bandwidth before.
"""

from __future__ import annotations

from dataclasses import replace

from agents.launchers.gang import GangShape, LaunchFile, LaunchSpec
from agents.node.spec.task_spec import SECRETS_PLACEHOLDER

_SCRIPT_FILE, _PROGRAM_FILE = "preflight.sh", "all_reduce.py"
_SCRIPT = """# Usage: preflight.sh ADDRESS PORT RANK TASKS LIMIT_S COMMAND...
if command -v python3 >/dev/null; then
  python3 "$FAIRWAY_SECRETS/all_reduce.py" "$1" "$2" "$3" "$4" "$5" || exit $?
fi
shift 5
exec "$@"
"""
_PROGRAM = r"""import datetime, os, socket, struct, sys, threading, time

address, port, rank, tasks, limit_s = sys.argv[1], *map(int, sys.argv[2:])
begin_s = time.monotonic()
until_s = begin_s + limit_s
expected = tasks * (tasks + 1) // 2
greeting_limit_s = 5  # for one connection: another program may accept or connect and send nothing
doing = ["starting"]


def fail(cause):
    print("fairway: the all-reduce of %d tasks failed on rank %d: %s" % (tasks, rank, cause), file=sys.stderr)
    sys.stderr.flush()
    os._exit(1)


def with_torch(torch):
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    limit = datetime.timedelta(seconds=limit_s)
    store = dist.TCPStore(address, port, tasks, rank == 0, limit, wait_for_workers=False)
    store.set("rank %d" % rank, "here")
    doing[0] = "waiting for rank "
    for other in range(tasks):
        doing[0] = "waiting for rank %d" % other
        store.get("rank %d" % other)
    doing[0] = "the all-reduce by " + ("NCCL" if cuda else "Gloo")
    if cuda:
        torch.cuda.set_device(0)
    dist.init_process_group("nccl" if cuda else "gloo", store=store, rank=rank, world_size=tasks, timeout=limit)
    value = torch.full((256 * 1024,), float(rank + 1), device="cuda" if cuda else "cpu")
    dist.all_reduce(value)
    total = int(value.min().item())
    dist.destroy_process_group()
    doing[0] = "waiting for the others to end"
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < tasks:
        time.sleep(0.01)
    if rank == 0:
        time.sleep(0.2)  # the others close their connections first, so that the port is free at once
    return total, "NCCL" if cuda else "Gloo"


def with_sockets():
    def receive(stream):
        line = b""
        while not line.endswith(b"\n"):
            data = stream.recv(64)
            if not data:
                raise ConnectionResetError("the connection was closed")
            line += data
        return [int(word) for word in line.split()]

    if rank:
        doing[0] = "connecting to rank 0 at %s port %d" % (address, port)
        while True:
            try:
                with socket.create_connection((address, port), timeout=until_s - time.monotonic()) as stream:
                    if stream.getsockname() == stream.getpeername():
                        # TCP's simultaneous open: nobody listens yet and this end got the same port. It is reset,
                        # for a port in TIME_WAIT could not be bound by rank 0.
                        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        raise ConnectionRefusedError
                    stream.settimeout(greeting_limit_s)
                    if receive(stream) != [tasks]:
                        raise ConnectionRefusedError
                    stream.settimeout(None)
                    stream.sendall(b"%d %d\n" % (rank, rank + 1))
                    return receive(stream)[0], "sockets"
            except (ConnectionError, socket.timeout, ValueError):  # nobody listens yet, or another program does
                time.sleep(0.1)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    missing, total, streams = set(range(1, tasks)), 1, []
    with socket.create_server((address, port), family=family, backlog=tasks) as server:
        while missing:
            doing[0] = "waiting for rank %d" % min(missing)
            stream = server.accept()[0]
            stream.settimeout(greeting_limit_s)
            try:
                stream.sendall(b"%d\n" % tasks)
                other, value = receive(stream)
                missing.remove(other)
            except (KeyError, OSError, ValueError):  # another program, or a rank that has connected again
                stream.close()
                continue
            total += value
            streams.append(stream)
    for stream in streams:
        stream.sendall(b"%d\n" % total)
        stream.recv(1)  # the other side closes first, so that the port is free at once
        stream.close()
    return total, "sockets"


watch = threading.Timer(limit_s, lambda: fail("no answer within %d s while %s" % (limit_s, doing[0])))
watch.daemon = True
watch.start()
try:
    try:
        import torch
        import torch.distributed
        total, how = with_torch(torch) if torch.distributed.is_available() else with_sockets()
    except ImportError:
        total, how = with_sockets()
except Exception as problem:
    fail("%s: %s" % (doing[0], str(problem).split("\n")[0] or type(problem).__name__))
if total != expected:
    fail("the sum is %d and should be %d" % (total, expected))
if rank == 0:
    print("fairway: all-reduce of %d tasks by %s in %.1f s" % (tasks, how, time.monotonic() - begin_s), flush=True)
"""


def with_all_reduce(launch: LaunchSpec, gang: GangShape, rank: int, limit_s: int) -> LaunchSpec:
    """Return a launch that runs its command after the all-reduce, for several tasks with a rendezvous."""
    if gang.tasks == 1 or gang.is_elastic or gang.rendezvous is None:
        return launch
    meeting = gang.rendezvous
    words = ["/bin/sh", f"{SECRETS_PLACEHOLDER}/{_SCRIPT_FILE}", meeting.address, str(meeting.port)]
    words += [str(rank), str(gang.tasks), str(limit_s)]
    files = {_SCRIPT_FILE: LaunchFile(_SCRIPT), _PROGRAM_FILE: LaunchFile(_PROGRAM)}
    return replace(launch, command=(*words, *launch.command), files=launch.files | files)
