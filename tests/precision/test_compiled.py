"""Layers that are compiled one by one; tests/parallel/compiled_script.py has them in several ranks."""

import torch

from kdtrain.models.head import layers_of, split
from kdtrain.precision.compiled import CompiledLayers
from kdtrain.testing import tiny_model


def test_layers_get_a_graph_for_each_length_beyond_the_compilers_own_limit_and_none_while_they_are_plain():
    torch.compiler.reset()
    graphs = []
    model = split(tiny_model())
    own = [layer.forward for layer in layers_of(model)]
    compiled = CompiledLayers(model, backend=lambda graph, inputs: graphs.append(graph) or graph.forward)
    forward = compiled.calling(model)
    for length in range(4, 14):
        forward(torch.zeros(1, length, dtype=torch.int64))
    assert len(graphs) == 10
    with compiled.plain():
        assert [layer.forward for layer in layers_of(model)] == own
        forward(torch.zeros(1, 20, dtype=torch.int64))
    forward(torch.zeros(1, 13, dtype=torch.int64))
    assert len(graphs) == 10
