"""Untrusted input ends a command in one line, or does no harm: a few attacks of each family of `make torture`.

Each is run by the real command, in a fork of a process that has imported everything, with a limit of time and memory.
"""

import dataclasses

import pytest

from tests.hostile import families
from tests.hostile.bench import Bench, named

SECONDS = 60.0  # torture asks for 20; here other tests run beside it
CASES = families.all_cases()


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    with Bench(tmp_path_factory.mktemp("hostile"), seconds=SECONDS) as bench:
        yield bench


@pytest.mark.parametrize("case", families.sample(CASES, 3), ids=named)
def test_an_attack_ends_in_one_line_or_does_no_harm(bench, case):
    done, wrong = bench.run(case)
    assert wrong == [], f"{done.code} after {done.seconds} s\n{done.stderr}"


def test_a_command_ends_the_same_in_an_interpreter_of_its_own(bench):
    (case,) = [each for each in CASES if (each.family, each.name) == ("json-toml", "student.toml: not TOML, distill")]
    assert bench.same_cold(case)


def test_an_attack_that_succeeds_is_seen(bench):
    """The judge on a command that writes where it must not, and on one that accepts what it must refuse."""
    sound = next(each for each in CASES if (each.family, each.name) == ("controls", "untouched, distill"))
    _, elsewhere = bench.run(dataclasses.replace(sound, writes=()))
    _, taken = bench.run(dataclasses.replace(sound, ends="refused"))
    assert elsewhere[0] == "files: made here/new"
    assert taken[0].startswith("accepted: ")
