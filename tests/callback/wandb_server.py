"""A W&B server for tests: takes the real online client and serves the real ``wandb.Api``. Standard library only.

What a run sent is kept in memory (:class:`StoredRun`). An operation nothing here answers gets ``{}`` and is listed in
``unknown_operations``: that is how a client that asks for something new shows up. Faults are set by route:

    with WandbServer() as server:
        server.faults["file_stream"] = Fault(status=500, times=2)
"""

from __future__ import annotations

import contextlib
import gzip
import json
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import urlsplit

ENTITY = "tester"
API_KEY = "0123456789abcdef" * 2 + "01234567"  # forty characters, as the client demands

_OPERATION = re.compile(r"\b(query|mutation)\s+(\w+)")
_CREATED_AT = "2026-08-17T10:00:00Z"


@dataclass
class Fault:
    """What a route does in place of answering, ``times`` times (``None``: for ever)."""

    status: int | None = None
    hang: bool = False
    drop: bool = False
    times: int | None = None

    def strike(self) -> bool:
        """Whether it applies to this request."""
        if self.times is None:
            return True
        self.times -= 1
        return self.times >= 0


@dataclass
class StoredRun:
    """Everything that arrived for one run."""

    entity: str
    project: str
    name: str
    display_name: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    alerts: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    state: str = "running"

    @property
    def id(self) -> str:
        return f"{self.entity}:{self.project}:{self.name}"

    def plain_config(self) -> dict[str, Any]:
        """Without the client's ``{"value": ...}`` around each entry and its own ``_wandb``."""
        return {key: entry.get("value") for key, entry in self.config.items() if key != "_wandb"}

    def rows(self) -> list[dict[str, Any]]:
        """The history without the client's own columns."""
        return [{key: value for key, value in row.items() if not key.startswith("_")} for row in self.history]


class WandbServer:
    """Listens on a free port of this machine from construction on."""

    def __init__(self) -> None:
        self.runs: dict[str, StoredRun] = {}
        self.views: list[dict[str, Any]] = []
        self.operations: list[str] = []
        self.unknown_operations: set[str] = set()
        self.faults: dict[Literal["graphql", "file_stream"], Fault] = {}
        self._lock = threading.RLock()
        self._connections: set[socket.socket] = set()
        self._http: ThreadingHTTPServer | None = None
        self._hanging = threading.Event()  # set: whoever hangs may go
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self, folder: str) -> dict[str, str]:
        """What a client needs to talk to this server alone, with every file of its below ``folder``."""
        return {
            "WANDB_BASE_URL": self.url,
            "WANDB_API_KEY": API_KEY,
            "WANDB_MODE": "online",
            "WANDB_DIR": folder,
            "WANDB_CONFIG_DIR": f"{folder}/config",
            "WANDB_CACHE_DIR": f"{folder}/cache",
            "WANDB_DATA_DIR": f"{folder}/data",
            "HOME": folder,
            "WANDB_ERROR_REPORTING": "false",
            "WANDB_SILENT": "true",
            "WANDB_CONSOLE": "off",
            "WANDB_X_DISABLE_STATS": "true",
            "WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "1",
        }

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen (again, on the port it had)."""
        self._hanging.clear()
        self._http = _Http(("127.0.0.1", self.port), _handler_of(self))
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def die(self) -> None:
        """Refuse connections, and cut those that are open."""
        http, self._http = self._http, None
        self._hanging.set()
        if http is None:
            return
        http.shutdown()
        http.server_close()
        with self._lock:
            connections, self._connections = self._connections, set()
        for connection in connections:  # a kept-alive one would be served on
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> WandbServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.die()

    # --- what tests ask -----------------------------------------------------------------------------------------------

    @property
    def run(self) -> StoredRun:
        """The only run."""
        (run,) = self.runs.values()
        return run

    # --- requests -----------------------------------------------------------------------------------------------------

    def graphql(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        found = _OPERATION.search(query)
        operation = found.group(2) if found is not None else "(anonymous)"
        with self._lock:
            self.operations.append(operation)
            answer = _ANSWERS.get(operation)
            if answer is None:
                self.unknown_operations.add(operation)
                return {}
            return answer(self, variables)

    def stored(self, entity: str | None, project: str | None, name: str) -> StoredRun:
        key = f"{entity or ENTITY}/{project or 'uncategorized'}/{name}"
        if key not in self.runs:
            self.runs[key] = StoredRun(*key.split("/"))
        return self.runs[key]

    def file_stream(self, entity: str, project: str, name: str, body: dict[str, Any]) -> None:
        with self._lock:
            run = self.stored(entity, project, name)
            for file, chunk in (body.get("files") or {}).items():
                rows = [json.loads(line) for line in chunk["content"] if line.strip()] if file != "output.log" else []
                if file == "wandb-history.jsonl":
                    # A retried chunk says from which line on it counts.
                    run.history[chunk.get("offset", len(run.history)) :] = rows
                elif file == "wandb-events.jsonl":
                    run.events[chunk.get("offset", len(run.events)) :] = rows
                elif file == "wandb-summary.json" and rows:
                    run.summary = rows[-1]
            if body.get("complete"):
                run.state = "finished" if body.get("exitcode", 0) == 0 else "failed"


# --- answers by operation ---------------------------------------------------------------------------------------------

_Answer = Callable[[WandbServer, dict[str, Any]], dict[str, Any]]


def _viewer(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    return {
        "viewer": {
            "id": "1",
            "entity": ENTITY,
            "username": ENTITY,
            "email": "tester@example.com",
            "name": ENTITY,
            "admin": False,
            "flags": "{}",
            "deletedAt": None,
            "teams": {"edges": []},
        },
        "serverInfo": {"cliVersionInfo": {"max_cli_version": "99.0"}, "latestLocalVersionInfo": None, "features": []},
    }


def _features(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    return {"serverInfo": {"features": []}}


def _resume_status(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    key = f"{variables.get('entity') or ENTITY}/{variables.get('project')}/{variables.get('name')}"
    run = server.runs.get(key)
    if run is None:
        return {"model": {"bucket": None}}
    return {
        "model": {
            "bucket": {
                "id": run.id,
                "name": run.name,
                "summaryMetrics": json.dumps(run.summary),
                "displayName": run.display_name,
                "logLineCount": 0,
                "historyLineCount": len(run.history),
                "eventsLineCount": len(run.events),
                "historyTail": json.dumps([json.dumps(run.history[-1])] if run.history else []),
                "eventsTail": json.dumps([]),
                "config": json.dumps(run.config),
                "tags": run.tags,
                "wandbConfig": json.dumps({"t": 1}),
            }
        }
    }


def _upsert(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    name = variables.get("name")
    if name is None:  # an update by id
        entity, project, name = str(variables["id"]).split(":")
    else:
        entity, project = variables.get("entity") or ENTITY, variables.get("project") or "uncategorized"
    is_new = f"{entity}/{project}/{name}" not in server.runs
    run = server.stored(entity, project, name)
    if variables.get("config"):
        run.config |= json.loads(variables["config"])
    if variables.get("summaryMetrics"):
        run.summary |= json.loads(variables["summaryMetrics"])
    run.display_name = variables.get("displayName") or run.display_name or name
    run.tags = variables.get("tags") or run.tags
    return {
        "upsertBucket": {
            "bucket": _bucket(run),
            "inserted": is_new,
        }
    }


def _bucket(run: StoredRun) -> dict[str, Any]:
    return {
        "id": run.id,
        "name": run.name,
        "displayName": run.display_name,
        "description": "",
        "config": json.dumps(run.config),
        "sweepName": None,
        "project": {"id": "1", "name": run.project, "entity": {"id": run.entity, "name": run.entity}},
        "historyLineCount": len(run.history),
    }


def _create_files(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    path = f"{server.url}/upload/{variables['entity']}/{variables['project']}/{variables['run']}"
    return {
        "createRunFiles": {
            "runID": variables["run"],
            "uploadHeaders": [],
            "files": [{"name": name, "uploadUrl": f"{path}/{name}"} for name in variables["files"]],
        }
    }


def _alert(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    run = server.stored(variables["entityName"], variables["projectName"], variables["runName"])
    run.alerts.append({"title": variables["title"], "text": variables["text"], "severity": variables["severity"]})
    return {"notifyScriptableRunAlert": {"success": True}}


def _view(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    server.views.append(variables)
    view = {"id": f"view{len(server.views)}", "name": variables.get("name"), "displayName": variables.get("displayName")}
    return {"upsertView": {"view": {**view, "spec": variables.get("spec")}, "inserted": True}}


def _stop_status(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    return {"project": {"run": {"stopped": False}}}


# Reading


def _run_fields(run: StoredRun) -> dict[str, Any]:
    last_step = max((row.get("_step", 0) for row in run.history), default=-1)
    return {
        **_bucket(run),
        "__typename": "Run",
        "projectId": "1",
        "tags": run.tags,
        "state": run.state,
        "group": None,
        "jobType": None,
        "commit": None,
        "readOnly": False,
        "createdAt": _CREATED_AT,
        "heartbeatAt": _CREATED_AT,
        "notes": None,
        "systemMetrics": json.dumps(run.events[-1] if run.events else {}),
        "summaryMetrics": json.dumps(run.summary),
        "historyKeys": _history_keys(run),
        "events": [json.dumps(row) for row in run.events],
        "lastHistoryStep": last_step,
        "user": {"name": ENTITY, "username": ENTITY},
    }


def _history_keys(run: StoredRun) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for row in run.history:
        for key, value in row.items():
            kind = "number" if isinstance(value, (int, float)) else "string"
            known = keys.setdefault(key, {"typeCounts": [{"type": kind, "count": 0}], "previousValue": value})
            known["typeCounts"][0]["count"] += 1
    last_step = max((row.get("_step", 0) for row in run.history), default=-1)
    return {"sets": [], "keys": keys, "lastStep": last_step}


def _find(server: WandbServer, variables: dict[str, Any]) -> StoredRun | None:
    name = variables.get("name") or variables.get("run") or variables.get("runName")
    return server.runs.get(f"{variables.get('entity') or ENTITY}/{variables.get('project')}/{name}")


def _read_run(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    run = _find(server, variables)
    return {"project": {"internalId": "1", "run": _run_fields(run) if run is not None else None}}


def _read_runs(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    place = f"{variables.get('entity') or ENTITY}/{variables.get('project')}/"
    runs = [run for key, run in server.runs.items() if key.startswith(place)]
    if not runs:
        return {"project": None}
    edges = [{"node": _run_fields(run), "cursor": run.name} for run in runs]
    page = {"endCursor": None, "hasNextPage": False}
    return {
        "project": {
            "internalId": "1",
            "runCount": len(runs),
            "readOnly": False,
            "runs": {"totalCount": len(runs), "edges": edges, "pageInfo": page},
        }
    }


def _page(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    run = _find(server, variables)
    rows = run.history if run is not None else []
    low, high = int(variables.get("minStep", 0)), int(variables.get("maxStep", len(rows)))
    page = [json.dumps(row) for row in rows if low <= row.get("_step", 0) < high]
    return {"project": {"run": {"history": page}}}


def _sampled_page(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    run = _find(server, variables)
    spec = variables.get("spec") or (variables.get("specs") or ["{}"])[0]
    wanted = json.loads(spec)
    keys = wanted.get("keys") or []
    low, high = wanted.get("minStep", 0), wanted.get("maxStep", 1 << 60)  # unlike a page's, inside
    rows = [
        {key: row[key] for key in keys} if keys else row
        for row in (run.history if run is not None else [])
        if low <= row.get("_step", 0) <= high and all(key in row for key in keys)
    ]
    return {"project": {"run": {"sampledHistory": [rows]}}}


def _parquet(server: WandbServer, variables: dict[str, Any]) -> dict[str, Any]:
    run = _find(server, variables)
    rows = run.history if run is not None else []
    return {"project": {"run": {"parquetHistory": {"parquetUrls": [], "liveData": rows}}}}


_ANSWERS: dict[str, _Answer] = {
    "Viewer": _viewer,
    "GetDefaultEntity": _viewer,
    "ServerFeaturesQuery": _features,
    "RunResumeStatus": _resume_status,
    "UpsertBucket": _upsert,
    "CreateRunFiles": _create_files,
    "MarkRunFilesUploaded": lambda server, variables: {"markRunFilesUploaded": {"success": True}},
    "NotifyScriptableRunAlert": _alert,
    "RunStoppedStatus": _stop_status,
    "UpsertView2": _view,
    "Run": _read_run,
    "Runs": _read_runs,
    "RunHistoryKeys": _read_run,
    "RunParquetHistory": _parquet,
    "HistoryPage": _page,
    "SampledHistoryPage": _sampled_page,
}


# --- HTTP -------------------------------------------------------------------------------------------------------------


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no news."""


def _handler_of(server: WandbServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            with server._lock:
                server._connections.add(self.connection)

        def finish(self) -> None:
            with server._lock:
                server._connections.discard(self.connection)
            with contextlib.suppress(OSError):
                super().finish()

        def log_message(self, format: str, *arguments: Any) -> None:
            """Quiet."""

        def do_GET(self) -> None:
            self._answer(404 if urlsplit(self.path).path != "/healthz" else 200, {})

        def do_POST(self) -> None:
            body = self._body()
            path = urlsplit(self.path).path
            if path == "/graphql":
                if not self._strikes("graphql"):
                    request = json.loads(body)
                    data = server.graphql(request["query"], request.get("variables") or {})
                    self._answer(200, {"data": data})
            elif path.endswith("/file_stream"):
                if not self._strikes("file_stream"):
                    _, _, entity, project, run, _ = path.split("/")
                    server.file_stream(entity, project, run, json.loads(body))
                    self._answer(200, {"exitcode": None, "limits": {}})
            else:
                server.unknown_operations.add(f"POST {path}")
                self._answer(200, {})

        def do_PUT(self) -> None:
            body = self._body()
            parts = urlsplit(self.path).path.split("/", 5)
            if len(parts) == 6 and parts[1] == "upload":
                with server._lock:
                    server.stored(parts[2], parts[3], parts[4]).files[parts[5]] = body
            self._answer(200, {})

        def _strikes(self, route: Literal["graphql", "file_stream"]) -> bool:
            fault = server.faults.get(route)
            with server._lock:
                applies = fault is not None and fault.strike()
            if fault is None or not applies:
                return False
            if fault.hang:
                server._hanging.wait()
            if fault.hang or fault.drop:
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self.connection.shutdown(socket.SHUT_RDWR)
            else:
                self._answer(fault.status or 500, {"error": "a fault of the test"})
            return True

        def _body(self) -> bytes:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

        def _answer(self, status: int, value: Any) -> None:
            content = json.dumps(value).encode()
            with contextlib.suppress(OSError):
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

    return Handler
