"""The built-in trace."""

from __future__ import annotations

import pytest

from kvmem.replay.options import BLOCK_TOKENS
from kvmem.replay.workload import generate_chat


def test_equal_seeds_give_equal_requests() -> None:
    assert generate_chat(3, 200) == generate_chat(3, 200)
    assert generate_chat(3, 200) != generate_chat(4, 200)


def test_fewer_requests_are_the_first_of_more() -> None:
    assert generate_chat(3, 50) == generate_chat(3, 200)[:50]


@pytest.mark.parametrize("seed", range(5))
def test_generated_requests_obey_the_format(seed: int) -> None:
    before = 0.0
    for request in generate_chat(seed, 500):
        assert request.timestamp_ms >= before
        before = request.timestamp_ms
        assert request.output_length >= 1
        assert -(-request.input_length // BLOCK_TOKENS) == len(request.keys)
        assert len(set(request.keys)) == len(request.keys)


def test_a_key_has_the_same_blocks_before_it_wherever_it_stands() -> None:
    before: dict[int, tuple[int, ...]] = {}
    for request in generate_chat(0, 500):
        for position, key in enumerate(request.keys):
            assert before.setdefault(key, request.keys[:position]) == request.keys[:position]


def test_prompts_repeat_within_and_across_chats() -> None:
    requests = generate_chat(0, 500)
    blocks = sum(len(request.keys) for request in requests)
    distinct = len({key for request in requests for key in request.keys})
    assert 0.5 < 1 - distinct / blocks < 0.95
