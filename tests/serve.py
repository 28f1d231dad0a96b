"""An engine behind a minimal OpenAI-compatible server on loopback, and any other reply behind the same server.

A reply is a function of (path, body) to an HTTP status and a JSON value, bytes, or an iterable of bytes.
"""

import json
import queue
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from dcp_fix.engine.blocks import BlockPool
from dcp_fix.engine.engine import Engine
from dcp_fix.engine.sharded import Ops
from dcp_fix.kv_cache import BLOCK
from dcp_fix.ranks.group import LocalGroup
from dcp_fix.tiny import corpus

MODEL = "tiny"
LONGEST = 512


@contextmanager
def serving(reply):
    """The address of a server that answers with `reply` while the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, answer = reply(self.path, json.loads(body) if body else None)
            if not isinstance(answer, bytes | list | dict):
                parts = answer
            else:
                parts = [answer if isinstance(answer, bytes) else json.dumps(answer).encode()]
            self.send_response(status)
            self.end_headers()
            try:
                for part in parts:
                    self.wfile.write(part)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the client had waited long enough

        do_POST = do_GET

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def engine_answers(model, dcp_size=1, ops=None):
    """A function (prompt ids, max tokens, salt) -> Generation of an engine at TP = DCP = `dcp_size`."""
    jobs, done = [queue.Queue() for _ in range(dcp_size)], queue.Queue()

    def rank(group):
        engine = Engine(model, group, dcp_size=dcp_size, ops=ops or Ops(), max_length=LONGEST)
        engine.leave_rows(corpus.prompts("512", 1, seed=1)[0].ids[:256])
        salt = None
        while (job := jobs[group.rank].get()) is not None:
            if job[2] != salt:  # another salt shares no cache
                engine.pool, salt = BlockPool(-(-LONGEST // (BLOCK * dcp_size)), BLOCK, dcp_size), job[2]
            generation = engine.generate(*job[:2])
            if group.rank == 0:
                done.put(generation)

    def answer(ids, max_tokens, salt):
        for line in jobs:
            line.put((ids, max_tokens, salt))
        return done.get(timeout=60)

    ranks = threading.Thread(target=LocalGroup.run, args=(dcp_size, rank), daemon=True)
    ranks.start()
    try:
        yield answer
    finally:
        for line in jobs:
            line.put(None)
        ranks.join(60)


def openai(answer, models=(MODEL,)):
    """A reply that speaks /v1/models and /v1/completions for `answer(prompt ids, max tokens, salt)`."""
    turn = threading.Lock()

    def reply(path, body):
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": name} for name in models]}
        if path != "/v1/completions" or body["model"] not in models:
            return 404, {"error": {"message": f"no {path} of {body and body['model']}"}}
        assert body["temperature"] == 0
        ids = corpus.encode(["<s>", *body["prompt"].split()])
        with turn:
            generation = answer(ids, body["max_tokens"], body["cache_salt"])
        return 200, completion(body, ids, generation)

    return reply


def completion(body, ids, generation):
    """The JSON of one generation."""
    tokens = generation.tokens
    reason = "stop" if tokens and tokens[-1] == corpus.END else "length"
    text = " " + corpus.decode([i for i in tokens if i != corpus.END])
    choice = {"index": 0, "text": text, "finish_reason": reason}
    if body.get("return_token_ids"):
        choice["token_ids"] = tokens
    if body.get("logprobs") is not None:
        chosen = generation.logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        choice["logprobs"] = {"token_logprobs": chosen.tolist()}
    usage = {"prompt_tokens": len(ids), "prompt_tokens_details": {"cached_tokens": generation.cached}}
    return {"id": "cmpl-1", "object": "text_completion", "model": body["model"], "choices": [choice], "usage": usage}
