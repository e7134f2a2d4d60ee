"""Asks every instance in the background whether it is well, and tells the instance. Chooses nobody, serves nobody."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp

from pdkv.proxy.instances import Instance

# A busy server may be late; one that refuses or says that it is ill is believed at once.
_LATE_PROBES = 3


class Probes:
    """A task for each instance, from `start` to `stop`."""

    def __init__(self, session: aiohttp.ClientSession, instances: tuple[Instance, ...], interval_s: float) -> None:
        self._session = session
        self._instances = instances
        self._interval_s = interval_s
        self._late: dict[Instance, int] = dict.fromkeys(instances, 0)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Probes everybody once, so that requests find who is there, and goes on in the background."""
        await asyncio.gather(*(self.probe(instance) for instance in self._instances))
        self._tasks = [asyncio.create_task(self._watch(instance)) for instance in self._instances]

    async def stop(self) -> None:
        """Ends the tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def probe(self, instance: Instance) -> None:
        """Asks one instance once; takes at most one interval."""
        try:
            timeout = aiohttp.ClientTimeout(total=self._interval_s)
            async with self._session.get(f"{instance.url}/health", timeout=timeout, allow_redirects=False) as response:
                status = response.status
        except TimeoutError:
            self._late[instance] += 1
            if self._late[instance] >= _LATE_PROBES:
                instance.tell(healthy=False, why=f"no answer to {_LATE_PROBES} probes of {self._interval_s:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            self._late[instance] = 0
            instance.tell(healthy=False, why=f"not reachable: {error}")
        else:
            self._late[instance] = 0
            instance.tell(healthy=status == 200, why=f"/health answers {status}")

    async def _watch(self, instance: Instance) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(instance.look.wait(), self._interval_s)
            instance.look.clear()
            await self.probe(instance)
