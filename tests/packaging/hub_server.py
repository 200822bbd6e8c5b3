"""As much of the Hub's web interface as an upload asks for, on this machine."""

from __future__ import annotations

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class HubServer(ThreadingHTTPServer):
    """Repositories are folders of `root`; a commit writes its files there. Use it with `with`."""

    def __init__(self, root: Path):
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.root = root
        self.endpoint = f"http://127.0.0.1:{self.server_port}"
        # their messages
        self.commits: list[str] = []

    def __enter__(self) -> HubServer:
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        super().__exit__(*error)


class HubHandler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        parts = self.path.partition("?")[0].strip("/").split("/")
        match parts:
            case ["api", "repos", "create"]:
                request = json.loads(body)
                name = f"{request.get('organization') or 'me'}/{request['name']}"
                self.answer({"url": f"{self.server.endpoint}/{name}", "name": name, "id": name})
            case ["api", "validate-yaml"]:
                self.answer({"errors": [], "warnings": []})
            case ["api", "models", _, _, "preupload", "main"]:
                files = [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                    for file in json.loads(body)["files"]
                ]
                self.answer({"files": files})
            case ["api", "models", owner, name, "commit", "main"]:
                self.commit(self.server.root / owner / name, [json.loads(line) for line in body.splitlines()])
                oid = f"{len(self.server.commits):040x}"
                url = f"{self.server.endpoint}/{owner}/{name}/commit/{oid}"
                self.answer({"success": True, "commitOid": oid, "commitUrl": url})
            case _:
                self.answer({"error": "not here"}, 404)

    def do_GET(self) -> None:
        self.answer({"error": "not here"}, 404)

    def commit(self, folder: Path, entries: list[dict[str, Any]]) -> None:
        for entry in entries:
            value = entry["value"]
            if entry["key"] == "header":
                self.server.commits.append(value["summary"])
                continue
            assert entry["key"] == "file", entry["key"]
            path = folder / value["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(base64.b64decode(value["content"]))

    def answer(self, content: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Nothing: the tests' output is theirs."""
