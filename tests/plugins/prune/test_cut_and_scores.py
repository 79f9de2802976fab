"""Pruning: what contributes nothing may go without a trace, scores are what their definition says, shapes that fit."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kdtrain import faults
from kdtrain.errors import RunError, UsageError
from kdtrain.models.head import split
from kdtrain.models.loading import architecture
from kdtrain.models.spec import ModelSpec
from kdtrain.plugins.prune import scores as scores_file
from kdtrain.plugins.prune.cut import ROLES, Cut, Importance, Shape, choose, prune, pruned_config, wanted_shape
from kdtrain.plugins.prune.scores import Scores, Subject, mean_loss, spread
from kdtrain.teaching.local import LocalTeacher
from kdtrain.testing import SHAPES, tiny_model

VOCABULARY, LENGTH = 60, 12
EPSILON = 1e-3
"""Of the norms: large, because what one adds to a mean square has to follow the number of channels."""
CUT = {"hidden_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_hidden_layers": 2}
"""Of the tiny shapes: one of two groups with both of its heads, two of three layers."""
TEACHERS = {
    "llama": {"attention_bias": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma": {"model_type": "gemma", "head_dim": 8},
    "gemma2": {"final_logit_softcapping": None},
    "gemma3_text": {
        **{"model_type": "gemma3_text", "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gpt2": {"n_layer": 3},
}


def teacher_of(kind, **config):
    """Make a random model of three layers, with biases and weights of norms other than 0 and 1."""
    layers = {} if kind == "gpt2" else {"num_hidden_layers": 3}
    shape = kind if kind in SHAPES else "llama"
    epsilon = {"layer_norm_epsilon" if kind == "gpt2" else "rms_norm_eps": EPSILON}
    model = tiny_model(shape, VOCABULARY, seed=3, **{**TEACHERS[kind], **layers, **epsilon, **config}).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10)
            else:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model.requires_grad_(False)


def like_of(kind, **config):
    own = {key: value for key, value in TEACHERS[kind].items() if key not in ("n_layer", "layer_types")}
    sizes = {**CUT, "intermediate_size": 40}
    if kind == "gpt2":
        sizes = {"n_embd": 24, "n_head": 3, "n_layer": 2, "n_inner": 80}
    elif kind == "qwen2":  # its configuration has no head_dim, and its heads stay the teacher's
        del sizes["head_dim"]
    shape = SHAPES[kind if kind in SHAPES else "llama"]
    return ModelSpec(name="small", config={**shape, **own, **sizes, **config}, init="scratch")


class Reader:
    """Rows of random tokens, as the reader of a cache gives them."""

    manifest = SimpleNamespace(settings=SimpleNamespace(document_mask=False))
    name = "cache"

    def __init__(self, rows=7):
        self.tokens = np.random.default_rng(0).integers(0, VOCABULARY, (rows, LENGTH + 1)).astype(np.uint16)

    def __len__(self):
        return len(self.tokens)

    def text(self, rows):
        shape = (len(rows), LENGTH)
        mask = np.ones(shape, bool)
        mask[:, :3] = False
        return {"tokens": self.tokens[rows], "loss_mask": mask, "segments": np.zeros(shape, np.uint8)}


def scored(model, path, *, depth=True, batch=3, rows=7):
    """Score a model; return its roles, shape and scores."""
    roles = ROLES[model.config.model_type]
    shape = Shape.of(model.config, roles)
    subject = Subject(teacher="t", cache="c", sequences=rows, precision="fp32")
    scores = Scores(path, subject, roles, shape)
    bar = SimpleNamespace(update=lambda done: None)
    scores.complete(LocalTeacher.of(split(copy.deepcopy(model))), Reader(rows), batch, depth, bar)
    return roles, shape, scores


def choosing(roles, shape, cut):
    """Make scores by which `choose` takes `cut`."""
    heads, neurons = torch.zeros(shape.layers, shape.heads), torch.zeros(shape.layers, shape.neurons)
    losses, width = torch.zeros(shape.layers), torch.zeros(shape.width)
    for own, layer in enumerate(cut.layers):
        heads[layer, cut.heads[own]], neurons[layer, cut.neurons[own]], losses[layer] = 1.0, 1.0, 1.0
    width[cut.width] = 1.0
    outputs = dict.fromkeys(roles.reading_norms(list(range(shape.layers))), width)
    return Importance(heads.double(), neurons.double(), outputs, {}, losses)


def emptied(model, roles, shape, cut):
    """Change `model` so that all that `cut` leaves out contributes exactly zero."""
    gone = torch.ones(shape.width, dtype=torch.bool)
    gone[cut.width] = False
    norms = [name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    for name in roles.embeddings:
        weight_VD = model.get_submodule(name).weight
        weight_VD[:, gone] = 0
        weight_VD[:, ~gone] -= weight_VD[:, ~gone].mean(1, keepdim=True) if norms else 0
    for name in norms:  # the bias of a channel that is gone would be read
        model.get_submodule(name).bias[gone] = 0
    for layer in range(shape.layers):
        own = cut.layers.index(layer) if layer in cut.layers else None
        for name, kind in roles.writes.items():
            module = model.get_submodule(f"{roles.layers}.{layer}.{name}")
            weight_DX = module.weight.T if roles.inputs_first else module.weight
            kept = torch.zeros(weight_DX.shape[1], dtype=torch.bool)
            if own is not None and kind == "neurons":
                kept[cut.neurons[own]] = True
            elif own is not None:
                kept.view(shape.heads, -1)[cut.heads[own]] = True
            weight_DX[:, ~kept] = 0
            weight_DX[gone] = 0
            parts = [weight_DX] + ([] if module.bias is None else [module.bias[:, None]])
            for part in parts:
                part[gone] = 0
                if own is None:
                    part.zero_()
                if norms:
                    part[~gone] -= part[~gone].mean(0, keepdim=True)
    return model


def logits(model):
    tokens = torch.randint(VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(5))
    return model(input_ids=tokens).logits


@pytest.mark.parametrize("kind", TEACHERS)
def test_what_contributes_exactly_zero_is_removed_without_a_trace(kind, tmp_path):
    like, model = like_of(kind), teacher_of(kind)
    roles, shape = ROLES[kind], Shape.of(model.config, ROLES[kind])
    after = wanted_shape(like, model.config, "t")
    some = torch.Generator().manual_seed(1)
    group = [torch.randperm(shape.groups, generator=some)[: after.groups].sort().values for _ in range(after.layers)]
    each = shape.heads // shape.groups
    heads = [(groups[:, None] * each + torch.arange(each)).flatten() for groups in group]
    neurons = [
        torch.randperm(shape.neurons, generator=some)[: after.neurons].sort().values for _ in range(after.layers)
    ]
    width = torch.randperm(shape.width, generator=some)[: after.width].sort().values
    cut = Cut([0, 2], width, heads, group, neurons)
    emptied(model, roles, shape, cut)
    _, _, scores = scored(model, tmp_path / "scores")
    found = choose(choosing(roles, shape, cut), roles, shape, after)
    assert found.layers == cut.layers and torch.equal(found.width, cut.width)
    for one, other in ((found.heads, heads), (found.groups, group), (found.neurons, neurons)):
        assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    student = prune(model, like, after, found, scores.importance().shares)
    assert sum(p.numel() for p in student.parameters()) < 0.7 * sum(p.numel() for p in model.parameters())
    expected = logits(model)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits(student), expected, atol=1e-5 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("kind", TEACHERS)
def test_a_shape_equal_to_the_teachers_gives_the_teacher_bit_by_bit(kind, tmp_path):
    model = teacher_of(kind)
    roles, shape, scores = scored(model, tmp_path / "scores", depth=False)
    like = ModelSpec(name="same", config=architecture(model), init="scratch")
    after = wanted_shape(like, model.config, "t")
    assert after == shape
    cut = choose(scores.importance(), roles, shape, after)
    student = prune(model, like, after, cut, scores.importance().shares)
    assert architecture(student) == architecture(model)
    mine, theirs = student.state_dict(), model.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_shape_without_head_dim_or_a_word_on_tied_ends_takes_what_the_teacher_has():
    like = like_of("qwen2")
    assert "head_dim" not in like.config and wanted_shape(like, teacher_of("qwen2").config, "t").head_dim == 8
    silent = ModelSpec(name="small", config={**like_of("llama").config}, init="scratch")
    del silent.config["tie_word_embeddings"]
    for tied in (True, False):
        model = teacher_of("llama", tie_word_embeddings=tied)
        after = wanted_shape(silent, model.config, "t")
        assert pruned_config(model.config, silent, after, [0, 1]).tie_word_embeddings == tied
    del silent.config["head_dim"]  # which a llama has
    with pytest.raises(UsageError, match="its heads have 12 numbers and the teacher's 8"):
        wanted_shape(silent, teacher_of("llama").config, "t")


def test_a_query_head_may_leave_its_group(tmp_path):
    model = teacher_of("llama", num_attention_heads=4, num_key_value_heads=2)
    like = like_of("llama", hidden_size=32, num_key_value_heads=2, intermediate_size=64, num_hidden_layers=3)
    roles, shape = ROLES["llama"], Shape.of(model.config, ROLES["llama"])
    after = wanted_shape(like, model.config, "t")
    scores = choosing(
        roles, shape, Cut([0, 1, 2], torch.arange(32), [torch.tensor([1, 2])] * 3, [], [torch.arange(64)] * 3)
    )
    cut = choose(scores, roles, shape, after)
    assert [heads.tolist() for heads in cut.heads] == [[1, 2]] * 3
    emptied(model, roles, shape, cut)
    torch.testing.assert_close(logits(prune(model, like, after, cut, {})), logits(model), atol=1e-3, rtol=1e-5)


def by_hand(model, tokens):
    """Compute each width score of a Llama by its definition, position by position, in fp64; and the shares."""
    model = copy.deepcopy(model).double()
    config, backbone = model.config, model.model
    found = {}

    def add(name, values_TX):
        found.setdefault(name, []).append(values_TX.mean(0))

    for row in tokens:
        hidden_TD = backbone.embed_tokens(row)
        cos, sin = backbone.rotary_emb(hidden_TD[None], torch.arange(len(row))[None])
        for number, layer in enumerate(backbone.layers):
            here = f"model.layers.{number}"
            add(f"share.{here}.input_layernorm", hidden_TD**2 / (hidden_TD**2).sum(-1, keepdim=True))
            normed_TD = layer.input_layernorm(hidden_TD)
            add(f"output.{here}.input_layernorm", normed_TD.abs())
            attention = layer.self_attn
            q, k, v = (
                getattr(attention, f"{name}_proj")(normed_TD).view(1, len(row), -1, 8).transpose(1, 2) for name in "qkv"
            )
            q, k = apply_rotary_pos_emb(q, k, cos, sin)
            each = config.num_attention_heads // config.num_key_value_heads
            heads_TX = []
            for head in range(config.num_attention_heads):
                scores_TT = q[0, head] @ k[0, head // each].T / 8**0.5
                scores_TT = scores_TT.masked_fill(torch.ones_like(scores_TT).triu(1).bool(), -torch.inf)
                heads_TX.append(scores_TT.softmax(-1) @ v[0, head // each])
            add(f"heads.{number}", torch.stack([(head**2).sum(-1).sqrt() for head in heads_TX], -1))
            hidden_TD = hidden_TD + attention.o_proj(torch.cat(heads_TX, -1))
            add(f"share.{here}.post_attention_layernorm", hidden_TD**2 / (hidden_TD**2).sum(-1, keepdim=True))
            normed_TD = layer.post_attention_layernorm(hidden_TD)
            add(f"output.{here}.post_attention_layernorm", normed_TD.abs())
            neurons_TI = nn.functional.silu(layer.mlp.gate_proj(normed_TD)) * layer.mlp.up_proj(normed_TD)
            add(f"neurons.{number}", neurons_TI.abs())
            hidden_TD = hidden_TD + layer.mlp.down_proj(neurons_TI)
        add("share.model.norm", hidden_TD**2 / (hidden_TD**2).sum(-1, keepdim=True))
        add("output.model.norm", backbone.norm(hidden_TD).abs())
    return {
        name: torch.stack(each).mean(0) if name.startswith("share") else torch.stack(each).square().mean(0).sqrt()
        for name, each in found.items()
    }


def test_scores_equal_their_definition_computed_by_hand(tmp_path):
    model, tokens = teacher_of("llama"), torch.from_numpy(Reader().tokens.astype(np.int64))
    _, shape, scores = scored(model, tmp_path / "scores")
    found, expected = scores.importance(), by_hand(model, tokens[:, :-1])
    own = {f"heads.{layer}": found.heads[layer] for layer in range(3)}
    own |= {f"neurons.{layer}": found.neurons[layer] for layer in range(3)}
    own |= {f"output.{name}": each for name, each in found.outputs.items()}
    own |= {f"share.{name}": each for name, each in found.shares.items()}
    assert own.keys() == expected.keys()
    for name, each in own.items():
        torch.testing.assert_close(each, expected[name], rtol=1e-4, atol=1e-6, msg=name)
    for layer in range(shape.layers):
        without = copy.deepcopy(model)
        del without.model.layers[layer]
        without.config.num_hidden_layers = 2
        logits_NV, labels_N = (
            without(input_ids=tokens[:, :-1], use_cache=False).logits[:, 3:].flatten(0, 1),
            tokens[:, 4:].flatten(),
        )
        assert found.losses[layer].item() == pytest.approx(cross_entropy(logits_NV, labels_N).item(), rel=1e-5)
    whole = cross_entropy(model(input_ids=tokens[:, :-1]).logits[:, 3:].flatten(0, 1), tokens[:, 4:].flatten())
    assert mean_loss(LocalTeacher.of(split(model)), Reader(), 7, 4) == pytest.approx(whole.item(), rel=1e-5)


def test_scoring_that_was_stopped_anywhere_ends_in_the_same_bits(tmp_path, monkeypatch):
    model = teacher_of("gpt2")
    _, _, whole = scored(model, tmp_path / "whole")
    monkeypatch.setattr(scores_file, "EVERY", 0.0)
    for number in range(1, 6):  # three batches for the width, three for the layers; the last one ends it
        monkeypatch.setenv("KDTRAIN_FAULT", f"prune.scores.after-publish:raise:{number}")
        faults.read()
        with pytest.raises(RuntimeError):
            scored(model, tmp_path / f"stopped-{number}")
        monkeypatch.delenv("KDTRAIN_FAULT")
        faults.read()
        before = Scores(tmp_path / f"stopped-{number}", whole.subject, whole.roles, whole.shape).done
        assert before == {"width": min(3 * number, 7), "depth": 3 * max(number - 3, 0)}
        scored(model, tmp_path / f"stopped-{number}")
        assert (tmp_path / f"stopped-{number}").read_bytes() == (tmp_path / "whole").read_bytes()


def test_layers_are_added_to_scores_that_have_none(tmp_path):
    model = teacher_of("llama")
    _, _, scores = scored(model, tmp_path / "scores", depth=False)
    assert scores.importance().losses is None
    scored(model, tmp_path / "scores")
    scored(model, tmp_path / "whole")
    assert (tmp_path / "scores").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize(
    "harm, words",
    [
        (lambda path, scores: path.write_text("not these"), "holds no scores"),
        (lambda path, scores: path.write_bytes(path.read_bytes()[:-40]), "holds no scores"),
        (lambda path, scores: path.write_bytes(path.read_bytes()[:-1] + b"\x41"), "is damaged"),
        (lambda path, scores: scores.done.update(width=70) or scores._write(), "is damaged"),
        (lambda path, scores: (path.unlink(), path.mkdir()), "holds no scores"),
    ],
)
def test_a_file_that_holds_no_whole_scores_is_refused_in_one_line(tmp_path, harm, words):
    path = tmp_path / "scores"
    roles, shape, scores = scored(teacher_of("llama"), path, depth=False)
    harm(path, scores)
    with pytest.raises(UsageError, match=words) as error:
        Scores(path, scores.subject, roles, shape)
    assert "\n" not in str(error.value) and path.exists()
    scored(teacher_of("llama"), tmp_path / "other", depth=False)
    with pytest.raises(UsageError, match="another teacher and number of sequences"):
        Scores(tmp_path / "other", Subject(teacher="u", cache="c", sequences=3, precision="fp32"), roles, shape)


def test_scores_that_are_non_finite_or_without_a_label_end_the_command(tmp_path):
    model = teacher_of("llama")
    _, _, scores = scored(model, tmp_path / "scores")
    scores._sums["labels"].zero_()
    with pytest.raises(RunError, match="no token of these sequences is a label"):
        scores.importance()
    model.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(RunError, match="non-finite"):
        scored(model, tmp_path / "odd")[2].importance()


@pytest.mark.parametrize(
    "config, words",
    [
        ({"num_hidden_layers": 4}, "num_hidden_layers = 4 is more than 3"),
        ({"hidden_size": 64}, "hidden_size = 64 is more than 32"),
        ({"head_dim": 16}, "its heads have 16 numbers and the teacher's 8, which are not cut: set head_dim = 8"),
        ({"num_attention_heads": 4}, "it has 4 query heads for each key/value head, and the teacher 2"),
        ({"vocab_size": 61}, "vocab_size is 61, and the teacher's is 60"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is False, and the teacher's is True"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu, and the teacher's is silu"),
        (
            {"rms_norm_eps": 1e-5, "intermediate_size": 99},
            "intermediate_size = 99 is more than 64; rms_norm_eps is 1e-05",
        ),
    ],
)
def test_a_shape_that_is_no_cut_of_the_teacher_is_refused_with_every_reason_in_one_line(config, words):
    with pytest.raises(UsageError) as error:
        wanted_shape(like_of("llama", **config), teacher_of("llama").config, "t")
    assert words in str(error.value) and "\n" not in str(error.value)


def test_a_type_without_roles_and_a_shape_of_copied_layers_are_refused():
    with pytest.raises(UsageError, match="t is a cohere, and llama, mistral"):
        wanted_shape(like_of("llama"), tiny_model("cohere").config, "t")
    with pytest.raises(UsageError, match="small is a mistral and t a llama; give a shape of the teacher's type"):
        wanted_shape(like_of("mistral"), teacher_of("llama").config, "t")
    copied = ModelSpec(name="copied", init="teacher-layers", teacher="t.toml", layers=(0,))
    with pytest.raises(UsageError, match="copied copies layers; give a spec"):
        wanted_shape(copied, teacher_of("llama").config, "t")


def test_what_is_no_part_of_the_forward_is_taken_from_the_shape():
    model, like = teacher_of("gpt2"), like_of("gpt2", resid_pdrop=0.3)
    shape = Shape.of(model.config, ROLES["gpt2"])
    after = wanted_shape(like, model.config, "t")
    scores = choosing(
        ROLES["gpt2"], shape, Cut([0, 1], torch.arange(24), [torch.arange(3)] * 2, [], [torch.arange(80)] * 2)
    )
    student = prune(model, like, after, choose(scores, ROLES["gpt2"], shape, after), {})
    assert (student.config.resid_pdrop, student.config.n_inner, student.config.n_positions) == (0.3, 80, 128)


def test_sequences_are_taken_at_equal_distances():
    assert spread(10, 4) == [0, 2, 5, 7] and spread(3, 3) == [0, 1, 2]
