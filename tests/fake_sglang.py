"""A program that is started like `python -m sglang.launch_server` and fails as its environment says.

FAKE_SGLANG is nothing (it works), `crash` (at start), `hang` (never ready), `die` (in its first request),
`stubborn` (does not end at SIGTERM, nor does its child) or `leaver` (its child has a session of its own).
Into the file FAKE_SGLANG_NOTES it writes process ids and what it was told.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BEHAVIOUR = os.environ.get("FAKE_SGLANG", "")


def flag(name: str) -> str | None:
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else None


def note(**what: Any) -> None:
    with Path(os.environ["FAKE_SGLANG_NOTES"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(what) + "\n")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/health_generate":
            self.answer(503 if BEHAVIOUR == "hang" else 200, {})
        elif self.path == "/server_info":
            self.answer(200, {"version": "0.0", "internal_states": [{}], "dtype": "float32"})
        else:
            self.answer(404, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path != "/generate":
            note(post=self.path)
            self.answer(200, {})
            return
        note(generate=json.loads(body))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        for tokens in ([5], [5, 6, 7], [5, 6, 7, 2]):
            self.send(tokens)
            if BEHAVIOUR == "die":
                print("torch.OutOfMemoryError: CUDA out of memory", flush=True)
                os._exit(3)
        self.wfile.write(b"data: [DONE]\n\n")

    def send(self, tokens: list[int]) -> None:
        is_last = len(tokens) == 4
        meta = {
            "completion_tokens": len(tokens), "prompt_tokens": 3,
            "finish_reason": {"type": "stop", "matched": 2} if is_last else None,
        }  # fmt: skip
        if flag("--speculative-algorithm") and len(tokens) > 1:
            meta |= {"spec_verify_ct": len(tokens) - 2, "spec_correct_drafts_histogram": [len(tokens) - 3, 1]}
        chunk = {"text": "abcd"[: len(tokens)], "output_ids": tokens, "meta_info": meta}
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.flush()

    def answer(self, status: int, document: Any) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: Any) -> None: ...


def main() -> None:
    if BEHAVIOUR == "crash":
        print("loading\nValueError: this model is not for here\nlast words", flush=True)
        sys.exit(1)
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=BEHAVIOUR == "leaver"
    )
    note(pids=[os.getpid(), child.pid], argv=sys.argv[1:], config=os.environ.get("DDTREE_CONFIG"))
    if BEHAVIOUR == "stubborn":
        signal.signal(signal.SIGTERM, lambda *_: note(signal="SIGTERM"))
    port = flag("--port")
    assert port is not None
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
    while True:
        try:
            server.serve_forever(poll_interval=0.05)
        except KeyboardInterrupt:
            time.sleep(0.01)


if __name__ == "__main__":
    main()
