"""A stand-in for vLLM's completions server, with a model of transformers behind it and faults on demand.

Only the standard library: clients are the real ones. It answers as vLLM 0.32 does (`tests/golden/vllm-answers.json`).
`faults` names the fault of a request by its number, from 0, of those for completions; `fired` has those that happened.
"""

import functools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import torch

from kdtrain.plugins.served.engine_samples import SampleRequest, entries, sample

VERSION = "0.32.0"


class StandIn:
    """A server on this machine of `model`, any causal language model of transformers in evaluation mode.

    max_logprobs, max_model_len: limits, as the options of vLLM. key: the API key that requests must have.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        name: str = "stdlib-5m",
        max_logprobs: int = 64,
        max_model_len: int | None = 600,
        key: str | None = None,
        port: int = 0,
    ) -> None:
        self.model, self.tokenizer, self.name, self.key = model, tokenizer, name, key
        self.max_logprobs, self.max_model_len = max_logprobs, max_model_len
        self.root: str | None = None
        """Where its weights are."""
        self.version: Any = {"version": VERSION}
        """What /version says; None: there is none."""
        self.build = f"vllm-{VERSION}-6ccaefe2"
        """Its `system_fingerprint`."""
        self.escaped: dict[bytes, bytes] = {}
        """Characters that stand in its JSON in another way."""
        self.owner = "vllm"
        self.ends: list[int] = []
        """Tokens at which it stops, asked or not."""
        self.another = "another"
        """The model whose answer it gives by the fault of this name."""
        self.faults: dict[int, str] = {}
        self.always = ""
        """A fault of every request."""
        self.after = 0
        """Completions before `always` begins."""
        self.fired: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        """Of completions, in order."""
        self.authorized: list[str | None] = []
        self.running = self.most_at_once = 0
        self.delay = 0.0
        self.swap: tuple[int, Any] | None = None
        """From this request on, another model."""
        self.raw: Callable[[socket.socket], None] | None = None
        """Answers instead, in bytes of its own, what does not fail for the key."""
        self.plugin = False
        """It has kdtrain's plugin."""
        self._lock, self._forward = threading.Lock(), threading.Lock()
        self._cached: dict[tuple[int, ...], list[Any]] = {}
        self._prompts: dict[tuple[int, ...], torch.Tensor] = {}
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}
        self._text = functools.cache(lambda token: tokenizer.decode([token]))
        stand_in = self

        class Handler(_Handler):
            server_of = stand_in

        self._server = _Quiet(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def begin(self, body: dict[str, Any]) -> str:
        """Count a request for completions, and return its fault."""
        with self._lock:
            number = len(self.bodies)
            self.bodies.append(body)
            if self.swap is not None and number >= self.swap[0]:
                self.model, self.swap = self.swap[1], None
            fault = self.faults.get(number) or (self.always if number >= self.after else "")
            if fault:
                self.fired.append(fault)
            return fault

    def logprobs(self, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
        """Compute log p [n, V] in fp32 of the next token of each."""
        with self._forward, torch.no_grad():
            key = (id(self.model), *tokens)
            if key not in self._logits:
                self._logits[key] = self.model(torch.tensor([tokens])).logits[0].float()
            return (self._logits[key] / temperature).log_softmax(-1)

    def tables(self, tokens: list[int], entries: int, fault: str, salt: str | None, body: dict[str, Any]) -> list[Any]:
        """Return the `prompt_logprobs` of a prompt."""
        asked = SampleRequest.from_args(body.get("vllm_xargs")) if self.plugin else None
        if asked is not None:
            return self._samples(tokens, asked, fault)
        temperature = body.get("temperature", 1.0) if fault == "processed-mode" else 1.0
        if fault == "warm":
            temperature = 1.3
        logprobs = self.logprobs(tokens, temperature)
        if fault == "logits":
            logprobs = logprobs + 9
        if fault == "low":
            logprobs = logprobs - 40
        if fault == "ahead":  # about the token after the next one, which a table has all the same
            logprobs = logprobs.roll(-1, 0)
        if fault == "noisy":
            logprobs = logprobs - 0.005 * (len(self.bodies) % 3)
        if fault == "balanced":  # one of three models answers
            logprobs = logprobs - 0.02 * (len(self.bodies) % 3)
        if fault == "stale" and (salt is None or self.always == "stale"):
            # what was computed for the last prompt with this beginning
            last, self._prompts[block] = self._prompts.get(block := tuple(tokens[:4]), logprobs), logprobs
            logprobs = torch.cat([last[: len(tokens)], logprobs[len(last) :]])
        if fault == "drift":  # the same prompt again gives other numbers, whatever its salt
            again = self._cached.setdefault(tuple(tokens), [])
            again.append(0)
            logprobs = (logprobs / (1 if len(again) == 1 else 1.7)).log_softmax(-1)
        found: list[Any] = [None]
        for position, label in enumerate(tokens[1:]):
            best = logprobs[position].topk(entries)
            ids = best.indices.tolist()
            rank = int((logprobs[position] > logprobs[position, label]).sum()) + 1
            order = [label, *(each for each in ids if each != label)]
            ranks = {each: place + 1 for place, each in enumerate(ids)} | {label: rank}
            values = {each: float(logprobs[position, each]) for each in order}
            if fault == "processed":
                values |= dict.fromkeys(ids[len(ids) // 2 :], -9999.0)
            found.append({str(each): self._entry(each, values[each], ranks[each]) for each in order})
        return found

    def _samples(self, tokens: list[int], asked: SampleRequest, fault: str) -> list[Any]:
        """Sample the logits as the plugin does."""
        if fault == "row":
            asked = msgspec.structs.replace(asked, row=asked.row + 1)
        with self._forward, torch.no_grad():
            logits = self.model(torch.tensor([tokens])).logits[0, :-1].float()
        if fault == "broken":
            logits[3] = torch.nan
        positions = entries(*sample(logits, torch.tensor(tokens[1:]), asked, 0))
        words = [
            {str(label): {"logprob": logprob, "rank": receipt, "decoded_token": text}}
            for label, logprob, receipt, text in positions
        ]
        return [None, *words]

    def write(self, body: dict[str, Any], fault: str) -> dict[str, Any]:
        """Return a choice with a text that is drawn as asked, and the model's log p of each of its tokens."""
        generator, tokens, ids, tables = torch.Generator().manual_seed(body["seed"]), [*body["prompt"]], [], []
        ends = {*body["stop_token_ids"], *self.ends}
        while len(ids) < body["max_tokens"] and not ends & {*ids}:
            logprobs = self.logprobs(tokens)[-1]
            scaled = (logprobs / max(body["temperature"], 1e-6)).softmax(-1)
            order = scaled.argsort(descending=True)
            scaled[order[scaled[order].cumsum(-1) - scaled[order] >= body["top_p"]]] = 0
            token = int(torch.multinomial(scaled, 1, generator=generator))
            if fault == "processed-text":
                logprobs = (logprobs / body["temperature"]).log_softmax(-1)
            best = logprobs.topk(body.get("logprobs", 0)).indices.tolist()
            name = "{}" if fault == "strings" else "token_id:{}"
            listed = [token, *(each for each in best if each != token)]
            tables.append({name.format(each if name != "{}" else f" {each}"): float(logprobs[each]) for each in listed})
            tokens, ids = [*tokens, token], [*ids, token]
        reason = "stop" if ends & {*ids} else "length"
        if fault == "short":
            ids, tables, reason = [each for each in ids if each not in ends][:2], tables[:2], "length"
        if fault == "finish":
            reason = "abort"
        written = {"text": self.tokenizer.decode(ids), "token_ids": None if fault == "untold" else ids}
        return {**_CHOICE, **written, "finish_reason": reason, "logprobs": {"top_logprobs": tables}}

    def _entry(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        text = self._text(token + 1 if self.always == "tokenizer" and token + 1 < len(self.tokenizer) else token)
        return {"logprob": logprob, "rank": rank, "decoded_token": text}


@contextmanager
def standing_in(*args: Any, **options: Any) -> Iterator[StandIn]:
    """Start a server for the block."""
    server = StandIn(*args, **options)
    try:
        yield server
    finally:
        server.close()


class _Quiet(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """Print nothing: clients disconnect, and faults break connections."""


class _Handler(BaseHTTPRequestHandler):
    server_of: StandIn
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if not self._permitted():
            return
        if (raw := self.server_of.raw) is not None:
            self.close_connection = True
            return raw(self.connection)
        if self.path == "/version" and self.server_of.version is not None:
            return self._json(self.server_of.version)
        if self.path == "/health":
            return self._json({})
        if self.path == "/v1/models":
            served = self.server_of
            model: dict[str, Any] = {"id": served.name, "object": "model", "owned_by": served.owner}
            model |= {} if served.max_model_len is None else {"max_model_len": served.max_model_len}
            model |= {} if served.root is None else {"root": served.root}
            return self._json({"object": "list", "data": [model]})
        self._json({"detail": "Not Found"}, 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        if not self._permitted():
            return
        if self.path != "/v1/completions":
            return self._json({"detail": "Not Found"}, 404)
        served = self.server_of
        with served._lock:
            served.running += 1
            served.most_at_once = max(served.most_at_once, served.running)
        try:
            time.sleep(served.delay)
            self._complete(body)
        finally:
            with served._lock:
                served.running -= 1

    def _permitted(self) -> bool:
        served, given = self.server_of, self.headers.get("Authorization")
        served.authorized.append(given)
        if served.key is not None and given != f"Bearer {served.key}":
            self._json({"error": "Unauthorized"}, 401)
            return False
        return True

    def _complete(self, body: dict[str, Any]) -> None:
        served = self.server_of
        fault = served.begin(body)
        if self._failed(fault):
            return None
        if (wrong := self._refusal(body)) is not None:
            return self._json(*wrong)
        prompt = body["prompt"]
        prompts = prompt if isinstance(prompt[0], list) else [prompt]
        entries, salt = body.get("prompt_logprobs"), body.get("cache_salt")
        entries = None if fault == "unscored" else entries
        entries = entries - 1 if fault == "fewer" else entries
        choices = []
        for index, tokens in enumerate(prompts):
            tokens = [0, *tokens] if fault == "bos" else tokens
            if body.get("return_token_ids"):
                choices.append(served.write(body, fault))
                continue
            tables = None if entries is None else served.tables(tokens, entries, fault, salt, body)
            choices.append({**_CHOICE, "index": index, "prompt_logprobs": tables})
        tables = choices[0]["prompt_logprobs"]
        total = sum(map(len, prompts)) + (fault in ("bos", "usage"))
        if fault == "shifted":
            tables[1:] = [*tables[2:], tables[1]]
        if fault == "longer":
            tables.append(tables[-1])
        if fault == "none":
            tables[2] = None
        if fault in ("id", "far-id"):
            tables[1]["999999" if fault == "id" else "9" * 40] = tables[1].pop(next(reversed(tables[1])))
        if fault == "positive":
            next(iter(tables[1].values()))["logprob"] = 0.5
        if fault == "text":
            next(iter(tables[1].values()))["logprob"] = "-0.5"
        if fault == "nan":
            next(iter(tables[1].values()))["logprob"] = float("nan")
        answer = {
            "id": f"cmpl-{len(served.bodies)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": served.another if fault == "model" else body["model"],
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": served.build,
            "usage": {
                "prompt_tokens": total,
                "total_tokens": total + len(prompts),
                "completion_tokens": len(prompts),
                "prompt_tokens_details": None,
                "completion_tokens_details": None,
            },
            **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "metrics")),
        }
        content = json.dumps(answer).encode()
        if fault == "cut":
            content = content[: len(content) // 2]
        if fault == "html":
            content = b"<html>please log in</html>"
        if fault == "deep":
            content = b'{"model": ' + b"[" * 100_000
        if fault == "huge":
            content += b" " * 2**23
        self._send(200, content, broken=fault == "drop")

    def _failed(self, fault: str) -> bool:
        """Answer by a fault that needs no model."""
        if fault in ("429", "500", "503"):
            headers = {"Retry-After": "0"} if fault == "429" else {}
            self._json({"error": {"message": f"fault {fault}", "type": "x", "code": int(fault)}}, int(fault), headers)
        elif fault == "hang":
            time.sleep(3)
            self.close_connection = True
        elif fault == "close":
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
        elif fault.startswith("redirect:"):
            self._json({}, 307, {"Location": fault.removeprefix("redirect:")})
        else:
            return False
        return True

    def _refusal(self, body: dict[str, Any]) -> tuple[Any, int] | None:
        """Return vLLM's refusal of a request that it cannot serve, and the code."""
        served, prompt = self.server_of, body["prompt"]
        flat = prompt[0] if isinstance(prompt[0], list) else prompt
        if body["model"] != served.name:
            words = f"The model `{body['model']}` does not exist. Valid aliases: {served.name}."
            return _error(words, "NotFoundError", "model", 404)
        if served.always == "no-scores":
            return _error("prompt_logprobs is not supported", "BadRequestError", None, 400)
        if "cache_salt" in body and served.always == "no-salt":
            return _error("Extra inputs are not permitted: cache_salt", "BadRequestError", None, 400)
        if (asked := body.get("prompt_logprobs") or 0) > served.max_logprobs:
            words = (
                f"Requested prompt logprobs of {asked}, which is greater than max allowed: {served.max_logprobs} "
                f"(parameter=prompt_logprobs, value={asked})"
            )
            return _error(words, "BadRequestError", "prompt_logprobs", 400)
        if served.max_model_len is not None and len(flat) + 1 > served.max_model_len:
            words = (
                f"This model's maximum context length is {served.max_model_len} tokens. However, your prompt contains "
                f"{len(flat)} input tokens, which exceeds this limit even without any output tokens. Please reduce the "
                f"length of the input prompt. (parameter=input_tokens, value={len(flat)})"
            )
            return _error(words, "BadRequestError", "input_tokens", 400)
        if (token := max(flat)) >= served.model.config.vocab_size:
            return _error(f"Token id {token} is out of vocabulary", "BadRequestError", None, 400)
        return None

    def _json(self, value: Any, code: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(code, json.dumps(value).encode(), headers)

    def _send(self, code: int, content: bytes, headers: dict[str, str] | None = None, broken: bool = False) -> None:
        for plain, escape in self.server_of.escaped.items():
            content = content.replace(plain, escape)
        self.send_response(code)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if broken else content)
        if broken:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True


_CHOICE: dict[str, Any] = {
    "index": 0,
    "text": "",
    "logprobs": None,
    "finish_reason": "length",
    "stop_reason": None,
    "token_ids": None,
    "prompt_logprobs": None,
    "prompt_token_ids": None,
    "routed_experts": None,
}


def _error(message: str, kind: str, param: str | None, code: int) -> tuple[Any, int]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}, code
