"""A mirror of the Hugging Face hub's protocol on the loopback, whose repositories can fail.

It speaks what `huggingface_hub` asks of the real one to list and download repositories: the
programming interface under `/api`, and files under `/ID/resolve/REVISION/FILE`. A process uses it
with `environment`: the real client runs, and no request leaves the machine.
"""

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self
from urllib.parse import unquote, urlsplit

Failure = Literal["gated", "missing", "busy", "limited", "cut", "silent", ""]
"""Requests of a repository: access is restricted; there is none; 503; 429; the connection breaks
off in the middle of a file; no answer ever comes; nothing fails."""


class Request(NamedTuple):
    """A request of a client.

    Attributes:
        method: HTTP method.
        path: Path without query.
        first_byte: First byte that is asked for.
    """

    method: str
    path: str
    first_byte: int


@dataclass
class Repository:
    """A repository of models or data.

    Attributes:
        files: Path in the repository -> content.
        failure: How its requests fail.
        times: Number of requests that fail before all is well; None: all fail.
    """

    files: dict[str, bytes]
    failure: Failure = ""
    times: int | None = None
    lock: Any = field(default_factory=threading.Lock, repr=False)

    @cached_property
    def commit(self) -> str:
        """Commit of the files."""
        content = json.dumps({name: etag(data) for name, data in self.files.items()})
        return hashlib.sha1(content.encode()).hexdigest()

    def fails(self) -> bool:
        """Count a request that may fail, and tell whether it does."""
        with self.lock:
            if not self.failure or self.times == 0:
                return False
            if self.times is not None:
                self.times -= 1
            return True


class Mirror:
    """The mirror: a context manager that serves until it is left.

    Attributes:
        repositories: Id -> repository; ids of data sets begin with `datasets/`.
        requests: Requests so far.
    """

    def __init__(self) -> None:
        """Bind a free port of the loopback."""
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.stopped = threading.Event()
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
        known = {name: value for name, value in os.environ.items() if name not in offline}
        return known | {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}

    def add(self, name: str, files: Path | Mapping[str, bytes], failure: Failure = "",
            times: int | None = None) -> Repository:  # fmt: skip
        """Add a repository with the files of a folder, or with named contents."""
        if isinstance(files, Path):
            paths = [path for path in sorted(files.rglob("*")) if path.is_file()]
            files = {path.relative_to(files).as_posix(): path.read_bytes() for path in paths}
        self.repositories[name] = Repository(dict(files), failure, times)
        return self.repositories[name]

    def requests_of(self, name: str) -> list[Request]:
        """Requests of one repository."""
        starts = (f"/{name}/", f"/api/{name}/", f"/api/models/{name}/")
        return [r for r in self.requests if f"{r.path}/".startswith(starts)]

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:  # fmt: skip
        self.stopped.set()
        self._server.shutdown()
        self._server.server_close()


@cache
def etag(content: bytes) -> str:
    """The hub's name of a file's content."""
    return hashlib.sha256(content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the terminal clean."""

    @property
    def mirror(self) -> Mirror:
        return self.server.mirror  # type: ignore[attr-defined]

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        span = self.headers.get("Range", "bytes=0-")
        first = int(span.removeprefix("bytes=").partition("-")[0])
        self.mirror.requests.append(Request(self.command, path, first))
        parts = path.strip("/").split("/")
        is_api = parts[0] == "api"
        kind, parts = ("models", parts) if not is_api else (parts[1], parts[2:])
        if not is_api and parts[0] == "datasets":
            kind, parts = "datasets", parts[1:]
        name = "/".join(parts[:2]) if kind == "models" else "/".join([kind, *parts[:2]])
        repository = self.mirror.repositories.get(name)
        if repository is None or repository.failure == "missing":
            self._refuse(404, "RepoNotFound", "Repository not found")
        elif repository.failure not in ("gated", "cut") and repository.fails():
            self._fail(repository.failure)
        elif is_api:
            self._describe(repository, name.removeprefix("datasets/"), parts[2:])
        elif repository.failure == "gated":
            self._refuse(403, "GatedRepo",
                f"Access to model {name} is restricted and you are not in the authorized list. "
                f"Visit https://huggingface.co/{name} to ask for access.")  # fmt: skip
        else:
            self._file(repository, "/".join(parts[4:]), first)

    def _fail(self, failure: Failure) -> None:
        if failure == "silent":
            self.mirror.stopped.wait()
            self.close_connection = True
        elif failure == "limited":
            self._send(429, b"Too many requests", {"Retry-After": "0"})
        else:
            self._send(503, b"Service unavailable", {"Retry-After": "0"})

    def _refuse(self, status: int, code: str, message: str) -> None:
        self._send(status, b"", {"X-Error-Code": code, "X-Error-Message": message})

    def _describe(self, repository: Repository, name: str, rest: list[str]) -> None:
        """Answer `/api/models/ID[/revision/REVISION]` or `.../tree/REVISION`."""
        files = repository.files.items()
        if rest[:1] == ["tree"]:
            answer: Any = [
                {"type": "file", "path": p, "size": len(data), "oid": etag(data)[:40]}
                for p, data in files
            ]
        else:
            answer = {"id": name, "modelId": name, "sha": repository.commit, "private": False,
                      "tags": [], "siblings": [{"rfilename": p} for p, _ in files]}  # fmt: skip
        self._send(200, json.dumps(answer).encode(), {"Content-Type": "application/json"})

    def _file(self, repository: Repository, path: str, first: int) -> None:
        if path not in repository.files:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        content = repository.files[path]
        headers = {"ETag": f'"{etag(content)}"', "X-Repo-Commit": repository.commit,
                   "X-Linked-Size": str(len(content)), "Accept-Ranges": "bytes"}  # fmt: skip
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        rest = content[first:]
        is_weights = path.endswith(".safetensors") and self.command == "GET"
        if repository.failure == "cut" and is_weights and repository.fails():
            self._send(206 if first else 200, rest, headers, stop_at=len(rest) // 2)
        else:
            self._send(206 if first else 200, rest, headers)

    def _send(self, status: int, content: bytes, headers: Mapping[str, str],
              stop_at: int | None = None) -> None:  # fmt: skip
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:stop_at])
        if stop_at is not None:
            self.close_connection = True
