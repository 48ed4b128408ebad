"""Failures of communication between ranks: NCCL, Gloo, rendezvous, Horovod and MPI."""

from __future__ import annotations

from portal.domain.jobs.failure_rules import (
    CONSEQUENCE,
    GENERAL,
    LAST,
    SPECIFIC,
    Evidence,
    FailureAction,
    FailureRule,
)

NCCL_RULES = (
    FailureRule(
        code="nccl_timeout",
        title="An NCCL operation timed out",
        cause="At least one rank did not reach a collective operation: it failed, was much slower, or the network "
        "failed.",
        fix="Look for the rank that reports another error or no progress. Raise the timeout of init_process_group "
        "only "
        "if a rank is slow on purpose.",
        priority=CONSEQUENCE + 3,
        evidence=Evidence.CAUSE,
        pattern=r"Watchdog caught collective operation timeout|Some NCCL operations have failed or timed out",
    ),
    FailureRule(
        code="nccl_watchdog",
        title="The NCCL watchdog ended a rank",
        cause="The watchdog thread made no progress, for example because a CUDA call or the Python lock blocked "
        "it.",
        fix="Look for an earlier error or a blocked rank. TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC raises the limit.",
        priority=CONSEQUENCE + 1,
        evidence=Evidence.CAUSE,
        pattern=r"ProcessGroupNCCL's watchdog got stuck|HeartbeatMonitor.*watchdog thread|watchdog hang",
    ),
    FailureRule(
        code="nccl_system_error",
        title="NCCL unhandled system error",
        cause="A system call of NCCL failed, most often for sockets, shared memory or locked memory.",
        fix="Run with NCCL_DEBUG=WARN: the line NCCL WARN before the error names the call.",
        priority=GENERAL,
        evidence=Evidence.CAUSE,
        pattern=r"[Uu]nhandled system error|ncclSystemError",
    ),
    FailureRule(
        code="nccl_cuda_error",
        title="NCCL unhandled CUDA error",
        cause="A CUDA call of NCCL failed: too little GPU memory, an earlier error, or a driver that does not "
        "match.",
        fix="Run with NCCL_DEBUG=WARN. Keep some GPU memory free for NCCL, and give each rank its own GPU.",
        priority=GENERAL,
        evidence=Evidence.CAUSE,
        pattern=r"[Uu]nhandled cuda error|ncclUnhandledCudaError",
    ),
    FailureRule(
        code="nccl_no_interface",
        title="NCCL found no network interface",
        cause="NCCL_SOCKET_IFNAME names an interface that the container does not have.",
        fix="Do not set NCCL_SOCKET_IFNAME: Fairway sets the interface of the pool.",
        priority=SPECIFIC,
        evidence=Evidence.CAUSE,
        pattern=r"Bootstrap : no socket interface found|NCCL WARN .*[Nn]o (usable )?(socket )?interface",
    ),
    FailureRule(
        code="nccl_socket",
        title="NCCL could not connect to another rank",
        cause="A socket between two ranks was refused, reset or timed out.",
        fix="Look for a rank that ended before. If all were alive, ask an administrator to check the network of "
        "the nodes.",
        priority=GENERAL + 2,
        evidence=Evidence.CAUSE,
        pattern=r"NCCL WARN (Net : )?([Cc]all to (connect|recv|send|accept|bind)|socket(Start|Poll|Try"
        r"|Finalize)[A-Z]\w+"
        r"|.*[Cc]onnection (refused|timed out))",
    ),
    FailureRule(
        code="nccl_infiniband",
        title="NCCL InfiniBand or RoCE error",
        cause="A transfer over InfiniBand or RoCE failed: a link, a port, its configuration, or the limit of "
        "locked memory.",
        fix="Start it again without this node. NCCL_IB_DISABLE=1 shows whether it works over sockets.",
        action=FailureAction.EXCLUDE_NODE,
        priority=SPECIFIC,
        evidence=Evidence.CAUSE,
        pattern=r"NCCL WARN (NET/IB|[Cc]all to ibv_|.*[Gg]ot completion .*(status|error))|ibv_(reg_mr|create_qp"
        r"|modify_qp)\w* failed",
    ),
    FailureRule(
        code="nccl_version_mismatch",
        title="NCCL versions do not match",
        cause="Ranks, or a rank and its plugin, use different versions of NCCL.",
        fix="Use the same image for all ranks, and remove other NCCL libraries from LD_LIBRARY_PATH.",
        priority=SPECIFIC,
        evidence=Evidence.CAUSE,
        pattern=r"[Mm]ismatched NCCL version|NCCL WARN .*version (mismatch|\S+ does not match)",
    ),
    FailureRule(
        code="nccl_duplicate_gpu",
        title="Two ranks use the same GPU",
        cause="NCCL requires a GPU for each rank.",
        fix="Call torch.cuda.set_device(LOCAL_RANK), and start as many processes as each task has GPUs.",
        priority=SPECIFIC,
        evidence=Evidence.CAUSE,
        pattern=r"Duplicate GPU detected",
    ),
    FailureRule(
        code="nccl_shared_memory",
        title="NCCL needs more shared memory",
        cause="NCCL could not create a segment in /dev/shm.",
        fix="Raise the job's shared memory (shm_mib), for example to 1024 MiB for each GPU.",
        priority=SPECIFIC,
        evidence=Evidence.CAUSE,
        pattern=r"NCCL WARN .*([Ee]rror while creating shared memory segment|ftruncate|posix_fallocate"
        r"|/dev/shm/nccl)",
    ),
    FailureRule(
        code="nccl_remote_error",
        title="Another rank failed",
        cause="NCCL lost the connection to another rank, which ended or lost its network.",
        fix="Look for the error of the rank that failed first.",
        priority=CONSEQUENCE,
        pattern=r"ncclRemoteError|remote process exited or there was a network error"
        r"|NCCL WARN .*Connection closed by (remote peer|localRank)",
    ),
    FailureRule(
        code="nccl_internal_error",
        title="NCCL internal error",
        cause="An internal check of NCCL failed: another rank ended during an operation, ranks use different "
        "versions "
        "of NCCL, or NCCL has a bug.",
        fix="Look for a rank that failed before. If there is none, run with NCCL_DEBUG=WARN: the line NCCL WARN "
        "before "
        "the error names the check.",
        priority=CONSEQUENCE - 2,
        evidence=Evidence.CAUSE,
        pattern=r"ncclInternalError|NCCL error.* internal error"
        r"|internal error - please report this issue to the NCCL",
    ),
    FailureRule(
        code="nccl_invalid_usage",
        title="NCCL invalid usage",
        cause="NCCL was called in a way that it does not permit, for example with ranks that share a GPU, or with "
        "different calls on different ranks.",
        fix="Call torch.cuda.set_device(LOCAL_RANK) before the first operation. NCCL_DEBUG=WARN names what is "
        "wrong.",
        priority=GENERAL,
        evidence=Evidence.CAUSE,
        pattern=r"ncclInvalid(Usage|Argument)|NCCL error.* invalid (usage|argument)",
    ),
    FailureRule(
        code="collective_mismatch",
        title="Ranks run different collective operations",
        cause="At the same time, ranks called different operations, or the same one with tensors of different "
        "shapes "
        "or types.",
        fix="Run the same operations in the same order on every rank, also for the last batch and for logging. The "
        "line names both ranks.",
        priority=SPECIFIC + 5,
        evidence=Evidence.CAUSE,
        pattern=r"Detected mismatch between collectives on ranks"
        r"|NCCL WARN .*([Mm]ismatched collective|[Cc]ollective mismatch)",
    ),
)

DISTRIBUTED_RULES = (
    FailureRule(
        code="gloo_connect",
        title="Gloo could not connect the ranks",
        cause="A rank could not reach the address of another rank.",
        fix="Do not set GLOO_SOCKET_IFNAME: Fairway sets it. Look for a rank that ended before.",
        priority=GENERAL,
        evidence=Evidence.CAUSE,
        pattern=r"[Gg]loo connectFullMesh failed|gloo/transport/tcp/\w+\.cc:\d+\] .*([Cc]onnect timeout"
        r"|Connection refused|no route)"
        r"|gloo/transport/tcp/\w+\.cc:\d+\] .*Unable to find address for",
    ),
    FailureRule(
        code="gloo_timeout",
        title="A Gloo operation timed out",
        cause="At least one rank did not reach a collective operation in time.",
        fix="Look for the rank that reports another error or no progress.",
        priority=CONSEQUENCE + 2,
        pattern=r"gloo/transport/tcp/unbound_buffer\.cc:\d+\] Timed out waiting",
    ),
    FailureRule(
        code="gloo_peer_closed",
        title="Another rank closed its Gloo connection",
        cause="Another rank ended while this rank waited for it.",
        fix="Look for the error of the rank that failed first.",
        priority=CONSEQUENCE,
        pattern=r"gloo/transport/tcp/(pair|buffer)\.cc:\d+\] .*(Connection (closed|reset) by peer|Broken pipe)",
    ),
    FailureRule(
        code="rendezvous_timeout",
        title="The ranks did not find each other in time",
        cause="Not all ranks reached the rendezvous: one did not start, or uses another address or world size.",
        fix="Check that every rank starts the launcher with the variables that Fairway sets, and that no rank "
        "failed before.",
        pattern=r"RendezvousTimeoutError|The client socket has timed out after"
        r"|Timed out after \d+ seconds waiting for clients",
    ),
    FailureRule(
        code="rendezvous_closed",
        title="The rendezvous was closed",
        cause="The rank that hosts the rendezvous ended, or the group had already completed.",
        fix="Look for the error of the rank that failed first, most often rank 0.",
        priority=CONSEQUENCE + 1,
        pattern=r"Rendezvous(Closed|Connection)Error|RendezvousGracefulExitError",
    ),
    FailureRule(
        code="store_lost",
        title="The key-value store of the ranks was lost",
        cause="Rank 0 ended, so the others lost the store through which they coordinate.",
        fix="Look for the error of rank 0.",
        priority=CONSEQUENCE - 1,
        pattern=r"DistStoreError|DistNetworkError.*(Connection reset|Broken pipe|recv|closed)"
        r"|TCPStore.*(Broken pipe|recvValue failed|sendBytes failed)",
    ),
    FailureRule(
        code="distributed_variables_missing",
        title="Variables of the process group are missing",
        cause="The program calls init_process_group, but no launcher set RANK, WORLD_SIZE, MASTER_ADDR and "
        "MASTER_PORT.",
        fix="Choose a launcher for the job, such as torchrun.",
        priority=SPECIFIC,
        pattern=r"environment variable (RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT|LOCAL_RANK) expected, but not set"
        r"|KeyError: '(RANK|WORLD_SIZE|LOCAL_RANK|MASTER_ADDR)'",
    ),
    FailureRule(
        code="ddp_unused_parameters",
        title="DDP found unused parameters",
        cause="Some parameters of the model took no part in the loss, so their gradients never arrived.",
        fix="Pass find_unused_parameters=True to DistributedDataParallel, or use all outputs in the loss.",
        priority=SPECIFIC,
        pattern=r"Expected to have finished reduction in the prior iteration",
    ),
    FailureRule(
        code="ddp_ready_twice",
        title="A parameter was ready twice for DistributedDataParallel",
        cause="DistributedDataParallel reduces each parameter once in a step. Activation checkpointing or a second "
        "forward pass used one twice.",
        fix="Use use_reentrant=False for activation checkpointing, find_unused_parameters=False, or "
        "static_graph=True.",
        priority=SPECIFIC,
        pattern=r"Expected to mark a variable ready only once",
    ),
    FailureRule(
        code="process_group_missing",
        title="The process group was not initialized",
        cause="The program uses torch.distributed before init_process_group, or was started without a launcher.",
        fix="Choose a launcher for the job, such as torchrun, and call init_process_group first.",
        priority=SPECIFIC,
        pattern=r"Default process group has not been initialized",
    ),
    FailureRule(
        code="child_killed",
        title="A process was killed (SIGKILL)",
        cause="A process that the task started was killed, most often because the task reached its memory limit.",
        fix="Request more memory, load less data at once, or use fewer workers of the data loader.",
        action=FailureAction.RETRY_WITH_MORE_MEMORY,
        priority=GENERAL + 3,
        evidence=Evidence.CAUSE,
        pattern=r"exits with return code = -9\b|Signal 9 \(SIGKILL\) received|exitcode *: -9\b|<Signals\.SIGKILL"
        r"|terminated with signal SIGKILL|exited on signal 9\b|was killed by signal 9|: line \d+: +\d+ Killed\b",
    ),
    FailureRule(
        code="child_bus_error",
        title="A process had a bus error",
        cause="A process that the task started got SIGBUS: /dev/shm is full, or a memory-mapped file ended early.",
        fix="Raise the job's shared memory (shm_mib), and do not truncate files that are mapped.",
        priority=GENERAL + 3,
        evidence=Evidence.CAUSE,
        pattern=r"exits with return code = -7\b|Signal 7 \(SIGBUS\)|exitcode *: -7\b|<Signals\.SIGBUS"
        r"|terminated with signal SIGBUS|exited on signal 7\b|: line \d+: +\d+ Bus error\b",
    ),
    FailureRule(
        code="child_aborted",
        title="A process aborted",
        cause="A failed check in native code of a process that the task started called abort (SIGABRT).",
        fix="Read the lines before: the check names its file and line.",
        priority=LAST + 4,
        evidence=Evidence.CAUSE,
        pattern=r"exits with return code = -6\b|Signal 6 \(SIGABRT\)|exitcode *: -6\b|<Signals\.SIGABRT"
        r"|terminated with signal SIGABRT|exited on signal 6\b|: line \d+: +\d+ Aborted\b",
    ),
    FailureRule(
        code="torchrun_child_failed",
        title="A process of torchrun failed",
        cause="torchrun ended because one of its processes did; its own error is above in the log, or in another "
        "rank's log.",
        fix="Read the lines before the summary of torchrun. The decorator torch.distributed.elastic record shows "
        "the traceback.",
        priority=LAST,
        pattern=r"torch\.distributed\.elastic\.multiprocessing\.errors\.ChildFailedError",
    ),
    FailureRule(
        code="horovod_stalled",
        title="Horovod waits for a rank",
        cause="Some ranks did not submit a tensor that the others reduce.",
        fix="Run the same operations on every rank, also at the end of an epoch; use hvd.join() for uneven data.",
        evidence=Evidence.CAUSE,
        pattern=r"One or more tensors were submitted to be reduced, gathered or broadcasted by subset of ranks",
    ),
    FailureRule(
        code="horovod_shut_down",
        title="Horovod was shut down",
        cause="Another rank ended while this rank waited for it.",
        fix="Look for the error of the rank that failed first.",
        priority=CONSEQUENCE,
        pattern=r"Horovod has been shut down",
    ),
    FailureRule(
        code="horovod_not_built",
        title="Horovod lacks the framework's extension",
        cause="Horovod was installed without the extension for this framework.",
        fix="Install the framework first, then Horovod with HOROVOD_WITH_PYTORCH=1 or HOROVOD_WITH_TENSORFLOW=1.",
        priority=SPECIFIC,
        pattern=r"Extension horovod\.\w+ has not been built",
    ),
    FailureRule(
        code="mpi_no_slots",
        title="MPI has too few slots",
        cause="mpirun was asked for more processes than the job has tasks.",
        fix="Use the number of tasks of the job, or the host file that Fairway writes.",
        priority=SPECIFIC,
        evidence=Evidence.CAUSE,
        pattern=r"There are not enough slots available in the system",
    ),
    FailureRule(
        code="mpi_as_root",
        title="mpirun refuses to run as root",
        cause="The image starts the program as root, which Open MPI refuses.",
        fix="Set OMPI_ALLOW_RUN_AS_ROOT=1 and OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1, or use an image with another user.",
        priority=SPECIFIC,
        evidence=Evidence.CAUSE,
        pattern=r"mpirun has detected an attempt to run as root",
    ),
    FailureRule(
        code="mpi_daemon",
        title="MPI could not start on another task",
        cause="mpirun could not start its daemon on a host of the job.",
        fix="Choose the launcher of the job for MPI, and install the same Open MPI in the images of all tasks.",
        evidence=Evidence.CAUSE,
        pattern=r"(ORTE|PRTE) was unable to reliably start one or more daemons|(ORTE|PRTE) has lost communication"
        r'|MCA parameter "plm_(rsh|ssh)_agent" was set to a path',
    ),
    FailureRule(
        code="preflight_all_reduce",
        title="The tasks could not exchange data before the start",
        cause="The all-reduce that the pool runs before the command did not succeed: a task did not start, or the "
        "network between the nodes does not carry what NCCL or Gloo send.",
        fix="The line says which rank failed and at what. Show it to your administrators; the page of its node has "
        "the measured links.",
        priority=SPECIFIC,
        evidence=Evidence.CAUSE,
        pattern=r"fairway: the all-reduce of \d+ tasks failed on rank \d+",
    ),
    FailureRule(
        code="mpi_tcp",
        title="MPI could not connect two ranks",
        cause="The TCP transport of Open MPI could not reach another rank.",
        fix="Restrict Open MPI to the interface of the job with OMPI_MCA_btl_tcp_if_include.",
        priority=GENERAL,
        evidence=Evidence.CAUSE,
        pattern=r"Open MPI (failed to TCP connect to a peer|detected an inbound MPI TCP connection)"
        r"|btl_tcp_endpoint.*connect\(\) .*failed",
    ),
    FailureRule(
        code="mpi_abort",
        title="A rank aborted the MPI program",
        cause="A rank called MPI_Abort, or mpirun ended because a rank did.",
        fix="Read the lines before: the rank that is named there failed first.",
        priority=LAST + 5,
        evidence=Evidence.CAUSE,
        pattern=r"MPI_ABORT was invoked on rank|mpirun noticed that process rank \d+"
        r"|Primary job +terminated normally, but 1 process",
    ),
)
