"""Push messages to browsers over a real HTTP server, and webhooks of projects and the cluster."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from portal.domain.jobs.reasons import EndReason
from portal.domain.notices.notices import Channel
from portal.errors import Forbidden, InvalidRequest, NotFound
from portal.models import Membership, Notice, NoticeDelivery, NoticeWebhook, User
from portal.services.lifecycle import job_control
from portal.services.lifecycle.job_control import TaskEnd
from portal.services.notices.delivery import deliver_notices
from portal.services.notices.inbox import do_retry_delivery, do_send_test
from portal.services.notices.web_push import BrowserKeys, decode_base64url, encrypt_push, portal_public_key
from portal.services.notices.webhooks import (
    do_remove_webhook,
    do_save_webhook,
    do_subscribe_browser,
    do_test_webhook,
)
from portal.services.projects.projects import QuotaValues, do_change_quota
from tests import factories
from tests.services.test_lifecycle import place, run, submit
from tests.services.test_notices import (  # noqa: F401 - fixtures
    Receiver,
    choose,
    dataset,
    delivery_of,
    kinds,
    notify,
    private_allowed,
    receiver,
)

pytestmark = pytest.mark.django_db(transaction=True)


def text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class Browser:
    """The keys of a subscription, and what a browser does with a message."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.auth = b"0123456789abcdef"
        self.point = self.key.public_key().public_bytes(Encoding.X962, PublicFormat.UncompressedPoint)

    def subscribe(self, user: User, url: str, label: str = "Firefox") -> NoticeWebhook:
        return do_subscribe_browser(user, url, text(self.point), text(self.auth), label)

    def decrypt(self, body: bytes) -> dict[str, Any]:
        """Return the payload; the steps are those of RFC 8291, 3.3, and RFC 8188, 2."""
        salt, size = body[:16], body[20]
        sender = body[21 : 21 + size]
        shared = self.key.exchange(
            ec.ECDH(), ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), sender)
        )

        def derive(salt: bytes, secret: bytes, info: bytes, length: int) -> bytes:
            return HKDF(SHA256(), length, salt, info).derive(secret)

        secret = derive(self.auth, shared, b"WebPush: info\0" + self.point + sender, 32)
        key = derive(salt, secret, b"Content-Encoding: aes128gcm\0", 16)
        nonce = derive(salt, secret, b"Content-Encoding: nonce\0", 12)
        padded = AESGCM(key).decrypt(nonce, body[21 + size :], None)
        assert padded[-1:] == b"\x02"
        return json.loads(padded[:-1])


def test_the_example_of_rfc_8291():
    sender = ec.derive_private_key(
        int.from_bytes(decode_base64url("yfWPiYE-n46HLnH0KqZOF1fJJU3MYrct3AELtAQ-oRw"), "big"),
        ec.SECP256R1(),
    )
    keys = BrowserKeys(
        "BCVxsr7N_eNgVRqvHtD0zTZsEc6-VV-JvLexhqUzORcxaOzi6-AYWXvTBHm4bjyPjs7Vd8pZGH6SRpkNtoIAiw4",
        "BTBZMqHH6r4Tts7J_aSIgg",
        "",
    )
    salt = decode_base64url("DGv6ra1nlYgDCS1FRnbzlw")
    body = encrypt_push(b"When I grow up, I want to be a watermelon", keys, sender, salt)
    assert text(body) == (
        "DGv6ra1nlYgDCS1FRnbzlwAAEABBBP4z9KsN6nGRTbVYI_c7VJSPQTBtkgcy27mlmlMoZIIgDll6e3vCYLocInmYWAmS6Tlz"
        "AC8wEqKK6PBru3jl7A_yl95bQpu6cVPTpK4Mqgkf1CXztLVBSt2Ks3oZwbuwXPXLWyouBWLVWGNWQexSgSxsj_Qulcy4a-fN"
    )


@pytest.mark.usefixtures("private_allowed")
def test_each_browser_gets_a_message_that_only_it_can_read(dataset, receiver):  # noqa: F811
    owner, browsers = dataset["owner"], [Browser(), Browser()]
    for number, browser in enumerate(browsers):
        browser.subscribe(owner, f"{receiver.url}&n={number}")
    choose(owner, Channel.PUSH)
    notice = notify(owner)
    assert deliver_notices() == 2
    received = sorted(receiver.received, key=lambda one: one[0]["path"])
    for browser, (headers, body) in zip(browsers, received, strict=True):
        found = browser.decrypt(body)
        assert (found["id"], found["title"]) == (notice.public_id, "vit-h failed")
        assert (headers["Content-Encoding"], headers["TTL"], headers["Urgency"]) == (
            "aes128gcm",
            "86400",
            "high",
        )
        fields = dict(part.strip().split("=", 1) for part in headers["Authorization"][6:].split(","))
        assert fields["k"] == portal_public_key()
        signed, _, signature = fields["t"].rpartition(".")
        raw = decode_base64url(signature)
        point = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), decode_base64url(fields["k"]))
        dss = encode_dss_signature(int.from_bytes(raw[:32], "big"), int.from_bytes(raw[32:], "big"))
        point.verify(dss, signed.encode(), ec.ECDSA(SHA256()))
        claims = json.loads(decode_base64url(signed.split(".")[1]))
        assert claims["aud"] == f"http://127.0.0.1:{receiver.server_port}"
    assert {row.state for row in NoticeDelivery.objects.filter(notice=notice)} == {"sent"}
    stored = NoticeWebhook.objects.first()
    assert receiver.url not in stored.encrypted_url


@pytest.mark.usefixtures("private_allowed")
@pytest.mark.parametrize(
    ("status", "left", "state"), [(410, 0, "failed"), (404, 0, "failed"), (503, 1, "pending")]
)
def test_an_expired_browser_is_removed_and_another_failure_is_retried(
    dataset,  # noqa: F811
    receiver,  # noqa: F811
    status,
    left,
    state,
):
    Browser().subscribe(dataset["owner"], receiver.url)
    receiver.status = status
    choose(dataset["owner"], Channel.PUSH)
    notice = notify(dataset["owner"])
    deliver_notices()
    assert NoticeWebhook.objects.count() == left
    assert delivery_of(notice).state == state
    assert f"status {status}" in delivery_of(notice).last_error


@pytest.mark.usefixtures("private_allowed")
def test_a_browser_belongs_to_the_user_who_subscribed_last(dataset, receiver):  # noqa: F811
    browser = Browser()
    browser.subscribe(dataset["owner"], receiver.url)
    browser.subscribe(dataset["admin"], receiver.url)
    assert [row.user for row in NoticeWebhook.objects.all()] == [dataset["admin"]]
    do_send_test(dataset["admin"], Channel.PUSH)
    deliver_notices()
    ((_, body),) = receiver.received
    assert browser.decrypt(body)["title"] == "Test of Push"


def test_a_push_service_inside_the_network_and_wrong_keys_are_refused(dataset):  # noqa: F811
    browser = Browser()
    with pytest.raises(InvalidRequest, match="not a public address"):
        browser.subscribe(dataset["owner"], "https://10.0.0.8/send")
    with pytest.raises(InvalidRequest, match="https"):
        browser.subscribe(dataset["owner"], "http://push.example.org/send")
    with pytest.raises(InvalidRequest, match="keys of a browser"):
        do_subscribe_browser(dataset["owner"], "https://push.example.org/1", "AAAA", text(browser.auth), "")
    assert not NoticeWebhook.objects.exists()


@pytest.mark.usefixtures("private_allowed")
def test_a_new_secret_key_keeps_browsers_while_the_old_one_is_a_fallback(
    dataset,  # noqa: F811
    receiver,  # noqa: F811
    settings,
):
    browser = Browser()
    browser.subscribe(dataset["owner"], receiver.url)
    settings.SECRET_KEY_FALLBACKS, settings.SECRET_KEY = [settings.SECRET_KEY], "a new secret key" * 4
    do_send_test(dataset["owner"], Channel.PUSH)
    deliver_notices()
    assert NoticeDelivery.objects.get().state == "sent"
    settings.SECRET_KEY_FALLBACKS = []
    do_send_test(dataset["owner"], Channel.PUSH)
    deliver_notices()
    assert "decrypted" in NoticeDelivery.objects.latest("id").last_error


# -- webhooks of projects and the cluster -------------------------------------------------------------


@pytest.mark.usefixtures("private_allowed")
def test_webhooks_of_the_project_those_above_and_the_cluster_get_each_event_once(
    dataset,  # noqa: F811
    receiver,  # noqa: F811
):
    owner, admin, project = dataset["owner"], dataset["admin"], dataset["project"]
    top = factories.project("top-level")
    project.parent = top
    project.save()
    other = factories.project("unrelated")
    for name, place_ in (("own", project), ("top", top), ("cluster", None), ("other", other)):
        url = f"{receiver.url}&to={name}"
        do_save_webhook(admin, place_, Channel.WEBHOOK, url, ["job_ended", "quota_changed"])
    Membership.objects.create(user=admin, project=project, role="viewer")
    job_control.cancel_job(submit(dataset).pk, EndReason.CANCELLED_BY_USER, actor=owner.username)
    job_control.record_tasks_ended(
        [TaskEnd(run(place(dataset, submit(dataset, retry_on=[])))[0], EndReason.EXIT_CODE, 3)]
    )
    deliver_notices()
    assert kinds(owner) == ["job_started", "job_failed"]  # not of the stop, which was their own
    sent = [
        (headers["path"].partition("to=")[2], json.loads(body)["kind"]) for headers, body in receiver.received
    ]
    assert sorted(sent) == [(name, "job_ended") for name in ("cluster", "own", "top")]
    receiver.received.clear()
    values = QuotaValues(guaranteed_milli=4000)
    do_change_quota(admin, project, dataset["pool"], values, version=None, reason="paper deadline")
    deliver_notices()
    assert sorted(json.loads(body)["recipient"] or "" for _, body in receiver.received) == ["", "", ""]
    assert Notice.objects.filter(kind="quota_changed", recipient=None).count() == 1


@pytest.mark.usefixtures("private_allowed")
def test_a_failed_delivery_of_a_project_is_tried_again_by_its_managers_only(
    dataset,  # noqa: F811
    receiver,  # noqa: F811
):
    owner, admin, project = dataset["owner"], dataset["admin"], dataset["project"]
    _, key = do_save_webhook(admin, project, Channel.WEBHOOK, receiver.url, ["job_failed"])
    assert do_save_webhook(admin, project, Channel.WEBHOOK, "", ["job_ended"])[1] == ""
    assert (key != "", NoticeWebhook.objects.get().events) == (True, ["job_ended"])
    receiver.status = 500
    do_test_webhook(admin, project, Channel.WEBHOOK)
    deliver_notices()
    failed = NoticeDelivery.objects.get()
    assert failed.last_error.endswith("answered with status 500.")
    Membership.objects.filter(user=owner, project=project).update(role="member")
    for attempt in (
        lambda: do_save_webhook(owner, project, Channel.SLACK, receiver.url, ["job_ended"]),
        lambda: do_remove_webhook(owner, None, Channel.WEBHOOK),
    ):
        with pytest.raises(Forbidden):
            attempt()
    with pytest.raises(NotFound):
        do_retry_delivery(owner, failed.public_id)
    receiver.status = 200
    do_retry_delivery(admin, failed.public_id)
    deliver_notices()
    assert NoticeDelivery.objects.get().state == "sent"


def test_a_project_cannot_choose_events_of_nodes(dataset):  # noqa: F811
    for events in (["node_maintenance"], []):
        with pytest.raises(InvalidRequest, match="Choose from"):
            do_save_webhook(
                dataset["admin"], dataset["project"], Channel.SLACK, "https://a.example/x", events
            )


# -- events of one job -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("notify_of", "expected"),
    [
        ([], {"job_started": {"inbox"}, "job_failed": {"inbox", "email"}}),
        (["job_started"], {"job_started": {"inbox", "email"}, "job_failed": {"inbox"}}),
        (["none"], {"job_failed": {"inbox"}}),
    ],
)
def test_a_job_names_the_events_of_which_its_owner_is_notified(
    dataset,  # noqa: F811
    settings,
    notify_of,
    expected,
):
    settings.SMTP_URL = "smtp://127.0.0.1:1"
    job = submit(dataset, retry_on=[], notify=notify_of)
    (task,) = run(place(dataset, job))
    job_control.record_tasks_ended([TaskEnd(task, EndReason.EXIT_CODE, 3)])
    found = {
        notice.kind: {"inbox"} | set(notice.deliveries.values_list("channel", flat=True))
        for notice in Notice.objects.filter(recipient=dataset["owner"], in_inbox=True)
    }
    assert found == expected
