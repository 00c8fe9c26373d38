"""A model hub on the loopback interface: local folders served the way huggingface_hub expects of the real one.

    with HubServer({"org/name": {"main": folder}}) as url:
        subprocess.run([...], env=client_env(url, home))

huggingface_hub reads HF_ENDPOINT and HF_HOME when it is imported, so its client belongs in a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from collections.abc import Collection, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/models/(?P<repo>[^/]+(?:/[^/]+)?)/(?P<what>revision|tree)/(?P<revision>[^/]+)")
_API_DEFAULT = re.compile(r"/api/models/(?P<repo>[^/]+(?:/[^/]+)?)")
_FILE = re.compile(r"/(?P<repo>[^/]+(?:/[^/]+)?)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


def client_env(url: str, home: Path, **more: str) -> dict[str, str]:
    """The environment for a client process: this server, a cache under ``home``, and nothing of the person's own."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        ours.pop(name, None)
        ours.pop(name.upper(), None)
    return {**ours, "HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", **more}


class HubServer:
    """Serves ``{repository: {revision: folder}}`` until the ``with`` block ends; entering it gives the URL.

    Args:
        repositories: the folder behind each branch or tag of each repository. Files are read when asked for.
        gated: repositories that tell what they hold, but give no file to a client without a token.
        cut: file names whose connection is closed half-way through the body, the first time they are asked for.

    ``requests`` lists what was asked, as ``"GET /path"`` and, for a part of a file, ``"GET /path bytes=5-"``.
    """

    def __init__(
        self,
        repositories: Mapping[str, Mapping[str, Path]],
        *,
        gated: Collection[str] = (),
        cut: Collection[str] = (),
    ) -> None:
        self.repositories = repositories
        self.gated = set(gated)
        self.cut = set(cut)
        self.requests: list[str] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        # Threads still waiting for the next request of a kept-alive connection must not hold the tests up.
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    def __enter__(self) -> str:
        self._thread.start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def folder(self, repository: str, revision: str) -> Path | None:
        """The folder of a branch, a tag or a commit."""
        revisions = self.repositories[repository]
        for name, folder in revisions.items():
            if revision in (name, self.commit(repository, name)):
                return folder
        return None

    def commit(self, repository: str, revision: str) -> str:
        """The commit of a branch or tag: 40 hexadecimal digits that follow from what its folder holds."""
        digest = hashlib.sha1(repository.encode())
        for name, file in _files(self.repositories[repository][revision]).items():
            digest.update(f"\n{name} {_digest(file)}".encode())
        return digest.hexdigest()

    def commit_of(self, repository: str, folder: Path) -> str:
        name = next(name for name, other in self.repositories[repository].items() if other == folder)
        return self.commit(repository, name)


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        part = self.headers.get("Range")
        self.hub.requests.append(f"{self.command} {self.path}" + (f" {part}" if part else ""))
        path = unquote(urlsplit(self.path).path)
        asked = _FILE.fullmatch(path) or _API.fullmatch(path) or _API_DEFAULT.fullmatch(path)
        if asked is None:
            return self._refuse(404, "", "no such page")
        repository = asked["repo"]
        if repository not in self.hub.repositories:
            # The Hub does not tell strangers which private repositories exist.
            return self._refuse(401, "RepoNotFound", "Repository not found")
        groups = asked.groupdict()
        folder = self.hub.folder(repository, groups.get("revision", "main"))
        if folder is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {groups.get('revision', 'main')}")
        if "file" in groups:
            return self._file(repository, folder, groups["file"])
        if groups.get("what") == "tree":
            return self._json([_tree_entry(name, file) for name, file in _files(folder).items()])
        return self._json(
            {
                "id": repository,
                "modelId": repository,
                "sha": self.hub.commit_of(repository, folder),
                "private": False,
                "gated": "manual" if repository in self.hub.gated else False,
                "tags": [],
                "downloads": 0,
                "likes": 0,
                "siblings": [{"rfilename": name} for name in _files(folder)],
            }
        )

    do_HEAD = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _file(self, repository: str, folder: Path, name: str) -> None:
        if repository in self.hub.gated and "Authorization" not in self.headers:
            return self._refuse(401, "GatedRepo", f"Access to model {repository} is restricted.")
        commit = {"X-Repo-Commit": self.hub.commit_of(repository, folder)}
        file = _files(folder).get(name)
        if file is None:
            return self._refuse(404, "EntryNotFound", "Entry not found", commit)
        content = file.read_bytes()
        headers = {"ETag": f'"{_digest(file)}"', "Accept-Ranges": "bytes", **commit}
        status, start = 200, self._range_start()
        if start:
            status, headers["Content-Range"] = 206, f"bytes {start}-{len(content) - 1}/{len(content)}"
        return self._answer(status, content[start:], headers, cut=name in self.hub.cut)

    def _range_start(self) -> int:
        """Where an open-ended range begins, the only kind a resumed download asks for."""
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        return int(match[1]) if match else 0

    def _json(self, data: object) -> None:
        self._answer(200, json.dumps(data).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str, message: str, more: Mapping[str, str] | None = None) -> None:
        headers = {"X-Error-Message": message, **(more or {})}
        if code:
            headers["X-Error-Code"] = code
        self._answer(status, json.dumps({"error": message}).encode(), headers)

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str], *, cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if cut:
            self.hub.cut.discard(self.path.rsplit("/", 1)[1])
            self.close_connection = True
            body = body[: len(body) // 2]
        self.wfile.write(body)


def _files(folder: Path) -> dict[str, Path]:
    return {file.relative_to(folder).as_posix(): file for file in sorted(folder.rglob("*")) if file.is_file()}


def _tree_entry(name: str, file: Path) -> dict[str, object]:
    return {"type": "file", "path": name, "size": file.stat().st_size, "oid": _digest(file)[:40]}


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
