import pytest
import torch
from objective_cases import run, targets_for
from objective_reference import problem


@pytest.mark.parametrize("rule", ["ghost", "dense"])
@pytest.mark.parametrize("divergence", ["forward-kl", "jsd"])
def test_leaving_out_a_number_changes_no_other(divergence, rule):
    """Neither the divergence at T = 1, nor the gradient in a temperature that is not learned."""
    found = []
    for learned in (True, False):
        for at_one in (True, False):
            p = problem(bias=True).cast(torch.float64)
            t = torch.tensor(2.0, dtype=torch.float64, requires_grad=learned)
            out = run(p, targets_for(p, rule), t, rule, divergence=divergence, at_one=at_one)
            assert (out.kd_at_one > 0) == at_one
            found.append([out.loss, out.kd, *torch.autograd.grad(out.loss, p.leaves())])
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-15)
