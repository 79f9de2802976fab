"""Every case, family by family."""

from hostile import code, controls, environments, fuzz, kinds, links, names, shapes, sizes, texts, values
from hostile.case import Case

FAMILIES = (controls, links, kinds, shapes, sizes, values, texts, names, environments, code, fuzz)


def all_cases() -> list[Case]:
    """The cases in a fixed order; their names tell them apart."""
    cases = [case for family in FAMILIES for case in family.cases()]
    named = {(case.family, case.name) for case in cases}
    assert len(named) == len(cases), "two cases of one name"
    return cases


def spread(cases: list[Case], every: int) -> list[Case]:
    """One of every so many, at least one of each family: always the same ones, at no regular distance."""
    chosen: list[Case] = []
    for family in dict.fromkeys(case.family for case in cases):
        shuffled = sorted((case for case in cases if case.family == family), key=lambda case: case.seed(0))
        chosen += shuffled[::every]
    return chosen
