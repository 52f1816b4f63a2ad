"""Two Valkey servers, one the replica of the other, each with its data on a small disk, and what can happen to them."""

import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis.asyncio as redis
from guard.processes import state_of
from storm.fault_proxy import BLACK_HOLE, FaultProxy
from waiting import until

from octavo.local.embedded import EmbeddedStore

PATIENCE_S = 60.0
DISK = "512m"


class SmallDisk:
    """A tmpfs that can be made full, where this process may mount one; else a plain folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mounted = False

    def mount(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "storm", str(self.folder)]
        self.mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0

    def resize(self, size: str) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.folder)], check=True)

    def used_kib(self) -> int:
        command = ["df", "-k", "--output=used", str(self.folder)]
        return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout.split()[1])

    def unmount(self) -> None:
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=False)


class StoreServer:
    """One server, with its disk and a client for commands of an operator."""

    def __init__(self, name: str, folder: Path, port: int) -> None:
        self.name = name
        self.port = port
        self.disk = SmallDisk(folder / name)
        self.client = redis.Redis(host="127.0.0.1", port=port, socket_timeout=10, decode_responses=True)
        self._folder = folder
        self._server: EmbeddedStore | None = None

    @property
    def pid(self) -> int | None:
        return self._server.pid if self._server else None

    @property
    def address(self) -> tuple[str, int]:
        return ("127.0.0.1", self.port)

    async def start(self) -> None:
        if self._server is None:
            self.disk.mount()
            self._server = EmbeddedStore(self.disk.folder, port=self.port)
        await self._server.start()
        await self.client.config_set("repl-diskless-sync-delay", 0)
        await self.client.config_set("repl-timeout", 10)

    async def kill(self) -> None:
        """kill -9, and proof of it."""
        assert self._server is not None and self.pid is not None
        pid = self.pid
        await self._server.kill()
        assert await self._server.wait() == -9, f"{self.name} ended by itself"
        assert not state_of(pid)

    async def stop(self) -> None:
        await self.client.aclose()
        if self._server is not None:
            await self._server.stop()
        self.disk.unmount()

    async def info(self, section: str) -> dict[str, Any]:
        found: dict[str, Any] = await self.client.info(section)
        return found

    async def is_primary(self) -> bool:
        return bool((await self.info("replication"))["role"] == "master")

    async def num_refused(self, code: str) -> int:
        """How many commands were answered with that error, such as OOM."""
        stats = await self.info("errorstats")
        found = stats.get(f"errorstat_{code}", {"count": 0})
        return int(found["count"])

    async def num_rewritten(self) -> int:
        """How many rewrites of the append-only file have ended in this life of the server."""
        state = await self.info("persistence")
        return int(state["aof_rewrites"]) - int(state["aof_rewrite_in_progress"])


class ReplicatedStore:
    """A primary and its replica. Replication goes through `link`, so that the replica can be made to lag."""

    def __init__(self, folder: Path, ports: list[int]) -> None:
        self.primary = StoreServer("store-a", folder, ports[0])
        self.replica = StoreServer("store-b", folder, ports[1])
        self.link = FaultProxy("replication", ports[2], self.primary.address)

    @property
    def servers(self) -> list[StoreServer]:
        return [self.primary, self.replica]

    async def start(self) -> None:
        await self.link.start()
        for server in self.servers:
            await server.start()
        await self.follow()

    async def stop(self) -> None:
        for server in self.servers:
            await server.stop()
        await self.link.close()

    async def follow(self) -> None:
        """Makes the replica one, and returns when it has all data."""
        self.link.heal()
        self.link.point_at(self.primary.address)
        await self.replica.client.replicaof("127.0.0.1", str(self.link.port))
        await self.in_step()

    async def in_step(self) -> None:
        """Returns when the replica follows the primary closely."""

        async def is_near() -> bool:
            with suppress(redis.RedisError, OSError):
                info = await self.replica.info("replication")
                follows = info["role"] == "slave" and info["master_link_status"] == "up"
                return follows and await self.lag() < 1_000_000
            return False

        await until(is_near, PATIENCE_S)

    async def lag(self) -> int:
        """Bytes of writes that the primary has and the replica has not."""
        ahead = await self.primary.info("replication")
        behind = await self.replica.info("replication")
        return int(ahead["master_repl_offset"]) - int(behind.get("slave_repl_offset", 0))

    async def promote_by_plan(self) -> None:
        """The replica becomes the primary with all data, by FAILOVER: the old primary follows it."""
        await self.in_step()
        old, new = self.primary, self.replica
        await old.client.execute_command("FAILOVER", "TO", "127.0.0.1", str(new.port), "TIMEOUT", "5000")
        await until(new.is_primary, PATIENCE_S)
        self.primary, self.replica = new, old

    async def fall_behind(self) -> None:
        """From now on the replica gets nothing."""
        self.link.condition = BLACK_HOLE

    async def promote_what_there_is(self) -> int:
        """The primary dies, and the replica takes its place with what it has. Returns the bytes that are lost."""
        lost = await self.lag()
        await self.primary.kill()
        await self.replica.client.replicaof("NO", "ONE")
        assert await self.replica.is_primary()
        self.primary, self.replica = self.replica, self.primary
        return lost
