"""The pages that change the cluster: who gets in, what an edit does, and what nonsense is told."""

from __future__ import annotations

import re

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from portal.models import AuditEntry, Environment, Invitation, Membership, Node, Project, Quota
from portal.services.environments.pins import record_claim
from portal.services.nodes.nodes import record_preflight_finished
from portal.web.cluster.audit import changed_fields
from tests import factories

SEEN_BY_ALL = ["quotas", "projects", "environments", "cluster", "volumes"]
FOR_ADMINS = ["users", "audit", "add-node", "registries", "failure-rules"]


@pytest.mark.parametrize("page", [*SEEN_BY_ALL, *FOR_ADMINS])
def test_signed_out_users_are_not_redirected_in_a_loop(client_of, page):
    answer = client_of().get(reverse(page))
    assert (answer.status_code, answer["Location"][:9]) == (302, "/sign-in/")


@pytest.mark.parametrize("kind", ["stranger", "member", "admin"])
@pytest.mark.parametrize("page", SEEN_BY_ALL)
def test_every_user_sees_the_cluster_and_their_share(client_of, page, kind):
    assert client_of(kind).get(reverse(page)).status_code == 200


@pytest.mark.parametrize(("kind", "status"), [("stranger", 403), ("member", 403), ("admin", 200)])
@pytest.mark.parametrize("page", FOR_ADMINS)
def test_only_administrators_see_users_and_the_audit_log(client_of, page, kind, status):
    assert client_of(kind).get(reverse(page)).status_code == status


def test_a_cycle_of_projects_is_shown_and_can_be_repaired(dataset, client_of):
    """Only an edit of the database can create one; the scheduler stops with an alert, and the pages still work."""
    below = factories.project(parent=factories.project())
    above = below.parent
    Project.objects.filter(pk=above.pk).update(parent=below)
    client = client_of("admin")
    for page in ("projects", "quotas", "queue", "cluster"):
        answer = client.get(reverse(page))
        assert answer.status_code == 200
    for project in (below, above):
        assert project.name in client.get(reverse("projects")).content.decode()
        assert client.get(reverse("project", args=[project.public_id])).status_code == 200
    outsider = client_of("stranger")
    assert outsider.get(reverse("project", args=[below.public_id])).status_code == 404
    path = f"/api/v1/projects/{above.name}/"
    answer = client.patch(path, {"parent": None}, content_type="application/json")
    assert answer.status_code == 200, answer.content
    assert Project.objects.get(pk=above.pk).parent is None


def test_a_node_has_a_page_and_its_series(dataset, client_of):
    node = Node.objects.first()
    assert client_of("stranger").get(reverse("node", args=[node.public_id])).status_code == 200
    assert "gpu" in client_of("member").get(reverse("node-series", args=[node.public_id])).json()["lines"]
    assert client_of("member").get(reverse("node", args=["nothere"])).status_code == 404


def test_the_cluster_map_names_no_job_to_strangers(dataset, client_of):
    page = client_of("stranger").get(reverse("cluster")).content.decode()
    assert not [name for name in dataset.jobs if name in page]


def test_the_query_count_of_the_map_does_not_grow(dataset, client_of):
    client = client_of("admin")
    counts = []
    for _ in range(2):
        with CaptureQueriesContext(
            connection,
        ) as seen:
            client.get(reverse("cluster"))
        counts.append(len(seen))
        factories.node(Node.objects.first().pool, gpus=8)
    assert counts[0] == counts[1]


# -- quotas ----------------------------------------------------------------------------------------


def edit(project: Project, pool: str, **cells: str) -> dict[str, str]:
    quota = Quota.objects.filter(project=project, pool__name=pool).first()
    seen = {
        "guaranteed": f"{(quota.guaranteed_milli if quota else 0) / 1000:g}",
        "limit": "none" if quota is None or quota.limit_milli is None else f"{quota.limit_milli / 1000:g}",
        "user_limit": "none"
        if quota is None or quota.user_limit_milli is None
        else f"{quota.user_limit_milli / 1000:g}",
        "weight": f"{quota.weight if quota else 1:g}",
        "priority": str(quota.priority if quota else 0),
    }
    key = project.public_id
    version = str(quota.version if quota else 0)
    form = {"pool": pool, "reason": "a test", f"seen-{key}": ";".join([version, *seen.values()])}
    return form | {f"{name}-{key}": cells.get(name, value) for name, value in seen.items()}


@pytest.fixture
def quota_place(dataset):
    project = Project.objects.get(name="vision")
    return project, Node.objects.first().pool


def test_an_admin_edits_a_quota_and_undoes_it(quota_place, client_of):
    project, pool = quota_place
    client = client_of("admin")
    answer = client.post(
        reverse("save-quotas"), edit(project, pool.name, guaranteed="2.5", limit="7"), follow=True
    )
    assert "takes effect with the next cycle" in answer.content.decode()
    quota = Quota.objects.get(project=project, pool=pool)
    assert (quota.guaranteed_milli, quota.limit_milli) == (2500, 7000)
    change = quota.changes.first()
    assert change.reason == "a test"
    answer = client.post(reverse("undo-quota", args=[change.pk]), follow=True)
    assert "Restored the previous quota of vision." in answer.content.decode()
    quota.refresh_from_db()
    assert quota.changes.first().undoes == change
    assert AuditEntry.objects.filter(action="quota.change").count() >= 2


def test_the_limit_per_user_is_edited_like_other_quotas(quota_place, client_of):
    project, pool = quota_place
    client = client_of("admin")
    client.post(reverse("save-quotas"), edit(project, pool.name, user_limit="1.5"))
    assert Quota.objects.get(project=project, pool=pool).user_limit_milli == 1500
    page = client.get(reverse("quotas"), {"pool": pool.name}).content.decode()
    assert "per user <s" in page and ">1.5</b>" in page
    assert "1.5 per user at once" in client.get(reverse("project", args=[project.public_id])).content.decode()
    for nonsense in ("two", "-1", "1e3", "0,5", "0.0001"):
        answer = client.post(reverse("save-quotas"), edit(project, pool.name, user_limit=nonsense))
        assert answer.status_code == 409
        assert f"user_limit-{project.public_id}-why" in answer.content.decode()
    assert Quota.objects.get(project=project, pool=pool).user_limit_milli == 1500
    client.post(reverse("save-quotas"), edit(project, pool.name, user_limit=""))
    assert Quota.objects.get(project=project, pool=pool).user_limit_milli is None


def test_a_conflict_shows_both_values_and_saves_nothing(quota_place, client_of):
    project, pool = quota_place
    client = client_of("admin")
    mine = edit(project, pool.name, guaranteed="3")
    client.post(reverse("save-quotas"), edit(project, pool.name, guaranteed="5"))
    answer = client.post(reverse("save-quotas"), mine)
    page = answer.content.decode()
    assert answer.status_code == 409
    assert "Another user changed this line" in page
    assert re.search(r'name="guaranteed-[a-z0-9]+" value="3"', page) and "now <b>5</b>" in page
    assert Quota.objects.get(project=project, pool=pool).guaranteed_milli == 5000
    again = dict(re.findall(r'name="(\w+-' + project.public_id + r')" value="([^"]*)"', page))
    client.post(reverse("save-quotas"), {"pool": pool.name, **again})
    assert Quota.objects.get(project=project, pool=pool).guaranteed_milli == 3000


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ({"guaranteed": "many"}, "not a number of GPUs"),
        ({"guaranteed": "-1"}, "from 0 to"),
        ({"guaranteed": "20000"}, "from 0 to"),
        ({"guaranteed": "1e9"}, "not a number of GPUs"),
        ({"guaranteed": "NaN"}, "not a number of GPUs"),
        ({"guaranteed": "0,5"}, "with a point"),
        ({"guaranteed": "٣"}, "digits 0 to 9"),
        ({"limit": "0.5", "guaranteed": "1"}, "cannot be below"),
        ({"weight": "nan"}, "not a weight"),
        ({"weight": "0"}, "between 0.001 and 1000"),
        ({"weight": "0,5"}, "with a point"),
        ({"weight": "²"}, "digits 0 to 9"),
        ({"priority": "1,0"}, "with a point"),
        ({"priority": "1.5"}, "whole number"),
    ],
)
def test_invalid_input_is_marked_at_its_cell(quota_place, client_of, cells, said):
    project, pool = quota_place
    before = Quota.objects.filter(project=project, pool=pool).values_list("version", flat=True).first()
    answer = client_of("admin").post(reverse("save-quotas"), edit(project, pool.name, **cells))
    assert answer.status_code == 409
    assert said in answer.content.decode()
    assert (
        Quota.objects.filter(project=project, pool=pool).values_list("version", flat=True).first() == before
    )


@pytest.mark.parametrize("kind", ["stranger", "member"])
def test_members_do_not_edit_quotas(quota_place, client_of, kind):
    project, pool = quota_place
    client = client_of(kind)
    assert client.post(reverse("save-quotas"), edit(project, pool.name, guaranteed="9")).status_code == 403
    assert 'class="fw-edit"' not in client.get(reverse("quotas")).content.decode()


def test_projects_are_paginated_and_searchable(quota_place, client_of):
    vision, pool = quota_place
    teams = [factories.project(f"team-{number:03}", parent=vision) for number in range(60)]
    client = client_of("admin")
    for place in ("quotas", "projects"):
        first = client.get(reverse(place)).content.decode()
        assert "page 1 of 2" in first and ">team-000</a>" in first and ">team-059</a>" not in first
        second = client.get(reverse(place), {"page": 2}).content.decode()
        assert ">team-059</a>" in second and "below vision" in second
        found = client.get(reverse(place), {"q": "TEAM-05"}).content.decode()
        assert (
            ">team-058</a>" in found
            and ">team-001</a>" not in found
            and "10 of 63" in found.replace("\xa0", " ")
        )
        assert "No project matches" in client.get(reverse(place), {"q": "nobody"}).content.decode()
    form = edit(teams[59], pool.name, guaranteed="1") | {"page": "2"}
    answer = client.post(reverse("save-quotas"), form)
    assert answer["Location"].endswith(f"?pool={pool.name}&page=2")
    assert Quota.objects.get(project=teams[59], pool=pool).guaranteed_milli == 1000
    answer = client.post(reverse("save-quotas"), edit(teams[58], pool.name, guaranteed="x") | {"page": "2"})
    page = answer.content.decode()
    assert "team-058" in page and "team-001" not in page, "the lines its editor had stand there, no others"


def test_an_incomplete_form_is_refused(quota_place, client_of):
    project, pool = quota_place
    form = edit(project, pool.name, guaranteed="1") | {f"seen-{project.public_id}": "x;1"}
    assert client_of("admin").post(reverse("save-quotas"), form).status_code == 400


# -- projects and people ---------------------------------------------------------------------------


def test_a_project_is_created_and_an_invalid_name_refused(dataset, client_of):
    client = client_of("admin")
    assert client.post(reverse("add-project"), {"name": "Bad Name!"}).status_code == 400
    long = client.post(reverse("add-project"), {"name": "a" * 64}).content.decode()
    assert "At most 63 characters; this has 64." in long and "Use lower-case letters" not in long
    answer = client.post(reverse("add-project"), {"name": "fresh", "title": "Fresh"}, follow=True)
    assert Project.objects.get(name="fresh").title == "Fresh"
    assert "Add members and a quota next" in answer.content.decode()
    assert client_of("member").post(reverse("add-project"), {"name": "mine"}).status_code == 403


def test_strangers_see_no_project(dataset, client_of):
    project = Project.objects.get(name="vision")
    assert client_of("stranger").get(reverse("project", args=[project.public_id])).status_code == 404
    assert client_of("stranger").post(reverse("set-member", args=[project.public_id])).status_code == 404


def test_administrators_list_where_jobs_of_a_project_may_connect(dataset, client_of):
    project = next(iter(dataset.projects.values()))
    address = reverse("change-project", args=[project.public_id])
    shown = client_of("admin").post(address, {"egress_allow": "10.1.0.0/16 443\r\ndns"}, follow=True)
    assert "10.1.0.0/16 443\ndns" in shown.content.decode()
    refused = client_of("admin").post(address, {"egress_allow": "example.org"}, follow=True).content.decode()
    assert "is not an IPv4 address or network" in refused
    client_of("member").post(address, {"egress_allow": "0.0.0.0/0"})
    project.refresh_from_db()
    assert project.egress_allow == ["10.1.0.0/16 443", "dns"]


def test_members_are_added_and_removed(dataset, client_of):
    project, person = Project.objects.get(name="vision"), factories.user("newcomer")
    client = client_of("admin")
    form = {"username": "newcomer", "role": "member"}
    client.post(reverse("set-member", args=[project.public_id]), form)
    assert Membership.objects.get(project=project, user=person).role == "member"
    client.post(reverse("set-member", args=[project.public_id]), form | {"role": "none"})
    assert not Membership.objects.filter(project=project, user=person).exists()
    answer = client.post(
        reverse("set-member", args=[project.public_id]), {"username": "ghost", "role": "member"}
    )
    assert answer.status_code == 400 and "no user called ghost" in answer.content.decode()


def test_a_one_time_link_uses_the_address_of_the_portal(dataset, client_of):
    page = client_of("admin").post(
        reverse("invite"), {"email": "", "project": ""}, headers={"host": "127.0.0.1:6666"}
    )
    assert "http://localhost:8000/invitation/#" in page.content.decode()
    assert "6666" not in page.content.decode()


def test_an_invitation_is_shown_once_and_can_be_revoked(dataset, client_of):
    client = client_of("admin")
    page = client.post(reverse("invite"), {"full_name": "Ann"}).content.decode()
    code = re.search(r"/invitation/#([\w-]+)", page)[1]
    assert code not in client.get(reverse("users")).content.decode()
    invitation = Invitation.objects.latest("id")
    client.post(reverse("revoke-invitation", args=[invitation.public_id]))
    assert client_of().post(reverse("invitation"), {"code": code}).status_code in (400, 404)
    assert client.post(reverse("invite"), {"email": "nonsense"}).status_code == 400


@pytest.mark.parametrize(
    ("act", "consequence"),
    [
        ("admin", "can then see and stop all jobs"),
        ("close", "cannot sign in any more"),
        ("no-admin", "only what members of their own projects can"),
    ],
)
def test_changes_of_accounts_are_confirmed_with_their_consequence(dataset, client_of, act, consequence):
    person, client = dataset.people["m-okafor"], client_of("admin")
    address = reverse("confirm-user-change", args=[person.public_id, act])
    assert f'href="{address}"' in client.get(reverse("users")).content.decode() or act == "no-admin"
    page = client.get(address).content.decode()
    assert consequence in page and f'name="act" value="{act}"' in page and "m-okafor" in page
    assert client.get(reverse("confirm-user-change", args=[person.public_id, "link"])).status_code == 404


def test_the_last_administrator_cannot_be_deactivated(dataset, client_of):
    admin = dataset.people["r-castellan"]
    page = client_of("admin").post(
        reverse("change-user", args=[admin.public_id]), {"act": "no-admin"}, follow=True
    )
    admin.refresh_from_db()
    assert admin.is_admin and "last administrator" in page.content.decode()


# -- nodes and environments ------------------------------------------------------------------------


def test_an_unreachable_address_is_marked_at_its_field(dataset, client_of):
    form = {
        "host": "127.0.0.1",
        "port": "9",
        "name": "far",
        "account": "fairway",
        "runtime": "podman",
        "engine": "auto",
    }
    answer = client_of("admin").post(reverse("add-node"), form)
    assert answer.status_code == 400
    assert "id_host_error" in answer.content.decode()
    assert client_of("admin").post(reverse("add-node"), form | {"port": "0"}).status_code == 400
    empty = client_of("admin").post(reverse("add-node"), form | {"host": ""}).content.decode()
    assert "Enter the host name" in empty
    for field, problem in (
        ("engine", "one of auto"),
        ("runtime", "one of podman"),
        ("account", "account name"),
    ):
        refused = client_of("admin").post(reverse("add-node"), form | {field: "x$(id)"})
        assert refused.status_code == 400
        assert problem in refused.content.decode()
    assert not Node.objects.filter(name="far").exists()


def test_environments_are_an_allow_list(dataset, client_of):
    form = {
        "name": "torch",
        "title": "PyTorch",
        "runtime": "podman",
        "image": "localhost/torch:1",
        "enabled": "on",
    }
    assert client_of("member").post(reverse("add-environment"), form).status_code == 403
    assert client_of("admin").post(reverse("add-environment"), form | {"image": "-x; rm"}).status_code == 400
    client_of("admin").post(reverse("add-environment"), form)
    row = Environment.objects.get(name="torch")
    old = factories.node(factories.pool("old"), agent_info={"driver": "470.82.01", "gpus": [{}]})
    for driver, status in (("new", 400), ("525.60.13", 302)):
        answer = client_of("admin").post(
            reverse("save-environment", args=[row.public_id]), form | {"min_driver": driver}
        )
        assert answer.status_code == status
    page = client_of("member").get(reverse("environment", args=[row.public_id])).content.decode()
    assert "525.60.13 or newer" in page
    assert "Its driver is 470.82.01." in page and old.name in page
    Node.objects.filter(pk=old.pk).update(
        agent_info={"driver": "535.104", "max_cuda_version": "12.2", "gpus": [{}]}
    )
    Environment.objects.filter(pk=row.pk).update(image_cuda="12.4")
    page = client_of("admin").get(reverse("environment", args=[row.public_id])).content.decode()
    assert "Its driver supports CUDA 12.2." in page and "Its image requires CUDA 12.4." in page
    launch = client_of("member").get(reverse("launch")).content.decode()
    assert "Its image needs CUDA 12.4; GPU jobs cannot use 1 of " in launch
    save = reverse("save-environment", args=[row.public_id])
    assert client_of("admin").post(save, form | {"min_cuda": "twelve"}).status_code == 400
    client_of("admin").post(save, form | {"min_cuda": "none"})
    assert "Its image needs CUDA" not in client_of("member").get(reverse("launch")).content.decode()
    save, bring = (reverse(name, args=[row.public_id]) for name in ("save-environment", "prefetch-image"))
    answer = client_of("admin").post(save, form | {"projects": "nowhere"})
    assert "There is no project called nowhere." in answer.content.decode() and answer.status_code == 400
    assert client_of("member").post(bring).status_code == 403
    reported = client_of("admin").post(bring, {"node": old.public_id}, follow=True).content.decode()
    assert "PyTorch is being pulled on 1\xa0node." in reported and "queued" in reported
    assert (
        "Bring" not in client_of("member").get(reverse("environment", args=[row.public_id])).content.decode()
    )
    stop = reverse("cancel-prefetch", args=[row.public_id])
    assert (
        "Queued pulls on 1\xa0node are cancelled"
        in client_of("admin").post(stop, follow=True).content.decode()
    )
    client_of("admin").post(save, form | {"enabled": ""})
    row.refresh_from_db()
    assert not row.enabled
    assert client_of("member").get(reverse("environment", args=[row.public_id])).status_code == 404


def test_the_page_of_an_environment_lists_which_image_each_node_reports(dataset, client_of):
    row, one, other = dataset.environments["lab"], *("sha256:" + digit * 64 for digit in "12")
    name, tag = row.image.split(":")
    page, change = (reverse(view, args=[row.public_id]) for view in ("environment", "change-image"))
    assert "The image is not pinned yet." in client_of("member").get(page).content.decode()
    nodes = list(dataset.nodes.values())[:2]
    for node, digest in zip(nodes, (one, other), strict=True):
        image = {"image_id": digest, "refs": [f"{name}:{tag}"], "digests": [f"{name}@{digest}"]}
        record_claim(row, node, [image])
    shown = " ".join(client_of("admin").get(page).content.decode().split())
    for node, digest in zip(nodes, (one, other), strict=True):
        assert (
            f'The tag refers to this image on {node.name}: <span class="fw-mono fw-wide">{name}@{digest}</span>'
            in shown
        )
    assert shown.count("Use this image for new jobs") == 2
    assert "Use this image" not in client_of("member").get(page).content.decode()

    several = client_of("admin").post(change, {"act": "update"}, follow=True).content.decode()
    assert "Nodes report 2 other images for this tag" in several
    reported = (
        client_of("admin")
        .post(change, {"act": "update", "image": f"{name}@{other}"}, follow=True)
        .content.decode()
    )
    assert f"New jobs run {name}@{other}." in reported
    shown = " ".join(client_of("admin").get(page).content.decode().split())
    assert (
        f"The tag refers to another image on {nodes[0].name}" in shown and "New jobs do not run it." in shown
    )
    gone = client_of("admin").post(change, {"act": "update", "image": "x"}, follow=True).content.decode()
    assert "No node reports this image for the tag now." in gone


@pytest.mark.parametrize("page", ["audit", "users", "cluster", "jobs", "quotas", "search"])
def test_a_null_character_is_refused_with_a_sentence(client_of, page):
    answer = client_of("admin").get(reverse(page), {"q": "a\0b"})
    assert answer.status_code == 400
    assert "null character" in answer.content.decode()


def test_a_null_character_in_a_form_is_refused(dataset, client_of):
    answer = client_of("admin").post(reverse("add-project"), {"name": "a\0b", "title": ""})
    assert answer.status_code == 400
    assert "null character" in answer.content.decode()


def test_an_address_for_forms_has_a_page_too(client_of):
    answer = client_of("admin").get(reverse("save-quotas"))
    assert (answer.status_code, answer["Allow"]) == (405, "POST")
    assert "accepts only submitted forms" in answer.content.decode()


def test_audit_entries_are_sentences(quota_place, client_of):
    project, pool = quota_place
    client_of("admin").post(reverse("save-quotas"), edit(project, pool.name, guaranteed="2.5"))
    newest = AuditEntry.objects.filter(action="quota.change").latest("id")
    assert ("guaranteed", "2.5") in [(name, new) for name, _, new in changed_fields(newest)]
    page = client_of("admin").get(reverse("audit")).content.decode()
    assert "guaranteed_milli" not in page


def test_the_palette_finds_nodes(dataset, client_of):
    found = client_of("member").get(reverse("search"), {"q": "h200"}).json()["found"]
    assert {"h200-1", "h200-2", "h200-3"} <= {row["name"] for row in found if row["note"] == "node"}


def test_back_in_service_the_old_reason_is_gone(dataset, client_of):
    node, admin = dataset.nodes["h200-1"], client_of("admin")
    Node.objects.filter(pk=node.pk).update(agent_info={"agent_version": "1"})
    address = reverse("set-node-state", args=[node.public_id])
    admin.post(address, {"act": "cordon", "reason": "a new fan"})
    shown = admin.post(address, {"act": "uncordon", "reason": "a new fan"}, follow=True)
    (check,) = node.operations.all()
    assert shown.request["PATH_INFO"] == reverse("node-operation", args=[node.public_id, check.public_id])
    record_preflight_finished(check.pk, ok=False)
    again = admin.get(shown.request["PATH_INFO"]).content.decode()
    assert "stays out of service until the problems are fixed" in again and "Force uncordon" in again
    Node.objects.filter(pk=node.pk).update(reachable=False)
    reported = admin.post(address, {"act": "uncordon", "reason": ""}, follow=True).content.decode()
    assert "is unreachable, so it cannot be checked" in reported and "Force uncordon" in reported
    admin.post(address, {"act": "force-uncordon", "reason": "a new fan"})
    node.refresh_from_db()
    assert (node.state, node.state_reason) == ("ready", "")


def test_each_container_engine_is_explained(client_of):
    page = client_of("admin").get(reverse("add-node"))
    titles = dict(page.context["engines"])
    assert titles["auto"].endswith("else rootful")
    assert "podman only" in titles["rootless"] and "sudoers" in titles["rootful"]


@pytest.mark.django_db
def test_the_nodes_of_an_environment_have_pages(client) -> None:
    pool, environment = factories.pool(), factories.environment()
    for number in range(51):
        factories.node(pool, gpus=0, name=f"n{number:03}")
    client.force_login(factories.user(admin=True))
    page = f"/environments/{environment.public_id}/"
    first = client.get(page).content.decode()
    second = client.get(f"{page}?page=2", headers={"HX-Request": "true"}).content.decode()
    assert "page 1 of 2" in first and f'href="{page}?page=1"' in second
    pages = [set(re.findall(r">(n0\d\d)<", each)) for each in (first, second)]
    assert all(pages) and not pages[0] & pages[1]
    assert pages[0] | pages[1] == {f"n{number:03}" for number in range(51)}
