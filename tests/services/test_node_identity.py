"""Host key, name and address of a node: a confirmed key is the one that was compared, and old names are free."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import IntegrityError, connection
from django.utils import timezone

from agents import ssh
from agents.keys import PURPOSES, fingerprint, make_keys, read_public_key
from agents.ssh import HostKey, SshTarget
from portal.domain.jobs.job_spec import JobKind
from portal.domain.nodes.node_operations import OWN_CONNECTION_TIMEOUT_S, OperationKind
from portal.errors import Conflict, Forbidden, InvalidRequest
from portal.models import AuditEntry, HostKeyChange, Job, Node, OutboxMessage, Schedule, Template, User
from portal.services.nodes import (
    enrolment,
    gang_fabric,
    identity,
    nodes,
    operations,
    quarantine,
    topologies,
)
from tests import factories
from tests.rig.fake_agent import echo_agent
from tests.rig.loopback import LoopbackSshd, loopback_sshd, make_host_key
from tests.rig.needs import missing_for_loopback
from tests.services.test_lifecycle import place, run
from tests.services.test_nodes import hello

pytestmark = pytest.mark.django_db(transaction=True)

REASON = "a new disk"


@pytest.fixture
def dataset(transactional_db: None) -> dict[str, Any]:
    factories.cluster_settings()
    pool = factories.pool()
    owner = factories.user()
    return {
        "pool": pool,
        "node": factories.node(
            pool, name="gpu1", host="10.0.0.1", host_key="ssh-ed25519 AAAA", boot_id="one"
        ),
        "owner": owner,
        "admin": factories.user(admin=True),
        "project": factories.project(member=owner),
        "environment": factories.environment(),
    }


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[LoopbackSshd]:
    reason = missing_for_loopback()
    if reason is not None:
        pytest.skip(reason)
    keys = make_keys(tmp_path / "keys", "test")
    public = {purpose: read_public_key(keys[purpose]) for purpose in PURPOSES}
    with loopback_sshd(tmp_path, echo_agent(), public) as running:
        yield running


@pytest.fixture
def reinstalled(dataset: dict[str, Any], sshd: LoopbackSshd, tmp_path: Path) -> Node:
    """A node whose machine presents another key than the confirmed one."""
    old = make_host_key(tmp_path / "old_key")
    fields = {
        "host": sshd.host,
        "port": sshd.port,
        "ssh_user": "fairway",
        "host_key": old,
        "reachable": False,
    }
    Node.objects.filter(pk=dataset["node"].pk).update(**fields, unreachable_code="host_key_mismatch")
    node: Node = dataset["node"]
    node.refresh_from_db()
    return node


def confirm(actor: User, node: Node, key: str) -> Any:
    return identity.do_confirm_host_key(actor, node, fingerprint=fingerprint(key), reason=REASON)


# -- the host key ----------------------------------------------------------------------------------


def test_a_confirmed_key_replaces_the_old_one_and_the_connection_is_tested(
    dataset, reinstalled, sshd
) -> None:
    old = reinstalled.host_key
    keys = identity.get_host_keys(dataset["admin"], reinstalled)
    assert (keys.known.line, keys.presented.line, keys.changed) == (old, sshd.host_key, True)
    operation = confirm(dataset["admin"], reinstalled, sshd.host_key)
    node = Node.objects.get(pk=reinstalled.pk)
    assert (node.host_key, node.unreachable_code, node.next_hello_is_first) == (sshd.host_key, "", True)
    change = node.host_key_changes.get()
    assert (change.old_key, change.new_key) == (old, sshd.host_key)
    assert (change.actor, change.reason) == (dataset["admin"], REASON)
    entry = AuditEntry.objects.get(action="node.confirm_key")
    assert (entry.actor, entry.reason, entry.object_name) == (dataset["admin"], REASON, "gpu1")
    assert (entry.before["fingerprint"], entry.after["fingerprint"]) == (
        fingerprint(old),
        fingerprint(sshd.host_key),
    )
    assert (operation.kind, operation.actor) == ("test", dataset["admin"])
    sent = list(OutboxMessage.objects.values_list("name", "arguments"))
    assert ("scheduler.check_node", [operation.public_id]) in sent
    assert ("scheduler.notify_node", [node.public_id, "connect", ""]) in sent
    assert "Accepted" not in (sshd.folder / "sshd.log").read_text()


def test_another_key_than_the_one_that_was_compared_is_refused(dataset, reinstalled, sshd) -> None:
    compared = sshd.host_key
    other = sshd.change_host_key()
    with pytest.raises(Conflict) as refused:
        confirm(dataset["admin"], reinstalled, compared)
    assert refused.value.code == "host_key_changed"
    assert fingerprint(compared) in refused.value.message and fingerprint(other) in refused.value.message
    assert refused.value.details["presented"] == fingerprint(other)
    assert_unchanged(reinstalled)


def test_a_key_that_changes_again_is_confirmed_again_and_all_are_kept(dataset, reinstalled, sshd) -> None:
    first = reinstalled.host_key
    confirm(dataset["admin"], reinstalled, sshd.host_key)
    third = sshd.change_host_key()
    node = Node.objects.get(pk=reinstalled.pk)
    assert identity.get_host_keys(dataset["admin"], node).changed
    confirm(dataset["admin"], node, third)
    keys = node.host_key_changes.values_list("old_key", "new_key")
    assert list(keys) == [(sshd.host_key, third), (first, sshd.host_key)]


def test_a_member_confirms_nothing(dataset, reinstalled, sshd) -> None:
    for act in (
        lambda: confirm(dataset["owner"], reinstalled, sshd.host_key),
        lambda: identity.get_host_keys(dataset["owner"], reinstalled),
        lambda: identity.do_rename_node(dataset["owner"], reinstalled, name="mine"),
        lambda: identity.do_move_node(dataset["owner"], reinstalled, host="mine.example"),
    ):
        with pytest.raises(Forbidden):
            act()
    assert_unchanged(reinstalled)


def test_one_of_several_confirmations_at_once_is_stored(dataset, reinstalled, sshd) -> None:
    begin, outcomes = threading.Barrier(4), []

    def act() -> None:
        try:
            begin.wait(10)
            outcomes.append(confirm(dataset["admin"], reinstalled, sshd.host_key).kind)
        except Conflict as error:
            outcomes.append(error.code)
        finally:
            connection.close()

    threads = [threading.Thread(target=act) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(outcomes) == ["host_key_unchanged"] * 3 + ["test"]
    assert HostKeyChange.objects.count() == AuditEntry.objects.filter(action="node.confirm_key").count() == 1


def test_a_node_that_was_changed_while_its_key_was_read_is_not_changed(dataset, reinstalled, sshd) -> None:
    stale = Node.objects.get(pk=reinstalled.pk)
    Node.objects.filter(pk=reinstalled.pk).update(port=sshd.port + 1)
    with pytest.raises(Conflict) as refused:
        confirm(dataset["admin"], stale, sshd.host_key)
    assert refused.value.code == "node_changed"
    assert_unchanged(reinstalled)


def test_a_confirmation_needs_a_new_key_a_fingerprint_and_a_reason(dataset, reinstalled, sshd) -> None:
    admin = dataset["admin"]
    with pytest.raises(InvalidRequest) as refused:
        identity.do_confirm_host_key(admin, reinstalled, fingerprint="yes", reason=" ")
    assert set(refused.value.fields) == {"fingerprint", "reason"}
    codes = {}
    before = {name: getattr(reinstalled, name) for name in ("host_key", "port", "transport", "state")}
    for name, fields in (
        ("known", {"host_key": sshd.host_key}),
        ("away", {"port": 1}),
        ("local", {"transport": "local"}),
        ("retired", {"state": "retired"}),
        ("no key", {"host_key": ""}),
    ):
        Node.objects.filter(pk=reinstalled.pk).update(**(before | fields))
        reinstalled.refresh_from_db()
        with pytest.raises(Conflict) as refusal:
            confirm(admin, reinstalled, sshd.host_key)
        codes[name] = refusal.value.code
    assert codes == {
        "known": "host_key_unchanged",
        "away": "node_unreachable",
        "local": "not_over_ssh",
        "retired": "node_retired",
        "no key": "no_host_key",
    }
    assert not HostKeyChange.objects.exists()


def assert_unchanged(node: Node) -> None:
    assert Node.objects.get(pk=node.pk).host_key == node.host_key
    assert not HostKeyChange.objects.exists()
    assert not AuditEntry.objects.filter(action="node.confirm_key").exists()
    assert not node.operations.exists()


# -- what follows a reinstallation -----------------------------------------------------------------


def running(dataset) -> Job:
    job = factories.job(dataset["owner"], dataset["project"], dataset["environment"])
    run(place(dataset, job))
    return job


def held(dataset) -> int:
    return dataset["node"].gpus.filter(used_milli__gt=0).count()


def test_tasks_of_the_old_system_end_when_the_new_one_answers(dataset, reinstalled, sshd) -> None:
    Node.objects.update(last_seen_at=timezone.now())
    job = running(dataset)
    confirm(dataset["admin"], reinstalled, sshd.host_key)
    job.refresh_from_db()
    assert (job.state, held(dataset)) == ("RUNNING", 1)  # a confirmation proves nothing
    addresses = [{"name": "eth0", "addresses": ["10.0.0.7/24"]}]
    assert nodes.record_hello(reinstalled.pk, hello(dataset, "two", interfaces=addresses), received_s=100)
    job.refresh_from_db()
    assert (job.state, held(dataset)) == ("PENDING", 0)
    attempt = job.attempts.get()
    assert (attempt.state, attempt.reason) == ("NODE_FAIL", "node_rebooted")
    assert "The node gpu1 was reinstalled while it ran." in job.message
    node = Node.objects.get(pk=reinstalled.pk)
    assert (node.addresses, node.next_hello_is_first) == (["10.0.0.7"], False)
    assert node.operations.filter(kind="preflight").exists()


def test_tasks_continue_if_only_the_key_was_changed(dataset, reinstalled, sshd) -> None:
    job = running(dataset)
    confirm(dataset["admin"], reinstalled, sshd.host_key)
    assert not nodes.record_hello(reinstalled.pk, hello(dataset, "one"), received_s=100)
    nodes.record_hello(reinstalled.pk, hello(dataset, "two"), received_s=100)
    job.refresh_from_db()
    assert "restarted" in job.message and "reinstalled" not in job.message  # a restart later on


# -- names -----------------------------------------------------------------------------------------


def again(dataset) -> Node:
    return nodes.do_create_node(
        dataset["admin"], name="gpu1", pool=dataset["pool"], host="10.0.0.1", host_key="ssh-ed25519 AAAB"
    )


def test_the_name_and_address_of_a_retired_node_are_free(dataset) -> None:
    job = running(dataset)
    with pytest.raises(InvalidRequest, match="already exists"):
        again(dataset)
    first = job.attempts.get().task_rows.get()
    nodes.record_unreachable(dataset["node"].pk, "It does not answer.")
    nodes.do_fence_node(dataset["admin"], dataset["node"], reason="It is on the scrapheap.")
    nodes.do_set_node_state(dataset["admin"], dataset["node"], nodes.NodeState.RETIRED)
    second = again(dataset)
    nodes.do_set_node_state(dataset["admin"], second, nodes.NodeState.RETIRED)
    third = again(dataset)
    assert Node.objects.filter(name="gpu1", host="10.0.0.1").count() == 3
    first.refresh_from_db()
    assert (first.node.name, first.node_id) == ("gpu1", dataset["node"].pk)
    for retired in (dataset["node"], second):
        for act in (
            lambda node: nodes.do_set_node_state(dataset["admin"], node, nodes.NodeState.READY),
            lambda node: nodes.do_uncordon_node(dataset["admin"], node, force=True),
            lambda node: identity.do_rename_node(dataset["admin"], node, name="gpu9"),
        ):
            with pytest.raises(Conflict) as refused:
                act(retired)
            assert refused.value.code == "node_retired"
    assert Node.objects.get(pk=third.pk).state == "enrolling"


def test_a_renamed_node_keeps_its_jobs_and_requests_follow(dataset) -> None:
    admin, node = dataset["admin"], dataset["node"]
    job = running(dataset)
    waiting = factories.job(dataset["owner"], dataset["project"], dataset["environment"])
    ended = factories.job(dataset["owner"], dataset["project"], dataset["environment"])
    Job.objects.filter(pk__in=[waiting.pk, ended.pk]).update(preferred_nodes=["gpu1", "gpu2"])
    Job.objects.filter(pk=ended.pk).update(state="CANCELLED")
    fields = {"preferred_nodes": ["gpu1"], "tasks": 1}
    template = Template.objects.create(name="t", title="t", kind=JobKind.TRAINING.value, fields=dict(fields))
    schedule = Schedule.objects.create(
        name="s", owner=dataset["owner"], project=dataset["project"], environment=dataset["environment"],
        job=dict(fields), cron="0 5 * * *", enabled=False,
    )  # fmt: skip
    renamed = identity.do_rename_node(admin, node, name="rack1-gpu1", reason="a naming scheme")
    assert (renamed.name, renamed.public_id, renamed.pk) == ("rack1-gpu1", node.public_id, node.pk)
    for row in (job, waiting, ended, template, schedule):
        row.refresh_from_db()
    assert job.state == "RUNNING" and job.attempts.get().task_rows.get().node.name == "rack1-gpu1"
    assert waiting.preferred_nodes == ["rack1-gpu1", "gpu2"]
    assert ended.preferred_nodes == ["gpu1", "gpu2"]
    assert template.fields == schedule.job == {"preferred_nodes": ["rack1-gpu1"], "tasks": 1}
    entry = AuditEntry.objects.get(action="node.rename")
    assert (entry.before, entry.reason) == ({"name": "gpu1"}, "a naming scheme")
    assert entry.after == {"name": "rack1-gpu1", "requests": 3}
    assert ("scheduler.notify_node", [node.public_id, "connect", ""]) in OutboxMessage.objects.values_list(
        "name", "arguments"
    )
    other = factories.node(dataset["pool"], name="gpu1")  # the old name is free
    for name, code in (("rack1-gpu1", "already_exists"), ("Rack 1", "invalid")):
        with pytest.raises(InvalidRequest) as refused:
            identity.do_rename_node(admin, other, name=name)
        assert (set(refused.value.fields), refused.value.code) == ({"name"}, code)


def test_a_retired_node_has_no_actions_and_nothing_brings_it_back(dataset) -> None:
    admin, stale = dataset["admin"], dataset["node"]
    Node.objects.filter(pk=stale.pk).update(reachable=False, agent_info={"interfaces": []})
    stale.refresh_from_db()  # as another administrator's page shows it
    nodes.do_set_node_state(admin, Node.objects.get(pk=stale.pk), nodes.NodeState.RETIRED)
    again(dataset)
    login = enrolment.SudoLogin("root", "secret")
    acts = {
        "state": lambda: nodes.do_set_node_state(admin, stale, nodes.NodeState.CORDONED),
        "uncordon": lambda: nodes.do_uncordon_node(admin, stale),
        "force": lambda: nodes.do_uncordon_node(admin, stale, force=True),
        "fence": lambda: nodes.do_fence_node(admin, stale, reason="it is away"),
        "labels": lambda: topologies.do_set_labels(admin, stale, {"rack": "a"}),
        "interface": lambda: gang_fabric.do_set_interface(admin, stale, ""),
        "quarantine": lambda: quarantine.do_clear_node_quarantine(admin, stale),
        "test": lambda: operations.do_start_connection_test(admin, stale),
        "check": lambda: operations.do_request_operation(admin, stale, OperationKind.PREFLIGHT),
        "enrol": lambda: enrolment.do_enrol_by_sudo(admin, stale, login),
        "rename": lambda: identity.do_rename_node(admin, stale, name="gpu9"),
        "move": lambda: identity.do_move_node(admin, stale, host="10.0.0.9"),
    }
    codes = {}
    for name, act in acts.items():
        try:
            codes[name] = repr(act())
        except Conflict as error:
            codes[name] = str(error.code)
    assert codes == dict.fromkeys(acts, "node_retired")
    assert Node.objects.get(pk=stale.pk).state == "retired" and not stale.operations.exists()


def test_a_node_that_is_retired_while_its_key_is_read_keeps_its_key(
    dataset, reinstalled, sshd, monkeypatch
) -> None:
    read = identity.scan_pinned_host

    def read_while_another_retires(target: SshTarget) -> HostKey:
        Node.objects.filter(pk=reinstalled.pk).update(state="retired")
        return read(target)

    monkeypatch.setattr(identity, "scan_pinned_host", read_while_another_retires)
    with pytest.raises(Conflict) as refused:
        confirm(dataset["admin"], reinstalled, sshd.host_key)
    assert refused.value.code == "node_retired"
    assert_unchanged(reinstalled)


def test_a_key_that_is_too_long_to_store_is_a_refusal(dataset, reinstalled, monkeypatch) -> None:
    # an RSA key of 16384 bits takes minutes to make
    monkeypatch.setattr(ssh, "MAX_HOST_KEY_LENGTH", 60)
    keys = identity.get_host_keys(dataset["admin"], reinstalled)
    assert keys.presented is None and "longer than any in use" in keys.problem


# -- addresses -------------------------------------------------------------------------------------


SPELLINGS = {
    "10.0.0.1": ("::ffff:10.0.0.1", "[::ffff:10.0.0.1]"),
    "fd00::1": ("FD00::1", "fd00:0:0::1", "[fd00::1]"),
    "gpu1.example": ("GPU1.Example", "gpu1.example.", "GPU1.EXAMPLE."),
}
NO_HOSTS = (
    *(
        "",
        ".",
        "10.1",
        "012.0.0.1",
        "167772161",
        "0x0a000001",
        "1.2.3",
        "0.0.0.0",
        "::",
        "224.0.0.1",
        "ff02::1",
    ),
    *("a;b", "a$(x)", "%h", "-oProxyCommand=x", "a b", "a\nb", "a..b", "fe80::1%a b", "x" * 64, "a/b", "u@h"),
)


@pytest.mark.parametrize("host", SPELLINGS)
def test_an_address_in_another_spelling_is_the_same_one(dataset, host: str) -> None:
    admin, pool = dataset["admin"], dataset["pool"]
    Node.objects.filter(pk=dataset["node"].pk).update(host=host)
    other = factories.node(pool, name="gpu2", host="10.0.0.3", host_key="ssh-ed25519 AAAA")
    for spelled in (host, *SPELLINGS[host]):
        with pytest.raises(Conflict) as same:
            identity.do_move_node(admin, dataset["node"], host=spelled)
        assert same.value.code == "address_unchanged"
        with pytest.raises(InvalidRequest) as moved:
            identity.do_move_node(admin, other, host=spelled)
        with pytest.raises(InvalidRequest) as added:
            nodes.do_create_node(admin, name="gpu3", pool=pool, host=spelled, host_key="ssh-ed25519 AAAB")
        assert moved.value.code == added.value.code == "already_exists"
        assert "host" in moved.value.fields
    operation = identity.do_move_node(admin, other, host="GPU2.Example.")
    assert operation.new_host == "gpu2.example"


@pytest.mark.parametrize("host", NO_HOSTS)
def test_what_is_no_address_is_refused(dataset, host: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        move(dataset, host)
    assert set(refused.value.fields) == {"host"}


def move(dataset, host: str = "10.0.0.2", port: int | None = None) -> Any:
    return identity.do_move_node(dataset["admin"], dataset["node"], host=host, port=port, reason="a new rack")


def target(dataset, **changes: object) -> SshTarget:
    fields = {"host": "10.0.0.2", "user": "fairway", "host_key": "ssh-ed25519 AAAA", "port": 22}
    return SshTarget(**(fields | changes))


def test_a_node_moves_once_the_test_at_its_new_address_succeeds(dataset) -> None:
    job = running(dataset)
    operation = move(dataset)
    node = dataset["node"]
    node.refresh_from_db()
    assert (node.host, operation.new_host, operation.new_port) == ("10.0.0.1", "10.0.0.2", 22)
    assert ("scheduler.move_node", [operation.public_id]) in OutboxMessage.objects.values_list(
        "name", "arguments"
    )
    with pytest.raises(Conflict) as refused:
        move(dataset, "10.0.0.3")
    assert refused.value.code == "move_in_progress"
    identity.record_move_tested(operation.public_id, True, target(dataset))
    node.refresh_from_db()
    operation.refresh_from_db()
    job.refresh_from_db()
    assert (node.host, node.port, operation.ok, job.state) == ("10.0.0.2", 22, True, "RUNNING")
    entry = AuditEntry.objects.get(action="node.move")
    assert (entry.actor, entry.reason) == (dataset["admin"], "a new rack")
    assert (entry.before["host"], entry.after["host"]) == ("10.0.0.1", "10.0.0.2")
    factories.node(dataset["pool"], host="10.0.0.1")  # the old address is free


@pytest.mark.parametrize("change", ["failed", "other key", "taken", "retired", "overdue"])
def test_a_test_that_proves_nothing_changes_no_address(dataset, change: str) -> None:
    operation = move(dataset)
    if change == "other key":
        Node.objects.update(host_key="ssh-ed25519 AAAB")
    if change == "taken":
        factories.node(dataset["pool"], host="10.0.0.2")
    if change == "retired":
        Node.objects.update(state="retired")
    if change == "overdue":
        began = timezone.now() - timedelta(seconds=OWN_CONNECTION_TIMEOUT_S + 1)
        type(operation).objects.filter(pk=operation.pk).update(started_at=began)
        operations.fail_overdue_operations()
    identity.record_move_tested(operation.public_id, change != "failed", target(dataset))
    operation.refresh_from_db()
    assert operation.ok is False and operation.finished_at
    assert Node.objects.get(pk=dataset["node"].pk).host == "10.0.0.1"
    assert not AuditEntry.objects.filter(action="node.move").exists()
    assert [step["message"] for step in operation.steps] == {
        "failed": [],
        "other key": ["Its host key was changed meanwhile; test the new address again."],
        "taken": ["Another node has this address."],
        "retired": ["It was retired meanwhile."],
        "overdue": ["It was interrupted; start it again."],
    }[change]


def test_an_address_that_cannot_be_is_refused(dataset) -> None:
    factories.node(dataset["pool"], host="10.0.0.2")
    for host, port, wrong in (("a b", 22, {"host"}), ("ok", 0, {"port"}), ("10.0.0.2", None, {"host"})):
        with pytest.raises(InvalidRequest) as refused:
            move(dataset, host, port)
        assert set(refused.value.fields) == wrong
    with pytest.raises(Conflict) as conflict:
        move(dataset, "10.0.0.1")
    assert conflict.value.code == "address_unchanged"
    with pytest.raises(IntegrityError):
        factories.node(dataset["pool"], name="gpu1")
