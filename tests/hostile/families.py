"""Every case, family by family."""

from tests.hostile import code, controls, environments, fuzz, kinds, links, names, shapes, sizes, texts, values
from tests.hostile.case import Case

FAMILIES = (controls, links, kinds, shapes, sizes, values, texts, names, environments, code, fuzz)


def all_cases() -> list[Case]:
    """List the cases in a fixed order; their names tell them apart."""
    cases = [case for family in FAMILIES for case in family.cases()]
    named = {(case.family, case.name) for case in cases}
    assert len(named) == len(cases), "two cases of one name"
    return cases


def sample(cases: list[Case], number: int) -> list[Case]:
    """Draw a fixed pseudo-random sample of each family."""
    chosen: list[Case] = []
    for family in dict.fromkeys(case.family for case in cases):
        chosen += sorted((case for case in cases if case.family == family), key=lambda case: case.seed(0))[:number]
    return chosen
