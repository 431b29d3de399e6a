"""What an owner allows: read from a table, kept to, and told in words that hold no data."""

import tomllib

import pytest

from numpyro_fed.remote.errors import PolicyRefused
from numpyro_fed.remote.policy import AT_POINTS, PHASES, Count, Policy, Purpose


def told(call) -> PolicyRefused:
    with pytest.raises(PolicyRefused) as error:
        call()
    return error.value


def test_a_table_is_a_policy() -> None:
    table = tomllib.loads(
        'studies = ["asthma"]\nphases = ["survey", "start", "rounds", "correct"]\nleast_rows = 1\ncheck_rows = 50\n'
        "most_rounds = 10\nmost_messages = 20\nmost_points = 256\ncopies = true\n"
    )
    expected = Policy(("asthma",), ("survey", "start", "rounds", "correct"), 1, 50, 10, 20, 256, True)
    assert Policy.from_table(table) == expected
    assert Policy.from_table({}) == Policy()


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"phase": ["check"]}, "a policy has no 'phase', did you mean 'phases'? It has studies, phases,"),
        ({"max_rounds": 3}, "a policy has no 'max_rounds', did you mean 'most_rounds'?"),
        ({"correct": True}, "'correct' is a phase: name all that you allow, phases = [..., 'correct']"),
        ({"xyz": 3}, "a policy has no 'xyz'. It has"),
        ({"phases": ["chekc"]}, "there is no phase 'chekc', did you mean 'check'? There are survey, start,"),
        ({"phases": "check"}, "phases must be a list of names, got 'check': write phases = [\"...\"]"),
        ({"phases": None}, "phases must be a list of names, got None"),
        ({"studies": "asthma"}, "studies must be a list of names"),
        ({"studies": [1]}, "studies must be a list of names"),
        ({"most_rounds": "many"}, "most_rounds must be an int of at least 0, got 'many'"),
        ({"most_rounds": True}, "most_rounds must be an int of at least 0, got True"),
        ({"least_rows": -1}, "least_rows must be an int of at least 0, got -1"),
        ({"copies": "yes"}, "copies must be true or false, got 'yes'"),
    ],
)
def test_a_mistake_in_a_table_is_named_with_its_cure(table: dict, expected: str) -> None:
    with pytest.raises(ValueError) as error:
        Policy.from_table(table)
    assert expected in str(error.value)


def test_by_default_a_fit_and_its_check_are_allowed_and_nothing_more() -> None:
    allowed = []
    for phase in PHASES:
        try:
            Policy().allow(Purpose(phase, 1), rows=20)
            allowed.append(phase)
        except PolicyRefused:
            pass
    assert allowed == ["survey", "start", "rounds", "closing", "check"]
    for phase in ("Rounds", "", "work", "modes"):
        assert (
            str(told(lambda phase=phase: Policy().allow(Purpose(phase, 1), 100))) == "its policy allows no such request"
        )


def test_of_rows_the_server_is_told_nothing() -> None:
    """A silo whose policy forbids checks and one with too few rows for them say the same; the owner's log does not."""
    for phase in AT_POINTS:
        few = told(lambda phase=phase: Policy(phases=tuple(PHASES)).allow(Purpose(phase, 1), rows=19))
        never = told(lambda phase=phase: Policy(phases=()).allow(Purpose(phase, 1), rows=1000))
        assert str(few) == str(never) == f"its policy allows no {PHASES[phase]}"
        assert few.stays == "there are 19 rows, and the policy's check_rows is 20"
    Policy(phases=tuple(PHASES)).allow(Purpose("rounds", 1), rows=19)

    few = told(lambda: Policy(least_rows=20).admit("asthma", rows=19))
    other = told(lambda: Policy(studies=("diabetes",)).admit("asthma", rows=1000))
    assert str(few) == str(other) == "its policy does not allow this study"
    assert "19 rows" in few.stays and "'asthma' is not among" in other.stays
    Policy(studies=("asthma",), least_rows=20).admit("asthma", rows=20)


def test_counts_are_spent_and_limits_are_kept_to_the_last() -> None:
    policy = Policy(most_rounds=2, most_messages=4, most_points=256)
    count = policy.spend(Count(), None)
    count = policy.spend(count, Purpose("start", 0))
    assert count == Count(rounds=1, messages=2)
    count = policy.spend(count, Purpose("rounds", 1))
    assert (
        str(told(lambda: policy.spend(count, Purpose("closing", 0))))
        == "its policy allows no more rounds of this study"
    )
    over = lambda: policy.spend(count, Purpose("check", 0, points=257))
    assert str(told(over)) == "its policy allows no more points of this study"
    count = policy.spend(count, Purpose("check", 0, points=256))
    assert count == Count(rounds=2, messages=4, points=256)
    assert str(told(lambda: policy.spend(count, None))) == "its policy allows no more messages of this study"


def test_a_limit_that_was_passed_before_it_was_set_stops_its_own_kind_only() -> None:
    policy, count = Policy(most_rounds=10), Count(rounds=50, messages=60)
    assert policy.spend(count, Purpose("check", 1, 16)) == Count(50, 61, 16)
    told(lambda: policy.spend(count, Purpose("rounds", 1)))
