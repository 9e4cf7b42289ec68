"""`--use-fault-tolerance`: a dead engine is started again instead of ending the run.

While a rollout or an evaluation runs, the engine is taken out of the router at once, restarted, given the weights that
the others have, and only then routed to again; what it was working on is issued again by the generator. At any other
moment it waits for the next weight update, which restarts it first: a trainer may be on its GPU until then.

What stays fatal: an engine that dies while weights are on their way to it, the death of an engine's actor or node, an
engine that spans nodes, an engine that was not started by the run, and the fourth death of one engine.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from rlkit.orchestration.engine_servers import EnginePool, engine_name
from rlkit.orchestration.rollout_worker import Rollouts
from rlkit.orchestration.router import add_worker, remove_worker
from rlkit.orchestration.train_workers import TrainGroup
from rlkit.orchestration.waiting import Waiter
from rlkit.sync.updater import WeightUpdater
from rlkit.types.ranks import EngineEndpoint

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Of one engine in one run: one that keeps dying needs its cause removed."""


class EngineRecovery:
    """Keeps the list of engines of a run, and every holder of that list, in step with restarts."""

    def __init__(
        self,
        *,
        endpoints: Sequence[EngineEndpoint],
        pool: EnginePool,
        actor: TrainGroup,
        updater: WeightUpdater,
        rollouts: Rollouts,
        router_url: str,
        waiter: Waiter,
        say: Callable[[str], None],
    ) -> None:
        self._endpoints = list(endpoints)
        self._pool = pool
        self._actor = actor
        self._updater = updater
        self._rollouts = rollouts
        self._router_url = router_url
        self._waiter = waiter
        self._say = say
        self._index_of = {engine_name(endpoint.index): endpoint.index for endpoint in endpoints}
        self._num_restarts: Counter[int] = Counter()
        self._dead: set[int] = set()
        self.trainer_version = 0
        """Version of the weights that the trainer holds; kept by the session."""
        waiter.on_end = self._note_death
        rollouts.on_poll = self.restart_into_rollout

    def _note_death(self, name: str, how: str) -> bool:
        index = self._index_of.get(name)
        if index is None or self._num_restarts[index] >= MAX_RESTARTS:
            return False
        self._dead.add(index)
        remove_worker(self._router_url, self._endpoints[index].url)
        self._say(f"{name} has died ({how.partition(';')[0]}); it is restarted (--use-fault-tolerance)")
        return True

    def restart_into_rollout(self) -> None:
        """Restart what has died, while the others generate, with the trainer's weights."""
        version = self.trainer_version
        for endpoint in self._restart():
            self._updater.push_to(endpoint, lambda v, to=endpoint: self._actor.push_weights_to(to, v), version)
            add_worker(self._router_url, endpoint.url)
            self._say(f"{engine_name(endpoint.index)} is back with weights v{version}")

    def restart_before_update(self, *, requests_may_run: bool = False) -> None:
        """Restart what has died, before an update that gives all engines their weights. `requests_may_run`: nothing may
        be routed to an engine before it has its weights.
        """
        if requests_may_run:
            self.restart_into_rollout()
            return
        restarted = self._restart()
        if restarted:
            self._updater.sleep_restarted(restarted)
        for endpoint in restarted:
            add_worker(self._router_url, endpoint.url)

    def _restart(self) -> list[EngineEndpoint]:
        restarted: list[EngineEndpoint] = []
        while self._dead:
            index = min(self._dead)
            self._num_restarts[index] += 1
            endpoint, watch = self._pool.restart(self._endpoints[index], self.trainer_version)
            self._dead.discard(index)
            self._endpoints[index] = endpoint
            self._waiter.watch_tasks(watch)
            restarted.append(endpoint)
        if restarted:
            self._actor.connect(self._endpoints)
            self._updater.set_endpoints(self._endpoints)
            self._rollouts.set_engines([endpoint.url for endpoint in self._endpoints])
        return restarted
