"""The tab on which a running job is saved as an environment, and the same in REST."""

from __future__ import annotations

import pytest

from portal.models import SavedImage
from portal.services.accounts.tokens import Scope, do_create_token
from portal.services.workspaces.saved_images import images_to_save, record_not_saved, record_saved
from tests import factories
from tests.services.test_saved_images import IMAGE, up

pytestmark = pytest.mark.django_db


@pytest.fixture
def dataset():
    made = factories.basic_cluster()
    made["job"] = up(factories.job(made["owner"], made["project"], made["environment"]), made["node"])
    return made


def finish(dataset, **problem: str) -> None:
    (row,) = images_to_save(dataset["node"])
    record_not_saved(row, problem["problem"]) if problem else record_saved(row, IMAGE, 700)


def test_the_page_keeps_wrong_input_and_shows_what_becomes_of_a_request(client, dataset) -> None:
    client.force_login(dataset["owner"])
    page = f"/jobs/{dataset['job'].public_id}/save-environment/"
    assert b"None yet." in client.get(page).content
    wrong = client.post(f"{page}start/", {"name": "No Spaces", "purpose": "Vision.", "audience": "project"})
    text = wrong.content.decode()
    assert wrong.status_code == 400 and 'value="No Spaces"' in text and "Use lower-case letters" in text
    assert 'value="project" checked' in text and not SavedImage.objects.exists()
    words = {"name": "torch-and-more", "purpose": "Vision.", "audience": "me"}
    assert client.post(f"{page}start/", words).status_code == 302
    live = client.get(page, headers={"HX-Request": "true"}).content.decode()
    assert "saves it since" in live and 'hx-trigger="every 2s"' in live and "<html" not in live
    finish(dataset)
    shown = client.get(page).content.decode()
    assert (
        "torch-and-more" in shown
        and "700\xa0MiB" in shown
        and "hx-trigger" not in shown.split('id="saved"')[1]
    )
    saved = SavedImage.objects.get().environment
    launch = client.get("/launch/").content.decode()
    assert "saved from a job; runs on 1\xa0node only" in launch
    assert client.post(f"/saved-environments/{saved.public_id}/delete/").status_code == 302
    assert "None yet." in client.get(page).content.decode()


def test_rest_says_how_far_it_is(client, dataset) -> None:
    _, token = do_create_token(dataset["owner"], name="t", scopes=[Scope.JOBS, Scope.READ])
    ask = {"headers": {"Authorization": f"Bearer {token}"}, "content_type": "application/json"}
    job = f"/api/v1/jobs/{dataset['job'].public_id}/"
    words = {"name": "torch-and-more", "purpose": "Vision.", "for_project": True}
    answer = client.post(f"{job}save-environment/", words, **ask)
    assert (answer.status_code, answer.json()["state"]) == (202, "saving")
    finish(dataset, problem="Its changed files are 9 MiB; at most 1 MiB can be saved.")
    (row,) = client.get(f"{job}saved-environments/", **ask).json()["items"]
    assert row["state"] == "failed" and "at most 1 MiB" in row["problem"]
    client.post(f"{job}save-environment/", words, **ask)
    finish(dataset)
    row = client.get(f"{job}saved-environments/", **ask).json()["items"][0]
    assert (row["state"], row["changed_mib"], row["name"]) == ("saved", 700, "torch-and-more")
    assert row["node"]["name"] == dataset["node"].name and row["project"]["name"] == dataset["project"].name
