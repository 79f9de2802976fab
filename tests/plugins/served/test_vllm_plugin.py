"""The plugin around stand-ins of vLLM's runners: chunks, batches, preemption, and requests of others.

What vLLM itself does with it is tested in tests/plugins/served/test_vllm.py.
"""

import logging
import subprocess
import sys
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from kdtrain.plugins.served import vllm_plugin
from kdtrain.plugins.served.engine_samples import SampleRequest, entries, sample

VOCAB = 60


class LogprobsTensors(NamedTuple):
    logprob_token_ids: torch.Tensor
    logprobs: torch.Tensor
    selected_token_ranks: torch.Tensor


class Params(SimpleNamespace):
    def __init__(self, asked=None, prompt_logprobs=0):
        super().__init__(extra_args=None if asked is None else asked.to_args(), prompt_logprobs=prompt_logprobs)


class Version1:
    """A runner whose hidden states are the logits, as far as the plugin touches it."""

    def __init__(self, prompts):
        self.requests = {
            name: SimpleNamespace(prompt_token_ids=tokens, sampling_params=params, num_computed_tokens=0)
            for name, (tokens, params, _) in prompts.items()
        }
        self.hidden = {name: logits for name, (_, _, logits) in prompts.items()}
        self.num_prompt_logprobs = {name: params.prompt_logprobs for name, (_, params, _) in prompts.items()}
        self.model = SimpleNamespace(compute_logits=lambda hidden: hidden)
        self.seen = []

    def _get_prompt_logprobs_dict(self, hidden_states, num_scheduled_tokens):
        self.seen.append(dict(self.num_prompt_logprobs))
        done = [name for name in self.num_prompt_logprobs if name in num_scheduled_tokens]
        for name in done:
            del self.num_prompt_logprobs[name]
        return dict.fromkeys(done, "vLLM's own")

    def step(self, scheduled):
        starts = np.cumsum([0, *scheduled.values()])
        self.query_start_loc = SimpleNamespace(np=starts)
        self.input_batch = SimpleNamespace(req_id_to_index={name: i for i, name in enumerate(scheduled)})
        rows = []
        for name, number in scheduled.items():
            start = self.requests[name].num_computed_tokens
            rows.append(self.hidden[name][start : start + number])
        found = self._get_prompt_logprobs_dict(torch.cat(rows), scheduled)
        for name, number in scheduled.items():
            self.requests[name].num_computed_tokens += number
        return found

    def at(self, name, position):
        self.requests[name].num_computed_tokens = position


class Version2:
    """The new runner's worker and what calls it."""

    def __init__(self, prompts):
        self.prompts, self.order = prompts, list(prompts)
        self.computed = dict.fromkeys(prompts, 0)
        self.uses_prompt_logprobs = np.zeros(len(prompts), bool)
        self.tokens = torch.zeros(len(prompts), 100, dtype=torch.int32)
        self.seen = []
        for i, (name, (tokens, params, _)) in enumerate(prompts.items()):
            self.tokens[i, : len(tokens)] = torch.tensor(tokens)
            self.add_request(name, i, params)

    def add_request(self, req_id, req_idx, sampling_params):
        self.uses_prompt_logprobs[req_idx] = sampling_params.prompt_logprobs is not None

    def remove_request(self, req_id):
        pass

    def compute_prompt_logprobs(self, logits_fn, hidden_states, input_batch, all_token_ids, computed, prompt_lens):
        asked = [name for name in input_batch.req_ids if self.uses_prompt_logprobs[self.order.index(name)]]
        self.seen.append(asked)
        return dict.fromkeys(asked, "vLLM's own")

    def step(self, scheduled):
        names = list(scheduled)
        lengths = np.array([len(tokens) for tokens, _, _ in self.prompts.values()])
        places = np.array([self.order.index(name) for name in names])
        batch = SimpleNamespace(
            req_ids=names,
            idx_mapping_np=places,
            num_computed_prefill_tokens_np=np.array([self.computed[name] for name in names]),
            num_scheduled_tokens=np.array(list(scheduled.values())),
            prefill_len_np=lengths[places],
            query_start_loc_np=np.cumsum([0, *scheduled.values()]),
        )
        rows = [self.prompts[name][2][self.computed[name] : self.computed[name] + n] for name, n in scheduled.items()]
        found = self.compute_prompt_logprobs(lambda each: each, torch.cat(rows), batch, self.tokens, None, lengths)
        for name, number in scheduled.items():
            self.computed[name] += number
        return found

    def at(self, name, position):
        self.computed[name] = position


@pytest.fixture(params=[1, 2], ids=["runner-1", "runner-2"])
def runner(request, monkeypatch):
    """Return a class of runner that the plugin has extended."""
    base = {1: Version1, 2: Version2}[request.param]
    extended = type(base.__name__, (base,), dict(vars(base)))
    around = {
        1: {"_get_prompt_logprobs_dict": vllm_plugin._version_1},
        2: {
            "add_request": vllm_plugin._add_request,
            "remove_request": vllm_plugin._remove_request,
            "compute_prompt_logprobs": vllm_plugin._version_2,
        },
    }[request.param]
    for name, function in around.items():
        vllm_plugin._extend(extended, name, function)
        vllm_plugin._extend(extended, name, function)  # a process may load its plugins twice
    outputs = ModuleType("vllm.v1.outputs")
    outputs.LogprobsTensors = LogprobsTensors
    monkeypatch.setitem(sys.modules, "vllm.v1.outputs", outputs)
    return extended


def a_prompt(seed, length, asked=None, prompt_logprobs=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(length, VOCAB, generator=generator)
    tokens = torch.randint(VOCAB, (length,), generator=generator).tolist()
    return tokens, Params(asked, prompt_logprobs), logits


def asked_for(row):
    return SampleRequest(number=20, seed=0, split="train", row=row)


def expected(prompt, asked):
    tokens, _, logits = prompt
    return list(entries(*sample(logits[:-1], torch.tensor(tokens[1:]), asked, 0)))


def test_chunks_of_prompts_in_one_batch_make_what_each_alone_would(runner):
    prompts = {f"r{i}": a_prompt(i, 17 + i, asked_for(i)) for i in range(3)}
    engine = runner(prompts)
    found = {}
    for scheduled in ({"r0": 10, "r1": 3}, {"r1": 14, "r0": 6}, {"r0": 1, "r2": 19, "r1": 1}):
        found |= engine.step(scheduled)
    assert found.keys() == prompts.keys()
    for i, (name, tensors) in enumerate(found.items()):
        prompt = prompts[name]
        assert list(entries(*tensors)) == expected(prompt, asked_for(int(name[1]))), (i, name)
        assert tensors.logprobs.shape[1] < 24, "columns that no position needs"


def test_requests_of_others_are_vllms_own(runner):
    prompts = {"ours": a_prompt(0, 9, asked_for(0)), "other": a_prompt(1, 9, None, 5), "none": a_prompt(2, 4, None, 0)}
    engine = runner(prompts)
    first = engine.step({"other": 9, "ours": 4})
    assert first == {"other": "vLLM's own"}
    second = engine.step({"ours": 5, "none": 4})
    assert list(entries(*second.pop("ours"))) == expected(prompts["ours"], asked_for(0))
    assert second == {"none": "vLLM's own"}
    assert not any("ours" in seen for seen in engine.seen)


def test_a_preempted_prompt_begins_again(runner):
    prompts = {"r0": a_prompt(0, 12, asked_for(0))}
    engine = runner(prompts)
    assert engine.step({"r0": 7}) == {}
    engine.at("r0", 0)
    assert engine.step({"r0": 5}) == {}
    assert list(entries(*engine.step({"r0": 7})["r0"])) == expected(prompts["r0"], asked_for(0))


def test_a_prompt_of_which_a_part_was_computed_elsewhere_lacks_positions(runner):
    """As from a prefix cache: the client refuses an answer with fewer positions."""
    prompts = {"r0": a_prompt(0, 12, asked_for(0))}
    engine = runner(prompts)
    engine.at("r0", 4)
    (tensors,) = engine.step({"r0": 8}).values()
    assert len(tensors.logprobs) == 7


def test_an_untested_version_of_vllm_is_left_alone_with_one_line(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.33.1+cu130"))
    with caplog.at_level(logging.INFO):
        vllm_plugin.register()
    (line,) = caplog.messages
    assert "off" in line and "0.33.1" in line and vllm_plugin.TESTED[-1] in line


def test_loading_the_plugin_loads_little():
    code = "import sys, kdtrain.plugins.served.vllm_plugin\n"
    code += "print(*sorted({n.split('.')[0] for n in sys.modules} & set(sys.argv[1:])))"
    heavy = ["torch", "transformers", "h5py", "hdf5plugin", "einops", "huggingface_hub", "requests", "rich"]
    done = subprocess.run([sys.executable, "-c", code, *heavy], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
