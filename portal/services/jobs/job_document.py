"""A job request as a document: the body of REST, YAML, and commands for a shell that submit it."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from django.utils.translation import gettext as _

from portal.domain.job_spec import JobRole, job_fields, json_value, roles_as_json
from portal.domain.kubernetes import DEFAULT, kubernetes_resources
from portal.domain.states import RuntimeKind
from portal.domain.template_parameters import field_error
from portal.errors import InvalidRequest
from portal.services.jobs.submission import JobRequest
from portal.services.yaml_input import line_of, load_yaml_document

REFERENCES = ("project", "environment", "pool")
_ITEM_KEYS = {
    "volumes": {"volume", "target", "read_only"},
    "secrets": {"secret", "owner_type", "variable", "file"},
    "roles": set(job_fields(JobRole)),
}
_NOT_IN_DOCUMENTS = {"parameters", "template_version"}
"""They are filled in already, or belong to the template."""
JOBS_PATH = "/api/v1/jobs/"


def request_body(request: JobRequest) -> dict[str, Any]:
    """Return the request as the body of ``POST /api/v1/jobs/``, without defaults."""
    body: dict[str, Any] = {
        "name": request.name,
        "project": request.project.name,
        "environment": request.environment.name,
        "kind": request.kind,
    }
    if request.pool is not None:
        body["pool"] = request.pool.name
    for name, rule in job_fields(type(request)).items():
        value = _plain(json_value(getattr(request, name)))
        shown = value != _plain(rule.default) or name in ("gpus_per_task", "tasks")
        if shown and name not in {*body, *_NOT_IN_DOCUMENTS}:
            body[name] = value
    if request.roles:
        body["roles"] = [_role_body(request, role) for role in request.roles]
        for name in ("tasks", "command"):
            body.pop(name, None)
    if request.dependencies:
        body["dependencies"] = [job.public_id for job in request.dependencies]
    return body


def _plain(value: Any) -> Any:
    """Return lists and dictionaries for sequences and mappings, which YAML writes."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _role_body(request: JobRequest, role: JobRole) -> dict[str, Any]:
    """Return a role without defaults and without amounts that are those of the job."""
    (given,) = roles_as_json([role])
    return {
        name: value
        for name, value in given.items()
        if name == "command"
        or value not in (job_fields(JobRole)[name].default, [], getattr(request, name, None))
    }


class _BlockDumper(yaml.SafeDumper):
    """Writes texts of several lines, such as programs, as they are instead of with ``\\n``."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    is_block = "\n" in text and text.replace("\n", "").isprintable()
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if is_block else None)


_BlockDumper.add_representer(str, _represent_text)


def to_yaml(body: Mapping[str, Any]) -> str:
    return yaml.dump(dict(body), Dumper=_BlockDumper, sort_keys=False, allow_unicode=True, width=100)


def kubernetes_yaml(request: JobRequest, kind: str = DEFAULT) -> str:
    """Return a job as YAML for kubectl, with a comment on what is left out. Raise NotExportable.

    ``kind`` is one of EXPORT_KINDS.
    """
    environment = request.environment
    image = environment.image if environment.runtime != RuntimeKind.PROCESS.value else ""
    resources, missing = kubernetes_resources(request, image or None, kind)
    remark = f"# Without counterpart, not exported: {', '.join(missing)}.\n" if missing else ""
    return remark + "---\n".join(map(to_yaml, resources))


def command_line(path: str, body: Mapping[str, Any]) -> str:
    """Return a command of the client ``fairway`` that submits the body."""
    if path != JOBS_PATH:
        return f"fairway api POST {path} --data {shlex.quote(json.dumps(body, ensure_ascii=False))}"
    words = ["fairway run"]
    for name, value in body.items():
        rule, flag = job_fields().get(name), name.replace("_", "-")
        if name == "env":
            words += [f"--env={key}={each}" for key, each in value.items()]
        elif isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        elif name in REFERENCES or (rule is not None and rule.is_scalar):
            words.append(f"--{flag}={value}")
        elif name != "command":
            words.append(f"--set={name}={json.dumps(value, ensure_ascii=False)}")
    lines = [words[0], *map(shlex.quote, words[1:])]
    if command := body.get("command"):
        lines.append(f"-- {shlex.join(command)}")
    return " \\\n  ".join(lines)


def curl_command(path: str, body: Mapping[str, Any]) -> str:
    """Return a command that posts the body with curl."""
    text = shlex.quote(json.dumps(body, indent=1, ensure_ascii=False))
    return (
        f'curl --fail-with-body -sS "$FAIRWAY_URL{path}" \\\n  -H "Authorization: Bearer $FAIRWAY_TOKEN" \\\n'
        f'  -H "Content-Type: application/json" \\\n  --data-binary {text}'
    )


@dataclass(frozen=True)
class JobDocument:
    """A job request as read from YAML; ``lines`` are the lines of its keys."""

    fields: dict[str, Any]
    lines: Mapping[str, int]

    def locate(self, wrong: Mapping[str, str]) -> list[str]:
        """Return the errors of fields, each with its line, in the order of the document."""
        found = sorted((line_of(name, self.lines), f"{name}: {message}") for name, message in wrong.items())
        return [
            _("Line {line}, {text}").format(line=line, text=text) if line else text for line, text in found
        ]


def read_job_yaml(text: str) -> tuple[JobDocument, dict[str, str]]:
    """Return the request and what is wrong with its keys and the types of its values, by field.

    Raise InvalidRequest for ``yaml`` if the text is no YAML mapping.
    """
    loaded, lines = load_yaml_document(text, "yaml")
    if not isinstance(loaded, dict):
        raise InvalidRequest(fields={"yaml": _("It must be a mapping, such as name: my-job.")})
    if "job" in loaded:
        message = _("This is a sweep, schedule or service; the form imports jobs alone. Submit it with REST.")
        raise InvalidRequest(fields={"yaml": message})
    return JobDocument(loaded, lines), dict(_document_errors(loaded))


def _document_errors(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    rules = {name: rule for name, rule in job_fields().items() if name not in _NOT_IN_DOCUMENTS}
    for name, value in fields.items():
        if name in (*REFERENCES, "template"):
            if not isinstance(value, str) and (value is not None or name == "project"):
                yield name, _("Must be text.")
        elif name == "dependencies":
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                yield name, _("Must be a list of ids of jobs.")
        elif name not in rules:
            yield name, _unknown(name, [*rules, *REFERENCES, "dependencies"])
        elif error := field_error(rules[name], json_value(value)):
            yield name, error
        else:
            yield from _nested_errors(name, value)


def _nested_errors(name: str, value: Any) -> Iterator[tuple[str, str]]:
    if name == "env":
        yield from ((f"env.{key}", _("Must be text; put it into quotes.")) for key, each in value.items()
                    if not isinstance(each, str))  # fmt: skip
    for number, item in enumerate(value if name in _ITEM_KEYS else ()):
        if not isinstance(item, dict):
            yield f"{name}.{number}", _("Must be a mapping.")
            continue
        keys = _ITEM_KEYS[name]
        yield from ((f"{name}.{number}.{key}", _unknown(key, keys)) for key in item.keys() - keys)


def _unknown(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return _("Unknown field.") + (_(" Did you mean {near}?").format(near=near[0]) if near else "")
