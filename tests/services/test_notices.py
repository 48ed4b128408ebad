"""Notices with their events, and deliveries to a real mail server and a real HTTP server that misbehave."""

from __future__ import annotations

import datetime as dt
import hashlib
import hmac
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from email import message_from_bytes
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from aiosmtpd.controller import Controller
from django.db import connection, transaction
from django.utils import timezone

from portal.domain.jobs.reasons import EndReason
from portal.domain.notices.notices import Channel, NoticeKind
from portal.domain.states import JobState, NodeState
from portal.errors import Conflict, InvalidRequest, NotFound
from portal.models import (
    Membership,
    Node,
    Notice,
    NoticeDelivery,
    NoticeWebhook,
    OutboxMessage,
    Task,
    User,
)
from portal.selectors.notices.notices import list_notices
from portal.services.jobs.failures import identify_failures
from portal.services.jobs.logs import write_log_bytes
from portal.services.lifecycle import job_control
from portal.services.lifecycle.job_control import StopRequest, TaskEnd
from portal.services.lifecycle.transitions import transition_job
from portal.services.nodes.nodes import do_set_node_state
from portal.services.notices import delivery, webhook_client
from portal.services.notices.delivery import deliver_notices
from portal.services.notices.inbox import (
    delete_old_notices,
    do_mark_read,
    do_retry_delivery,
    do_save_preferences,
    do_send_test,
)
from portal.services.notices.webhooks import do_remove_webhook, do_save_webhook
from portal.services.notices.write import NoticeDraft, write_notices
from portal.services.projects.projects import QuotaValues, do_change_quota
from portal.services.scheduling.policy_settings import do_change_policy
from portal.services.scheduling.reservations import do_cancel_reservation, do_save_reservation
from tests import factories
from tests.failpoint_crash import crashes_at
from tests.services.test_lifecycle import place, run, submit
from tests.services.test_reservations import words

pytestmark = pytest.mark.django_db(transaction=True)

TRACEBACK = (
    b'Traceback (most recent call last):\n  File "t.py", line 1, in f\n    g()\nValueError: bad config\n'
)
NO_TIMES: dict[str, Any] = {"quiet_start": None, "quiet_end": None, "digest_at": dt.time(8)}


@pytest.fixture
def dataset() -> dict[str, Any]:
    factories.cluster_settings()
    made = factories.basic_cluster() | {"admin": factories.user("boss", admin=True)}
    made["other"] = factories.node(made["pool"])
    User.objects.filter(pk=made["owner"].pk).update(email="owner@example.org")
    made["owner"].refresh_from_db()
    return made


# -- servers that misbehave --------------------------------------------------------------------------


class Mailbox:
    """Handler of a real SMTP server: keeps what it accepts, and answers ``reply`` to a recipient instead of 250."""

    def __init__(self) -> None:
        self.received: list[Message] = []
        self.reply = ""
        self.data_reply = ""

    async def handle_RCPT(self, server: Any, session: Any, envelope: Any, address: str, options: Any) -> str:
        if self.reply:
            return self.reply
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        self.received.append(message_from_bytes(envelope.content))
        return self.data_reply or "250 OK"


@pytest.fixture
def mail_port(settings: Any) -> int:
    """The port of a configured mail server that is down."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    settings.SMTP_URL = f"smtp://127.0.0.1:{port}"
    settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", port
    return port


@pytest.fixture
def mailbox(mail_port: int) -> Iterator[Mailbox]:
    handler = Mailbox()
    controller = Controller(handler, hostname="127.0.0.1", port=mail_port)
    controller.start()
    yield handler
    controller.stop()


class Receiver(ThreadingHTTPServer):
    """A real HTTP server that answers with ``status``, or behaves as ``behavior`` does with the connection."""

    status = 200
    behavior: Callable[[BaseHTTPRequestHandler], None] | None = None

    def __init__(self) -> None:
        self.received: list[tuple[dict[str, str], bytes]] = []
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_port}/hook?a=1"


class Answer(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received.append(({**self.headers, "path": self.path}, body))
        if self.server.behavior is not None:
            self.server.behavior(self)
            return
        self.send_response(self.server.status)
        self.send_header("Location", self.server.url)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def private_allowed(dataset: dict[str, Any]) -> None:
    do_change_policy(dataset["admin"], None, {"webhook_private_addresses": "allow"}, version=1)


# -- helpers -----------------------------------------------------------------------------------------


def kinds(user: User) -> list[str]:
    return list(Notice.objects.filter(recipient=user).order_by("id").values_list("kind", flat=True))


def choose(user: User, *channels: Channel, **times: Any) -> None:
    """Send every failed job of the user over these channels."""
    do_save_preferences(user, {"job_failed": [each.value for each in channels]}, **(NO_TIMES | times))


def notify(user: User, title: str = "vit-h failed", kind: NoticeKind = NoticeKind.JOB_FAILED) -> Notice:
    with transaction.atomic():
        (notice,) = write_notices([NoticeDraft(kind, user.pk, title, "Out of memory.")])
    return notice


def delivery_of(notice: Notice) -> NoticeDelivery:
    return NoticeDelivery.objects.get(notice=notice)


def make_due(*, claims: bool = False) -> None:
    """Let the wait before the next attempt pass; ``claims``: those of senders that died, too."""
    NoticeDelivery.objects.update(due_at=timezone.now())
    if claims:
        NoticeDelivery.objects.update(claimed_until=timezone.now())


# -- events ------------------------------------------------------------------------------------------


def test_the_owner_of_a_job_is_notified_of_its_start_and_end(dataset):
    job = submit(dataset, gpus_per_task=2, name="vit-h")
    (task,) = run(place(dataset, job))
    job_control.record_task_ended(task, exit_code=0, reason=EndReason.COMPLETED)
    started, ended = Notice.objects.filter(recipient=dataset["owner"]).order_by("id")
    assert (started.kind, started.title) == ("job_started", "vit-h started")
    assert started.message.startswith("It runs on 2 GPUs, after ")
    assert (ended.kind, ended.title, ended.job) == ("job_ended", "vit-h completed", job)
    assert not NoticeDelivery.objects.exists()  # no mail server


def test_a_failure_and_a_cancellation_by_an_administrator_but_not_by_the_owner(dataset):
    failing, stopped, own = (submit(dataset, retry_on=[]) for _ in range(3))
    (task,) = run(place(dataset, failing))
    job_control.record_tasks_ended([TaskEnd(task, EndReason.EXIT_CODE, 3)])
    reason = EndReason.CANCELLED_BY_ADMIN
    job_control.cancel_job(stopped.pk, reason, actor=dataset["admin"].username)
    job_control.cancel_job(own.pk, EndReason.CANCELLED_BY_USER, actor=dataset["owner"].username)
    assert kinds(dataset["owner"]) == ["job_started", "job_failed", "job_ended"]
    failed, ended = Notice.objects.order_by("id")[1:]
    assert failed.message.startswith("The command ended with exit code 3.")
    assert ended.message == "Stopped by the administrator boss."


def test_a_notice_is_written_with_its_event_or_not_at_all(dataset):
    job = submit(dataset)
    with pytest.raises(RuntimeError), transaction.atomic():
        job_control.cancel_job(job.pk, EndReason.CANCELLED_BY_ADMIN, actor="boss")
        raise RuntimeError
    assert not Notice.objects.exists()


def test_a_preempted_job_warns_before_and_reports_after(dataset):
    job = submit(dataset, termination_grace_s=90)
    attempt = place(dataset, job)
    (task,) = run(attempt)
    job_control.request_stops([StopRequest(attempt.pk, EndReason.RECLAIMED)])
    job_control.request_stops([StopRequest(attempt.pk, EndReason.RECLAIMED)])
    assert kinds(dataset["owner"]) == ["job_started", "reclaim_warning"]
    assert "90 s to save" in Notice.objects.get(kind="reclaim_warning").message
    job_control.record_task_ended(task, exit_code=143, reason=EndReason.EXIT_CODE)
    assert kinds(dataset["owner"])[2:] == ["job_preempted"]


def test_trials_and_replicas_report_only_failures(dataset):
    trial = submit(dataset, env={"FAIRWAY_TRIAL": "1"}, retry_on=[])
    (task,) = run(place(dataset, trial))
    assert kinds(dataset["owner"]) == []
    job_control.record_tasks_ended([TaskEnd(task, EndReason.EXIT_CODE, 1)])
    assert kinds(dataset["owner"]) == ["job_failed"]


def test_members_are_notified_of_a_changed_quota_but_not_who_changed_it(dataset):
    owner, admin, project = dataset["owner"], dataset["admin"], dataset["project"]
    Membership.objects.create(user=admin, project=project, role="viewer")
    values = QuotaValues(guaranteed_milli=4000)
    do_change_quota(admin, project, dataset["pool"], values, version=None, reason="paper deadline")
    do_change_quota(admin, project, dataset["pool"], values, version=None)
    assert kinds(admin) == []
    (notice,) = Notice.objects.filter(recipient=owner)
    assert notice.title == f"Quota of {project.name} in {dataset['pool'].name} changed"
    assert notice.message == f"guaranteed 0 GPUs to 4 GPUs. {admin.display_name}: paper deadline"


def test_users_of_a_node_are_notified_of_its_maintenance_in_their_time_zone(dataset):
    owner, admin, node = dataset["owner"], dataset["admin"], dataset["node"]
    User.objects.filter(pk=owner.pk).update(timezone="Asia/Tokyo")
    run(place(dataset, submit(dataset)))
    Notice.objects.all().delete()
    start = (timezone.now() + dt.timedelta(days=1)).replace(microsecond=0)
    plan = words(dataset, projects=[], starts_at=start, ends_at=start + dt.timedelta(hours=2), nodes=[node])
    row = do_save_reservation(admin, plan)
    do_save_reservation(admin, plan, row)
    do_cancel_reservation(admin, row)
    do_set_node_state(admin, node, NodeState.CORDONED, reason="new fan")
    do_set_node_state(admin, dataset["other"], NodeState.CORDONED)
    planned, cancelled, cordoned = Notice.objects.filter(recipient=owner).order_by("id")
    assert {each.kind for each in (planned, cancelled, cordoned)} == {"node_maintenance"}
    local = (start + dt.timedelta(hours=9)).strftime("%d %b %H:%M")
    assert planned.title.startswith(f"Maintenance of {node.name} from {local} to ")
    assert cancelled.title == f"Maintenance of {node.name} at {local} is cancelled"
    assert (cordoned.node, cordoned.message) == (Node.objects.get(pk=node.pk), "new fan")


def test_an_inactive_user_gets_none(dataset):
    User.objects.filter(pk=dataset["owner"].pk).update(is_active=False)
    with transaction.atomic():
        assert write_notices([NoticeDraft(NoticeKind.JOB_FAILED, dataset["owner"].pk, "x")]) == []


# -- e-mail ------------------------------------------------------------------------------------------


def test_a_failure_is_mailed_once(dataset, mailbox):
    job = submit(dataset, name="vit-h", retry_on=[])
    (task,) = run(place(dataset, job))
    write_log_bytes(job.public_id, 1, 0, "raw", 0, TRACEBACK)
    job_control.record_tasks_ended([TaskEnd(task, EndReason.EXIT_CODE, 3)])
    assert deliver_notices() == 0 and mailbox.received == []  # the log is not searched yet
    Task.objects.update(log_complete=True)
    identify_failures()
    assert OutboxMessage.objects.filter(name="scheduler.deliver_notices").exists()
    assert deliver_notices() == 1
    assert deliver_notices() == 0
    (mail,) = mailbox.received
    row = NoticeDelivery.objects.get()
    assert (mail["Subject"], mail["To"]) == ("vit-h failed", "owner@example.org")
    assert f"/jobs/{job.public_id}/" in mail.get_payload()
    assert "exit code 3. ValueError: bad config" in mail.get_payload()
    assert mail["Message-ID"] == f"<{row.public_id}@localhost>"
    assert (row.state, row.attempt_count, row.last_error) == ("sent", 1, "")


def test_a_failure_whose_log_is_not_searched_is_sent_after_90_s(dataset, receiver, mailbox, private_allowed):
    do_save_webhook(dataset["owner"], dataset["owner"], Channel.WEBHOOK, receiver.url)
    choose(dataset["owner"], Channel.EMAIL, Channel.WEBHOOK)
    job = submit(dataset, name="vit-h", retry_on=[])
    (task,) = run(place(dataset, job))
    job_control.record_tasks_ended([TaskEnd(task, EndReason.EXIT_CODE, 3)])
    held = [row.due_at - job.attempts.get().ended_at for row in NoticeDelivery.objects.all()]
    assert len(held) == 2 and all(90 <= each.total_seconds() < 100 for each in held)
    assert deliver_notices() == 0
    make_due()
    assert deliver_notices() == 2


def test_a_failure_without_an_attempt_is_sent_at_once(dataset, mailbox):
    job = submit(dataset, name="vit-h")
    with transaction.atomic():
        transition_job(job, JobState.FAILED, reason="invalid", message="Its image does not exist.")
    assert deliver_notices() == 1


def test_a_mail_server_that_is_down_loses_nothing(dataset, mail_port):
    notices = [notify(dataset["owner"], f"job {number} failed") for number in range(3)]
    for attempt in range(1, 4):  # an hour: 30 s, 1 min, 2 min, ...
        assert deliver_notices() == 3
        row = delivery_of(notices[0])
        assert (row.state, row.attempt_count) == ("pending", attempt)
        assert row.last_error.startswith("The mail server did not answer:")
        wait_s = (row.due_at - timezone.now()).total_seconds()
        assert 30 * 2 ** (attempt - 1) - 20 < wait_s <= 30 * 2 ** (attempt - 1)
        assert deliver_notices() == 0
        make_due()
    handler = Mailbox()
    controller = Controller(handler, hostname="127.0.0.1", port=mail_port)
    controller.start()
    try:
        assert deliver_notices() == 3
    finally:
        controller.stop()
    assert [mail["Subject"] for mail in handler.received] == [f"job {n} failed" for n in range(3)]
    assert not NoticeDelivery.objects.exclude(state="sent").exists()


@pytest.mark.parametrize(("reply", "state"), [("450 greylisted", "pending"), ("550 no such user", "failed")])
def test_a_refused_recipient_is_retried_only_after_a_temporary_refusal(dataset, mailbox, reply, state):
    mailbox.reply = reply
    notice = notify(dataset["owner"])
    deliver_notices()
    row = delivery_of(notice)
    assert row.state == state
    assert row.last_error == f"The mail server refused owner@example.org: {reply}"
    mailbox.reply = ""
    do_retry_delivery(dataset["owner"], row.public_id)
    deliver_notices()
    assert delivery_of(notice).state == "sent"
    with pytest.raises(NotFound):
        do_retry_delivery(dataset["owner"], row.public_id)


def test_a_message_that_the_server_refuses_for_now_is_sent_again_under_the_same_id(dataset, mailbox):
    mailbox.data_reply = "451 try later"
    notice = notify(dataset["owner"])
    deliver_notices()
    assert delivery_of(notice).last_error == "The mail server refused the message: 451 try later"
    mailbox.data_reply = ""
    make_due()
    deliver_notices()
    assert delivery_of(notice).state == "sent"
    assert len({mail["Message-ID"] for mail in mailbox.received}) == 1


@pytest.mark.parametrize(("point", "mails"), [("notice.before_send", 1), ("notice.sent", 2)])
def test_a_killed_sender_loses_nothing_and_repeats_only_unrecorded_messages(dataset, mailbox, point, mails):
    notice = notify(dataset["owner"])
    assert crashes_at(point, deliver_notices)
    assert deliver_notices() == 0  # claimed by the dead one
    make_due(claims=True)
    assert deliver_notices() == 1
    assert delivery_of(notice).state == "sent"
    assert [mail["Message-ID"] for mail in mailbox.received] == [mailbox.received[0]["Message-ID"]] * mails


def test_the_task_delivers_in_a_thread_of_its_own(dataset, mailbox):
    notify(dataset["owner"])
    delivery.start_delivery()
    with delivery._pass_lock:  # it has ended
        assert [mail["Subject"] for mail in mailbox.received] == ["vit-h failed"]


def test_two_concurrent_senders_send_each_message_once(dataset, mailbox):
    for number in range(20):
        notify(dataset["owner"], f"job {number} failed")

    def send() -> None:
        deliver_notices()
        connection.close()

    senders = [threading.Thread(target=send) for _ in range(3)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()
    assert sorted(mail["Subject"] for mail in mailbox.received) == sorted(
        f"job {n} failed" for n in range(20)
    )


def test_a_failure_ignores_quiet_hours_and_a_warning_is_held_until_they_end(dataset, mailbox):
    owner = dataset["owner"]
    User.objects.filter(pk=owner.pk).update(timezone="Asia/Tokyo")
    now = timezone.now() + dt.timedelta(hours=9)
    quiet = {
        "quiet_start": (now - dt.timedelta(hours=1)).time(),
        "quiet_end": (now + dt.timedelta(hours=1)).time(),
    }
    choose(owner, Channel.EMAIL, **quiet)
    notify(owner)
    warned = notify(owner, "lab is idle", NoticeKind.IDLE_WARNING)
    deliver_notices()
    assert [mail["Subject"] for mail in mailbox.received] == ["vit-h failed"]
    assert dt.timedelta(minutes=58) < delivery_of(warned).due_at - timezone.now() <= dt.timedelta(hours=1)
    make_due()
    deliver_notices()
    assert [mail["Subject"] for mail in mailbox.received][1:] == ["lab is idle"]


def test_a_digest_is_one_mail_a_day(dataset, mailbox):
    choose(dataset["owner"], Channel.DIGEST)
    notices = [notify(dataset["owner"], f"job {number} failed") for number in range(3)]
    assert deliver_notices() == 0
    assert delivery_of(notices[0]).due_at.strftime("%H:%M") == "08:00"
    make_due()
    assert deliver_notices() == 3
    (mail,) = mailbox.received
    assert mail["Subject"] == "Fairway: 3 notices"
    assert all(f"job {number} failed" in mail.get_payload() for number in range(3))


# -- webhooks ----------------------------------------------------------------------------------------


def test_a_webhook_is_signed(dataset, receiver, private_allowed):
    _, key = do_save_webhook(dataset["owner"], dataset["owner"], Channel.WEBHOOK, receiver.url)
    choose(dataset["owner"], Channel.WEBHOOK)
    notice = notify(dataset["owner"])
    deliver_notices()
    ((headers, body),) = receiver.received
    fields = dict(part.split("=") for part in headers["Fairway-Signature"].split(","))
    signed = hmac.new(key.encode(), f"{fields['t']}.".encode() + body, hashlib.sha256).hexdigest()
    assert fields["v1"] == signed
    assert (headers["path"], headers["Fairway-Delivery"]) == ("/hook?a=1", delivery_of(notice).public_id)
    assert json.loads(body)["title"] == "vit-h failed"
    stored = NoticeWebhook.objects.get()
    assert receiver.url not in stored.encrypted_url
    assert key not in stored.encrypted_secret


def test_slack_and_teams_get_their_formats(dataset, receiver, private_allowed):
    for channel in (Channel.SLACK, Channel.TEAMS):
        assert do_save_webhook(dataset["owner"], dataset["owner"], channel, receiver.url)[1] == ""
    choose(dataset["owner"], Channel.SLACK, Channel.TEAMS)
    notify(dataset["owner"], "<b> & failed")
    deliver_notices()
    bodies = [json.loads(body) for _, body in receiver.received]
    slack = next(body for body in bodies if "text" in body)
    assert slack["text"].startswith(
        "*&lt;b&gt; &amp; failed*\nOut of memory.\n<http://localhost:8000/inbox/|"
    )
    card = next(body for body in bodies if "attachments" in body)["attachments"][0]["content"]
    assert (card["type"], card["body"][0]["text"]) == ("AdaptiveCard", "<b> & failed")
    assert all("Fairway-Signature" not in headers for headers, _ in receiver.received)


@pytest.mark.parametrize(
    ("status", "error"),
    [(500, "answered with status 500."), (302, "answered with status 302; redirects are not followed.")],
)
def test_a_receiver_that_refuses_is_tried_again_and_a_redirect_is_not_followed(
    dataset, receiver, private_allowed, status, error
):
    do_save_webhook(dataset["owner"], dataset["owner"], Channel.WEBHOOK, receiver.url)
    choose(dataset["owner"], Channel.WEBHOOK)
    receiver.status = status
    first, second = notify(dataset["owner"]), notify(dataset["owner"])
    deliver_notices()
    assert len(receiver.received) == 1  # the second waits with the first
    assert delivery_of(first).last_error == delivery_of(second).last_error == f"127.0.0.1 {error}"
    receiver.status = 204
    make_due()
    deliver_notices()
    assert {delivery_of(first).state, delivery_of(second).state} == {"sent"}
    ids = [headers["Fairway-Delivery"] for headers, _ in receiver.received]
    assert ids[0] == ids[1] != ids[2]


def hang(answer: BaseHTTPRequestHandler) -> None:
    time.sleep(3)


def drip(answer: BaseHTTPRequestHandler) -> None:
    """Send a byte of a header before each read times out."""
    try:
        for byte in b"HTTP/1.1 200 OK\r\nX: " + b"x" * 40:
            answer.wfile.write(bytes([byte]))
            answer.wfile.flush()
            time.sleep(0.1)
    except OSError:
        return


@pytest.mark.parametrize("behavior", [hang, drip])
def test_a_receiver_that_hangs_delays_neither_mails_nor_other_receivers(
    dataset, receiver, mailbox, private_allowed, monkeypatch, behavior
):
    monkeypatch.setattr(webhook_client, "TIME_LIMIT_S", 0.6)
    receiver.behavior = behavior
    do_save_webhook(dataset["owner"], dataset["owner"], Channel.WEBHOOK, receiver.url)
    choose(dataset["owner"], Channel.WEBHOOK, Channel.EMAIL)
    notice = notify(dataset["owner"])
    deliver_notices()
    by_channel = {row.channel: row for row in NoticeDelivery.objects.filter(notice=notice)}
    assert by_channel["email"].state == "sent"
    assert by_channel["webhook"].state == "pending"
    assert by_channel["webhook"].last_error.startswith("127.0.0.1 did not answer")


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.0.0.8", "169.254.169.254", "[::1]", "[fe80::1]", "[::ffff:10.0.0.1]", "0.0.0.0",
     "[64:ff9b::a00:1]", "100.64.0.1", "[fd00:ec2::254]", "[64:ff9b:1::a00:1]", "[::127.0.0.1]", "[2002:a00:1::1]"],
)  # fmt: skip
def test_an_address_inside_the_network_is_refused(dataset, address):
    with pytest.raises(InvalidRequest, match="is not a public address"):
        do_save_webhook(dataset["owner"], dataset["owner"], Channel.WEBHOOK, f"http://{address}/")


def test_metadata_is_refused_also_where_private_addresses_are_allowed(dataset, private_allowed):
    do_save_webhook(dataset["owner"], dataset["owner"], Channel.WEBHOOK, "http://10.0.0.8/")
    for address in (
        "169.254.169.254",
        "[fe80::1]",
        "[fd00:ec2::254]",
        "[::169.254.169.254]",
        "[64:ff9b:1::1]",
    ):
        with pytest.raises(InvalidRequest, match="is not a public address"):
            do_save_webhook(dataset["owner"], dataset["owner"], Channel.WEBHOOK, f"http://{address}/")


def test_a_name_that_resolves_to_a_private_address_is_not_connected(dataset, receiver):
    url = f"http://localhost:{receiver.server_port}/"
    do_save_webhook(dataset["owner"], dataset["owner"], Channel.WEBHOOK, url)
    choose(dataset["owner"], Channel.WEBHOOK)
    notice = notify(dataset["owner"])
    deliver_notices()
    assert receiver.received == []
    assert "is not a public address" in delivery_of(notice).last_error


@pytest.mark.parametrize(
    "url", ["", "ftp://a.example/", "http://", "http://u:p@a.example/", "http://a b/", "http://a:0/"]
)
def test_an_invalid_address_is_refused(dataset, url):
    with pytest.raises(InvalidRequest) as refusal:
        do_save_webhook(dataset["owner"], dataset["owner"], Channel.WEBHOOK, url)
    assert list(refusal.value.fields) == ["url"]


def test_deliveries_of_a_removed_webhook_end(dataset, receiver, private_allowed):
    do_save_webhook(dataset["owner"], dataset["owner"], Channel.WEBHOOK, receiver.url)
    choose(dataset["owner"], Channel.WEBHOOK)
    notice = notify(dataset["owner"])
    do_remove_webhook(dataset["owner"], dataset["owner"], Channel.WEBHOOK)
    deliver_notices()
    assert delivery_of(notice).state == "failed"
    assert receiver.received == []


def test_a_delivery_is_given_up_after_many_attempts(dataset, mail_port, monkeypatch):
    monkeypatch.setattr(delivery, "MAX_DELIVERY_ATTEMPTS", 2)
    notice = notify(dataset["owner"])
    for _ in range(2):
        deliver_notices()
        make_due()
    assert delivery_of(notice).state == "failed"
    assert delivery_of(notice).finished_at


# -- the inbox ---------------------------------------------------------------------------------------


def test_preferences_select_inbox_notices_and_failures_are_always_included(dataset):
    owner = dataset["owner"]
    do_save_preferences(owner, {"job_started": [], "job_failed": []}, **NO_TIMES)
    with transaction.atomic():
        assert write_notices([NoticeDraft(NoticeKind.JOB_STARTED, owner.pk, "x")]) == []
    notify(owner)
    assert [notice.kind for notice in list_notices(owner)] == ["job_failed"]


@pytest.mark.parametrize(
    ("channels", "times", "field"),
    [
        ({"nonsense": []}, {}, "channels"),
        ({"job_failed": ["pigeon"]}, {}, "channels"),
        ({"job_failed": ["email", "digest"]}, {}, "channels"),
        ({}, {"quiet_start": dt.time(1)}, "quiet_end"),
        ({}, {"quiet_start": dt.time(1), "quiet_end": dt.time(1)}, "quiet_end"),
    ],
)
def test_invalid_preferences_are_refused_by_field(dataset, channels, times, field):
    with pytest.raises(InvalidRequest) as refusal:
        do_save_preferences(dataset["owner"], channels, **(NO_TIMES | times))
    assert list(refusal.value.fields) == [field]


def test_notices_are_readable_by_their_user_only(dataset):
    notify(dataset["owner"])
    assert not list_notices(dataset["admin"]).exists()
    assert do_mark_read(dataset["admin"], Notice.objects.all()) == 0
    assert do_mark_read(dataset["owner"], list_notices(dataset["owner"])) == 1


def test_a_test_needs_a_channel_that_is_set_up(dataset, mailbox):
    with pytest.raises(Conflict, match="Slack is not set up"):
        do_send_test(dataset["owner"], Channel.SLACK)
    do_send_test(dataset["owner"], Channel.EMAIL)
    with pytest.raises(Conflict, match="already on its way"):
        do_send_test(dataset["owner"], Channel.EMAIL)
    deliver_notices()
    assert mailbox.received[0]["Subject"] == "Test of E-mail"


def test_read_notices_are_deleted_after_the_setting(dataset):
    do_change_policy(dataset["admin"], None, {"notice_retention_days": 30}, version=1)
    owner = dataset["owner"]
    old_read, old_unread, new_read = notify(owner), notify(owner), notify(owner)
    do_mark_read(owner, Notice.objects.filter(pk__in=[old_read.pk, new_read.pk]))
    old = Notice.objects.filter(pk__in=[old_read.pk, old_unread.pk])
    old.update(created_at=timezone.now() - dt.timedelta(days=31))
    assert delete_old_notices() == 1
    assert set(Notice.objects.all()) == {old_unread, new_read}
