"""A stranger's engine: SGLang's own interface, whose lists of log-probabilities are not tables."""

import msgspec

from kdtrain.plugins.served.answers import Choice, Entry
from kdtrain.plugins.served.engine import Completion, Engine, Usage, register_engine


class Meta(msgspec.Struct):
    prompt_tokens: int
    input_token_logprobs: list[tuple[float | None, int, str | None]]
    input_top_logprobs: list[list[tuple[float, int, str | None]] | None]


class Generated(msgspec.Struct):
    meta_info: Meta


@register_engine("sglang")
class Sglang(Engine):
    """SGLang's /generate."""

    answer = Generated

    def url(self, api):
        return f"{api.removesuffix('/v1')}/generate"

    def request(self, body):
        drawn = {"max_new_tokens": body["max_tokens"], "temperature": body["temperature"]}
        return {
            "input_ids": body["prompt"],
            "sampling_params": drawn,
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": body["prompt_logprobs"],
            "return_text_in_logprobs": True,
        }

    def read(self, answer, body):
        found, tables = answer.meta_info, [None]
        for own, top in zip(found.input_token_logprobs[1:], found.input_top_logprobs[1:], strict=True):
            tables.append({token: Entry(logprob, decoded_token=text) for logprob, token, text in (own, *top)})
        return Completion(body["model"], [Choice(tables)], Usage(found.prompt_tokens))
