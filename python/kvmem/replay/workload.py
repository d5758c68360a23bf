"""The built-in trace: multi-turn chats, generated from a seed.

Chats begin as a Poisson process. Each has one of a few long system prompts, which all chats with
that prompt share, and takes a few turns; a turn's prompt is everything said before it and a new
message. So prompts grow, prefixes repeat within a chat and across chats, and old chats fall silent,
which is what a host tier lives from.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, islice

from kvmem.replay.options import BLOCK_TOKENS
from kvmem.replay.trace import Request

DEFAULT_REQUESTS = 5000
DEFAULT_HOST_BLOCKS = 4096

_CHAT_GAP_MS = 1000.0
_TURN_GAP_MS = 45_000.0
_SYSTEM_PROMPTS = 6
_TURNS_MEAN = 5.0
_MESSAGE_TOKENS_MEDIAN = 700.0
_ANSWER_TOKENS_MEDIAN = 250.0
_CONTEXT_TOKENS_MOST = 64_000


@dataclass
class _Chat:
    turns_left: int
    tokens: int
    keys: list[int] = field(default_factory=list)
    """Keys of the full blocks so far; a partial last block has another key each time."""


def generate_chat(seed: int, requests: int = DEFAULT_REQUESTS) -> list[Request]:
    """Make the first `requests` requests; equal seeds give equal requests, and a prefix of them."""
    return list(islice(_chats(random.Random(seed)), requests))


def _chats(draw: random.Random) -> Iterator[Request]:
    new_key = count()
    prompts = [_system_prompt(draw, new_key) for _ in range(_SYSTEM_PROMPTS)]
    order = count()
    # Earliest first; the running number keeps chats themselves from being compared.
    waiting: list[tuple[float, int, _Chat]] = []
    next_chat_ms = 0.0
    while True:
        while not waiting or next_chat_ms <= waiting[0][0]:
            heapq.heappush(waiting, (next_chat_ms, next(order), _new_chat(draw, prompts)))
            next_chat_ms += draw.expovariate(1.0 / _CHAT_GAP_MS)
        now_ms, _, chat = heapq.heappop(waiting)
        request = _turn(draw, chat, now_ms, new_key)
        yield request
        if chat.turns_left > 0 and chat.tokens < _CONTEXT_TOKENS_MOST:
            later_ms = now_ms + draw.expovariate(1.0 / _TURN_GAP_MS)
            heapq.heappush(waiting, (later_ms, next(order), chat))


def _system_prompt(draw: random.Random, new_key: Iterator[int]) -> list[int]:
    return list(islice(new_key, draw.randint(2, 12)))


def _new_chat(draw: random.Random, prompts: list[list[int]]) -> _Chat:
    # Some prompts are far more popular than others.
    prompt = draw.choices(prompts, weights=[1.0 / (i + 1) for i in range(len(prompts))])[0]
    turns = 1 + min(int(draw.expovariate(1.0 / _TURNS_MEAN)), 30)
    return _Chat(turns, len(prompt) * BLOCK_TOKENS, list(prompt))


def _turn(draw: random.Random, chat: _Chat, now_ms: float, new_key: Iterator[int]) -> Request:
    chat.turns_left -= 1
    chat.tokens += _tokens(draw, _MESSAGE_TOKENS_MEDIAN)
    full = chat.tokens // BLOCK_TOKENS
    chat.keys.extend(islice(new_key, full - len(chat.keys)))
    tail = [next(new_key)] if chat.tokens % BLOCK_TOKENS else []
    answer = _tokens(draw, _ANSWER_TOKENS_MEDIAN)
    request = Request(float(int(now_ms)), chat.tokens, answer, (*chat.keys, *tail))
    chat.tokens += answer
    return request


def _tokens(draw: random.Random, median: float) -> int:
    return max(1, min(int(median * draw.lognormvariate(0.0, 1.0)), 8000))
