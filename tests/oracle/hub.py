"""A stand-in for the Hugging Face hub: the few routes that the real client uses to push and to fetch a model."""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0" * 40


class _Handler(BaseHTTPRequestHandler):
    files: dict  # name -> bytes, of the one repository

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        if self.path.startswith("/api/models/owner/name/tree/"):
            sizes = {name: len(content) for name, content in self.files.items()}
            return self._json([{"type": "file", "path": x, "size": n, "oid": x} for x, n in sizes.items()])
        if self.path.startswith("/api/models/owner/name"):
            siblings = [{"rfilename": name} for name in self.files]
            return self._json({"id": "owner/name", "sha": COMMIT, "siblings": siblings, "private": False})
        name = self.path.partition("?")[0].rpartition("/")[2]
        if not self.path.startswith("/owner/name/resolve/") or name not in self.files:
            return self._json({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
        return self._send(self.files[name])

    do_HEAD = do_GET  # noqa: N815

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if self.path == "/api/repos/create":
            return self._json({"url": "http://127.0.0.1/owner/name"})
        if "/preupload/" in self.path:
            asked = json.loads(body)["files"]
            return self._json(
                {"files": [{"path": x["path"], "uploadMode": "regular", "shouldIgnore": False} for x in asked]}
            )
        for line in map(json.loads, body.splitlines()):  # a commit
            if line["key"] == "file":
                self.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return self._json({"commitUrl": f"http://127.0.0.1/owner/name/commit/{COMMIT}", "commitOid": COMMIT})

    def _json(self, value, status=200, headers=None):
        self._send(json.dumps(value).encode(), status, headers)

    def _send(self, content, status=200, headers=None):
        self.send_response(status)
        etag = hashlib.sha256(content).hexdigest()
        for key, value in {"Content-Length": len(content), "ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}.items():
            self.send_header(key, str(value))
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def running_hub():
    """Its address, and the files that were pushed to it."""
    handler = type("Handler", (_Handler,), {"files": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", handler.files
    finally:
        server.shutdown()
        server.server_close()
