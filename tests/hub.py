"""A Hub on this machine: a data set and a model, by the few calls that libraries make."""

import contextlib
import hashlib
import http.server
import json
import threading
import urllib.parse

COMMIT = "0123456789abcdef0123456789abcdef01234567"
DATA, MODEL = "owner/rows", "owner/model"
CARD = """---
configs:
- config_name: easy
  data_files:
  - {split: train, path: easy/train.jsonl}
  - {split: test, path: easy/test.jsonl}
---
"""


def rows(word, number):
    return "".join(json.dumps({"text": f"{word} {i} of {number}."}) + "\n" for i in range(number))


FILES = {
    "README.md": CARD.encode(),
    "easy/train.jsonl": rows("train", 50).encode(),
    "easy/test.jsonl": rows("test", 10).encode(),
}


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers for the data set above, and for the model whose files the server holds."""

    def log_message(self, *_):
        """Says nothing about requests."""

    def answer(self, body, code=200, **headers):
        self.send_response(code)
        for name, value in {**headers, "Content-Length": len(body)}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_GET(self):
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path).strip("/")
        self.server.asked.append(path)
        for name, files in ((DATA, FILES), (MODEL, self.server.model)):
            kind = "datasets" if name == DATA else "models"
            page = name if kind == "models" else f"datasets/{name}"
            api = f"api/{kind}/{name}"
            if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
                about = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": f} for f in files]}
                return self.answer(json.dumps(about).encode())
            if path.startswith(f"{api}/tree/"):
                folder = path.partition(COMMIT)[2].strip("/")
                found = [entry(f, files) for f in files if f.startswith(folder)]
                return self.answer(json.dumps(found).encode())
            if path.startswith(f"{page}/resolve/"):
                file = path.split("/resolve/")[1].partition("/")[2]
                if file not in files:
                    return self.answer(b"", 404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
                tag = f'"{hashlib.sha1(files[file]).hexdigest()}"'
                return self.answer(files[file], ETag=tag, X_Repo_Commit=COMMIT)
        return self.answer(b"{}", 404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET

    def do_POST(self):
        """Says which of the asked paths are files."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        asked = json.loads(body)["paths"] if body[:1] == b"{" else urllib.parse.parse_qs(body)
        paths = asked if isinstance(asked, list) else [p.decode() for p in asked[b"paths"]]
        self.answer(json.dumps([entry(p, FILES) for p in paths if p in FILES]).encode())


def entry(file, files):
    digest = hashlib.sha1(files[file]).hexdigest()
    return {"type": "file", "oid": digest, "size": len(files[file]), "path": file}


@contextlib.contextmanager
def serve(model):
    """Serves, with a folder as the model; gives the address and the list of paths asked for."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.model = {f.name: f.read_bytes() for f in model.iterdir() if f.is_file()}
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.asked
    finally:
        server.shutdown()
