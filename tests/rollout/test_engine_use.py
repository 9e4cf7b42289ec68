"""Requests in flight over time."""

import pytest

from rlkit.rollout.engine_use import EngineUse


def test_idle_time_and_mean_number_of_requests():
    now = [100.0]
    use = EngineUse(clock=lambda: now[0])
    assert use.drain() == {}, "nothing was asked yet"
    now[0] = 110.0
    with use:
        now[0] = 112.0
        with use:
            now[0] = 113.0
        now[0] = 114.0
    now[0] = 118.0
    assert use.drain() == {"bubble/engines": pytest.approx(0.5), "rollout/requests_in_flight": pytest.approx(5 / 8)}
    with use:
        now[0] = 120.0
        assert use.drain() == {"bubble/engines": 0.0, "rollout/requests_in_flight": 1.0}, "an open request counts"
        assert use.drain() == {}
        now[0] = 121.0
    assert use.drain() == {"bubble/engines": 0.0, "rollout/requests_in_flight": 1.0}


def test_a_failed_request_is_over():
    now = [0.0]
    use = EngineUse(clock=lambda: now[0])
    with pytest.raises(ValueError), use:
        raise ValueError
    now[0] = 1.0
    assert use.drain()["bubble/engines"] == 1.0
