"""llama.cpp in a process of its own: `python runner.py cyllama|xllamacpp`, a request on stdin, answers on stdout.

It imports nothing of kdtrain. What llama.cpp prints, and a crash of it, stay here. The request is JSON: a file, texts,
rows of ids, threads. The answers are arrays of numpy one behind the other: the ids of each text, as JSON, and for each
row the logits of its last positions, [T, V]: of all by cyllama, of one by xllamacpp, which is a server.
"""

import http.client
import importlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np


def cyllama(package: str, file: str, texts: list[str], rows: list[list[int]], threads: int) -> Iterator[Any]:
    """Yield the outputs of cyllama: the texts' token ids as JSON, then the logits of each row."""
    llama: Any = importlib.import_module(f"{package}.llama.llama_cpp")

    class Model(llama.LlamaModel):  # type: ignore[name-defined]
        """A model with the attribute that `get_logits_ith` reads, and LlamaModel lacks."""

        @property
        def n_vocab(self) -> int:
            return self.get_vocab().n_vocab

    settings = llama.LlamaModelParams()
    settings.n_gpu_layers = 0
    model = Model(file, settings)
    vocabulary = model.get_vocab()
    yield json.dumps([vocabulary.tokenize(text, True, True) for text in texts])
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
        yield np.array([context.get_logits_ith(place) for place in range(len(row))], np.float32)


def xllamacpp(package: str, file: str, texts: list[str], rows: list[list[int]], threads: int) -> Iterator[Any]:
    """Yield the outputs of xllamacpp, whose server listens on this machine alone: token ids as JSON, then log p."""
    llama: Any = importlib.import_module(package)
    settings = llama.CommonParams()
    settings.model.path = file
    settings.warmup = False
    settings.ui = False
    settings.n_gpu_layers = 0
    settings.n_parallel = 1
    settings.n_ctx = max(map(len, rows)) + 8
    settings.cpuparams.n_threads = threads
    settings.cache_type_k = settings.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    settings.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # which rounds
    server = llama.Server(settings)

    def ids(text: str) -> Any:
        connection = http.client.HTTPConnection(server.listening_address.partition("//")[2])
        connection.request("POST", "/tokenize", json.dumps({"content": text, "add_special": True}))
        return json.loads(connection.getresponse().read())["tokens"]

    yield json.dumps([ids(text) for text in texts])
    always = [[ids("a")[-1], 1e9]]  # there are no log p beside an end, or a part of a character; they are without bias
    for row in rows:
        request = {"prompt": row, "n_predict": 1, "n_probs": 10**9, "logit_bias": always, "cache_prompt": False}
        (found,) = server.handle_completions(request)["choices"][0]["logprobs"]["content"]
        entries = {each["id"]: each["logprob"] for each in found["top_logprobs"]}
        yield np.array([[entries[token] for token in range(len(entries))]], np.float32)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    for answer in {"cyllama": cyllama, "xllamacpp": xllamacpp}[sys.argv[1]](sys.argv[1], **json.load(sys.stdin)):
        np.save(answers, answer)
    answers.flush()
    os._exit(0)  # a server's threads may not end
