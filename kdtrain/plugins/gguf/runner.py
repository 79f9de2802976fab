"""llama.cpp in a process of its own: `python runner.py cyllama|xllamacpp`, a request on stdin, answers on stdout.

It imports nothing of kdtrain. What llama.cpp prints, and a crash of it, stay here. The request is JSON: a file, texts,
rows of ids, threads. The answers are a line when the library is loaded, a line with the ids of each text, and for each
row either float32 [T, V], its logits, or a line with the likeliest next ids and their log p.
"""

import http.client
import importlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

LIKELIEST = 5


def cyllama(llama: Any, file: str, texts: list[str], rows: list[list[int]], threads: int) -> Iterator[bytes]:
    """The answers by cyllama."""

    class Model(llama.LlamaModel):
        """A model with the attribute that `get_logits_ith` reads, and LlamaModel lacks."""

        @property
        def n_vocab(self) -> int:
            return self.get_vocab().n_vocab

    settings = llama.LlamaModelParams()
    settings.n_gpu_layers = 0
    model = Model(file, settings)
    vocabulary = model.get_vocab()
    yield json.dumps([vocabulary.tokenize(text, True, True) for text in texts]).encode() + b"\n"
    settings = llama.LlamaContextParams()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = max(map(len, rows))
    settings.type_k = settings.type_v = settings.flash_attn_type = 0  # fp32 keys and values
    settings.n_threads = settings.n_threads_batch = threads
    context = llama.LlamaContext(model, settings)
    for row in rows:
        context.kv_cache_clear()
        batch = llama.LlamaBatch(n_tokens=len(row), embd=0, n_seq_max=1)
        for place, token in enumerate(row):
            batch.add(token, place, [0], True)
        context.decode(batch)
        yield np.array([context.get_logits_ith(place) for place in range(len(row))], np.float32).tobytes()


def xllamacpp(llama: Any, file: str, texts: list[str], rows: list[list[int]], threads: int) -> Iterator[bytes]:
    """The answers by xllamacpp, whose server listens on this machine alone."""
    settings = llama.CommonParams()
    settings.model.path, settings.warmup, settings.ui = file, False, False
    settings.n_gpu_layers, settings.n_parallel, settings.n_ctx = 0, 1, max(map(len, rows)) + 8
    settings.cache_type_k = settings.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.cpuparams.n_threads = threads
    server = llama.Server(settings)
    address = server.listening_address.partition("//")[2]

    def ids(text: str) -> Any:
        body = json.dumps({"content": text, "add_special": True, "parse_special": True})
        connection = http.client.HTTPConnection(address)
        connection.request("POST", "/tokenize", body, {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read())["tokens"]

    yield json.dumps([ids(text) for text in texts]).encode() + b"\n"
    for row in rows:
        asked = {"prompt": row, "n_predict": 1, "n_probs": LIKELIEST, "temperature": 0.0, "cache_prompt": False}
        (found,) = server.handle_completions(asked)["choices"][0]["logprobs"]["content"]
        yield json.dumps([[each["id"], each["logprob"]] for each in found["top_logprobs"]]).encode() + b"\n"


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    answer_by, module = {"cyllama": (cyllama, "cyllama.llama.llama_cpp"), "xllamacpp": (xllamacpp, "xllamacpp")}[
        sys.argv[1]
    ]
    library = importlib.import_module(module)
    answers.write(b"loaded\n")
    answers.flush()
    for answer in answer_by(library, **json.load(sys.stdin)):
        answers.write(answer)
        answers.flush()
    os._exit(0)  # a server's threads may not end
