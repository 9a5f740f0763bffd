"""A mirror of the Hugging Face hub's protocol on the loopback, whose repositories can fail.

It answers the requests of `huggingface_hub` and `datasets` to list, download and upload. The real
client runs: in other processes with `environment`, in this one with `connect`.
"""

import base64
import hashlib
import importlib
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub
import pytest

Failure = Literal["gated", "missing", "limited", "cut", "altered", "full", ""]
"""Access is restricted; there is no repository; 429; files break off, or one byte differs; commits
are refused; none."""


@dataclass
class Request:
    """A request: its method, path without query, and bytes of the answer."""

    method: str
    path: str
    sent: int = 0


@dataclass
class Repository:
    """A repository of models or data: content by path. Its one commit is `main` and `v1`.

    With `hiccup` the first request of each method and path has this status.
    """

    files: dict[str, bytes]
    failure: Failure = ""
    hiccup: int = 0
    private: bool = False

    @property
    def commit(self) -> str:
        content = json.dumps({name: etag(data) for name, data in self.files.items()})
        return hashlib.sha1(content.encode()).hexdigest()


class Mirror:
    """The mirror: a context manager that serves until it is left, on a free port."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}  # datasets by `datasets/ID`
        self.requests: list[Request] = []
        self.token, self.role = "hf_test", "write"  # of the user `me`, a member of `my-name`
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.mirror = self  # type: ignore[attr-defined]

    @property
    def url(self) -> str:
        """Address, for `HF_ENDPOINT`."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def environment(self, home: Path) -> dict[str, str]:
        """Environment of a process that uses the mirror, online, with a cache in `home`."""
        offline = {"HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_TOKEN"}
        usual = {name: value for name, value in os.environ.items() if name not in offline}
        return usual | {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}

    def connect(self, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
        """Let the client in this process use the mirror, with a new cache in `home`."""
        files = f"{self.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        address = {"ENDPOINT": self.url, "HUGGINGFACE_CO_URL_TEMPLATE": files}
        address |= {"HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(home)}
        for name, value in address.items():
            monkeypatch.setattr(huggingface_hub.constants, name, value)
        # Releases before 1.0 read a copy.
        copy = "huggingface_hub.file_download.HUGGINGFACE_CO_URL_TEMPLATE"
        monkeypatch.setattr(copy, files, raising=False)
        monkeypatch.setattr("fusion_bench_featcal.models.hub._MODELS", {})
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        _end_sessions()

    def add(
        self, name: str, files: Path | Mapping[str, bytes], failure: Failure = ""
    ) -> Repository:
        """Add a repository with the files of a folder, or with named contents."""
        if isinstance(files, Path):
            paths = [path for path in files.rglob("*") if path.is_file()]
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in paths}
        self.repositories[name] = Repository(dict(files), failure)
        return self.repositories[name]

    def files_sent(self, name: str) -> dict[str, list[int]]:
        """File of a repository -> bytes of each answer that has its content."""
        sent: dict[str, list[int]] = {}
        for request in self.requests:
            _, _, place = request.path.partition(f"/{name}/resolve/")
            if request.method == "GET" and place and request.sent:
                sent.setdefault(place.partition("/")[2], []).append(request.sent)
        return sent

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        _end_sessions()


def _end_sessions() -> None:
    """Let the hub's client begin anew: its releases before 1.0 go offline for a whole session."""
    client: Any = importlib.import_module("huggingface_hub.utils._http")
    end = "close_session" if hasattr(client, "close_session") else "reset_sessions"
    getattr(client, end)()


@cache
def etag(content: bytes) -> str:
    """The hub's name of a file's content."""
    return hashlib.sha256(content).hexdigest()


def _sibling(path: str, content: bytes) -> dict[str, Any]:
    """A file in the hub's description of a repository, with its hash."""
    blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    lfs = {"sha256": etag(content), "size": len(content), "pointerSize": 100}
    large = {"lfs": lfs} if path.endswith((".safetensors", ".bin")) else {}
    return {"rfilename": path, "size": len(content), "blobId": blob, **large}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    request_: Request

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the terminal clean."""

    @property
    def mirror(self) -> Mirror:
        return self.server.mirror  # type: ignore[attr-defined]

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.request_ = Request(self.command, path)
        is_first = all((r.method, r.path) != (self.command, path) for r in self.mirror.requests)
        self.mirror.requests.append(self.request_)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path == "/api/whoami-v2":
            self._describe_user()
            return
        if path in ("/api/repos/create", "/api/validate-yaml"):
            self._create(json.loads(body))
            return
        steps = path.removeprefix("/api").removeprefix("/models/").strip("/").split("/")
        ids = ["/".join(steps[:length]) for length in (1, 2, 3)]
        name = next((name for name in ids if name in self.mirror.repositories), "")
        repository = self.mirror.repositories.get(name, Repository({}, "missing"))
        failure, rest = repository.failure, steps[name.count("/") + 1 :]
        if failure == "missing":
            self._refuse(404, "RepoNotFound", "Repository not found")
        elif is_first and repository.hiccup:
            self._send(repository.hiccup, b"Sorry", {})
        elif failure == "limited":
            self._send(429, b"Too many", {"ratelimit": '"api";r=0;t=55'})
        elif path.startswith("/api/"):
            self._describe(repository, name.removeprefix("datasets/"), rest, body)
        elif failure == "gated":
            self._refuse(403, "GatedRepo", f"Access to model {name} is restricted")
        elif "/".join(rest[2:]) not in repository.files:
            self._refuse(404, "EntryNotFound", "Entry not found")
        else:
            self._file(repository, "/".join(rest[2:]))

    do_HEAD = do_GET = do_POST = _answer

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": message})

    def _create(self, request: dict[str, Any]) -> None:
        """Create a repository of models. A card, which the client sends first, is not checked."""
        if "name" in request:
            name = f"{request['organization']}/{request['name']}"
            known = self.mirror.repositories.get(name)
            repository = known or self.mirror.add(name, {})
            if known is None:
                is_private = request.get("private") or request.get("visibility") == "private"
                repository.private = bool(is_private)
            self._json({"url": f"{self.mirror.url}/{name}", "name": name})
        else:
            self._json({"errors": [], "warnings": []})

    def _describe_user(self) -> None:
        """Answer who has the token of a request."""
        if self.headers.get("Authorization") != f"Bearer {self.mirror.token}":
            self._send(401, b'{"error":"Invalid username or password."}', {})
            return
        token = {"accessToken": {"displayName": "tests", "role": self.mirror.role}}
        self._json({"type": "user", "name": "me", "orgs": [{"name": "my-name"}], "auth": token})

    def _commit(self, repository: Repository, name: str, body: bytes) -> None:
        """Add the files of a commit, which are sent whole."""
        for entry in map(json.loads, body.splitlines()):
            if entry["key"] == "file":
                file_entry = entry["value"]
                repository.files[file_entry["path"]] = base64.b64decode(file_entry["content"])
        address = f"{self.mirror.url}/{name}/commit/{repository.commit}"
        self._json({"commitUrl": address, "commitOid": repository.commit})

    def _describe(self, repository: Repository, name: str, rest: list[str], body: bytes) -> None:
        """Answer `/api/models/ID[/ACTION/REVISION[/PATH]]`."""
        files, action = repository.files, rest[0] if rest else ""
        if action in ("revision", "tree") and rest[1] not in ("main", "v1", repository.commit):
            self._refuse(404, "RevisionNotFound", "Invalid rev id")
        elif action == "preupload":
            sent = [file["path"] for file in json.loads(body)["files"]]
            modes = [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in sent]
            self._json({"files": modes})
        elif action == "commit" and repository.failure == "full":
            self._refuse(403, "", "Private repository storage limit reached")
        elif action == "commit":
            self._commit(repository, name, body)
        elif action in ("paths-info", "tree"):
            paths = parse_qs(body.decode()).get("paths", ["/".join(rest[2:])])
            entries = [
                {"type": "file", "path": path, "size": len(data), "oid": etag(data)[:40]}
                for path, data in files.items()
                if path.startswith(tuple(paths))
            ]
            if entries or action == "paths-info":
                self._json(entries)
            else:
                self._refuse(404, "EntryNotFound", "Entry not found")
        else:
            siblings = [_sibling(path, data) for path, data in files.items()]
            self._json({"id": name, "modelId": name, "sha": repository.commit, "private": False,
                        "tags": [], "siblings": siblings})  # fmt: skip

    def _file(self, repository: Repository, path: str) -> None:
        """Send a file, or the range of it that a resumed download asks for."""
        content, name = repository.files[path], etag(repository.files[path])
        if repository.failure == "altered" and path == max(repository.files):
            content = content[:-1] + b"?"
        first, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")
        part = content[int(first) : int(last) + 1 if last else None]
        headers = {"ETag": f'"{name}"', "X-Repo-Commit": repository.commit,
                   "X-Linked-Size": str(len(content)), "Accept-Ranges": "bytes"}  # fmt: skip
        is_part = len(part) < len(content)
        if is_part:
            end = int(first) + len(part) - 1
            headers["Content-Range"] = f"bytes {first}-{end}/{len(content)}"
        is_cut = repository.failure == "cut" and path.endswith(".safetensors")
        self._send(206 if is_part else 200, part, headers, len(part) // 2 if is_cut else None)

    def _json(self, answer: Any) -> None:
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _send(
        self, status: int, content: bytes, headers: Mapping[str, str], stop_at: int | None = None
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.request_.sent = len(content[:stop_at])
            self.wfile.write(content[:stop_at])
        if stop_at is not None:
            self.close_connection = True
