"""Keeps the list of hosts of elastic jobs current in their running tasks."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from agents import verbs
from agents.engines.replies import AgentError, TaskKey
from agents.launchers.ssh import CONFIG_FILE
from agents.node.spec.task_spec import HOSTS_FILE
from portal.domain.states import AttemptState
from portal.models import Task
from portal.services.jobs.launching import (
    attempt_gang,
    attempt_keys,
    launch_task,
    needs_ssh_keys,
    rank_network,
)
from scheduler.nodes.node_connection import NodeConnection

log = logging.getLogger(__name__)


def refresh_hosts(connection: NodeConnection, tasks: Iterable[Task]) -> None:
    """Send hosts and SSH configuration to running tasks of elastic jobs that use SSH; the node compares them.

    Tasks that are placed later, or leave, change the lists of all others.
    """
    for task in tasks:
        attempt, job = task.attempt, task.attempt.job
        if task.state != AttemptState.RUNNING or not job.is_elastic or not needs_ssh_keys(job):
            continue
        gang = attempt_gang(attempt, attempt_keys(attempt))
        if all(member.rank != task.rank for member in gang.members):
            continue  # it is leaving
        network = rank_network(task.rank, attempt.rendezvous, connection.node.public_id)
        files = launch_task(job, gang, network, job.command).files
        key = TaskKey(job.public_id, attempt.number, task.rank)
        try:
            sent = {name: files[name].content for name in (HOSTS_FILE, CONFIG_FILE)}
            connection.engine.command(verbs.UPDATE_FILES, **vars(key), files=sent)
        except AgentError as error:
            log.info("the hosts of %s were not updated: %s", key, error.message)
