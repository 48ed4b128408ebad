"""Lists registered models of several workspaces with one statement on MLflow's tables.

MLflow's own search reads one workspace a request. Only the portal sends such a request, with the projects that the
user may see; ``portal.tracking.endpoints`` does not offer the path to scripts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from portal.domain.experiments.tracking import MODEL_LIST_ENDPOINT

_PATH = f"/api/2.0/mlflow/{MODEL_LIST_ENDPOINT}"
_STATEMENT = """
SELECT model.workspace, model.name, model.description, model.last_updated_time,
    (SELECT max(version) FROM model_versions AS held WHERE held.workspace = model.workspace
        AND held.name = model.name AND held.current_stage <> 'Deleted_Internal'),
    (SELECT json_agg(json_build_object('alias', alias, 'version', version) ORDER BY alias)
        FROM registered_model_aliases AS named
        WHERE named.workspace = model.workspace AND named.name = model.name),
    tags.rows
FROM registered_models AS model
LEFT JOIN LATERAL (
    SELECT json_agg(json_build_object('key', key, 'value', value) ORDER BY key) AS rows,
        string_agg(concat_ws(' ', key, value), E'\\n') AS text
    FROM registered_model_tags AS tag
    WHERE tag.workspace = model.workspace AND tag.name = model.name AND tag.key NOT LIKE 'mlflow.%%'
) AS tags ON true
WHERE model.workspace = ANY(%(workspaces)s) AND NOT EXISTS (
    SELECT FROM registered_model_tags AS tag WHERE tag.workspace = model.workspace AND tag.name = model.name
        AND tag.key = 'mlflow.prompt.is_prompt' AND tag.value = 'true'
) AND (
    model.workspace = ANY(%(named)s)
    OR position(%(text)s IN lower(concat_ws(E'\\n', model.name, model.description, tags.text))) > 0
)
ORDER BY model.last_updated_time DESC NULLS LAST, model.workspace, model.name
LIMIT %(limit)s OFFSET %(offset)s
"""


class ModelLists:
    """WSGI middleware in front of MLflow's application; ``engine`` is its SQLAlchemy engine."""

    def __init__(self, application: WSGIApplication, engine: Any) -> None:
        self._application, self._engine = application, engine

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] != _PATH or environ["REQUEST_METHOD"] != "POST":
            return self._application(environ, start_response)
        given = json.loads(environ["wsgi.input"].read())
        answer = json.dumps(self._list(given)).encode()
        start_response("200 OK", [("Content-Type", "application/json"), ("Content-Length", str(len(answer)))])
        return [answer]

    def _list(self, given: dict[str, Any]) -> dict[str, Any]:
        """Return the models in the shape of MLflow's answers, each with its workspace, last changed first.

        ``text`` is part of a name, description or tag, in lower case; all models of ``named`` workspaces match.
        """
        limit = given["max_results"]
        connection = self._engine.raw_connection()
        try:
            cursor = connection.cursor()
            cursor.execute(_STATEMENT, {**given, "limit": limit + 1})
            rows = cursor.fetchall()
        finally:
            connection.close()  # back to the pool, rolled back
        models = [
            {
                "workspace": workspace,
                "name": name,
                "description": description or "",
                "last_updated_timestamp": changed,
                "latest_versions": [{"version": newest}] if newest else [],
                "aliases": aliases or [],
                "tags": tags or [],
            }
            for workspace, name, description, changed, newest, aliases, tags in rows[:limit]
        ]
        return {"registered_models": models, "has_more": len(rows) > limit}
