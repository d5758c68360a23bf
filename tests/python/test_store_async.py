"""Storing in a cache without blocking: the turn, the room, and what a cancelled task leaves."""

import asyncio
import gc

import pytest

import kvmem
from keyed_cache import KeyedCache, keys
from kvmem import READY
from kvmem.testing import stall
from support import PATIENCE, in_thread

pytestmark = pytest.mark.host_only("awaiting moves no virtual clock")


@pytest.fixture
def keyed(device):
    keyed = KeyedCache(device, slots=2)
    yield keyed
    gc.collect()
    keyed.finish()


def run(main):
    return asyncio.run(asyncio.wait_for(main, PATIENCE))


async def waiting(keyed, count):
    while keyed.cache.stats()["waiters"] != count:
        await asyncio.sleep(0.001)


def full(keyed):
    """A hit that holds all slots."""
    keyed.store(keys(1, 2))
    return keyed.cache.reserve(keys(1, 2))


def test_a_store_is_awaited_twice_for_its_place_and_for_its_end(keyed):
    async def main():
        keyed.fill(keys(1, 2), [3, 4])
        stored = await keyed.cache.store_async(keys(1, 2), [3, 4], after=READY, owner="a")
        await stored
        assert (stored.kind, stored.state, stored.covered) == ("store", "done", 2)

    run(main())
    assert keyed.load(keys(1, 2)).loaded == 2
    assert keyed.cache.owner("a")["offloads"] == 2


def test_stores_wait_for_room_in_their_order(keyed):
    hit = full(keyed)
    keyed.fill(keys(11, 2), [5, 6])

    async def main():
        first = asyncio.ensure_future(keyed.cache.store_async(keys(11), [5], after=READY))
        await waiting(keyed, 1)
        second = asyncio.ensure_future(keyed.cache.store_async(keys(12), [6], after=READY))
        await waiting(keyed, 2)
        assert hit.keep(1) == 1
        await (await first)
        assert keyed.cache.try_store(keys(1), [0], after=READY).state == "done"
        hit.release()
        await (await second)

    run(main())
    assert keyed.cache.stats()["waiters"] == 0
    assert keyed.load(keys(12)).loaded == 1


def test_nobody_overtakes_who_awaits(keyed):
    hit = full(keyed)

    async def main():
        task = asyncio.ensure_future(keyed.cache.store_async(keys(11), [5], after=READY))
        await waiting(keyed, 1)
        hit.release()  # the loop has not run since
        assert keyed.cache.try_store(keys(12), [6], after=READY) is None
        await (await task)
        assert keyed.cache.try_store(keys(12), [6], after=READY) is not None

    run(main())


def test_a_cancelled_task_gives_up_its_place_and_stores_nothing(keyed):
    hit = full(keyed)
    keyed.fill(keys(11, 2), [5, 6])

    async def main():
        first = asyncio.ensure_future(keyed.cache.store_async(keys(11), [5], after=READY))
        await waiting(keyed, 1)
        second = asyncio.ensure_future(keyed.cache.store_async(keys(12), [6], after=READY))
        await waiting(keyed, 2)
        first.cancel()
        with pytest.raises(asyncio.CancelledError) as error:
            await first
        # The task and the error with its traceback are alive, as in a log of failures.
        assert keyed.cache.stats()["waiters"] == 1
        hit.release()
        await (await second)
        assert error.value is not None
        assert first.cancelled()

    run(main())
    assert keyed.cache.why_miss(keys(11)[0]).reason == "no_room"
    assert keyed.load(keys(12)).loaded == 1


def test_closing_tells_all_who_await(keyed):
    hit = full(keyed)

    async def main():
        tasks = [
            asyncio.ensure_future(keyed.cache.store_async(keys(key), [5], after=READY))
            for key in (11, 12)
        ]
        await waiting(keyed, 2)
        closing = in_thread(keyed.cache.close)
        for task in tasks:
            with pytest.raises(kvmem.Closed):
                await task
        assert closing.result(PATIENCE).quiet

    run(main())
    del hit


def test_a_wrong_argument_is_refused_by_the_call_itself(keyed):
    for wrong in (
        lambda: keyed.cache.store_async([b"short"], [0], after=None),
        lambda: keyed.cache.store_async(keys(1), [0, "b"], after=READY),
        lambda: keyed.cache.store_async(keys(1), [0], after=READY, priority="soon"),
    ):
        with pytest.raises(kvmem.InvalidArgument):
            wrong()
    with pytest.raises(TypeError, match="after"):
        keyed.cache.store_async(keys(1), [0])

    async def main():
        with pytest.raises(kvmem.InvalidArgument, match="99"):
            await keyed.cache.store_async(keys(1), [99], after=READY)

    run(main())
    assert keyed.cache.stats()["waiters"] == 0


def test_after_and_the_keys_are_taken_by_the_call(keyed, device):
    async def main():
        stream = device.stream()
        names = keys(1)
        starting = keyed.cache.store_async(names, [0], after=stream)
        names[0] = keys(2)[0]
        with stall(device, stream):
            await (await starting)  # not held back by what came later
        assert len(keyed.cache.reserve(keys(1))) == 1

    run(main())


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_one_that_is_never_awaited_stores_nothing(keyed):
    starting = keyed.cache.store_async(keys(1), [0], after=READY)
    del starting
    gc.collect()
    assert len(keyed.cache.reserve(keys(1))) == 0


def test_two_loops_and_a_blocking_thread_take_turns_at_one_cache(keyed):
    async def main(first):
        for i in range(50):
            await (await keyed.cache.store_async(keys(first + i), [first // 1000], after=READY))

    def blocking():
        for i in range(50):
            keyed.cache.store(keys(5000 + i), [5], after=READY).wait(PATIENCE)

    work = [in_thread(lambda first=first: run(main(first))) for first in (1000, 2000)]
    work.append(in_thread(blocking))
    for each in work:
        each.result(2 * PATIENCE)
    stats = keyed.cache.stats()
    assert (stats["stores"], stats["waiters"]) == (150, 0)
