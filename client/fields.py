"""Fields of a job that have an option of their own; a test of the server compares them with its specification."""

from __future__ import annotations

_OPTIONS: dict[type, str] = {
    str: "name kind gpu_model mig_profile program code_repository code_ref code_host_key "
    "code_archive code_path checkpoint_dir resume_from on_stall launcher completion_role start_after",
    int: "tasks min_tasks gpus_per_task milli_per_gpu min_gpu_memory_mib cpu_milli memory_mib shm_mib "
    "template_version priority time_limit_s termination_grace_s max_attempts retry_backoff_s retry_max_backoff_s "
    "seed stall_timeout_s checkpoint_keep_last checkpoint_keep_every min_succeeded",
    float: "min_compute_capability",
    bool: "preemptible allow_mixed_gpus exclude_failed_node apply_failure_actions held ignore_dependency_failure",
}
FLAGS = {name: kind for kind, names in _OPTIONS.items() for name in names.split()}
"""Type of each option by the name of its field."""

REFERENCES = ("project", "environment", "pool", "template")
OTHERS = (
    "topology_constraint", "preferred_nodes", "parameters", "env", "volumes", "secrets", "retry_on",
    "notify", "retry_exit_codes", "launcher_options", "rank_overrides", "roles", "command", "dependencies",
)  # fmt: skip
"""Fields whose values are lists or mappings: --set FIELD=JSON, or an option of their own notation."""
