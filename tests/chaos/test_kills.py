"""kill -9 under load: no token is lost, doubled or changed."""

import asyncio
import random
import time

import pytest

VICTIMS = ("w0", "w1", "r0", "r1", "store")


@pytest.mark.scaled
@pytest.mark.timeout(7200)
async def test_no_token_is_lost_doubled_or_changed(cluster, traffic, num_kills, seed):
    rng = random.Random(seed)
    victims = [VICTIMS[number % len(VICTIMS)] for number in range(num_kills)]
    rng.shuffle(victims)
    print(f"OCTAVO_TEST_SEED={seed}: {' '.join(victims)}")
    for victim in victims:
        await asyncio.sleep(rng.uniform(0.3, 1.5))
        traffic.check()
        began = time.monotonic()
        await asyncio.to_thread(cluster.kill, victim)
        await asyncio.sleep(rng.choice([0.0, 0.2, 0.6]))
        await asyncio.to_thread(cluster.spawn, victim)
        await asyncio.to_thread(cluster.wait_ready)
        print(
            f"{victim} killed; all ready {time.monotonic() - began:.1f} s later; {traffic.num_streams} streams so far"
        )
    await traffic.stop()
    assert traffic.num_streams > num_kills
    assert traffic.num_reattaches > 0  # the kills of routers were felt
