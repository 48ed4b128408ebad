"""Volumes, secrets and registries on pages: declared, named by a job, and never more shown than may be."""

from __future__ import annotations

from django.utils import timezone

from portal.api.jobs.job_requests import JobBody
from portal.models import Job, RegistryLogin, Secret, Volume, VolumeUsage
from portal.services.jobs.job_document import request_body
from portal.services.jobs.submission import request_from_job
from tests import factories

VALUE = "hush-on-pages"


def test_a_job_is_launched_with_a_volume_and_secrets(client_of, dataset, typed) -> None:
    admin, member = client_of("admin"), client_of("member")
    form = {"name": "team", "kind": "project", "reach": "node", "path": "/data/teams", "quota_gib": "0.5"}
    form |= {"projects": "vision", "nodes": "h200-1, h200-2", "pool": "", "description": ""}
    assert member.post("/volumes/save/", form).status_code == 403
    refused = admin.post("/volumes/save/", form | {"nodes": "nowhere", "path": "/keeps"})
    assert refused.status_code == 400
    page = refused.content.decode()
    assert "There is no node called nowhere." in page and 'value="/keeps"' in page
    assert admin.post("/volumes/save/", form).status_code == 302
    assert Volume.objects.get().quota_mib == 512
    assert (
        "No node reports that its file system enforces this limit" in admin.get("/volumes/").content.decode()
    )
    assert 'value="0.5"' in admin.get("/volumes/?edit=team").content.decode()
    assert "team" in member.get("/volumes/").content.decode()
    assert "team" not in client_of("stranger").get("/volumes/").content.decode()

    member.post("/account/secrets/", {"name": "hub", "value": VALUE})
    project = dataset.projects["vision"].public_id
    assert (
        "lack the permission"
        in member.post(
            f"/projects/{project}/secrets/", {"name": "x", "value": VALUE}, follow=True
        ).content.decode()
    )
    assert client_of("stranger").post(f"/projects/{project}/secrets/", {"name": "x"}).status_code == 404
    lines = {"volumes": "team /work ro", "secret_variables": "HUB_TOKEN=hub", "secret_files": "key=hub"}
    wrong = member.post("/launch/", typed | lines | {"secret_variables": "HUB_TOKEN", "volumes": "a b c d"})
    assert wrong.status_code == 400 and "is not VARIABLE=SECRET." in wrong.content.decode()
    assert "is not of the form NAME [PATH] [ro]." in wrong.content.decode()
    assert member.post("/launch/", typed | lines).status_code == 302
    job = Job.objects.get(name="my run")
    assert job.volumes == [{"volume": "team", "target": "/work", "read_only": True}]
    ways = [
        {"secret": "hub", "owner_type": "me", "variable": "HUB_TOKEN"},
        {"secret": "hub", "owner_type": "me", "file": "key"},
    ]
    assert job.secrets == ways
    example = JobBody(data=request_body(request_from_job(job)))
    assert example.is_valid(), example.errors
    assert [each["owner_type"] for each in example.validated_data["secrets"]] == ["me", "me"]
    pages = [
        member.get(path).content.decode()
        for path in (f"/jobs/{job.public_id}/run/", f"/launch/?like={job.public_id}", "/account/", "/launch/")
    ]
    assert "/run/fairway/key" in pages[0] and "team /work ro" in pages[1] and "HUB_TOKEN=hub" in pages[1]
    assert not any(VALUE in page for page in pages)
    kept = admin.post("/volumes/team/remove/", follow=True).content.decode()
    assert "1 unfinished job uses it." in kept
    member.post("/account/secrets/hub/delete/")
    assert not Secret.objects.exists()


def test_a_login_is_kept_by_administrators_and_never_shown(client_of) -> None:
    admin, form = client_of("admin"), {"host": "reg.example.org", "username": "robot", "password": VALUE}
    assert client_of("member").post("/registries/save/", form).status_code == 403
    refused = admin.post("/registries/save/", form | {"host": "https://x"})
    assert refused.status_code == 400 and VALUE not in refused.content.decode()
    page = admin.post("/registries/save/", form, follow=True).content.decode()
    assert "as robot" in page and VALUE not in page
    admin.post(f"/registries/{RegistryLogin.objects.get().public_id}/remove/")
    assert not RegistryLogin.objects.exists()


def test_the_usage_of_folders_is_shown_to_whom_it_concerns(client_of, dataset, typed) -> None:
    admin, member, stranger = (client_of(who) for who in ("admin", "member", "stranger"))
    owner, project = dataset.people["m-okafor"], dataset.projects["vision"]
    node = next(iter(dataset.nodes.values()))
    assert "not measured yet" in member.get("/account/").content.decode()
    assert "is full" not in member.post("/launch/check/", typed).content.decode()
    team = Volume.objects.create(name="team", kind="project", path="/data/teams")
    home = VolumeUsage.objects.create(
        owner=owner,
        node=node,
        used_mib=20_480,
        files=12,
        limit_mib=20_480,
        enforced=True,
        measured_at=timezone.now(),
    )
    problem = "It was not counted within 300 s."
    VolumeUsage.objects.create(volume=team, project=project, node=node, limit_mib=10_240, problem=problem)
    account = member.get("/account/").content.decode()
    assert "20\u00a0GiB" in account and "12\u00a0files" in account and node.name in account
    assert ">enforced<" in account and problem not in account
    page = member.get(f"/projects/{project.public_id}/").content.decode()
    assert "not measured yet" in page and problem in page and "not enforced" in page
    assert "20\u00a0GiB" not in stranger.get("/account/").content.decode()
    preview = member.post("/launch/check/", typed).content.decode()
    assert f"Your home on {node.name} is full:" in preview and "Jobs cannot write to it" in preview
    VolumeUsage.objects.filter(pk=home.pk).update(enforced=False)
    assert "Its limit is not enforced." in member.post("/launch/check/", typed).content.decode()
    VolumeUsage.objects.filter(pk=home.pk).update(used_mib=100)
    assert "is full" not in member.post("/launch/check/", typed).content.decode()

    for query, shown in (
        ("", ("m-okafor", "team")),
        ("?q=okafor", ("m-okafor",)),
        ("?volume=team", ("team",)),
        ("?volume=-", ("m-okafor",)),
        ("?q=nothing-like-this", ()),
    ):
        page = admin.get(f"/volumes/{query}").content.decode().partition("Usage of folders")[2]
        rows = page.partition("<tbody>")[2].partition("</tbody>")[0]
        assert ("m-okafor" in rows, ">team<" in rows) == ("m-okafor" in shown, "team" in shown), query
    assert "Usage of folders" not in member.get("/volumes/").content.decode()


def test_the_largest_of_many_folders_are_on_the_first_page(client_of, dataset) -> None:
    node = next(iter(dataset.nodes.values()))
    for number in range(30):
        VolumeUsage.objects.create(
            owner=factories.user(f"home-{number:02}"), node=node, used_mib=number, measured_at=timezone.now()
        )
    page = client_of("admin").get("/volumes/").content.decode()
    assert page.index("home-29") < page.index("home-05") and "home-04" not in page
    assert "home-04" in client_of("admin").get("/volumes/?page=2").content.decode()
