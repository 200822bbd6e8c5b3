"""A Hub on this machine: the web interface that `huggingface_hub` uses to create, upload, look up and download.

Repositories have branches, commits and private visibility; large files are stored by content, in one request or in
parts. Tokens are checked. What a request does can be watched or broken by `HubServer.watch`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from huggingface_hub import RepoCard

TOKEN, READER = "hf_write", "hf_read"
# files of at least this size are sent in parts
PART_SIZE = 64 * 1024
# files that are stored by content: of these kinds, or larger than 10 MB
LARGE_KINDS = (".safetensors", ".bin", ".h5", ".msgpack", ".pt")
LARGE_SIZE = 10 * 1000**2
# of the Hub's list
LICENSES = ("apache-2.0", "bsd-3-clause", "cc-by-4.0", "mit", "other")


@dataclass
class File:
    """Content of a file, by its hash, and whether it was uploaded as a large file."""

    sha256: str
    size: int
    git_oid: str
    is_large: bool

    @property
    def oid(self) -> str:
        return self.sha256 if self.is_large else self.git_oid


@dataclass
class Repository:
    is_private: bool
    # commit -> path -> file
    trees: dict[str, dict[str, File]] = field(default_factory=dict)
    # branch -> commit
    branches: dict[str, str] = field(default_factory=dict)

    def commit_of(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.trees else None)


def is_large(path: str, size: int) -> bool:
    return path.endswith(LARGE_KINDS) or size > LARGE_SIZE


class HubServer(ThreadingHTTPServer):
    """Use it with `with`. The files of the branch `main` of a repository are also written to `root`."""

    daemon_threads = True

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.root = root
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        self.repositories: dict[str, Repository] = {}
        # names of repositories that no token of ours may see
        self.hidden: set[str] = set()
        # by SHA-256
        self.blobs: dict[str, bytes] = {}
        self.parts: dict[tuple[str, int], bytes] = {}
        # messages of commits, and all requests
        self.commits: list[str] = []
        self.requests: list[str] = []
        # called with each request, such as "PUT /lfs/…"; False closes the connection in the middle of the body
        self.watch: Callable[[str], bool] = lambda request: True

    def __enter__(self) -> HubServer:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        super().__exit__(*error)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: clients of tests vanish on purpose."""

    def environment(self, folder: Path, token: str | None = TOKEN) -> dict[str, str]:
        """Variables by which a process uses this Hub, with a cache of its own."""
        login = {} if token is None else {"HF_TOKEN": token}
        return {
            **{"HF_ENDPOINT": self.endpoint, "HF_HOME": str(folder / "hf_home"), "HF_HUB_DISABLE_XET": "1"},
            **{"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0", **login},
        }


class HubHandler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    # --- routes

    def do_POST(self) -> None:
        body = self.read_body()
        if body is None:
            return
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        match parts:
            case ["api", "validate-yaml"]:
                self.validate_card(json.loads(body)["content"])
            case ["lfs", "verify"]:
                asked = json.loads(body)
                known = len(self.server.blobs.get(asked["oid"], b"")) == asked["size"]
                self.answer({} if known else {"error": "not uploaded"}, 200 if known else 404)
            case ["lfs", oid, "complete"]:
                numbers = sorted(part["partNumber"] for part in json.loads(body)["parts"])
                self.store(b"".join(self.server.parts.pop((oid, number)) for number in numbers), oid)
            case _ if not self.may_write():
                self.answer({"error": "Invalid credentials"}, 403 if self.token() else 401)
            case ["api", "repos", "create"]:
                self.create(json.loads(body))
            case ["api", "models", owner, name, "preupload", revision]:
                if (repository := self.visible(f"{owner}/{name}")) is not None:
                    self.preupload(repository, revision, json.loads(body)["files"])
            case [owner, git, "info", "lfs", "objects", "batch"] if git.endswith(".git"):
                self.answer({"objects": [self.upload_of(**item) for item in json.loads(body)["objects"]]})
            case ["api", "models", owner, name, "branch", branch]:
                if (repository := self.visible(f"{owner}/{name}")) is not None:
                    repository.branches[branch] = repository.branches["main"]
                    self.answer({})
            case ["api", "models", owner, name, "commit", revision]:
                if self.visible(f"{owner}/{name}") is not None:
                    self.commit(f"{owner}/{name}", revision, [json.loads(line) for line in body.splitlines()])
            case _:
                self.answer({"error": "not here"}, 404)

    def do_PUT(self) -> None:
        body = self.read_body()
        if body is None:
            return
        match urlsplit(self.path).path.strip("/").split("/"):
            case ["lfs", oid]:
                self.store(body, oid)
            case ["lfs", oid, number]:
                self.server.parts[oid, int(number)] = body
                self.answer({}, headers={"ETag": f'"{hashlib.md5(body).hexdigest()}"'})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.read_body() is None:
            return
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        match parts:
            case ["api", "whoami-v2"]:
                known = self.token() in (TOKEN, READER)
                self.answer({"name": "me", "type": "user", "orgs": []} if known else {}, 200 if known else 401)
            case ["api", "models", owner, name, *rest]:
                if (repository := self.visible(f"{owner}/{name}")) is not None:
                    self.describe(f"{owner}/{name}", repository, rest)
            case [owner, name, "resolve", revision, *path]:
                if (repository := self.visible(f"{owner}/{name}")) is not None:
                    self.download(repository, revision, "/".join(path))
            case _:
                self.answer({"error": "not here"}, 404)

    # --- what they do

    def create(self, request: dict[str, Any]) -> None:
        name = f"{request.get('organization') or 'me'}/{request['name']}"
        if not name.startswith("me/"):
            self.answer({"error": "You don't have the rights to create a model under this namespace"}, 403)
            return
        exists = name in self.server.repositories
        if not exists:
            # older clients send the second
            is_private = request.get("visibility") == "private" or bool(request.get("private"))
            empty = hashlib.sha1(name.encode()).hexdigest()
            self.server.repositories[name] = Repository(is_private, {empty: {}}, {"main": empty})
        content = {"url": f"{self.server.endpoint}/{name}", "name": name, "id": name}
        self.answer({**content, **({"error": "exists already"} if exists else {})}, 409 if exists else 200)

    def validate_card(self, text: str) -> None:
        metadata = RepoCard(text, ignore_metadata_errors=True).data.to_dict()
        licenses = metadata.get("license", [])
        if set(licenses if isinstance(licenses, list) else [licenses]) <= set(LICENSES):
            self.answer({"errors": [], "warnings": []})
            return
        message = f'"license" must be one of [{", ".join(LICENSES)}]'
        if self.headers.get("Accept") == "text/plain":
            self.send(f"- Error: {message}".encode(), 400, {"Content-Type": "text/plain"})
        else:
            self.answer({"errors": [{"message": message}], "warnings": []}, 400)

    def preupload(self, repository: Repository, revision: str, files: list[dict[str, Any]]) -> None:
        tree = repository.trees[repository.commit_of(revision) or repository.branches["main"]]
        self.answer(
            {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if is_large(file["path"], file["size"]) else "regular",
                        "shouldIgnore": False,
                        "oid": tree[file["path"]].oid if file["path"] in tree else None,
                    }
                    for file in files
                ]
            }
        )

    def upload_of(self, oid: str, size: int) -> dict[str, Any]:
        """What a client has to do to upload a large file: nothing, if its content is here."""
        if oid in self.server.blobs:
            return {"oid": oid, "size": size}
        href = f"{self.server.endpoint}/lfs/{oid}"
        upload: dict[str, Any] = {"href": href}
        if size > PART_SIZE:
            numbers = range(1, -(-size // PART_SIZE) + 1)
            parts = {f"{number:05}": f"{href}/{number}" for number in numbers}
            upload = {"href": f"{href}/complete", "header": {"chunk_size": str(PART_SIZE), **parts}}
        verify = {"href": f"{self.server.endpoint}/lfs/verify"}
        return {"oid": oid, "size": size, "actions": {"upload": upload, "verify": verify}}

    def store(self, content: bytes, oid: str) -> None:
        """Keep an uploaded file, if it is the one that was announced."""
        if hashlib.sha256(content).hexdigest() != oid:
            self.answer({"error": "the content has another hash"}, 400)
            return
        self.server.blobs[oid] = content
        self.answer({})

    def commit(self, name: str, revision: str, entries: list[dict[str, Any]]) -> None:
        repository = self.server.repositories[name]
        if revision not in repository.branches:
            self.answer({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
            return
        tree = dict(repository.trees[repository.branches[revision]])
        for entry in entries:
            value = entry["value"]
            match entry["key"]:
                case "header":
                    self.server.commits.append(value["summary"])
                case "file":
                    content = base64.b64decode(value["content"])
                    tree[value["path"]] = self.file(content, is_large=False)
                case "lfsFile":
                    tree[value["path"]] = self.file(self.server.blobs[value["oid"]], is_large=True)
                case "deletedFile":
                    del tree[value["path"]]
                    if revision == "main":
                        (self.server.root / name / value["path"]).unlink()
        commit = hashlib.sha1(f"{name} {len(self.server.commits)}".encode()).hexdigest()
        repository.trees[commit] = tree
        repository.branches[revision] = commit
        if revision == "main":
            for path, file in tree.items():
                place = self.server.root / name / path
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(self.server.blobs[file.sha256])
        url = f"{self.server.endpoint}/{name}/commit/{commit}"
        self.answer({"success": True, "commitOid": commit, "commitUrl": url})

    def file(self, content: bytes, is_large: bool) -> File:
        sha256 = hashlib.sha256(content).hexdigest()
        self.server.blobs[sha256] = content
        git_oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return File(sha256, len(content), git_oid, is_large)

    def describe(self, name: str, repository: Repository, rest: list[str]) -> None:
        if rest == ["refs"]:
            refs = [
                {"name": key, "ref": f"refs/heads/{key}", "targetCommit": value}
                for key, value in repository.branches.items()
            ]
            self.answer({"branches": refs, "tags": [], "converts": []})
            return
        revision = rest[1] if len(rest) > 1 else "main"
        commit = repository.commit_of(revision)
        if commit is None:
            self.answer({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
            return
        tree = repository.trees[commit]
        if rest[:1] == ["tree"]:
            large = {
                path: {"oid": file.sha256, "size": file.size, "pointerSize": 130}
                for path, file in tree.items()
                if file.is_large
            }
            files = [
                {"type": "file", "path": path, "size": file.size, "oid": file.git_oid} for path, file in tree.items()
            ]
            self.answer(
                [{**entry, **({"lfs": large[entry["path"]]} if entry["path"] in large else {})} for entry in files]
            )
            return
        siblings = [{"rfilename": path} for path in tree]
        facts = {"_id": "0", "id": name, "modelId": name, "sha": commit, "private": repository.is_private}
        self.answer({**facts, "siblings": siblings, "tags": [], "downloads": 0, "likes": 0})

    def download(self, repository: Repository, revision: str, path: str) -> None:
        commit = repository.commit_of(revision)
        if commit is None:
            self.answer({"error": "Invalid rev id"}, 404, {"X-Error-Code": "RevisionNotFound"})
            return
        file = repository.trees[commit].get(path)
        if file is None:
            self.answer({"error": "not here"}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        content = self.server.blobs[file.sha256]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{file.oid}"', "Accept-Ranges": "bytes"}
        start = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if start is None:
            self.send(content, 200, headers)
            return
        first = int(start[1])
        last = min(int(start[2] or len(content)), len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        self.send(content[first : last + 1], 206, headers)

    # --- tokens

    def token(self) -> str | None:
        return self.headers.get("Authorization", "").removeprefix("Bearer ") or None

    def may_write(self) -> bool:
        return self.token() == TOKEN

    def visible(self, name: str) -> Repository | None:
        """A repository that the token may read; otherwise the answer is that there is none."""
        repository = self.server.repositories.get(name)
        is_refused = repository is not None and repository.is_private and self.token() not in (TOKEN, READER)
        if repository is None or is_refused or name in self.server.hidden:
            self.answer(
                {"error": "Repository not found"}, 404 if self.token() else 401, {"X-Error-Code": "RepoNotFound"}
            )
            return None
        return repository

    # --- requests and answers

    def read_body(self) -> bytes | None:
        """The body of the request; `None` where the connection was broken on purpose."""
        request = f"{self.command} {urlsplit(self.path).path}"
        self.server.requests.append(request)
        length = int(self.headers.get("Content-Length") or 0)
        if not self.server.watch(request):
            self.rfile.read(length // 2)
            self.close_connection = True
            self.connection.close()
            return None
        if self.headers.get("Transfer-Encoding") == "chunked":
            return self.read_chunks()
        return self.rfile.read(length)

    def read_chunks(self) -> bytes:
        content = b""
        while size := int(self.rfile.readline(), 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def answer(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send(json.dumps(content).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def send(self, body: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Nothing: the tests' output is theirs."""
